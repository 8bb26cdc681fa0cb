"""Training: the step, its state, data, checkpoints, metrics."""
