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
    kind = file.metadata("general.architecture")
    if kind not in ("llama", "gemma3"):
        raise InputError(
            f"{file.where!r} has general.architecture={kind!r}; known: llama, gemma3",
            key="weights.unknown_architecture",
        )
    if file.metadata(f"{kind}.expert_count", 0):
        raise InputError(
            f"{file.where!r} has {kind}.expert_count="
            f"{file.metadata(f'{kind}.expert_count')}; known: models without experts",
            key="weights.experts_in_gguf",
        )
    check_keys(file, kind)
    config = _gemma3(file) if kind == "gemma3" else _llama(file)
    _check_sizes(file, kind, config)
    return config


def _check_sizes(file: GGUFFile, kind: str, config: Any) -> None:
    """Check that the sizes of a file agree with one another and with its tensors.

    Raises:
        InputError: They differ, as with partial rotary positions, or attention scores
            are not scaled by `head_dim**-0.5`.
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
    if file.metadata(f"{kind}.attention.scale"):  # 0 is none that is given.
        check_value(file, f"{kind}.attention.scale", scaled_by**-0.5)


def _rope_factor(file: GGUFFile, kind: str) -> float:
    """Return the number that a file's rotary positions are divided by.

    A factor without a type is `linear`, as in files from before there were types; with
    the type `none` a factor is not read.

    Raises:
        InputError: They are scaled in another way.
    """
    scaling = file.metadata(f"{kind}.rope.scaling.type")
    if f"{kind}.rope.scaling.factor" in file.keys:
        factor = number(file, f"{kind}.rope.scaling.factor")
    else:
        factor = number(file, f"{kind}.rope.scale_linear", 1.0)
    others = sorted(name for name in file.names if name.startswith("rope_"))
    is_known = scaling in (None, "none", "linear")
    if others or not is_known:
        raise _scaled_rope(file, *([] if is_known else [repr(scaling)]), *others)
    # 0 is a factor that is not given.
    return 1.0 if scaling == "none" or not factor else factor


def _scaled_rope(file: GGUFFile, *by: str) -> InputError:
    return InputError(
        f"{file.where!r} has scaled rotary positions ({', '.join(by)}), which are "
        "not read from GGUF; take the model's safetensors",
        key="weights.scaled_rope_in_gguf",
    )


def _common_fields(file: GGUFFile, kind: str) -> dict[str, Any]:
    """Return the fields that a `LlamaConfig` and a `Gemma3Config` have alike."""
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
    factor = _rope_factor(file, "llama")
    if factor != 1:
        raise _scaled_rope(file, f"divided by {factor}")
    return LlamaConfig(
        **_common_fields(file, "llama"),
        head_dim=number(file, "llama.attention.key_length", 0),
        rope_theta=float(number(file, "llama.rope.freq_base", 10_000.0)),
        tied="output.weight" not in file.names,
    )


_LAYERS_OF_27B = 62
"""Gemma 3 27B alone divides scores by the square root of `embed / heads`, not of
`head_dim`. No key says so: llama.cpp recognises the model by its number of layers."""


def _gemma3(file: GGUFFile) -> Gemma3Config:
    fields = _common_fields(file, "gemma3")
    period = _period(file, fields["layers"])
    by_heads = whole_number("embed / heads", fields["embed"] // (fields["heads"] or 1))
    return Gemma3Config(
        **fields,
        head_dim=number(file, "gemma3.attention.key_length", by_heads),
        window=number(file, "gemma3.attention.sliding_window"),
        period=period,
        query_size=by_heads if fields["layers"] == _LAYERS_OF_27B else 0,
        # Readers differ where a file leaves it out.
        rope_theta=float(number(file, "gemma3.rope.freq_base")),
        rope_factor=float(_rope_factor(file, "gemma3")),
        local_rope_theta=float(number(file, "gemma3.rope.freq_base_swa", 10_000.0)),
    )


def _period(file: GGUFFile, layers: int) -> int:
    """Return the period of layers of which the last sees all tokens; 6 by default.

    Raises:
        InputError: The layers do not repeat.
    """
    key = "gemma3.attention.sliding_window_pattern"
    pattern = file.metadata(key)
    if not isinstance(pattern, list):
        every = whole_number(key, number(file, key, 6))
        return whole_period(every, whole_number("layers", layers))
    # For each layer, whether it sees a window.
    period = pattern.index(False) + 1 if False in pattern else 0
    if not period or pattern != [(at + 1) % period != 0 for at in range(layers)]:
        raise InputError(
            f"{file.where!r} has {key}={pattern!r}: one layer in so many must see all "
            "tokens, always after as many that see a window; take another model",
            key="weights.irregular_layer_types",
        )
    return period
