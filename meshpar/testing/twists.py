"""Unusual models and batches for `meshpar fuzz`, and the error each must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import InputError
from meshpar.layout import Layout, nearest
from meshpar.model.contract import Model
from meshpar.parallel.grids.space import splits_tokens
from meshpar.rules.rules import Rules
from meshpar.testing.batches import Arrays

Refusal = Callable[[Model, Layout, Rules], str | None]
"""(model, layout, rules) -> key of the expected error, or None if it must train."""


def _never(model: Model, layout: Layout, rules: Rules) -> str | None:
    return None


def _same(given: Any) -> Any:
    return given


@dataclass(frozen=True, kw_only=True)
class Twist:
    """A change of a model or of its batches.

    Args:
        model: Model -> the changed one, which one device trains as it is.
        batch: A batch -> the changed one.
        refused: Returns the key of the expected error.
        suits: Whether a model can have it.
    """

    model: Callable[[Model], Model] = _same
    batch: Callable[[Arrays], Arrays] = _same
    refused: Refusal = _never
    suits: Callable[[Model], bool] = lambda model: True


def twist_named(name: str) -> Twist:
    """The twist of a name.

    Raises:
        InputError: There is none.
    """
    if name not in TWISTS:
        raise InputError(
            f"no twist {name!r}; {nearest(name, TWISTS)}", key="testing.unknown_twist"
        )
    return TWISTS[name]


def _with_backward(change: Callable[[jax.Array], jax.Array]) -> Callable:
    """The model with a backward of its own after `embed`."""

    @jax.custom_vjp
    def function(x: jax.Array) -> jax.Array:
        return x

    function.defvjp(lambda x: (x, None), lambda _, dx: (change(dx),))

    def on(x: jax.Array) -> jax.Array:
        return function(x) if jnp.issubdtype(x.dtype, jnp.floating) else x

    def changed(model: Model) -> Model:
        embed = model.embed

        def after(params: Any, batch: Any, scope: Any) -> Any:
            return jax.tree.map(on, embed(params, batch, scope))

        return replace(model, embed=after)

    return changed


def _flat(model: Model) -> Model:
    """The model whose head has examples and tokens as one dim."""
    head = model.head

    def flattened(params: Any, x: Any, batch: Any, scope: Any) -> Any:
        arrays = {
            name: array.reshape(-1, 1, *array.shape[2:]) if array.ndim > 1 else array
            for name, array in batch.items()
        }
        return head(params, x.reshape(-1, 1, *x.shape[2:]), arrays, scope)

    return replace(model, head=flattened)


def _of_tokens(model: Model) -> bool:
    """Whether its stream and all that a batch needs are of tokens, dim 1 of each."""
    return all(group.stream is None for group in model.groups) and all(
        one.logical_axes == ("batch", "seq") for one in model.known_inputs.values()
    )


def _joined_examples(model: Model, layout: Layout, rules: Rules) -> str | None:
    parts = layout.batch_shards * layout.microbatches * layout.stage
    return "model.joins_examples" if parts > 1 else None


def _joined_tokens(model: Model, layout: Layout, rules: Rules) -> str | None:
    if splits_tokens(model, layout, rules):
        return "model.joins_tokens"
    if layout.stage > 1 and model.per_token:
        return "model.per_token_joins_tokens"
    return None


def _flat_tokens(model: Model, layout: Layout, rules: Rules) -> str | None:
    """A trace does not follow the tokens of a split sequence through that reshape."""
    return "model.joins_tokens" if splits_tokens(model, layout, rules) else None


def _always(key: str) -> Refusal:
    return lambda model, layout, rules: key


def _with_extra(batch: Arrays) -> Arrays:
    first = next(iter(batch))
    return {**batch, f"{first}s": np.zeros_like(batch[first])}


def _without_first(batch: Arrays) -> Arrays:
    return dict(list(batch.items())[1:])


TWISTS = {
    "injected": Twist(model=_with_backward(lambda dx: dx + 1e-3)),
    "clipped": Twist(model=_with_backward(lambda dx: jnp.clip(dx, -0.01, 0.01))),
    "joined_examples": Twist(
        model=_with_backward(lambda dx: dx - dx.mean(0)), refused=_joined_examples
    ),
    "joined_tokens": Twist(
        model=_with_backward(lambda dx: dx - dx.mean(1, keepdims=True)),
        refused=_joined_tokens,
        suits=_of_tokens,
    ),
    "flat": Twist(model=_flat, refused=_flat_tokens, suits=_of_tokens),
    "extra_array": Twist(
        batch=_with_extra,
        refused=_always("batch.unknown_array"),
        suits=lambda model: model.inputs is not None,
    ),
    "missing_array": Twist(
        batch=_without_first, refused=_always("batch.missing_array")
    ),
}
"""By what `--twist` calls them: backwards that are not linear, that join examples or
tokens, a flattened head, and batches with an array too many or too few."""
