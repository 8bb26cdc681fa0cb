"""Runs one case after another: how each ends, within which time and memory."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from meshpar.errors import InputError
from tests.file_fuzz.guard import Guard, OutsideError

MOST_S = 10
MOST_BYTES = 1 << 30
CANARY = "canary-d41d8cd98f00b204"
"""The text of a file beside the folders of all cases, which none may tell."""

_ADDRESS_BYTES = 16 << 30
_HARD_S = 3 * MOST_S


class OverdueError(BaseException):
    """A case takes longer than it may; no handler of errors hides it."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Args:
        kind: `taken`, `refused` or `fault`.
        told: The message of a refusal, or the trace of a fault.
    """

    kind: str
    told: str = ""


def limit_memory() -> None:
    """Let an allocation beyond any reason fail, and not the machine."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = _address_bytes() + _ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def run_case(
    guard: Guard, folder: Path, call: Callable[[], str], most_s: float = MOST_S
) -> Outcome:
    """Call a reader in a folder, and return how it ends.

    It may return what it has read, as a text, or raise what the commands make one line
    of. Everything else is a fault: another error, more than `most_s` seconds or than
    `MOST_BYTES` of memory, something outside of the folder, or the canary's text.

    A call in C that does not return ends the process after some more seconds; who
    started it knows the case from what was noted before.
    """
    before, cwd = _start_of_peak(), os.getcwd()
    os.chdir(folder)
    try:
        with warnings.catch_warnings(), guard.watching(folder), _alarm(most_s):
            warnings.simplefilter("ignore")
            outcome = _outcome(call)
    except OverdueError as error:
        outcome = Outcome("fault", f"takes over {most_s} s\n{error}")
    finally:
        os.chdir(cwd)
    grown = _peak() - before
    if guard.seen:
        return Outcome("fault", "\n".join((*guard.seen, outcome.told)))
    if outcome.kind != "fault" and CANARY in outcome.told:
        return Outcome("fault", f"tells of a file outside: {outcome.told[:300]}")
    if outcome.kind != "fault" and grown > MOST_BYTES:
        return Outcome("fault", f"takes {grown:,} bytes of memory")
    return outcome


def _outcome(call: Callable[[], str]) -> Outcome:
    try:
        return Outcome("taken", call())
    except (InputError, OSError) as error:
        return Outcome("refused", str(error))
    except OverdueError:
        return Outcome("fault", f"takes too long\n{traceback.format_exc()}")
    except OutsideError:
        return Outcome("fault", traceback.format_exc())
    except BaseException:
        return Outcome("fault", traceback.format_exc())


@contextlib.contextmanager
def _alarm(most_s: float) -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise OverdueError("".join(traceback.format_stack(frame)[-6:]))

    earlier = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, most_s)
    faulthandler.dump_traceback_later(_HARD_S, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, earlier)


@contextlib.contextmanager
def captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Keep what is printed on stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err


def _start_of_peak() -> int:
    """Let the peak of memory begin anew, where the kernel can, and return what is."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    return 1024 * _status("VmHWM:")


def _address_bytes() -> int:
    return 1024 * _status("VmSize:")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def note(folder: Path, text: str) -> None:
    """Write which case runs, for whoever finds the process ended."""
    (folder / "running.txt").write_text(text)
    sys.stdout.flush()
