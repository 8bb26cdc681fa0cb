"""Vision Transformers that classify images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshpar import InputError
from meshpar.models.convert.row import Row
from meshpar.models.vit import ViTConfig

COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "architectures": ("ViTForImageClassification",),
    "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh"),
    "qkv_bias": (True,),
}
_LAYER = "vit.encoder.layer.{layer}"

# N heads, H head_dim, D embed, F mlp, T tokens, C channels, p and q of a patch.


def table(config: ViTConfig) -> tuple[Row, ...]:
    """Their names, our paths."""
    patch = {"p": config.patch, "q": config.patch, "C": config.channels}
    embeddings = "vit.embeddings"
    projection = f"{embeddings}.patch_embeddings.projection"
    return (
        Row(f"{embeddings}.cls_token", "class_token", "1 1 D -> D"),
        Row(f"{embeddings}.position_embeddings", "position_embed", "1 T D -> T D"),
        Row(f"{projection}.weight", "patch_embed", "D C p q -> (p q C) D", sizes=patch),
        Row(f"{projection}.bias", "patch_bias"),
        *_norm("layernorm_before", "attention_norm"),
        *(
            row
            for at, name in enumerate(("query", "key", "value"))
            for row in _projection(name, at)
        ),
        Row(
            f"{_LAYER}.attention.output.dense.weight",
            "blocks.attention.out",
            "D (N H) -> N H D",
        ),
        Row(f"{_LAYER}.attention.output.dense.bias", "blocks.attention.out_bias"),
        *_norm("layernorm_after", "mlp_norm"),
        Row(f"{_LAYER}.intermediate.dense.weight", "blocks.mlp.up", "F D -> D F"),
        Row(f"{_LAYER}.intermediate.dense.bias", "blocks.mlp.up_bias"),
        Row(f"{_LAYER}.output.dense.weight", "blocks.mlp.down", "D F -> F D"),
        Row(f"{_LAYER}.output.dense.bias", "blocks.mlp.down_bias"),
        Row("vit.layernorm.weight", "final_norm.scale"),
        Row("vit.layernorm.bias", "final_norm.bias"),
        Row("classifier.weight", "classifier"),
        Row("classifier.bias", "classifier_bias"),
    )


def _norm(theirs: str, ours: str) -> tuple[Row, Row]:
    return (
        Row(f"{_LAYER}.{theirs}.weight", f"blocks.{ours}.scale"),
        Row(f"{_LAYER}.{theirs}.bias", f"blocks.{ours}.bias"),
    )


def _projection(name: str, at: int) -> tuple[Row, Row]:
    theirs, ours = f"{_LAYER}.attention.attention.{name}", "blocks.attention"
    return (
        Row(f"{theirs}.weight", f"{ours}.qkv[:, :, {at}]", "(N H) D -> D N H"),
        Row(f"{theirs}.bias", f"{ours}.bias[:, {at}]", "(N H) -> N H"),
    )


def from_json(values: Mapping[str, Any]) -> ViTConfig:
    """Our config of theirs.

    Args:
        values: Of the `config.json`, with defaults.

    Raises:
        KeyError: A size is missing.
        InputError: A size is not a whole number, or `id2label` names no classes.
    """
    classes, labels = values["num_labels"], values["id2label"]
    if classes is None:
        if not (isinstance(labels, dict) and labels):
            raise InputError(
                f"id2label={labels!r}: must be an object with the name of each class",
                key="weights.unsupported_config_value",
            )
        classes = len(labels)
    return ViTConfig(
        layers=values["num_hidden_layers"],
        embed=values["hidden_size"],
        heads=values["num_attention_heads"],
        image=values["image_size"],
        patch=values["patch_size"],
        channels=values["num_channels"],
        classes=classes,
        ffn=values["intermediate_size"],
        activation="gelu"
        if values.get("hidden_act", "gelu") == "gelu"
        else "gelu_tanh",
        norm_epsilon=values["layer_norm_eps"],
    )


def to_json(config: ViTConfig) -> dict[str, Any]:
    """A `config.json` of the model.

    Raises:
        InputError: Theirs has a class token.
    """
    if not config.has_class_token:
        raise InputError(
            f"pooling={config.pooling!r}: theirs reads a class token; export a model "
            "with pooling='class_token'",
            key="weights.no_class_token",
        )
    labels = {str(at): f"LABEL_{at}" for at in range(config.classes)}
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "num_hidden_layers": config.layers,
        "hidden_size": config.embed,
        "num_attention_heads": config.heads,
        "intermediate_size": config.ffn or 4 * config.embed,
        "image_size": config.image,
        "patch_size": config.patch,
        "num_channels": config.channels,
        "id2label": labels,
        "label2id": {label: int(at) for at, label in labels.items()},
        "hidden_act": "gelu" if config.activation == "gelu" else "gelu_pytorch_tanh",
        "layer_norm_eps": config.norm_epsilon,
        "qkv_bias": True,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": config.init_std,
    }
