"""A scatter plot as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BELOW, _ABOVE = 720, 400, 70, 50, 20


@dataclass(frozen=True, kw_only=True)
class Points:
    """Points of one kind.

    Args:
        name: What the legend calls them.
        color: As CSS has it.
        points: (x, y, what the pointer shows) of each.
        joined: Whether a line joins them.
    """

    name: str
    color: str
    points: Sequence[tuple[float, float, str]]
    joined: bool = False


def scatter(
    kinds: Sequence[Points],
    *,
    x_label: str,
    y_label: str,
    diagonal: bool = False,
    limit: tuple[float, str] | None = None,
) -> str:
    """The plot.

    Args:
        kinds: What is plotted; those without points are left out.
        x_label: What the horizontal axis is, with its unit.
        y_label: The vertical one.
        diagonal: Whether to draw x = y, on logarithmic axes.
        limit: A height to draw a line at, and its name.
    """
    xs = [x for kind in kinds for x, _, _ in kind.points]
    ys = [y for kind in kinds for _, y, _ in kind.points]
    ys += [limit[0]] if limit else []
    if diagonal:
        xs = ys = xs + ys
    x_scale = _Scale(xs, _LEFT, _WIDTH - 10, log=diagonal)
    y_scale = _Scale(ys, _HEIGHT - _BELOW, _ABOVE, log=diagonal)
    parts = [*_axes(x_scale, y_scale, x_label, y_label)]
    if limit:
        y = y_scale(limit[0])
        parts.append(_line(_LEFT, y, _WIDTH - 10, y, "#b00", dash="6 4"))
        parts.append(_text(_LEFT + 6, y - 5, limit[1]))
    if diagonal:
        low, high = x_scale.low, x_scale.high
        ends = (x_scale(low), y_scale(low), x_scale(high), y_scale(high))
        parts.append(_line(*ends, "#999", dash="4 4"))
    for place, kind in enumerate(kinds):
        parts += _kind(kind, x_scale, y_scale, place)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" font-family="sans-serif" '
        f'font-size="12">\n{body}\n</svg>'
    )


class _Scale:
    """From values to pixels, with round ticks."""

    def __init__(
        self, values: Sequence[float], start: float, end: float, *, log: bool
    ) -> None:
        self._log, self._start, self._end = log, start, end
        smallest, largest = min(values), max(values)
        if log:
            self.low = 10 ** (math.floor(math.log10(smallest) * 2) / 2)
            self.high = 10 ** (math.ceil(math.log10(largest) * 2) / 2)
        else:
            room = 0.08 * (largest - smallest) or 0.1 * abs(largest) or 1.0
            self.low, self.high = smallest - room, largest + room
        if self.low == self.high:
            self.high = self.low * 10

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self._log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self._start + (value - low) / (high - low) * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Round values within the range."""
        if self._log:
            powers = range(
                math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1
            )
            ticks = [digit * 10.0**power for power in powers for digit in (1, 3)]
        else:
            step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
            while (self.high - self.low) / step > 8:
                step *= 2
            first = math.ceil(self.low / step)
            ticks = [step * (first + place) for place in range(9)]
        return [tick for tick in ticks if self.low <= tick <= self.high]


def _axes(x_scale: _Scale, y_scale: _Scale, x_label: str, y_label: str) -> list[str]:
    bottom = _HEIGHT - _BELOW
    parts = [
        _line(_LEFT, bottom, _WIDTH - 10, bottom, "#444"),
        _line(_LEFT, _ABOVE, _LEFT, bottom, "#444"),
        _text((_LEFT + _WIDTH) / 2, _HEIGHT - 8, x_label, anchor="middle"),
        f'<text transform="translate(14 {bottom / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_label)}</text>',
    ]
    for tick in x_scale.ticks():
        x = x_scale(tick)
        parts.append(_line(x, bottom, x, bottom + 5, "#444"))
        parts.append(_text(x, bottom + 18, f"{tick:.4g}", anchor="middle"))
    for tick in y_scale.ticks():
        y = y_scale(tick)
        parts.append(_line(_LEFT - 5, y, _LEFT, y, "#444"))
        parts.append(_text(_LEFT - 8, y + 4, f"{tick:.4g}", anchor="end"))
    return parts


def _kind(kind: Points, x_scale: _Scale, y_scale: _Scale, place: int) -> list[str]:
    if not kind.points:
        return []
    places = [(x_scale(x), y_scale(y), text) for x, y, text in kind.points]
    parts = []
    if kind.joined:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{kind.color}"/>')
    parts += [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{kind.color}" '
        f'fill-opacity="0.7"><title>{escape(text)}</title></circle>'
        for x, y, text in places
    ]
    y = _ABOVE + 8 + 18 * place
    parts.append(f'<circle cx="{_LEFT + 24}" cy="{y}" r="4" fill="{kind.color}"/>')
    parts.append(_text(_LEFT + 34, y + 4, kind.name))
    return parts


def _line(
    x1: float, y1: float, x2: float, y2: float, color: str, dash: str = ""
) -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{color}"{dashed}/>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
