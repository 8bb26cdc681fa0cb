"""Where a workload comes from: a named shape, words, or a `config.json`."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

from meshpar.errors import InputError, key_values
from meshpar.layout import nearest
from meshpar.planner.workload.hf_workload import GPT2, LLAMA, workload_from_json
from meshpar.planner.workload.workload import Workload

_FIELDS = {field.name for field in fields(Workload)} - {"name", "traced"}


def _gpt2(layers: int, hidden: int, heads: int, vocab: int, seq: int = 1024) -> dict:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab}
    return {**GPT2, **sizes, "seq": seq}


def _megatron(layers: int, hidden: int, heads: int) -> dict:
    return _gpt2(layers, hidden, heads, vocab=51_200, seq=2048)


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any
) -> dict:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads}
    return {**LLAMA, **sizes, "kv_heads": kv_heads, "ffn": ffn, **more}


_QWEN3 = {"vocab": 151_936, "head_dim": 128, "qk_norm": True}

# Sizes of each model's released config.json (Hugging Face hub, 2024-2025), and of:
# Narayanan et al. 2021, table 1 (megatron-*); Korthikanti et al. 2022, table 3 (22b to
# 1t); Brown et al. 2020, table 2.1, with Megatron's vocabulary (gpt3-175b).
_SHAPES: dict[str, dict[str, Any]] = {
    "test": _llama(2, 32, 4, 2, 64, vocab=64, tied=True),
    "tiny": _llama(4, 128, 8, 4, 384, vocab=256),
    "tiny-8": _llama(4, 128, 8, 8, 384, vocab=256),
    **dict.fromkeys(
        ("tiny-moe", "tiny-moe-capacity"),
        _llama(4, 128, 8, 4, 192, vocab=256, experts=8, top_k=2),
    ),
    "tiny-gpt2": _gpt2(4, 128, 8, 256, seq=256),
    "gpt2": _gpt2(12, 768, 12, 50_257),
    "gpt2-medium": _gpt2(24, 1024, 16, 50_257),
    "gpt2-large": _gpt2(36, 1280, 20, 50_257),
    "gpt2-xl": _gpt2(48, 1600, 25, 50_257),
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, vocab=49_152, tied=True),
    "smollm2-1.7b": _llama(24, 2048, 32, 32, 8192, vocab=49_152, tied=True),
    "qwen2-0.5b": _llama(24, 896, 14, 2, 4864, vocab=151_936, tied=True, qkv_bias=True),
    "qwen2-7b": _llama(28, 3584, 28, 4, 18_944, vocab=152_064, qkv_bias=True),
    "qwen3-0.6b": _llama(28, 1024, 16, 8, 3072, tied=True, **_QWEN3),
    "qwen3-8b": _llama(36, 4096, 32, 8, 12_288, **_QWEN3),
    "llama2-7b": _llama(32, 4096, 32, 32, 11_008, vocab=32_000),
    "llama3.2-1b": _llama(16, 2048, 32, 8, 8192, vocab=128_256, tied=True),
    "llama3-8b": _llama(32, 4096, 32, 8, 14_336, vocab=128_256),
    "llama3-70b": _llama(80, 8192, 64, 8, 28_672, vocab=128_256),
    "llama3-405b": _llama(126, 16_384, 128, 8, 53_248, vocab=128_256),
    "qwen3-30b-a3b": _llama(48, 2048, 32, 4, 768, experts=128, top_k=8, **_QWEN3),
    "qwen3-235b-a22b": _llama(94, 4096, 64, 4, 1536, experts=128, top_k=8, **_QWEN3),
    "mixtral-8x7b": _llama(32, 4096, 32, 8, 14_336, vocab=32_000, experts=8, top_k=2),
    # Without the multi-token prediction layer, which is not the main model's.
    "deepseek-v3": _llama(
        61,
        7168,
        128,
        128,
        18_432,
        vocab=129_280,
        experts=256,
        top_k=8,
        expert_ffn=2048,
        shared_experts=1,
        dense_layers=3,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
}

_PUBLISHED: dict[str, dict[str, Any]] = {
    # OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", and its config.json; with
    # attention to all tokens in every layer, and no sinks.
    "gpt-oss-120b": _llama(
        36,
        2880,
        64,
        8,
        2880,
        vocab=201_088,
        head_dim=64,
        experts=128,
        top_k=4,
        biases=True,
    ),
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

SHAPES = {
    name: Workload(name=name, **sizes)
    for name, sizes in {**_SHAPES, **_PUBLISHED}.items()
}
"""Workloads by name: those of `meshpar.models.presets`, and published runs."""

PUBLISHED = frozenset(_PUBLISHED)
"""Names of published runs, which are no preset."""

_FREQUENCIES = 256
"""Sinusoids of a time, which the first of two matrices reads."""


def dit_workload(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    image: int,
    patch: int,
    channels: int = 4,
    classes: int = 1000,
) -> Workload:
    """The workload of `meshpar.models.dit`: sequences are the patches of an image.

    Args:
        name: What reports call it.
        layers: Number of blocks.
        hidden: Width of the residual stream.
        heads: Attention heads.
        image: Height and width of the latents.
        patch: Of a patch.
        channels: Of a latent.
        classes: Labels, beside that of no class.

    Example:
        >>> xl = dit_workload(
        ...     "dit-xl2", layers=28, hidden=1152, heads=16, image=32, patch=2
        ... )
        >>> xl.seq, round(xl.num_parameters / 1e6)
        (256, 675)
    """
    values = patch * patch * channels
    time = (_FREQUENCIES + 1 + hidden + 1) * hidden
    last = 2 * hidden * (hidden + 1)
    biases = hidden + values
    return Workload(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=values,
        seq=(image // patch) ** 2,
        biases=True,
        causal=False,
        modulations=6,
        other_end_parameters=(classes + 1) * hidden + time + last + biases,
        logits_bytes=0,
    )


def _imagenet(layers: int, hidden: int, heads: int) -> dict[str, int]:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads}
    return {**sizes, "image": 32, "patch": 2}


_SIZES = {
    "tiny-dit": {
        "layers": 4,
        "hidden": 128,
        "heads": 8,
        "image": 8,
        "patch": 2,
        "channels": 1,
        "classes": 10,
    },
    "dit-s2": _imagenet(12, 384, 6),
    "dit-b2": _imagenet(12, 768, 12),
    "dit-l2": _imagenet(24, 1024, 16),
    "dit-xl2": _imagenet(28, 1152, 16),
    "dit-12b": {"layers": 32, "hidden": 4608, "heads": 36, "image": 256, "patch": 2},
}

OTHER_SHAPES = {name: dit_workload(name, **sizes) for name, sizes in _SIZES.items()}
"""Workloads of Diffusion Transformers by the name of their preset.

