"""DLRM, a recommendation model (Naumov et al. 2019), with dot or cross interaction.

A bottom MLP takes the numbers of an example, tables its ids; their vectors interact, by
dot products of all pairs or by low-rank cross layers (DCN-v2, Wang et al. 2021), and a
top MLP says how likely a click is. The tables are no parameters of the model: it takes
their pooled rows as the input `embedded`, whose gradient the step finds, so that they
may be larger than a device (`meshpar.tables`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from meshpar import Blocks, Input, InputError, Model, Scope, from_nnx
from meshpar.model.inputs import Batch
from meshpar.models.family import Family
from meshpar.models.field_types import check_field_types, check_sizes

EMBEDDED = "embedded"
_VECTORS = ("batch", "embed")
_INTERACTIONS = ("dot", "cross")


@dataclass(frozen=True, kw_only=True)
class DLRMConfig:
    """Shape of a DLRM without its tables.

    Args:
        numbers: How many numbers an example has.
        features: How many features with ids.
        dim: Size of a table's rows.
        bottom: Widths of the bottom MLP; `dim` is the last.
        top_width: Width of the top MLP's equal layers, which pipeline stages hold.
        top_layers: How many of them follow the one that takes the interaction.
        tail: Widths of the layers after them, before the one number of the end.
        interaction: `dot` or `cross`.
        cross_layers: Layers of `cross`, which pipeline stages hold too.
        cross_rank: Rank of their matrices.

    Raises:
        InputError: A size that is no whole number or below 1, no such interaction, or a
            bottom MLP that does not end in `dim`.
    """

    numbers: int
    features: int
    dim: int
    bottom: tuple[int, ...]
    top_width: int
    top_layers: int = 1
    tail: tuple[int, ...] = ()
    interaction: str = "dot"
    cross_layers: int = 3
    cross_rank: int = 512

    def __post_init__(self) -> None:
        check_field_types(self)
        sizes = ("numbers", "features", "dim", "top_width", "top_layers")
        check_sizes(self, *sizes, "cross_layers", "cross_rank")
        for name in ("bottom", "tail"):
            widths = tuple(getattr(self, name))
            object.__setattr__(self, name, widths)
            if not all(isinstance(width, int) and width > 0 for width in widths):
                raise InputError(
                    f"{name}={widths}: each must be a whole number above 0",
                    key="value.not_whole_number",
                )
        if self.bottom[-1:] != (self.dim,):
            raise InputError(
                f"bottom={self.bottom} does not end in dim={self.dim}: its output "
                "interacts with the tables' rows; make that its last width",
                key="model.bottom_width_mismatch",
            )
        if self.interaction not in _INTERACTIONS:
            raise InputError(
                f"interaction={self.interaction!r}: must be one of "
                f"{', '.join(_INTERACTIONS)}",
                key="model.unknown_interaction",
            )

    @property
    def vectors_width(self) -> int:
        """Values of all vectors that interact."""
        return (self.features + 1) * self.dim

    @property
    def interacted_width(self) -> int:
        """Values that the top MLP takes."""
        if self.interaction == "cross":
            return self.vectors_width
        return self.dim + math.comb(self.features + 1, 2)

    @property
    def inputs(self) -> dict[str, Input]:
        """Numbers, pooled rows, whether there was a click, how much that counts."""
        rows = (None, self.features, self.dim)
        return {
            "numbers": Input(("batch", None), shape=(None, self.numbers)),
            EMBEDDED: Input(("batch", None, None), shape=rows, has_gradient=True),
            "clicks": Input(("batch",)),
            "weights": Input(("batch",), optional=True, is_weight=True),
        }


class Dense(nnx.Module):
    """`x @ kernel + bias`, drawn as Glorot and Bengio 2010 do.

    Args:
        sizes: Of input and output.
        axes: Their logical axes.
    """

    def __init__(
        self, sizes: tuple[int, int], axes: tuple[str | None, ...], rngs: nnx.Rngs
    ) -> None:
        draw = nnx.initializers.glorot_normal()
        self.kernel = nnx.Param(
            draw(rngs.params(), sizes, jnp.float32), out_sharding=axes
        )
        self.bias = nnx.Param(jnp.zeros(sizes[1:]), out_sharding=axes[1:])

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, in) -> (batch, out)."""
        return x @ self.kernel[...] + self.bias[...]


class CrossBlock(nnx.Module):
    """`first * (up(down(x)) + bias) + x` (Wang et al. 2021, section 3.4)."""

    def __init__(self, config: DLRMConfig, rngs: nnx.Rngs) -> None:
        width, rank = config.vectors_width, config.cross_rank
        draw = nnx.initializers.glorot_normal()
        self.down = nnx.Param(
            draw(rngs.params(), (width, rank), jnp.float32),
            out_sharding=("embed", "mlp"),
        )
        self.up = Dense((rank, width), ("mlp", "embed"), rngs)

    def __call__(
        self, stream: dict[str, jax.Array], scope: Scope
    ) -> dict[str, jax.Array]:
        """Map the vectors, (batch, width), and their first values to the same shape."""
        x = stream["x"]
        narrow = scope.constrain(x @ self.down[...], ("batch", "mlp"))
        crossed = scope.constrain(self.up(narrow), _VECTORS)
        return {**stream, "x": stream["first"] * crossed + x}


