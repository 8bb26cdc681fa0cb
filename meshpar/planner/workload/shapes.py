"""Workloads by name (`presets.json`, published runs), from words, or a `config.json`.

`presets.json` is written by `python -m meshpar.models.presets`, so that a plan of a
preset needs no jax.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from meshpar.errors import InputError, key_values, nearest
from meshpar.planner.workload.config_json import (
    GPT2_FIELDS,
    LLAMA_FIELDS,
    workload_from_json,
)
from meshpar.planner.workload.workload import Workload

_FIELDS = {field.name for field in fields(Workload)} - {"name", "traced"}


def _megatron(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads}
    return {**GPT2_FIELDS, **sizes, "vocab": 51_200, "seq": 2048}


# Sizes of Narayanan et al. 2021, table 1 (megatron-*); Korthikanti et al. 2022, table 3
# (22b to 1t); Brown et al. 2020, table 2.1, with Megatron's vocabulary (gpt3-175b).
_PUBLISHED: dict[str, dict[str, Any]] = {
    # OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", and its config.json; without
    # sinks.
    "gpt-oss-120b": {
        **LLAMA_FIELDS,
        "layers": 36,
        "hidden": 2880,
        "heads": 64,
        "kv_heads": 8,
        "ffn": 2880,
        "vocab": 201_088,
        "head_dim": 64,
        "experts": 128,
        "top_k": 4,
        "biases": True,
        "window": 128,
        "window_layers": 18,
    },
    "gpt3-175b": _megatron(96, 12_288, 96),
    "megatron-1.7b": _megatron(24, 2304, 24),
    "megatron-3.6b": _megatron(30, 3072, 32),
    "megatron-7.5b": _megatron(36, 4096, 32),
    "megatron-18.4b": _megatron(40, 6144, 48),
    "megatron-39.1b": _megatron(48, 8192, 64),
    "megatron-76.1b": _megatron(60, 10_240, 80),
    "megatron-145.6b": _megatron(80, 12_288, 96),
    "megatron-310.1b": _megatron(96, 16_384, 128),
    "megatron-529.6b": _megatron(105, 20_480, 128),
    "megatron-1008.0b": _megatron(128, 25_600, 160),
    "22b": _megatron(48, 6144, 64),
    "175b": _megatron(96, 12_288, 96),
    "530b": _megatron(105, 20_480, 128),
    "1t": _megatron(128, 25_600, 160),
}

_TABLE: dict[str, dict[str, Any] | None] = json.loads(
    Path(__file__).parents[1].joinpath("presets.json").read_text()
)
_PRESETS = {
    name: Workload(name=name, **sizes)
    for name, sizes in _TABLE.items()
    if sizes is not None
}

SHAPES = {
    **{name: each for name, each in _PRESETS.items() if each.causal},
    **{name: Workload(name=name, **sizes) for name, sizes in _PUBLISHED.items()},
}
"""Workloads of text by name: presets, and published runs."""

PUBLISHED = frozenset(_PUBLISHED)
"""Names of published runs, which are no presets."""

OTHER_SHAPES = {name: each for name, each in _PRESETS.items() if not each.causal}
"""Workloads of other inputs than text, by the name of their preset."""

TRACED = frozenset(name for name, sizes in _TABLE.items() if sizes is None)
"""Presets without a workload here: their arithmetic is traced, which needs jax."""

_BY_NAME = {**SHAPES, **OTHER_SHAPES}


def workload_of(model: str, *, words: str | None = None) -> Workload:
    """Return the workload of a name, of a `config.json`, or of `key=value` words.

    Args:
        model: A name in `SHAPES` or `OTHER_SHAPES`, a path that ends in .json, or
            `layers=4,hidden=256,heads=8,vocab=256`; `ffn` is `4 * hidden` when absent.
        words: Sizes that differ from it, as `key=value,...`.

    Raises:
        InputError: Unknown name, file or word, or sizes that do not fit together.

    Example:
        >>> workload_of("layers=2,hidden=64,heads=4,vocab=96,gated=true").num_parameters
        143680
    """
    if model.endswith(".json"):
        workload = workload_from_json(model)
    elif "=" in model:
        workload = _from_words(model)
    elif model in _BY_NAME:
        workload = _BY_NAME[model]
    else:
        raise InputError(
            f"no model {model!r}; {nearest(model, {*_BY_NAME, *TRACED})}; or give the "
            "path of a config.json, or sizes such as "
            "layers=4,hidden=256,heads=8,vocab=256",
            key="model.unknown_name",
        )
    return workload if words is None else _changed(workload, words)


def _changed(workload: Workload, words: str) -> Workload:
    """Return `workload` with other sizes, and derive again what follows from them."""
    given = _words(words)
    derived = {
        "kv_heads": "heads" in given and workload.kv_heads == workload.heads,
        "head_dim": {"heads", "hidden"} & given.keys()
        and workload.head_dim * workload.heads == workload.hidden,
        "ffn": "hidden" in given and workload.ffn == 4 * workload.hidden,
        "expert_ffn": {"ffn", "hidden"} & given.keys()
        and workload.expert_ffn == workload.ffn,
    }
    again = {name: 0 for name, follows in derived.items() if follows}
    return replace(workload, **{**again, **given})


def _from_words(text: str) -> Workload:
    given = _words(text)
    missing = [
        name for name in ("layers", "hidden", "heads", "vocab") if name not in given
    ]
    if missing:
        raise InputError(
            f"model {text!r}: no {', '.join(missing)}; give each a size",
            key="model.missing_sizes",
        )
    # As `meshpar.models.presets.build` has it: a Llama where gated, otherwise a GPT-2.
    family = {} if given.get("gated") else GPT2_FIELDS
    return Workload(**{"name": text, **family, **given})


_OTHER_WORDS = {"embed": "hidden", "max_seq": "seq"}
"""Names of sizes in the configs of `meshpar.models.presets`."""


def _words(text: str) -> dict[str, Any]:
    given = key_values(text, noun="model", example="layers=4,hidden=256")
    names = _FIELDS | _OTHER_WORDS.keys()
    sizes: dict[str, Any] = {}
    for key, value in given.items():
        name = _OTHER_WORDS.get(key, key)
        if key not in names:
            raise InputError(
                f"model {text!r}: no size {key!r}; {nearest(key, names)}",
                key="model.unknown_size",
            )
        if name in sizes:
            other = next(one for one, same in _OTHER_WORDS.items() if same == name)
            raise InputError(
                f"model {text!r}: {other} is {name} too; give one of them",
                key="model.repeated_size",
            )
        sizes[name] = _scalar(text, key, value)
    return sizes


def _scalar(text: str, key: str, value: str) -> int | bool:
    if value in ("true", "false"):
        return value == "true"
    if key == "dropout" and re.fullmatch(r"0?\.\d+|0", value):
        return float(value) > 0  # a share, as `meshpar.models.presets` has it
    if not value.isdecimal():
        raise InputError(
            f"model {text!r}: {key}={value} is no whole number, true or false",
            key="model.unreadable_size",
        )
    return int(value)
