"""GGUF of Llama-like models and of Gemma 3: other names, and two other values.

The files are written by llama.cpp, which puts the two dims that turn together side by
side in the queries and keys of a `llama`, and adds 1 to the norms of a `gemma3`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from meshpar import InputError
from meshpar.models.convert.gguf_file import GGUFFile
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
        InputError: It is of another architecture than `llama` and `gemma3`, or has
            rotary positions that are scaled.
    """
    kind = file.said("general.architecture")
    if kind not in ("llama", "gemma3"):
        raise InputError(
            f"{file.where!r} has general.architecture={kind!r}; known: llama, gemma3",
            key="weights.unknown_architecture",
        )
    scaling = file.said(f"{kind}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file.names:
        raise InputError(
            f"{file.where!r} has scaled rotary positions ({scaling!r}), which are not "
            "read from GGUF; take the model's safetensors",
            key="weights.scaled_rope_in_gguf",
        )
    if file.said(f"{kind}.expert_count", 0):
        raise InputError(
            f"{file.where!r} has {kind}.expert_count="
            f"{file.said(f'{kind}.expert_count')}; known: models without experts",
            key="weights.experts_in_gguf",
        )
    return _gemma3(file) if kind == "gemma3" else _llama(file)


def _same(file: GGUFFile, kind: str) -> dict[str, Any]:
    def said(key: str, default: Any = None) -> Any:
        found = file.said(f"{kind}.{key}", default)
        if found is None:
            raise InputError(
                f"{file.where!r} does not say {kind}.{key}",
                key="weights.missing_config_value",
            )
        return found

    heads = said("attention.head_count")
    vocab, embed = file.shape("token_embd.weight")
    return {
        "layers": said("block_count"),
        "embed": embed,
        "heads": heads,
        "kv_heads": said("attention.head_count_kv", heads),
        "ffn": said("feed_forward_length"),
        "vocab": vocab,
        # Stored in fp32: 1e-5 comes back as 9.99999974e-06.
        "norm_epsilon": float(f"{said('attention.layer_norm_rms_epsilon'):.6g}"),
    }


def _llama(file: GGUFFile) -> LlamaConfig:
    return LlamaConfig(
        **_same(file, "llama"),
        head_dim=file.said("llama.attention.key_length", 0),
        rope_theta=file.said("llama.rope.freq_base", 10_000.0),
        tied="output.weight" not in file.names,
    )


def _gemma3(file: GGUFFile) -> Gemma3Config:
    same = _same(file, "gemma3")
    return Gemma3Config(
        **same,
        head_dim=file.said("gemma3.attention.key_length", 256),
        window=file.said("gemma3.attention.sliding_window", 512),
        # A file does not say it: llama.cpp has one period for all of them.
        period=whole_period(6, same["layers"]),
        rope_theta=file.said("gemma3.rope.freq_base", 1_000_000.0),
    )
