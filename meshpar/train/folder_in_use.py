"""A lock on the folder of a run, held for as long as the run lasts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from meshpar.errors import InputError, printable

NAME = ".in-use"
"""The file that is locked. It stays: one that is removed could be locked twice."""

_WAIT_S = 5.0
"""How long to wait for an earlier start that has not ended yet."""

_RETRY_S = 0.1
_LOCKED = (errno.EACCES, errno.EAGAIN)
"""Errors that say that another process has the lock."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors that say that the file system has no locks."""


class FolderInUse:
    """A folder that this process has locked.

    Args:
        folder: The folder.
        descriptor: Of the open file that is locked.
    """

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self._descriptor = descriptor

    def refuse_deleted(self) -> None:
        """Refuse to go on if the folder was deleted or moved after it was locked.

        Raises:
            InputError: The locked file is no longer in the folder.
        """
        with contextlib.suppress(OSError):
            there = os.stat(self.folder / NAME)
            if os.path.samestat(there, os.fstat(self._descriptor)):
                return
        raise InputError(
            f"{str(self.folder)!r} was deleted or moved while the run wrote to it, and "
            "its metrics and checkpoints with it; start again with --resume auto, "
            "which goes on from what is there",
            key="run.folder_deleted",
        )


@contextlib.contextmanager
def folder_in_use(folder: Path) -> Iterator[FolderInUse]:
    """Lock a folder, which is made if it is not there, against other runs.

    The system ends the lock when the process ends, however it ends.

    Args:
        folder: Of a run.

    Raises:
        InputError: Another process has locked it, or nothing can be written there.
    """
    descriptor = -1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        _lock(folder, descriptor)
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        with contextlib.suppress(OSError):  # A full disk: the lock holds all the same.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner.encode(), 0)
        yield FolderInUse(folder, descriptor)
    finally:
        os.close(descriptor)  # And with it ends the lock.


def _lock(folder: Path, descriptor: int) -> None:
    """Lock the file, once the start before has let it go."""
    tried_until = time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if error.errno in _NO_LOCKS:
                warnings.warn(
                    f"the file system of {str(folder)!r} has no locks "
                    f"({error.strerror}): nothing keeps a second run out of it",
                    stacklevel=2,
                )
                return
            if error.errno not in _LOCKED:
                raise _unwritable(folder, error) from error
            if time.monotonic() > tried_until:
                owner = printable(os.pread(descriptor, 200, 0).decode(errors="replace"))
                raise InputError(
                    f"{str(folder)!r} is in use by {owner or 'another process'}: wait "
                    "until that run has ended, or name another --out",
                    key="run.folder_in_use",
                ) from error  # By which its status is that of what may pass.
            time.sleep(_RETRY_S)


def _unwritable(folder: Path, error: OSError) -> InputError:
    return InputError(
        f"{str(folder)!r}: {error.strerror or error}; name in --out a folder that this "
        "process may write to",
        key="checkpoint.folder_not_made",
    )
