"""Stages on ranks, and microbatches through them, as one program of ticks.

`program.pipeline_of` arranges a model for its stages (`stages`), and
`executor.Executor` runs the table of ticks that `meshpar.schedules` made: `work` does
a rank's forward and backward, `buffers` keeps values between ticks, `hops` sends them.
No order of work is decided here.
"""
