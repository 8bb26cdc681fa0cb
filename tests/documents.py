"""The code blocks of a Markdown document, in their order.

A fence names its language. `python` and `bash` run; a fence with a title, such as
`python title="my_model.py"`, is the file of that name; `text` is output. A comment
in the line before a block says what is special about it: `<!-- slow -->` is run by
`make test-full` only, `<!-- not run: why -->` never. A text marked `<!-- output -->` is
what the programs of its page print.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = ("python", "bash")
SHOWN = ("text", "csv", "toml", "yaml", "json", "ini")

_FENCE = re.compile(r'(?P<indent>\s*)```(?P<language>\S*)(?: title="(?P<title>.+)")?$')
_MARKER = re.compile(r"<!-- (?P<marker>slow|output|not run: .+) -->$")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block.

    Args:
        document: Path from the checkout.
        line: Of its first line, counted from 1.
        language: What the fence names.
        title: The file that it is; None where it is none.
        marker: `slow`, `output`, `not run: ...`, or empty.
        text: What is between the fences.
    """

    document: str
    line: int
    language: str
    title: str | None
    marker: str
    text: str

    @property
    def is_run(self) -> bool:
        """Whether it is a program of its own, and not a file or something shown."""
        return self.language in RUN and self.title is None

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.document}:{self.line}"


def documents() -> list[str]:
    """README and every page; a page that is a link by the file that it stands for."""
    found = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md")}
    return sorted({str(path.resolve().relative_to(ROOT)) for path in found})


def blocks(document: str) -> Iterator[Block]:
    """The blocks of one document.

    Raises:
        ValueError: A fence is indented or never closed.
    """
    lines = (ROOT / document).read_text().splitlines()
    number, marker = 0, ""
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence is None:
            marked = _MARKER.match(lines[number])
            marker = marked["marker"] if marked else marker * (not lines[number])
            number += 1
            continue
        if fence["indent"] or "```" not in lines[number + 1 :]:
            raise ValueError(f"{document}:{number + 1}: an indented or open fence")
        end = lines.index("```", number + 1)
        yield Block(
            document=document,
            line=number + 2,
            language=fence["language"],
            title=fence["title"],
            marker=marker,
            text="\n".join([*lines[number + 1 : end], ""]),
        )
        number, marker = end + 1, ""
