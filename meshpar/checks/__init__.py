"""Checks before training: which examples and tokens a model joins, and its batch."""
