"""One HTML file: headings, tables and plots, with plotly's own script in it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from meshpar.html import assumed, heading, paragraph, table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

__all__ = ["assumed", "heading", "page", "paragraph", "plot", "table"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem;
  padding: 0 1rem; color: #222; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; }
h2 { font-size: 1.15rem; margin-top: 2rem; }
.plot { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .6rem; text-align: left;
  vertical-align: top; }
th, td:not(:first-child, :last-child) { white-space: nowrap; }
td:first-child { font-family: ui-monospace, monospace; min-width: 12rem; }
@media (max-width: 640px) {
  table, tbody, tr, td { display: block; } tr:first-child { display: none; }
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
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def plot(figure: Figure, *, min_width: int = 0) -> str:
    """Return a plot as wide as the page, which scrolls if that is below `min_width`."""
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG)
    return f'<div class="plot"><div style="min-width:{min_width}px">{drawn}</div></div>'
