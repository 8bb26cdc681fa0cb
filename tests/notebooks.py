"""Runs the notebooks of the documentation: `make notebooks` stores what they show."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ADDRESS, COLOUR = re.compile(r"0x[0-9a-f]+"), re.compile(r"\x1b\[[\d;]*m")


def ran(path: Path) -> Any:
    """The notebook, run by a kernel of its own; an output has one form, HTML first."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, 4)
    NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if "text/html" in output.get("data", {}):
                output["data"] = {"text/html": output["data"]["text/html"]}
    return notebook


def shown(cells: Any) -> Iterator[tuple[str, str]]:
    """Kind and text of every output, without addresses and colours of terminals."""
    for cell in cells:
        for output in cell.get("outputs", []):
            data = output.get("data") or {"stream": output.get("text", "")}
            for kind, text in sorted(data.items()):
                yield kind, COLOUR.sub("", ADDRESS.sub("0x", "".join(text)))


def main(folder: str) -> None:
    """Run every notebook of a folder and store its outputs in it."""
    import nbformat

    for path in sorted(Path(folder).glob("*.ipynb")):
        nbformat.write(ran(path), path)


if __name__ == "__main__":
    main(sys.argv[1])
