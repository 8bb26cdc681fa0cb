"""The folder of a run is one run's for as long as it runs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from meshpar.errors import InputError, printable

NAME = ".in-use"
"""The file that is locked. It stays: one that is removed could be locked twice."""

_WAIT_S = 5.0
"""For the start before, which may not have ended yet."""

_RETRY_S = 0.1
_OTHERS = (errno.EACCES, errno.EAGAIN)
"""What the system says where another process has the lock."""


class FolderInUse:
    """A folder that this process has locked.

    Args:
        folder: It.
        descriptor: Of the open file whose lock it is.
    """

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self._descriptor = descriptor

    def refuse_deleted(self) -> None:
        """Refuse to go on where the folder was deleted after it was locked.

        Raises:
            InputError: It was.
        """
        if os.fstat(self._descriptor).st_nlink:
            return
        raise InputError(
            f"{str(self.folder)!r} was deleted while the run wrote to it: its metrics "
            "and checkpoints are lost; start again with --resume auto, which goes on "
            "from what has been saved since",
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
        raise InputError(
            f"{str(folder)!r}: {error.strerror or error}; name in --out a folder that "
            "this process may write to",
            key="checkpoint.folder_not_made",
        ) from error
    try:
        _lock(folder, descriptor)
        _write_owner(descriptor)
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
            if error.errno not in _OTHERS:  # A file system without locks.
                return
            if time.monotonic() > tried_until:
                raise InputError(
                    f"{str(folder)!r} is in use by {_owner(descriptor)}: wait until "
                    "that run has ended, or name another --out",
                    key="run.folder_in_use",
                ) from None
            time.sleep(_RETRY_S)


def _write_owner(descriptor: int) -> None:
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    with contextlib.suppress(OSError):  # The disk is full: the lock holds all the same.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner.encode(), 0)


def _owner(descriptor: int) -> str:
    """Who has locked the file, as it says itself."""
    text = os.pread(descriptor, 200, 0).decode(errors="replace")
    return printable(text) or "another process"
