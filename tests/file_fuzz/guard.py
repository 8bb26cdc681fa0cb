"""What a process does to files, sockets and programs, held against one folder."""

from __future__ import annotations

import contextlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

_READ = frozenset(("os.listdir", "os.scandir", "os.chdir", "glob.glob"))
_WRITTEN = frozenset(
    (
        *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink"),
        *("os.truncate", "os.chmod", "os.chown", "os.utime", "os.setxattr"),
        *("shutil.copyfile", "shutil.copymode", "shutil.copystat", "shutil.copytree"),
        *("shutil.move", "shutil.rmtree", "shutil.make_archive", "shutil.chown"),
        *("shutil.unpack_archive", "tempfile.mkstemp", "tempfile.mkdtemp"),
    )
)
_REFUSED = frozenset(
    (
        *("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"),
        *(
            "os.spawn",
            "os.startfile",
            "pickle.find_class",
            "pty.spawn",
            "ftplib.connect",
        ),
        *(
            "socket.connect",
            "socket.bind",
            "socket.getaddrinfo",
            "socket.gethostbyname",
        ),
        *("socket.sendto", "urllib.Request", "webbrowser.open", "smtplib.connect"),
    )
)
_DEVICES = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/shm")
_SYSTEM = (
    *("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys"),
    *("/sys", "/usr/share/zoneinfo", "/etc/localtime", "/etc/mime.types"),
)
_CODE = (".py", ".pyc", ".so")
_PATHS = (str, bytes, os.PathLike)


class OutsideError(BaseException):
    """Something outside of the folder was asked for; no handler of errors hides it."""


class Guard:
    """An audit hook that refuses and notes what leaves a folder.

    Read may be: files within the folder, the interpreter and its packages, Python files
    of this checkout, `/proc/self`, the processor's and the memory's size in `/proc`,
    `/sys`, time zones, types of files, `/dev/null` and random numbers. Written may be
    what is within the folder, and `/dev/null`. No program is started, no socket is
    connected or bound, and no code is run that is of a file within the folder.

    It sees what Python does. Libraries in C++ and Rust (TensorStore, safetensors,
    tokenizers) open files unseen: the text of a file beside the folder stands in for
    those, and must occur in no outcome. A name relative to an open folder (`dir_fd`) is
    taken as relative to the working directory.

    A hook stays as long as its process: make one guard in a process, and enter
    `watching` for each case.

    Args:
        reads: Whether reading is guarded too; else writing alone, and what runs code.

    Attributes:
        seen: What has left the folder of the latest case, in words.
        paths: The paths among it.
    """

    def __init__(self, *, reads: bool = True) -> None:
        self._reads = reads
        self.seen: list[str] = []
        self.paths: list[str] = []
        self._folder: str | None = None
        packages = [*site.getsitepackages(), *sysconfig.get_paths().values()]
        roots = {sys.prefix, sys.base_prefix, *packages}
        both = {*roots, *map(os.path.realpath, roots)}
        self._readable = tuple(sorted(both - {"/", "/usr"})) + _SYSTEM + _DEVICES
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        """Refuse and note what leaves a folder, from all threads, while inside."""
        self.seen, self.paths = [], []
        self._folder = os.path.realpath(folder)
        try:
            yield
        finally:
            self._folder = None

    def _hook(self, event: str, values: tuple[Any, ...]) -> None:
        if self._folder is None:
            return
        problem = self._problem(event, values)
        if problem is not None:
            self.seen.append(problem)
            raise OutsideError(problem)

    def _problem(self, event: str, values: tuple[Any, ...]) -> str | None:
        if event == "open":
            path, mode, flags = values
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            writes = writes or (isinstance(mode, str) and set(mode) & set("wax+"))
            return self._leaves(event, path, bool(writes))
        if event in _READ:
            return self._leaves(event, values[0], False)
        if event in _WRITTEN:
            paths = [
                one for one in values if isinstance(one, str | bytes | os.PathLike)
            ]
            found = (self._leaves(event, one, True) for one in paths)
            return next(filter(None, found), None)
        if event in _REFUSED:
            return None if _is_local(event, values) else f"{event} {values!r:.200}"
        if event == "exec":
            name = getattr(values[0], "co_filename", "")
            inside = os.path.isabs(name) and self._is_within(
                name, (self._folder or "",)
            )
            return f"exec of {name}" if inside else None
        return None

    def _leaves(self, event: str, path: Any, writes: bool) -> str | None:
        if not writes and not self._reads:
            return None
        if path is None:
            path = "."
        if not isinstance(path, _PATHS):
            return None  # The number of a file that is open.
        full = os.path.realpath(os.fsdecode(path))
        allowed = (self._folder or "", *(_DEVICES if writes else self._readable))
        if self._is_within(full, allowed):
            return None
        is_code = full.endswith(_CODE) or event in ("os.listdir", "os.scandir")
        if not writes and is_code and self._is_within(full, (str(ROOT),)):
            return None
        self.paths.append(full)
        return f"{event} for {'writing' if writes else 'reading'}: {full:.300}"

    @staticmethod
    def _is_within(path: str, folders: tuple[str, ...]) -> bool:
        return any(path == one or path.startswith(f"{one}/") for one in folders)


def _is_local(event: str, values: tuple[Any, ...]) -> bool:
    """Return whether a socket joins two threads of this process (an event loop's)."""
    return event in ("socket.bind", "socket.connect") and values[1:2] == ("",)
