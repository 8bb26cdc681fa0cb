"""Text of the form `key=value,key=value`, split with errors that quote it."""

from __future__ import annotations

from meshpar.errors import InputError


def key_value_pairs(
    text: str, *, noun: str, form: str, way_out: str
) -> list[tuple[str, str]]:
    """The keys and values of `text` in order, without the spaces around them.

    Args:
        text: What was written.
        noun: What errors call it.
        form: What each part must be, such as `key=value`.
        way_out: The end of the error about a part that is not.

    Raises:
        InputError: A part has no key or no value.

    Example:
        >>> key_value_pairs("a=1, a = 2", noun="text", form="key=value", way_out="")
        [('a', '1'), ('a', '2')]
    """
    pairs = []
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise InputError(
                f"{noun} {text!r}: {part.strip()!r} is not {form}; {way_out}",
                key=f"{_room(noun)}.not_key_value",
            )
        pairs.append((key, value))
    return pairs


def key_values(text: str, *, noun: str, example: str) -> dict[str, str]:
    """The values of `text` by key.

    Args:
        text: What was written.
        noun: What errors call it.
        example: What errors show.

    Raises:
        InputError: A part is not key=value, or a key is given twice.

    Example:
        >>> key_values("data=2,tensor=4", noun="layout", example="data=2")
        {'data': '2', 'tensor': '4'}
    """
    values: dict[str, str] = {}
    way_out = f"write for example {example}"
    for key, value in key_value_pairs(
        text, noun=noun, form="key=value", way_out=way_out
    ):
        if key in values:
            raise InputError(
                f"{noun} {text!r}: {key!r} is given twice; give it once",
                key=f"{_room(noun)}.repeated_key",
            )
        values[key] = value
    return values


def _room(noun: str) -> str:
    """The room of an error's key: `rules` of `--with-rules`."""
    return noun.rpartition("-")[2]
