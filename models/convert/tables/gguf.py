"""GGUF of Llama-like models and of Gemma 3: other names, and two other values.

The files are written by llama.cpp, which puts the two dims that turn together side by
side in the queries and keys of a `llama`, and adds 1 to the norms of a `gemma3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshpar import InputError
from meshpar.errors import whole_number
from meshpar.models.convert.gguf_file import GGUFFile
from meshpar.models.convert.gguf_keys import check_keys, check_value, number
from meshpar.models.convert.row import Row
from meshpar.models.convert.tables.gemma3 import whole_period
from meshpar.models.gemma3 import Gemma3Config
from meshpar.models.llama import LlamaConfig

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OF_LLAMA = {"post_attention_layernorm": "ffn_norm"}
_OF_GEMMA3 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# r is half of a head: theirs has the two that turn together side by side.
_TURNED = {
    "(K G H) D -> D K G H": "(K G r 2) D -> D K G (2 r)",
    "(K H) D -> D K H": "(K r 2) D -> D K (2 r)",
}


def gguf_table(config: Any, table: Sequence[Row]) -> tuple[Row, ...]:
    """The rows of a family with the names and values of its GGUF files."""
    return tuple(_row(row, isinstance(config, Gemma3Config)) for row in table)


def _row(row: Row, is_gemma: bool) -> Row:
    if row.theirs in _NAMES:
        name = _NAMES[row.theirs]
    else:
        names = {**_IN_LAYER, **(_OF_GEMMA3 if is_gemma else _OF_LLAMA)}
        stem, _, kind = row.theirs.removeprefix("model.layers.{layer}.").rpartition(".")
        name = f"blk.{{layer}}.{names[stem]}.{kind}"
    turned = not is_gemma and ".self_attn.v_proj" not in row.theirs
    return replace(
        row,
        theirs=name,
        how=_TURNED.get(row.how, row.how) if turned else row.how,
        plus=-1.0 if is_gemma and "norm" in name else 0.0,
    )


def gguf_config(file: GGUFFile) -> Any:
    """Our config of what a file says.

    Raises:
        InputError: It is of another architecture than `llama` and `gemma3`, or has a
            key with which no model here computes what llama.cpp does.
    """
    kind = file.said("general.architecture")
    if kind not in ("llama", "gemma3"):
        raise InputError(
            f"{file.where!r} has general.architecture={kind!r}; known: llama, gemma3",
            key="weights.unknown_architecture",
        )
    if file.said(f"{kind}.expert_count", 0):
        raise InputError(
            f"{file.where!r} has {kind}.expert_count="
            f"{file.said(f'{kind}.expert_count')}; known: models without experts",
            key="weights.experts_in_gguf",
        )
    check_keys(file, kind)
    config = _gemma3(file) if kind == "gemma3" else _llama(file)
    _check_sizes(file, kind, config)
    return config


def _check_sizes(file: GGUFFile, kind: str, config: Any) -> None:
    """Check what a file says that other sizes of it say too.

    Raises:
        InputError: They do not agree: a head turns in a part of its dims, or scores
            have a scale of their own.
    """
    head_dim = config.size_per_head
    check_value(file, f"{kind}.embedding_length", config.embed)
    for key in ("attention.value_length", "rope.dimension_count"):
        check_value(file, f"{kind}.{key}", head_dim)
    if kind == "gemma3":
        for key in ("attention.key_length_swa", "attention.value_length_swa"):
            check_value(file, f"{kind}.{key}", head_dim)
        check_value(file, f"{kind}.rope.dimension_count_swa", head_dim)
    scaled_by = getattr(config, "query_size", 0) or head_dim
    if file.said(f"{kind}.attention.scale"):  # 0 is none that is given.
        check_value(file, f"{kind}.attention.scale", scaled_by**-0.5)


def _stretched(file: GGUFFile, kind: str) -> float:
    """Return what a file's rotary positions are divided by.

    Where a factor has no type it is `linear`, as files were before there were types;
    `none` scales by no factor.

    Raises:
        InputError: They are scaled in another way.
    """
    scaling = file.said(f"{kind}.rope.scaling.type", "linear")
    if f"{kind}.rope.scaling.factor" in file.keys:
        factor = number(file, f"{kind}.rope.scaling.factor")
    else:
        factor = number(file, f"{kind}.rope.scale_linear", 1.0)
    others = sorted(name for name in file.names if name.startswith("rope_"))
    if scaling not in ("none", "linear") or others:
        raise _scaled(file, f"{scaling!r}{''.join(f', {name}' for name in others)}")
    # 0 is a factor that is not given.
    return 1.0 if scaling == "none" or not factor else factor


def _scaled(file: GGUFFile, how: str) -> InputError:
    return InputError(
        f"{file.where!r} has scaled rotary positions ({how}), which are not read from "
        "GGUF; take the model's safetensors",
        key="weights.scaled_rope_in_gguf",
    )


def _same(file: GGUFFile, kind: str) -> dict[str, Any]:
    heads = number(file, f"{kind}.attention.head_count")
    vocab, embed = _shape(file, "token_embd.weight")
    return {
        "layers": number(file, f"{kind}.block_count"),
        "embed": embed,
        "heads": heads,
        "kv_heads": number(file, f"{kind}.attention.head_count_kv", heads),
        "ffn": number(file, f"{kind}.feed_forward_length"),
        "vocab": vocab,
        # Stored in fp32: 1e-5 comes back as 9.99999974e-06.
        "norm_epsilon": float(
            f"{number(file, f'{kind}.attention.layer_norm_rms_epsilon'):.6g}"
        ),
    }


def _shape(file: GGUFFile, name: str) -> tuple[int, ...]:
    shape = file.shape(name) if name in file.names else ()
    if len(shape) != 2:
        raise InputError(
            f"{file.where!r} has no table {name!r}", key="weights.missing_tensor"
        )
    return shape


def _llama(file: GGUFFile) -> LlamaConfig:
    same, stretched = _same(file, "llama"), _stretched(file, "llama")
    if stretched != 1:
        raise _scaled(file, f"linear, by {stretched}")
    return LlamaConfig(
        **same,
        head_dim=number(file, "llama.attention.key_length", 0),
        rope_theta=float(number(file, "llama.rope.freq_base", 10_000.0)),
        tied="output.weight" not in file.names,
    )


_UNUSUAL_SCORES = 62
"""Layers of the one Gemma 3, of 27B, whose scores are divided by another root than
that of its heads' size. A file does not say it: llama.cpp knows it by this number."""


