"""T5, with ReLU or, as from version 1.1 on, a gated GELU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar import InputError
from meshpar.models.convert.needed import check_needed
from meshpar.models.convert.row import Row
from meshpar.models.encoder_decoder import EncoderDecoderConfig

COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "architectures": ("T5ForConditionalGeneration",),
    "feed_forward_proj": ("relu", "gated-gelu"),
}
_ENCODER, _DECODER = "encoder.block.{layer}.layer", "decoder.block.{layer}.layer"

# N heads, H head_dim, D embed, F mlp.


def table(config: EncoderDecoderConfig) -> tuple[Row, ...]:
    """Their names, our paths."""
    bias = "layer.0.SelfAttention.relative_attention_bias.weight"
    cross = f"{_DECODER}.1.EncDecAttention"
    return (
        Row("shared.weight", "token_embed"),
        Row(f"encoder.block.0.{bias}", "source_bias"),
        Row(f"decoder.block.0.{bias}", "target_bias"),
        Row("encoder.final_layer_norm.weight", "encoder_norm.scale"),
        Row("decoder.final_layer_norm.weight", "decoder_norm.scale"),
        *(() if config.tied else (Row("lm_head.weight", "unembed"),)),
        *_self_attention(f"{_ENCODER}.0", "encoder"),
        *_mlp(f"{_ENCODER}.1", "encoder", gated=config.gated),
        *_self_attention(f"{_DECODER}.0", "decoder"),
        Row(f"{_DECODER}.1.layer_norm.weight", "decoder.cross_norm.scale"),
        Row(f"{cross}.q.weight", "decoder.cross.q", "(N H) D -> D N H"),
        Row(f"{cross}.k.weight", "decoder.cross.kv[:, :, 0]", "(N H) D -> D N H"),
        Row(f"{cross}.v.weight", "decoder.cross.kv[:, :, 1]", "(N H) D -> D N H"),
        Row(f"{cross}.o.weight", "decoder.cross.out", "D (N H) -> N H D"),
        *_mlp(f"{_DECODER}.2", "decoder", gated=config.gated),
    )


def _self_attention(theirs: str, ours: str) -> tuple[Row, ...]:
    qkv, of = f"{ours}.attention.qkv", f"{theirs}.SelfAttention"
    return (
        Row(f"{theirs}.layer_norm.weight", f"{ours}.attention_norm.scale"),
        Row(f"{of}.q.weight", f"{qkv}[:, :, 0]", "(N H) D -> D N H"),
        Row(f"{of}.k.weight", f"{qkv}[:, :, 1]", "(N H) D -> D N H"),
        Row(f"{of}.v.weight", f"{qkv}[:, :, 2]", "(N H) D -> D N H"),
        Row(f"{of}.o.weight", f"{ours}.attention.out", "D (N H) -> N H D"),
    )


def _mlp(theirs: str, ours: str, *, gated: bool) -> tuple[Row, ...]:
    of, to = f"{theirs}.DenseReluDense", f"{ours}.mlp"
    up = (Row(f"{of}.wi.weight", f"{to}.up", "F D -> D F"),)
    if gated:
        up = (
            Row(f"{of}.wi_0.weight", f"{to}.gate_up[:, 0]", "F D -> D F"),
            Row(f"{of}.wi_1.weight", f"{to}.gate_up[:, 1]", "F D -> D F"),
        )
    return (
        Row(f"{theirs}.layer_norm.weight", f"{ours}.mlp_norm.scale"),
        *up,
        Row(f"{of}.wo.weight", f"{to}.down", "D F -> F D"),
    )


def from_json(values: Mapping[str, Any]) -> EncoderDecoderConfig:
    """Our config of theirs.

    Args:
        values: Of the `config.json`, with defaults.

    Raises:
        KeyError: A size is missing.
        InputError: A size is not a whole number, or `dense_act_fn` or `is_gated_act`
            contradicts `feed_forward_proj`.
    """
    gated = values.get("feed_forward_proj") == "gated-gelu"
    _check_activation(values, gated=gated)
    tied = values["tie_word_embeddings"]
    scaled = values["scale_decoder_outputs"]
    return EncoderDecoderConfig(
        encoder_layers=values["num_layers"],
        decoder_layers=values["num_decoder_layers"] or values["num_layers"],
        embed=values["d_model"],
        heads=values["num_heads"],
        head_dim=values["d_kv"],
        ffn=values["d_ff"],
        vocab=values["vocab_size"],
        gated=gated,
        activation="gelu_tanh" if gated else "relu",
        mlp_bias=False,
        relative_buckets=values["relative_attention_num_buckets"],
        relative_distance=values["relative_attention_max_distance"],
        scaled_scores=False,
        tied=tied,
        scaled_head=tied if scaled is None else scaled,
        norm_epsilon=values["layer_norm_epsilon"],
    )


def check_decoder_layers(values: Mapping[str, Any]) -> None:
    """Check that a config without `num_decoder_layers` has `num_layers`.

    Transformers takes as many decoder layers as `num_layers` says; with
    `num_hidden_layers` alone, its other name, it takes 6.

    Args:
        values: Of the `config.json`, as they are.

    Raises:
        KeyError: It has `num_hidden_layers` alone.
    """
    layers = values.get("num_layers"), values.get("num_decoder_layers")
    if values.get("num_hidden_layers") is not None and layers == (None, None):
        raise KeyError("num_decoder_layers")


def _check_activation(values: Mapping[str, Any], *, gated: bool) -> None:
    """Check that `feed_forward_proj` and what Transformers makes of it agree.

    Raises:
        InputError: They contradict each other; Transformers would compute the latter.
    """
    made = {"dense_act_fn": "gelu_new" if gated else "relu", "is_gated_act": gated}
    for name, value in made.items():
        if values.get(name, value) != value:
            raise InputError(
                f"{name}={values[name]!r} is not what feed_forward_proj="
                f"{values.get('feed_forward_proj', 'relu')!r} makes it, which is "
                f"{value!r}: leave it out",
                key="weights.contradictory_config_values",
            )


def to_json(config: EncoderDecoderConfig) -> dict[str, Any]:
    """A `config.json` of the model.

    Raises:
        InputError: Theirs computes something else.
    """
    needed = {
        "mlp_bias": config.gated and config.mlp_bias,
        "scaled_scores": False,
        "activation": "gelu_tanh" if config.gated else "relu",
    }
    check_needed(config, needed, "t5")
    if not config.relative_buckets:
        raise InputError(
            "relative_buckets=0: t5 has no learned positions; export a model with a "
            "table of biases",
            key="weights.learned_positions_in_t5",
        )
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "num_layers": config.encoder_layers,
        "num_decoder_layers": config.decoder_layers,
        "d_model": config.embed,
        "d_kv": config.size_per_head,
        "d_ff": config.ffn,
        "num_heads": config.heads,
        "vocab_size": config.vocab,
        "feed_forward_proj": "gated-gelu" if config.gated else "relu",
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_distance,
        "tie_word_embeddings": config.tied,
        "scale_decoder_outputs": config.scaled_head,
        "layer_norm_epsilon": config.norm_epsilon,
        "dropout_rate": config.dropout,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }
