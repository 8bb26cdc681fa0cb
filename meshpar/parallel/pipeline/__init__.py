"""Stages on ranks, and microbatches through them, as one program of ticks.

`stages.pipeline_for` arranges a model for its stages, `program.PipelineProgram` returns
loss and gradients, `executor.Executor` runs the table of ticks that `meshpar.schedules`
made, and `crossing` has what goes from rank to rank. No order of work is decided here.
"""
