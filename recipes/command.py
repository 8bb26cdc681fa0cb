"""The training recipe as a command: options, exit status and one-line errors."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from meshpar.distributed import exit_status, leave
from meshpar.errors import (
    InputError,
    escape_unencodable,
    install_extra,
    print_fault,
    with_notes,
)
from meshpar.recipes.config import RunConfig
from meshpar.recipes.options import parse_arguments, program_words
from meshpar.train.faults import BadStepError

NO, BAD_INPUT = 1, 2
_OF_EXTRA = ("grain", "orbax")
INTERRUPTED = 128
"""And the number of the signal, as a shell has it: 130 after Ctrl-C, 143 on SIGTERM."""


def main(argv: Sequence[str] | None = None, command: str = "pretrain") -> int:
    """Runs the recipe.

    Args:
        argv: Its options; those of this process when absent.
        command: What errors begin with.

    Returns:
        0 done, 1 stopped by a bad step, 2 on bad input, 130 when stopped by Ctrl-C, 143
        by SIGTERM: saved, but for a second Ctrl-C, and one outside of the training
        loop. 75 where a new start may mend it: another process has ended or not come,
        or the system has failed (`OSError`) at other than a wrong path or a full disk.
        70 where meshpar itself is at fault.
    """
    began = time.perf_counter()
    argv = sys.argv[1:] if argv is None else list(argv)
    escape_unencodable(sys.stdout)
    config = None
    try:
        config = parse_arguments(argv, command)
        from meshpar.recipes.pretrain import pretrain  # and with it jax

        program = program_words(argv, default=("meshpar", "train"))
        result = pretrain(config, program=program, began=began)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _OF_EXTRA:
            raise
        needed = f"training needs {name}: {install_extra('train')}"
        print(f"{command}: {needed}", file=sys.stderr)
        return BAD_INPUT
    except BadStepError as error:
        print(f"{command}: {_one_line(error, config)}", file=sys.stderr)
        return leave(NO)
    except (InputError, OSError) as error:
        print(f"{command}: {_one_line(error, config)}", file=sys.stderr)
        return leave(exit_status(error))
    except KeyboardInterrupt as error:
        told = with_notes("stopped at once, nothing more is saved", error)
        print(f"{command}: {told}", file=sys.stderr)
        return leave(INTERRUPTED + 2)
    except Exception as error:
        return leave(print_fault(command, error))
    return 0 if result.signal is None else INTERRUPTED + result.signal


def _one_line(error: Exception, config: RunConfig | None) -> str:
    told = str(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        out = Path("runs") if config is None or config.out is None else config.out
        where = str(error.filename or out)
        told = f"the disk of {where!r} is full; free some space or name another folder"
    return with_notes(told, error)