def _gemma3(file: GGUFFile) -> Gemma3Config:
    same = _same(file, "gemma3")
    period = _period(file, same["layers"])
    by_heads = whole_number("embed / heads", same["embed"] // (same["heads"] or 1))
    return Gemma3Config(
        **same,
        head_dim=number(file, "gemma3.attention.key_length", by_heads),
        window=number(file, "gemma3.attention.sliding_window"),
        period=period,
        query_size=by_heads if same["layers"] == _UNUSUAL_SCORES else 0,
        # Readers differ where a file leaves it out.
        rope_theta=float(number(file, "gemma3.rope.freq_base")),
        rope_factor=float(_stretched(file, "gemma3")),
        local_rope_theta=float(number(file, "gemma3.rope.freq_base_swa", 10_000.0)),
    )


def _period(file: GGUFFile, layers: int) -> int:
    """Return the layers from one that sees all tokens to the next, 6 if not said.

    Raises:
        InputError: They are not those of a period.
    """
    key = "gemma3.attention.sliding_window_pattern"
    said = file.said(key)
    if not isinstance(said, list):
        pattern = whole_number(key, number(file, key, 6))
        return whole_period(pattern, whole_number("layers", layers))
    # For each layer, whether it sees a window.
    period = said.index(False) + 1 if False in said else 0
    if not period or said != [(at + 1) % period != 0 for at in range(layers)]:
        raise InputError(
            f"{file.where!r} has {key}={said!r}: one layer in so many must see all "
            "tokens, always after as many that see a window; take another model",
            key="weights.irregular_layer_types",
        )
    return period
