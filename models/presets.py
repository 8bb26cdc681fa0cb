"""Named shapes of public models, and small ones for machines without accelerators.

Sizes are those of each model's released `config.json` (Hugging Face hub, 2024-2025).

A new preset is one entry, in `PRESETS` or in the file of its family. Then write the
planner's table of sizes, which needs no jax when it is read:

    python -m meshpar.models.presets > meshpar/planner/presets.json
"""

from __future__ import annotations

import itertools
import json
from dataclasses import MISSING, fields, replace
from typing import Any

from meshpar import InputError, Model
from meshpar.errors import nearest
from meshpar.models.afno import AFNO
from meshpar.models.convert.hf_config import config_from_json
from meshpar.models.dit import DIT
from meshpar.models.dlrm import DLRM
from meshpar.models.encoder_decoder import ENCODER_DECODER
from meshpar.models.gemma3 import GEMMA3
from meshpar.models.gpt2 import GPT2, GPT2Config
from meshpar.models.layers.rope import RopeScaling
from meshpar.models.llama import LLAMA, LlamaConfig
from meshpar.models.moe import MOE, MoEConfig
from meshpar.models.pair import PAIR
from meshpar.models.unet3d import UNET3D
from meshpar.models.vit import VIT

_LLAMA3 = {"vocab": 128_256, "rope_theta": 500_000.0}
_LLAMA31 = {**_LLAMA3, "rope_scaling": RopeScaling()}
_QWEN2 = {"rope_theta": 1_000_000.0, "norm_epsilon": 1e-6, "qkv_bias": True}
_QWEN3 = {
    "vocab": 151_936,
    "head_dim": 128,
    "rope_theta": 1_000_000.0,
    "norm_epsilon": 1e-6,
    "qk_norm": True,
}

_TINY_MOE = MoEConfig(
    layers=4,
    embed=128,
    heads=8,
    kv_heads=4,
    vocab=256,
    experts=8,
    top_k=2,
    expert_ffn=192,
    bias_rate=0.001,
)

PRESETS: dict[str, LlamaConfig | GPT2Config | MoEConfig] = {
    "test": LlamaConfig(
        layers=2, embed=32, heads=4, kv_heads=2, ffn=64, vocab=64, tied=True
    ),
    "tiny": LlamaConfig(layers=4, embed=128, heads=8, kv_heads=4, ffn=384, vocab=256),
    "tiny-8": LlamaConfig(layers=4, embed=128, heads=8, kv_heads=8, ffn=384, vocab=256),
    "tiny-moe": _TINY_MOE,
    "tiny-moe-capacity": replace(_TINY_MOE, capacity_factor=1.25, bias_rate=0.0),
    "tiny-gpt2": GPT2Config(layers=4, embed=128, heads=8, vocab=256, max_seq=256),
    "gpt2": GPT2Config(layers=12, embed=768, heads=12, vocab=50_257),
    "gpt2-medium": GPT2Config(layers=24, embed=1024, heads=16, vocab=50_257),
    "gpt2-large": GPT2Config(layers=36, embed=1280, heads=20, vocab=50_257),
    "gpt2-xl": GPT2Config(layers=48, embed=1600, heads=25, vocab=50_257),
    "smollm2-135m": LlamaConfig(
        layers=30,
        embed=576,
        heads=9,
        kv_heads=3,
        ffn=1536,
        vocab=49_152,
        tied=True,
        rope_theta=100_000.0,
    ),
    "smollm2-1.7b": LlamaConfig(
        layers=24,
        embed=2048,
        heads=32,
        kv_heads=32,
        ffn=8192,
        vocab=49_152,
        tied=True,
        rope_theta=130_000.0,
    ),
    "qwen2-0.5b": LlamaConfig(
        layers=24,
        embed=896,
        heads=14,
        kv_heads=2,
        ffn=4864,
        vocab=151_936,
        tied=True,
        **_QWEN2,
    ),
    "qwen2-7b": LlamaConfig(
        layers=28,
        embed=3584,
        heads=28,
        kv_heads=4,
        ffn=18_944,
        vocab=152_064,
        **_QWEN2,
    ),
    "qwen3-0.6b": LlamaConfig(
        layers=28, embed=1024, heads=16, kv_heads=8, ffn=3072, tied=True, **_QWEN3
    ),
    "qwen3-8b": LlamaConfig(
        layers=36, embed=4096, heads=32, kv_heads=8, ffn=12_288, **_QWEN3
    ),
    "llama2-7b": LlamaConfig(
        layers=32, embed=4096, heads=32, kv_heads=32, ffn=11_008, vocab=32_000
    ),
    "llama3.2-1b": LlamaConfig(
        layers=16,
        embed=2048,
        heads=32,
        kv_heads=8,
        ffn=8192,
        tied=True,
        **{**_LLAMA31, "rope_scaling": RopeScaling(factor=32.0)},
    ),
    "llama3-8b": LlamaConfig(
        layers=32, embed=4096, heads=32, kv_heads=8, ffn=14_336, **_LLAMA3
    ),
    "llama3-70b": LlamaConfig(
        layers=80, embed=8192, heads=64, kv_heads=8, ffn=28_672, **_LLAMA3
    ),
    "llama3-405b": LlamaConfig(
        layers=126, embed=16_384, heads=128, kv_heads=8, ffn=53_248, **_LLAMA31
    ),
    "mixtral-8x7b": MoEConfig(
        layers=32,
        embed=4096,
        heads=32,
        kv_heads=8,
        vocab=32_000,
        experts=8,
        top_k=2,
        expert_ffn=14_336,
        rope_theta=1_000_000.0,
        balance_coefficient=0.02,
    ),
    "qwen3-30b-a3b": MoEConfig(
        layers=48,
        embed=2048,
        heads=32,
        kv_heads=4,
        experts=128,
        top_k=8,
        expert_ffn=768,
        balance_coefficient=0.001,
        **_QWEN3,
    ),
    "qwen3-235b-a22b": MoEConfig(
        layers=94,
        embed=4096,
        heads=64,
        kv_heads=4,
        experts=128,
        top_k=8,
        expert_ffn=1536,
        balance_coefficient=0.001,
        **_QWEN3,
    ),
    # Router: DeepSeek-AI 2024, section 4.2 (bias 0.001, balance 0.0001, no z-loss).
    "deepseek-v3": MoEConfig(
        layers=61,
        embed=7168,
        heads=128,
        vocab=129_280,
        experts=256,
        top_k=8,
        expert_ffn=2048,
        shared_experts=1,
        dense_layers=3,
        ffn=18_432,
        score="sigmoid",
        scale=2.5,
        groups=8,
        top_groups=4,
        bias_rate=0.001,
        balance_coefficient=0.0001,
        z_coefficient=0.0,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        norm_epsilon=1e-6,
        init_std=0.006,
    ),
}
"""Language models, of which the planner has shapes."""