class TopBlock(nnx.Module):
    """One of the top MLP's equal layers."""

    def __init__(self, config: DLRMConfig, rngs: nnx.Rngs) -> None:
        self.dense = Dense((config.top_width,) * 2, ("mlp", "embed"), rngs)

    def __call__(self, x: jax.Array, scope: Scope) -> jax.Array:
        """(batch, width) -> the same."""
        x = scope.constrain(x, ("batch", "mlp"))
        return jax.nn.relu(scope.constrain(self.dense(x), _VECTORS))


class DLRMEnds(nnx.Module):
    """Bottom MLP, interaction, and where the top MLP begins and ends."""

    def __init__(self, config: DLRMConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.bottom = _layers((config.numbers, *config.bottom), rngs)
        widths = (config.interacted_width, config.top_width)
        self.top = Dense(widths, (None, "embed"), rngs)
        self.tail = _layers((config.top_width, *config.tail), rngs)
        last = (config.top_width, *config.tail)[-1]
        self.click = Dense((last, 1), ("embed", None), rngs)

    def embed(self, batch: Batch, scope: Scope) -> dict[str, jax.Array] | jax.Array:
        """Numbers and pooled rows -> the first group's stream."""
        bottom = self.bottom[0].kernel[...]
        x = batch["numbers"].astype(bottom.dtype)
        for dense in self.bottom:
            x = jax.nn.relu(dense(x))
        rows = batch[EMBEDDED].astype(x.dtype)
        vectors = jnp.concatenate([x[:, None], rows], axis=1)
        if self.config.interaction == "cross":
            flat = scope.constrain(vectors.reshape(len(vectors), -1), _VECTORS)
            return {"first": flat, "x": flat}
        return self._topped(jnp.concatenate([x, _dots(vectors)], axis=1), scope)

    def after_cross(self, stream: dict[str, jax.Array], scope: Scope) -> jax.Array:
        """Map the interactions to (batch, top width)."""
        return self._topped(stream["x"], scope)

    def logits(self, x: jax.Array, scope: Scope) -> jax.Array:
        """(batch, top width) -> fp32 (batch,), the log of the odds of a click."""
        x = scope.constrain(x, _VECTORS)
        for dense in self.tail:
            x = jax.nn.relu(dense(x))
        return self.click(x)[:, 0].astype(jnp.float32)

    def head(
        self, x: jax.Array, batch: Batch, scope: Scope
    ) -> tuple[jax.Array, jax.Array]:
        """Summed binary cross-entropy and summed weights of the examples."""
        logits, clicks = self.logits(x, scope), batch["clicks"].astype(jnp.float32)
        weights = batch.get("weights", jnp.ones_like(clicks)).astype(jnp.float32)
        losses = jax.nn.softplus(logits) - clicks * logits
        return jnp.sum(weights * losses), jnp.sum(weights)

    def _topped(self, x: jax.Array, scope: Scope) -> jax.Array:
        return jax.nn.relu(scope.constrain(self.top(x), _VECTORS))


def dlrm(config: DLRMConfig) -> Model:
    """The model of a config, under meshpar's contract."""
    cross = {
        "cross": Blocks(
            block=lambda rngs: CrossBlock(config, rngs),
            num_layers=config.cross_layers,
            stream={"first": _VECTORS, "x": _VECTORS},
        )
    }
    is_cross = config.interaction == "cross"
    top = Blocks(
        block=lambda rngs: TopBlock(config, rngs),
        num_layers=config.top_layers,
        enter="after_cross" if is_cross else None,
        stream=_VECTORS,
    )
    return from_nnx(
        ends=lambda rngs: DLRMEnds(config, rngs),
        groups={**(cross if is_cross else {}), "blocks": top},
        inputs=config.inputs,
    )


def _layers(widths: tuple[int, ...], rngs: nnx.Rngs) -> nnx.List:
    """Dense layers from each width to the next."""
    pairs = zip(widths[:-1], widths[1:], strict=True)
    return nnx.List([Dense(sizes, (None, "embed"), rngs) for sizes in pairs])


def _dots(vectors_BVD: jax.Array) -> jax.Array:
    """Dot products of all pairs of an example's vectors, (batch, pairs)."""
    dots_BVW = jnp.einsum("BVD,BWD->BVW", vectors_BVD, vectors_BVD)
    rows, columns = jnp.tril_indices(vectors_BVD.shape[1], k=-1)
    return dots_BVW[:, rows, columns]


DLRM = Family(
    config=DLRMConfig,
    build=dlrm,
    presets={
        "tiny-dlrm": DLRMConfig(
            numbers=4, features=6, dim=16, bottom=(32, 16), top_width=32, top_layers=2
        ),
        "tiny-dlrm-cross": DLRMConfig(
            numbers=4,
            features=6,
            dim=16,
            bottom=(32, 16),
            interaction="cross",
            cross_layers=3,
            cross_rank=16,
            top_width=32,
        ),
        "dlrm-v2": DLRMConfig(
            numbers=13,
            features=26,
            dim=128,
            bottom=(512, 256, 128),
            interaction="cross",
            cross_layers=3,
            cross_rank=512,
            top_width=1024,
            tail=(512, 256),
        ),
    },
    fuzzed=(
        "--preset tiny-dlrm --model top_layers=4",
        "--preset tiny-dlrm-cross --model cross_layers=3,cross_rank=12,top_width=24,"
        "top_layers=3",
    ),
)
"""`dlrm-v2` has the sizes of MLPerf Training 3.0's recommendation benchmark."""
