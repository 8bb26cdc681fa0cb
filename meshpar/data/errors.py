"""The error of data that cannot be trained on."""

from __future__ import annotations

from meshpar.errors import InputError


class DataError(InputError):
    """A file, or what it holds, that cannot be trained on."""
