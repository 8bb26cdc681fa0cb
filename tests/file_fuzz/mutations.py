"""Random changes of a file: of its bytes, and of the values of JSON and TOML."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np

Random = np.random.Generator

NAMES = (
    *("../../outside", "/etc/passwd", "/dev/zero", "a\0b", "\ud800", "\x1b[2J\r\x07"),
    *("", ".", "x" * 300, "http://localhost:1/x", "~root", "-1"),
)
"""Texts that a reader may take for the name of a file, or print."""

LONG = "x" * 100_000


def nested(depth: int = 400) -> list:
    """Return a list in a list in a list, deeper than any settings are."""
    found: list = []
    for _ in range(depth):
        found = [found]
    return found


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, 0.0, 0.5, 1.5, -0.0, 1e-300, 1e300),
    *(2**31 - 1, 2**31, 2**63, 2**64, 10**30, -(10**30)),
    *(float("nan"), float("inf"), -float("inf")),
    *("", "1", "true", "llama", [], {}, [[]], [None], [1, 2], {"a": 1}, {"": None}),
)
"""Values that take the place of another of any type."""

HUGE = "1e400"
"""A number beyond all floats, as JSON and TOML may write it."""


def changed_bytes(random: Random, content: bytes) -> bytes:
    """Return the bytes with one to three changes: other bytes, fewer or more."""
    changed = bytearray(content)
    for _ in range(random.integers(1, 4)):
        at = int(random.integers(0, len(changed) + 1))
        size = int(random.choice([1, 1, 2, 4, 8, 64]))
        match random.integers(0, 6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << int(random.integers(0, 8))
            case 1 if at < len(changed):
                changed[at] = int(random.integers(0, 256))
            case 2:
                changed[at:at] = random.bytes(size)
            case 3:
                del changed[at : at + size]
            case 4:
                changed[at:at] = changed[at : at + size]
            case 5 if random.random() < 0.5:
                del changed[at:]
    return bytes(changed)


def places(value: Any) -> list[tuple[Any, ...]]:
    """Return the keys that lead to each value within an object."""
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value[:50])  # A vocabulary would leave no chance to others.
    found = []
    for number, (key, inner) in enumerate(pairs):
        if number < 200:
            found += [(key,), *((key, *rest) for rest in places(inner))]
    return found


def changed_values(random: Random, value: Any) -> Any:
    """Return an object with one or two of its values, or its keys, changed."""
    value = copy.deepcopy(value)
    for _ in range(random.choice([1, 1, 1, 2])):
        found = places(value)
        if not found:
            return _value(random, value)
        *above, key = found[random.integers(len(found))]
        holder = value
        for one in above:
            holder = holder[one]
        _change(random, holder, key)
    return value


def _change(random: Random, holder: Any, key: Any) -> None:
    kind = random.random()
    if kind < 0.7:
        holder[key] = _value(random, holder[key])
    elif kind < 0.85 or isinstance(holder, list):
        del holder[key]
    else:
        holder[f"{key}{random.choice(['_', 's', ' ', 'x' * 50])}"] = holder.pop(key)


def _value(random: Random, before: Any) -> Any:
    kind = random.random()
    if type(before) is str:
        near: tuple[Any, ...] = (
            before + " ",
            before[:-1],
            before.upper(),
            f"../{before}",
        )
        if kind < 0.35:
            return NAMES[random.integers(len(NAMES))]
        if kind < 0.5:
            return near[random.integers(len(near))]
    if type(before) in (int, float) and kind < 0.45:
        near = (before + 1, before - 1, before * 2, -before, before / 2, f"{before}")
        return near[random.integers(len(near))]
    if type(before) in (list, dict) and kind < 0.3:
        return before * 2 if type(before) is list else [before]
    if kind < 0.53:
        return LONG
    if kind < 0.58:
        return nested()
    return VALUES[random.integers(len(VALUES))]


def changed_json(random: Random, text: str) -> bytes:
    """Return JSON with changed values, or a key twice, or a number beyond floats.

    Half of a surrogate pair is written as an escape.
    """
    changed = changed_values(random, json.loads(text))
    told = json.dumps(changed)
    kind = random.random()
    if kind < 0.05 and isinstance(changed, dict) and changed:
        key = list(changed)[random.integers(len(changed))]
        told = f"{told[:-1]}, {json.dumps(key)}: {json.dumps(_value(random, 1))}}}"
    elif kind < 0.1:
        told = told.replace(": 1", f": {HUGE}", 1)
    return told.encode()


def changed_toml(random: Random, text: str, parse: Callable[[str], Any]) -> bytes:
    """Return TOML with changed values, its tables written as inline ones."""
    changed = changed_values(random, parse(text))
    if not isinstance(changed, dict):
        return b"x" + text.encode()
    lines = [f"{_key(key)} = {toml_of(value)}" for key, value in changed.items()]
    kind = random.random()
    if kind < 0.05 and lines:
        lines.append(lines[random.integers(len(lines))])
    elif kind < 0.1 and lines:
        lines[-1] = f"{lines[-1].partition('=')[0]}= {HUGE}"
    return "\n".join(lines).encode(errors="surrogatepass")


def toml_of(value: Any) -> str:
    """Return a value as TOML; null, which TOML has not, as an empty text."""
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {toml_of(one)}" for key, one in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_of, value))}]"
    if isinstance(value, float):
        return repr(value)
    return '""' if value is None else json.dumps(value, ensure_ascii=False)


def _key(key: Any) -> str:
    return json.dumps(str(key), ensure_ascii=False)