FAMILIES = (
    LLAMA,
    GPT2,
    MOE,
    GEMMA3,
    VIT,
    AFNO,
    PAIR,
    ENCODER_DECODER,
    UNET3D,
    DIT,
    DLRM,
)
"""A new one is a file, with its presets, and a line here."""

FUZZED = tuple(text for family in FAMILIES for text in family.fuzzed)
"""Models that `meshpar fuzz` draws from."""

_LANGUAGE = tuple(family.fuzzed for family in (LLAMA, GPT2, MOE))
_FUZZED_FAMILIES = tuple(family.fuzzed for family in FAMILIES if family.fuzzed)
FUZZED_TURNS = (
    *_FUZZED_FAMILIES,
    *itertools.islice(
        itertools.cycle(_LANGUAGE), len(_FUZZED_FAMILIES) - 2 * len(_LANGUAGE)
    ),
)
"""Families as they take turns there: half of the turns are of language models."""

OTHER_PRESETS: dict[str, Any] = {
    name: config for family in FAMILIES for name, config in family.presets.items()
}
"""Presets of the families with a config of their own."""

TEXT_PRESETS = (
    *PRESETS,
    *(name for family in FAMILIES if family.of_text for name in family.presets),
)
"""Models that learn from a text alone."""

_BUILDERS = {family.config: family.build for family in FAMILIES}


