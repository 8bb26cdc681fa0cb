"""What is said, and with which status, when processes do not come together."""

from __future__ import annotations

import errno

from meshpar.errors import InputError

BAD_INPUT = 2
"""Exit status of what a new start would not mend."""

LOST = 75
"""Exit status of a process that ends because another one has: a scheduler may start all
of them again (EX_TEMPFAIL of sysexits.h)."""

_OF_WHAT_WAS_GIVEN = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.EPERM,
        errno.EROFS,
    }
)
"""What the system says of a wrong path, and of a full disk; all else may pass."""


class DistributedError(InputError, RuntimeError):
    """Processes that could not come together, or not stay so.

    Attributes:
        status: The exit status: `LOST` where a new start may mend it, `BAD_INPUT` where
            the processes contradict one another.
    """

    def __init__(self, message: str, *, key: str, status: int = LOST) -> None:
        super().__init__(message, key=key)
        self.status = status


def status_of(error: BaseException) -> int:
    """The exit status of a process that ends by this error.

    Example:
        >>> status_of(InputError("no such preset")), status_of(OSError("stale handle"))
        (2, 75)
    """
    if isinstance(error, DistributedError):
        return error.status
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if isinstance(cause, OSError):
        return BAD_INPUT if cause.errno in _OF_WHAT_WAS_GIVEN else LOST
    return BAD_INPUT if isinstance(error, InputError) else LOST
