"""HTML of results: tables, grids, bars and lanes, for notebooks and for report pages.

Every text is escaped. An `element` needs no script, no file and no network: it takes
the colours of the page around it, light or dark, and its own colours carry black text.
A `page` is one file, with plotly's own script in it for its plots.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


COLORS = ("#8ec9f0", "#f7c77a", "#9fdcc4", "#e9b3d3", "#d6d27a", "#c7c7c7", "#e8a088")
"""Colours of kinds; black text is readable on all of them."""

_STYLE = """
.meshpar { overflow-x: auto; }
.meshpar table { border-collapse: collapse; margin: .5em 0; font-size: 90%; }
.meshpar tr { background: transparent; }
.meshpar th, .meshpar td { border: 0; border-bottom: 1px solid rgba(128,128,128,.35);
  padding: .2em .6em; text-align: left; vertical-align: top; color: inherit; }
.meshpar .grid td { border: 1px solid transparent; background-clip: padding-box;
  text-align: center; }
.meshpar p { margin: .4em 0; }
.meshpar summary { cursor: pointer; }
"""

_BLACK = "color:#000"

# Units of an SVG.
_LANE, _BAR, _NAMES, _AXIS, _WIDTH = 24, 19, 70, 18, 900
_DIGIT = 7


def element(title: str, parts: Iterable[str]) -> str:
    """Return one element with a title, for `_repr_html_`; the parts are HTML."""
    body = "\n".join(parts)
    head = f"<p><strong>{breakable(title)}</strong></p>"
    return f'<div class="meshpar"><style>{_STYLE}</style>\n{head}\n{body}\n</div>'


def heading(text: str) -> str:
    """Return a heading below the title."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{breakable(text)}</p>"


def assumed(text: str) -> str:
    """Return a paragraph that is marked as an assumption."""
    style = "border-left:4px solid #e69f00;padding-left:.6em"
    return f'<p class="assumed" style="{style}">{breakable(text)}</p>'


def details(summary: str, part: str) -> str:
    """Return a part that a reader opens by its summary."""
    return f"<details><summary>{breakable(summary)}</summary>\n{part}\n</details>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of plain text; each cell knows its column (`data-head`).

    Example:
        >>> table(["a"], [["<1"]])
        '<table><tr><th>a</th></tr>\\n<tr><td data-head="a">&lt;1</td></tr></table>'
    """
    lines = ["".join(f"<th>{escape(name)}</th>" for name in head)]
    lines += [
        "".join(
            f'<td data-head="{escape(name)}">{breakable(cell)}</td>'
            for name, cell in zip(head, row, strict=True)
        )
        for row in rows
    ]
    return "<table>" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def breakable(text: str) -> str:
    """Return escaped text with possible line breaks after a layout's commas."""
    return re.sub(r",(?=\w+=)", ",<wbr>", escape(text))


class Cell(NamedTuple):
    """Cell of a grid.

    Args:
        text: Its text.
        color: Its colour, in CSS.
        hover: Text on pointing at it.
    """

    text: str
    color: str
    hover: str


def grid(head: Sequence[str], rows: Mapping[str, Sequence[Cell]]) -> str:
    """Return coloured cells: name of a row -> its cells, below the columns' names."""
    lines = ["<th></th>" + "".join(f"<th>{escape(name)}</th>" for name in head)]
    lines += [
        f"<th>{escape(name)}</th>"
        + "".join(
            f'<td style="background-color:{escape(cell.color)};{_BLACK}" '
            f'title="{escape(cell.hover)}">{escape(cell.text)}</td>'
            for cell in cells
        )
        for name, cells in rows.items()
    ]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table class="grid">{body}</table>'


def shade(index: int, number: int) -> str:
    """Return one of `number` colours that differ and carry black text."""
    if number <= len(COLORS):
        return COLORS[index]
    return f"hsl({360 * index / number:.0f}, 65%, 78%)"


def legend(colors: Mapping[str, str]) -> str:
    """Return the names of kinds, each on its colour."""
    names = (
        f'<span style="background-color:{escape(color)};{_BLACK};padding:0 .4em">'
        f"{escape(name)}</span>"
        for name, color in colors.items()
    )
    return f"<p>{' '.join(names)}</p>"


