"""Training: how a step is built and what it needs around it.

`make_step.make_train_step` makes a `TrainStep`; `step` tells its path from a batch to
an update, and `step_functions` has what its programs compute. State, optimizer,
batches, checkpoints and faults of a run stand beside them. What a model computes, and
how it is split, is `meshpar.model`'s and `meshpar.parallel`'s.
"""