`meshpar.models.dit` has the sources of their sizes.
"""

TRACED = frozenset(
    (
        *("tiny-gemma3", "gemma3-270m", "tiny-vit", "vit-b16", "vit-l16"),
        *("tiny-t5", "t5-small", "t5-base"),
        *("tiny-afno", "afno-quarter-degree", "tiny-pair", "evoformer-pair"),
        *("tiny-unet3d", "unet3d-512"),
        *("tiny-dlrm", "tiny-dlrm-cross", "dlrm-v2"),
    )
)
"""Presets without a workload here: what is known of them is traced, which needs jax."""

_BY_NAME = {**SHAPES, **OTHER_SHAPES}


def workload_of(model: str, *, words: str | None = None) -> Workload:
    """The workload of a name, of a `config.json`, or of `key=value` words.

    Args:
        model: A name in `SHAPES` or `OTHER_SHAPES`, a path that ends in .json, or
            `layers=4,hidden=256,heads=8,vocab=256`; `ffn` is `4 * hidden` when absent.
        words: What differs from it, in words.

    Raises:
        InputError: No such name, file or word, or sizes that do not fit together.

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
    """`workload` with other words; sizes that follow from them follow again."""
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
    family = {} if given.get("gated") else GPT2
    return Workload(**{"name": text, **family, **given})


_OTHER_WORDS = {"embed": "hidden", "max_seq": "seq"}
"""As the configs of `meshpar.models.presets` call them."""


def _words(text: str) -> dict[str, Any]:
    given = key_values(text, noun="model", example="layers=4,hidden=256")
    known = _FIELDS | _OTHER_WORDS.keys()
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = _OTHER_WORDS.get(key, key)
        if key not in known:
            raise InputError(
                f"model {text!r}: no size {key!r}; {nearest(key, known)}",
                key="model.unknown_size",
            )
        if name in found:
            other = next(one for one, same in _OTHER_WORDS.items() if same == name)
            raise InputError(
                f"model {text!r}: {other} is {name} too; give one of them",
                key="model.repeated_size",
            )
        found[name] = _scalar(text, key, value)
    return found


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
