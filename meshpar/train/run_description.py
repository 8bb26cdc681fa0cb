"""What a checkpoint of a recipe says of its run, of the types that a run writes."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from meshpar.foreign_files import json_type
from meshpar.train.checkpoint_errors import CheckpointError

_TEXT, _WHOLE, _NUMBER = (str,), (int,), (int, float)
_OBJECT = (dict,)
_MOST = 1 << 63
"""Limit of a whole number, which counts something."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("layout", "layout_asked", "data", "chat_date"), _TEXT),
    **dict.fromkeys(("tokenizer", "eos", "from_weights"), (*_TEXT, type(None))),
    **dict.fromkeys(("seed", "steps", "global_batch", "seq", "windows"), _WHOLE),
    "decay_steps": (*_WHOLE, type(None)),
    "learning_rate": _NUMBER,
    "model_sizes": _OBJECT,
    "lora": (*_OBJECT, type(None)),
}
"""Name -> what it may be, where it is there."""

_LISTS: Mapping[str, type] = {
    **dict.fromkeys(("text", "sources", "validation_data", "formats"), str),
    "stop_tokens": int,
}
"""Name -> of what it is a list, where it is there."""


def check_description(said: Mapping[str, Any], where: str) -> None:
    """Check that what a checkpoint says of its run has the types that a run writes.

    A checkpoint may come from anybody, and may lack a name that this version writes.

    Args:
        said: By name; others than a recipe writes may have any type.
        where: The checkpoint, for the error.

    Raises:
        CheckpointError: A value is of another type.
    """
    for name, value in said.items():
        if name in _TYPES:
            is_right = _is_one_of(value, _TYPES[name])
        elif name in _LISTS:
            kind = (_LISTS[name],)
            is_list = isinstance(value, list | tuple)
            is_right = is_list and all(_is_one_of(one, kind) for one in value)
        else:
            is_right = True
        if not is_right:
            raise CheckpointError(
                f"{where} says of its run {name}={reprlib.repr(value)} "
                f"({json_type(value)}), which no run writes: its file run/metadata is "
                "of something else, or was changed",
                key="checkpoint.unreadable",
            )


def _is_one_of(value: Any, kinds: tuple[type, ...]) -> bool:
    if isinstance(value, bool) or not isinstance(value, kinds):
        return False
    return not isinstance(value, int) or 0 <= value < _MOST
