"""How a process of a job ends: its error, its exit status, and the end itself."""

from __future__ import annotations

import errno
import os
import sys

from meshpar.errors import BAD_INPUT, InputError

LOST = 75
"""Exit status of a process that ends because another one has: a scheduler may start all
of them again (EX_TEMPFAIL of sysexits.h)."""

_INPUT_ERRNOS = frozenset(
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
"""Error numbers of a wrong path and of a full disk; any other may pass."""


class DistributedError(InputError, RuntimeError):
    """Processes that could not come together, or not stay so.

    Attributes:
        status: The exit status: `LOST` where a new start may mend it, `BAD_INPUT` where
            the processes contradict one another.
    """

    def __init__(self, message: str, *, key: str, status: int = LOST) -> None:
        super().__init__(message, key=key)
        self.status = status


def exit_status(error: BaseException) -> int:
    """Return the exit status of a process that ends by this error.

    Example:
        >>> exit_status(InputError("no such preset"))
        2
        >>> exit_status(OSError("stale handle"))
        75
    """
    if isinstance(error, DistributedError):
        return error.status
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    if isinstance(cause, OSError):
        return BAD_INPUT if cause.errno in _INPUT_ERRNOS else LOST
    return BAD_INPUT if isinstance(error, InputError) else LOST


def leave(status: int) -> int:
    """End this process at once if it is one of several and `status` is not 0.

    When Python ends, JAX waits for all processes of `jax.distributed`: a process that
    fails alone would wait for minutes.

    Args:
        status: The exit status.

    Returns:
        `status`, if there are no others.
    """
    jax = sys.modules.get("jax")
    if status and jax is not None and jax.distributed.is_initialized():
        end_now(status)
    return status


def end_now(status: int) -> None:
    """Flush the output and end the process without waiting for others."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
