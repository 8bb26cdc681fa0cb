"""A model, its rules and a layout, compared before anything runs.

`lint.lint` reports `findings`, and how every parameter lies. It
refuses what a training step refuses, in the same words, and compiles nothing.
"""

LARGE_BYTES = 1 << 20
"""A parameter above this size should not be whole on every device."""