def planner_table() -> str:
    """Return the text of `meshpar/planner/presets.json`: sizes of every preset.

    They are null for presets whose arithmetic only a trace tells.
    """
    sizes = {family.config: family.sizes for family in FAMILIES}
    rows = []
    for name, config in {**PRESETS, **OTHER_PRESETS}.items():
        of_family = sizes[type(config)]
        row = of_family and of_family(config)
        rows.append(f"{json.dumps(name)}: {json.dumps(row)}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


# What the command line calls the fields of a config.
_FIELDS = {"hidden": "embed", "seq": "max_seq"}

_A_LLAMA = "choose a Llama (gated=true, or a preset of one)"


def build(
    preset: str | None = None, *, config_json: str | None = None, **sizes: object
) -> Model:
    """The model of a preset, of a Hugging Face config, or of sizes alone.

    Args:
        preset: A name in `PRESETS` or `OTHER_PRESETS`.
        config_json: Path of a `config.json`, instead of a preset.
        sizes: Fields of the config that differ; `hidden` is another word for `embed`,
            `seq` for `max_seq`. Without preset or file they are all of it:
            `experts=8` is a decoder with routed experts, `gated=true` a Llama,
            otherwise a GPT-2 whose `ffn` is four times `hidden` when absent.

    Raises:
        InputError: An unknown preset or field, sizes that do not fit together, or a
            value that the family does not have, such as `tied=false` for a GPT-2.
    """
    return build_config(configure(preset, config_json=config_json, **sizes))


def build_config(config: Any) -> Model:
    """The model of a config of any family."""
    return _BUILDERS[type(config)](config)


def configure(
    preset: str | None = None, *, config_json: str | None = None, **sizes: object
) -> Any:
    """The family's config that `build` makes a model of; arguments and errors alike."""
    if preset is not None and config_json is not None:
        raise InputError(
            f"preset {preset!r} and {config_json!r} are both given; give one",
            key="model.preset_and_model",
        )
    presets = {**PRESETS, **OTHER_PRESETS}
    if preset is not None and preset not in presets:
        raise InputError(
            f"no preset {preset!r}; {nearest(preset, presets)}",
            key="model.unknown_preset",
        )
    named = {_FIELDS.get(name, name): value for name, value in sizes.items()}
    if preset is None and config_json is None:
        return _from_sizes(named)
    config = presets[preset] if preset is not None else config_from_json(config_json)
    if isinstance(config, LlamaConfig | GPT2Config | MoEConfig):
        named = _without_fixed(type(config), named, named.get("heads", config.heads))
    _check_fields(type(config), named)
    return replace(config, **named)


def _from_sizes(
    sizes: dict[str, object],
) -> LlamaConfig | GPT2Config | MoEConfig:
    routed = "experts" in sizes
    gated = sizes.get("gated", routed)
    if not isinstance(gated, bool):
        raise InputError(
            f"gated={gated!r}: must be true or false", key="value.not_boolean"
        )
    kind: type = MoEConfig if routed else LlamaConfig if gated else GPT2Config
    if gated and "kv_heads" not in sizes and "heads" in sizes:
        sizes["kv_heads"] = sizes["heads"]
    # Absent heads are missing below, whatever kv_heads is.
    sizes = _without_fixed(kind, sizes, sizes.get("heads", sizes.get("kv_heads")))
    _check_fields(kind, sizes)
    missing = [
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.name not in sizes
    ]
    if missing:
        raise InputError(
            f"no {', '.join(missing)} given, and no preset; give each a size",
            key="model.missing_sizes",
        )
    return kind(**sizes)


def _without_fixed(
    kind: type, sizes: dict[str, object], heads: object
) -> dict[str, object]:
    """`sizes` without the words that only say what every model of the family is."""
    for name in ("experts", "top_k"):
        if name in sizes and kind is not MoEConfig:
            raise InputError(
                f"{name}={sizes[name]!r}: {kind.__name__} has no experts; leave {name} "
                "out, or choose a preset with experts",
                key="model.no_experts",
            )
    fixed = _gpt2_fixed_keys(heads) if kind is GPT2Config else _llama_fixed_keys()
    for name, (value, why, other) in fixed.items():
        if sizes.get(name, value) != value:
            raise InputError(
                f"{name}={sizes[name]!r}: {why}; leave {name} out, or {other}",
                key="model.value_fixed_by_family",
            )
    return {name: value for name, value in sizes.items() if name not in fixed}


def _llama_fixed_keys() -> dict[str, tuple[object, str, str]]:
    return {
        "gated": (
            True,
            "the MLP of a Llama is gated",
            "choose a GPT-2 preset",
        )
    }


def _gpt2_fixed_keys(heads: object) -> dict[str, tuple[object, str, str]]:
    return {
        "gated": (False, "the MLP of a GPT-2 is not gated", "choose a Llama preset"),
        "tied": (True, "the head of a GPT-2 is its embedding table", _A_LLAMA),
        "kv_heads": (
            heads,
            f"each of a GPT-2's heads={heads} has its own keys and values",
            _A_LLAMA,
        ),
    }


def _check_fields(kind: type, sizes: dict[str, object]) -> None:
    known = {field.name for field in fields(kind)}
    for name in sizes:
        if name not in known:
            raise InputError(
                f"{kind.__name__} has no {name!r}; {nearest(name, known)}",
                key="model.unknown_size",
            )


if __name__ == "__main__":
    print(planner_table(), end="")
