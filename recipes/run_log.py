"""Log records of the recipes, and the handler that prints them on the console.

Each recipe has a logger, such as `meshpar.recipes.pretrain`. A recipe that runs as a
command prints its records; a program that calls one may have them instead.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, RenderableType

ROOM = "meshpar.recipes"
"""Logger above those of all recipes."""

_WIDTH = 140


@dataclass(frozen=True)
class Drawn:
    """A message that the console draws, such as a table; as a string it is plain text.

    Args:
        renderable: An object of rich.
    """

    renderable: RenderableType

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDTH)
        with console.capture() as capture:
            console.print(self.renderable)
        return capture.get().rstrip("\n")


class ConsoleHandler(logging.Handler):
    """Print records on a console of rich, so that a progress bar stays below them.

    Args:
        console: The console.
    """

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record; a warning begins with that word."""
        try:
            if isinstance(record.msg, Drawn):
                self._console.print(record.msg.renderable)
                return
            word = "warning: " if record.levelno >= logging.WARNING else ""
            line = word + record.getMessage()
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def on_console(console: Console | None = None) -> Iterator[None]:
    """Print the records of the recipes while the context is open.

    Args:
        console: Where to; standard output by default.
    """
    logger = logging.getLogger(ROOM)
    handler, level = ConsoleHandler(console or Console()), logger.level
    handed_on = logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level or logging.INFO)
    logger.propagate = False  # A library's handler of all records would print them too.
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = handed_on