def stacked_bar(sizes: Mapping[str, float], text: Callable[[float], str]) -> str:
    """Return one bar of parts side by side, as wide as the page, and its legend.

    Args:
        sizes: Kind -> its size; one without a size is left out.
        text: A size in words.
    """
    total = sum(sizes.values())
    named = {
        f"{kind} {text(size)} ({size / total:.0%})": size
        for kind, size in sizes.items()
        if size > 0
    }
    colors = dict(zip(named, cycle(COLORS), strict=False))
    parts = (
        f'<div title="{escape(name)}" style="background-color:{colors[name]};'
        f'width:{size / total:.2%};height:1.4em"></div>'
        for name, size in named.items()
    )
    bar = f'<div style="display:flex;max-width:60em">{"".join(parts)}</div>'
    return f"{bar}\n{legend(colors)}" if named else ""


class Bar(NamedTuple):
    """Bar of a lane.

    Args:
        start, end: Its place along the lane.
        text: Text inside, if there is room.
        kind: Its kind, which has a colour.
        hover: Text on pointing at it.
    """

    start: float
    end: float
    text: str
    kind: str
    hover: str


def lanes(
    rows: Mapping[str, Sequence[Bar]], kinds: Sequence[str], unit: str = ""
) -> str:
    """Return lanes of bars to one scale, and the legend of their kinds.

    Args:
        rows: Name of a lane -> its bars.
        kinds: All kinds, in the order of their colours; those without a bar are left
            out of the legend.
        unit: Unit of the scale.
    """
    bars = [bar for row in rows.values() for bar in row]
    end = max((bar.end for bar in bars), default=0.0) or 1.0
    colors = dict(zip(kinds, cycle(COLORS), strict=False))
    height = _LANE * len(rows) + _AXIS
    parts = [
        _lane(name, row, at * _LANE, (_WIDTH - _NAMES) / end, colors)
        for at, (name, row) in enumerate(rows.items())
    ]
    ends = ((_NAMES, "start", "0"), (_WIDTH, "end", f"{end:.4g} {unit}".strip()))
    parts += [
        f'<text x="{x}" y="{height - 4}" text-anchor="{anchor}">{escape(text)}</text>'
        for x, anchor, text in ends
    ]
    drawn = {bar.kind for bar in bars}
    shown = {kind: color for kind, color in colors.items() if kind in drawn}
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" style="width:100%;max-width:{_WIDTH}px;'
        'font:11px sans-serif" role="img" fill="currentColor">'
        f"{''.join(parts)}</svg>\n{legend(shown)}"
    )


def _lane(
    name: str, row: Sequence[Bar], y: float, scale: float, colors: Mapping[str, str]
) -> str:
    middle = y + _BAR - 5
    parts = [f'<text x="0" y="{middle}">{escape(name)}</text>']
    for bar in row:
        x, width = _NAMES + bar.start * scale, (bar.end - bar.start) * scale
        fits = width > _DIGIT * len(bar.text)
        inside = (
            f'<text x="{x + width / 2:.1f}" y="{middle}" text-anchor="middle" '
            f'fill="#000">{escape(bar.text)}</text>'
        )
        parts.append(
            f"<g><title>{escape(bar.hover)}</title>"
            f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.7, 0.3):.1f}" '
            f'height="{_BAR}" fill="{colors[bar.kind]}"/>{inside if fits else ""}</g>'
        )
    return "".join(parts)


_PAGE_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem;
  padding: 0 1rem; color: #222; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
.plot { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; display: block;
  width: max-content; max-width: 100%; overflow-x: auto; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .6rem; text-align: left;
  vertical-align: top; }
td:not(:first-child, :last-child) { white-space: nowrap; }
td[data-head="exposed"] { white-space: normal; min-width: 7rem; }
td:first-child { font-family: ui-monospace, monospace; min-width: 12rem;
  overflow-wrap: anywhere; }
@media (max-width: 640px) {
  table, tbody, tr, td { display: block; } tr:first-child { display: none; }
  table { width: auto; }
  td { border: 0; padding: 0; }
  td:not(:first-child) { white-space: normal; overflow-wrap: anywhere; }
  td:first-child { padding-top: .5rem; overflow-wrap: anywhere; }
  td:last-child { padding-bottom: .5rem; border-bottom: 1px solid #ddd; }
  td + td::before { content: attr(data-head) ": "; color: #595959; } }
"""
_CONFIG = {"responsive": True, "displaylogo": False}


def page(title: str, parts: Iterable[str]) -> str:
    """Return an HTML file of these parts, which are HTML."""
    from plotly.offline import get_plotlyjs

    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_PAGE_STYLE}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def plot(figure: Figure, *, min_width: int = 0) -> str:
    """Return a plot as wide as the page, which scrolls if that is below `min_width`."""
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG)
    return f'<div class="plot"><div style="min-width:{min_width}px">{drawn}</div></div>'
