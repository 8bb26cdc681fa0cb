"""The error of what was given, which is no bug: its one line is all one needs."""

from __future__ import annotations


class InputError(ValueError):
    """What was given cannot be used: a value, a name, a file, a number of devices.

    Its message says what was asked, what was found, and a way out. Every error that
    meshpar raises on purpose for bad input is one.
    """
