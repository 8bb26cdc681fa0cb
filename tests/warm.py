"""A warm interpreter: programs that tests start find JAX and its company imported.

A start of Python that imports JAX, Flax and Orbax takes some three seconds of a core,
which is most of what a small program takes. Here one process imports them, starts no
backend, and forks for every program. `words` stands where `sys.executable` would:

    subprocess.run([*warm.words(), "-m", "meshpar", "lint", "--preset", "tiny"])

What is started so has the environment, folder and streams that the test gives it;
`tests/warm_client.py` passes them on. Tests of the start itself, of what is imported,
and of processes that are killed start Python.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

CLIENT = Path(__file__).with_name("warm_client.py")
IMPORTED = (
    *("jax", "jax.numpy", "flax.nnx", "optax", "orbax.checkpoint", "grain"),
    *("rich.console", "tyro", "tokenizers", "safetensors"),
    *("meshpar.cli.main", "meshpar.models.presets", "meshpar.testing"),
    "recipes.pretrain",
)
_PR_SET_PDEATHSIG = 1


@functools.cache
def words() -> list[str]:
    """Return the words that start a program in the warm interpreter.

    The first call starts that interpreter, which ends with this process.
    """
    place = Path(tempfile.mkdtemp(prefix="warm-")) / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(listener.fileno())],
            cwd=Path(__file__).parents[1],
            env=_plain_environment(),
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
        )
    atexit.register(_end, server, place.parent)
    return [sys.executable, "-I", "-S", str(CLIENT), str(place)]


def _end(server: subprocess.Popen, folder: Path) -> None:
    server.kill()
    server.wait()
    shutil.rmtree(folder)


def commands(folder: Path) -> Path:
    """Write `python`, `meshpar` and `pytest` of the warm interpreter into a folder.

    Returns:
        The folder, to stand first in a shell's PATH.
    """
    folder.mkdir(exist_ok=True)
    for name, module in (("python", []), *((m, ["-m", m]) for m in _PROGRAMS)):
        started = " ".join(map(_quoted, [*words(), *module]))
        (folder / name).write_text(f'#!/bin/sh\nexec {started} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


_PROGRAMS = ("meshpar", "pytest")


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def _plain_environment() -> dict[str, str]:
    """Return the environment without what JAX and meshpar read while imported."""
    read = ("JAX_", "MESHPAR_", "PYTEST")
    return {k: v for k, v in os.environ.items() if not k.startswith(read)}


# The server.


def serve(listener: socket.socket) -> NoReturn:
    """Fork for every program that a client asks for, until the test's process ends."""
    _end_with_parent()
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in sys.modules["meshpar"].__all__:
        getattr(sys.modules["meshpar"], name)
    gc.collect()
    gc.freeze()
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}
    while True:
        for ready, _ in selector.select():
            if ready.fileobj is listener:
                client, _ = listener.accept()
                program = _program_of(client)
                child = os.fork()
                if child == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for end in (listener, woken, wakes, client, *clients.values()):
                        end.close()
                    selector.close()
                    _run(program)
                for stream in program["streams"]:
                    os.close(stream)
                client.send(f"{child}\n".encode())
                clients[child] = client
                selector.register(client, selectors.EVENT_READ, data=child)
            elif ready.fileobj is woken:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
                _tell_ends(clients, selector)
            elif ready.data in clients:  # The client is gone: killed by the test.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ready.data, signal.SIGKILL)
                selector.unregister(clients[ready.data])


def _tell_ends(
    clients: dict[int, socket.socket], selector: selectors.BaseSelector
) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            client = clients.pop(ended[0])
            with contextlib.suppress(KeyError):
                selector.unregister(client)
            with contextlib.suppress(OSError):
                client.send(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())
            client.close()


def _program_of(client: socket.socket) -> dict:
    """Return what a client asks for, its three streams among it."""
    streams = array.array("i")
    received, ancillary, *_ = client.recvmsg(1 << 16, socket.CMSG_LEN(3 * 4))
    for _, _, passed in ancillary:
        streams.frombytes(passed)
    while not received.endswith(b"\n"):
        received += client.recv(1 << 16)
    return {**json.loads(received), "streams": list(streams)}


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# A program, in a fork.


def _run(program: dict) -> NoReturn:
    _end_with_parent()
    for number, stream in enumerate(program["streams"]):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    words = program["words"]
    sys.orig_argv = [sys.executable, *words]
    while words[0] == "-W":
        warnings.simplefilter(words[1])
        words = words[2:]
    if words[0].startswith("-") and words[0] not in ("-c", "-m"):
        os.execv(sys.executable, [sys.executable, *words])
    unbuffered = "PYTHONUNBUFFERED" in os.environ
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", 1 if unbuffered else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    _configure()
    status = 0
    try:
        _run_words(words)
    except SystemExit:
        raise
    except BaseException:
        kind, error, frames = sys.exc_info()
        traceback.print_exception(kind, error, frames and frames.tb_next)
        status = 1
    sys.exit(status)


def _configure() -> None:
    """Give JAX and meshpar what they would have read while they were imported."""
    import jax

    import meshpar

    for name, text in os.environ.items():
        option = name.lower()
        if name.startswith("JAX_") and hasattr(jax.config, option):
            kind = type(getattr(jax.config, option))
            value = {bool: text.lower() in ("1", "true"), int: text, float: text}
            jax.config.update(option, kind(value[kind]) if kind in value else text)
    if "MESHPAR_EMULATE" in os.environ:
        meshpar.emulate(int(os.environ["MESHPAR_EMULATE"]))


def _run_words(words: Sequence[str]) -> None:
    """Do what Python does with those words."""
    roots = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, roots), *sys.path[1:]]
    if words[0] == "-m":
        sys.argv = list(words[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        code = compile(words[1], "<string>", "exec")
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        main.__dict__["__file__"] = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
