"""Check user-written derivatives by running a model on half of the tokens per device.

A trace follows tokens through a model's functions (`meshpar.model.token_mixing`), but
not through a derivative that a user wrote. A model with one runs once on whole
sequences and once on two devices that share them; both must give the same result.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.model.contract import Model
from meshpar.model.halves import Cut, check_small, what_halves_change
from meshpar.model.inputs import BATCH_DIM, logical_sizes, shapes_of
from meshpar.model.own_backward import own_derivatives
from meshpar.model.token_order import TokenOrder
from meshpar.model.tracing import traced_forward, tracing
from meshpar.parallel.sequence import is_sequence, sequence_dims
from meshpar.rules.rules import LogicalAxes

_EXAMPLES = 4
_CANNOT_RUN = (KeyError, TypeError, ValueError, NotImplementedError, RuntimeError)
"""Exceptions of a model's functions, and of operations that `vmap` cannot map."""


@dataclass(frozen=True)
class _TokenCut(Cut):
    """Each of two devices has half of the tokens of every sequence.

    Args:
        dims: The dim of the tokens of each array of a batch; None where it has none.
        seq: Tokens of a sequence.
        ends_only: Whether they are ranks of a pipeline, which share those of the ends.
    """

    dims: Mapping[str, int | None]
    seq: int
    ends_only: bool

    mesh_axis = "context"
    unit = "tokens"

    @property
    def fields(self) -> dict[str, Any]:
        if not self.ends_only:
            return {"order": TokenOrder(mesh_axis=self.mesh_axis, num_ranks=2)}
        half = self.seq // 2
        first = lax.axis_index(self.mesh_axis) * half
        places = first + jnp.arange(half, dtype=jnp.int32)
        return {"token_positions": places, "full_seq": self.seq}

    def dim(self, name: str) -> int | None:
        return self.dims[name]

    def dim_of_stream(self, logical_axes: LogicalAxes) -> int | None:
        dims = [dim for dim, axis in enumerate(logical_axes) if is_sequence(axis)]
        return dims[0] if dims else None

    def examples(self, numbers: jax.Array, parts: int) -> tuple[jax.Array, int | None]:
        return numbers, None


def tokens_joined_backward(
    model: Model, num_tokens: int, *, ends_only: bool = False
) -> str | None:
    """Return what changes when two devices share the tokens; None if nothing does.

    Only a model with a user-written derivative is run. If it is too large or cannot run
    on random numbers, a warning says that it is not checked.

    Args:
        model: A model whose trace has no function that joins tokens.
        num_tokens: Of a sequence that it can be traced on.
        ends_only: Whether embed and head alone are asked for.
    """
    inputs = {k: one for k, one in model.known_inputs.items() if not one.optional}
    sizes = {**dict.fromkeys(logical_sizes(inputs), num_tokens), BATCH_DIM: _EXAMPLES}
    batch = shapes_of(inputs, sizes)
    with tracing("the model cannot be traced on whole sequences"):
        once, *shapes = traced_forward(model, batch, head=True, ends_only=ends_only)
        written = own_derivatives(jax.make_jaxpr(once)(*shapes))
    if not written:
        return None
    try:
        found = _in_halves(model, batch, num_tokens, ends_only)
    except _CANNOT_RUN as error:
        names = ", ".join(repr(group.name) for group in model.groups)
        warnings.warn(
            f"the model of blocks {names} cannot run on halves of its sequences "
            f"({error}): its own derivative is not checked",
            stacklevel=2,
        )
        return None
    return found and f"{found}: see the derivative of your own at {written[0]}"


def _in_halves(
    model: Model, batch: Mapping[str, Any], num_tokens: int, ends_only: bool
) -> str | None:
    if num_tokens % 2:
        raise ValueError(f"{num_tokens} tokens are an odd number")
    check_small(model, batch)
    dims = {
        name: next(iter(sequence_dims(model, name, shape)), None)
        for name, shape in batch.items()
    }
    cut = _TokenCut(dims=dims, seq=num_tokens, ends_only=ends_only)
    return what_halves_change(model, batch, cut, ends_only=ends_only)
