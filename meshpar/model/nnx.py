"""A Flax NNX module as a model under the contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from meshpar.errors import InputError
from meshpar.model.contract import SEQUENCE_INPUTS, BlockGroup, Model, Parameter, Params
from meshpar.rules.sharding import axes_of, insert


def from_nnx(
    *,
    ends: Callable[[nnx.Rngs], nnx.Module],
    block: Callable[[nnx.Rngs], nnx.Module],
    num_layers: int,
    group: str = "blocks",
    per_token: bool = False,
    sequence_inputs: Sequence[str] = SEQUENCE_INPUTS,
    auxiliary: Mapping[str, float] | None = None,
) -> Model:
    """A model whose two ends and repeated block are Flax NNX modules.

    The ends module has `embed(batch, scope) -> x`, `head(x, batch, scope) ->
    (loss_sum, weight_sum)` and, for sampling, `logits(x, scope)`. The block module is
    called as `block(x, scope) -> x`, or `-> (x, sums)` with auxiliary losses. Logical
    axes are the modules' own sharding metadata (`nnx.with_partitioning` or
    `out_sharding=`), a parameter without any is replicated. The parameter tree of the
    blocks stands under the key `group`.

    Args:
        ends: Builds the module of embedding and head.
        block: Builds one block.
        num_layers: Number of blocks.
        group: Name of the blocks in parameter paths.
        per_token: Whether embed and head treat every token by itself (`Model`).
        sequence_inputs: Arrays of a batch that are (batch, seq, ...) (`Model`).
        auxiliary: Name of each auxiliary loss of the blocks -> its coefficient.

    Raises:
        InputError: A module has state that is no parameter, such as batch statistics,
            or a parameter of the ends is called `group`.
    """
    if num_layers < 1:
        raise InputError(f"num_layers={num_layers}: a model has at least 1 block")
    ends_call, ends_parameters = _functional(ends, None)
    block_call, block_parameters = _functional(block, num_layers)
    if group in ends_parameters:
        raise InputError(
            f"the ends have parameters called {group!r}, the blocks' own name; rename "
            "them or pass another group="
        )
    has_logits = hasattr(_abstract(ends), "logits")
    return Model(
        parameters={**ends_parameters, group: block_parameters},
        embed=lambda params, *args: ends_call(params, "embed", *args),
        groups=(
            BlockGroup(
                name=group,
                num_layers=num_layers,
                block=lambda params, *args: block_call(params, "__call__", *args),
                auxiliary=dict(auxiliary or {}),
            ),
        ),
        head=lambda params, *args: ends_call(params, "head", *args),
        logits=(lambda params, *args: ends_call(params, "logits", *args))
        if has_logits
        else None,
        per_token=per_token,
        sequence_inputs=tuple(sequence_inputs),
    )


class _OneKey(nnx.RngStream):
    """Gives the same key at every call, so that construction order cannot matter."""

    def __call__(self) -> jax.Array:
        return self.key[...]


def _build(builder: Callable[[nnx.Rngs], nnx.Module], key: jax.Array) -> nnx.Module:
    rngs = nnx.Rngs(0)
    rngs.default = _OneKey(key, tag="default")
    with nnx.use_eager_sharding(False):
        return builder(rngs)


def _abstract(builder: Callable[[nnx.Rngs], nnx.Module]) -> nnx.Module:
    return nnx.eval_shape(lambda: _build(builder, jax.random.key(0)))


def _functional(
    builder: Callable[[nnx.Rngs], nnx.Module], num_layers: int | None
) -> tuple[Callable[..., Any], Params]:
    """A function of (parameters, method name, arguments), and the parameter tree."""
    graph, state, rest = nnx.split(_abstract(builder), nnx.Param, ...)
    others = [path for path, _ in nnx.to_flat_state(rest)]
    if others:
        raise InputError(
            f"module state {'.'.join(map(str, others[0]))!r} is no nnx.Param; keep "
            "running statistics and random streams out of the module (scope.dropout "
            "draws its own)"
        )
    parameters: Params = {}
    for path, variable in nnx.to_flat_state(state):
        parameter = Parameter(
            shape=tuple(variable.shape),
            dtype=variable.dtype,
            logical_axes=axes_of(variable),
            initial=_initial(builder, path),
            num_layers=num_layers,
        )
        insert(parameters, path, parameter)

    def call(params: Params, method: str, *args: Any) -> Any:
        with nnx.use_eager_sharding(False):
            filled = nnx.State(state)
            nnx.replace_by_pure_dict(filled, params)
            module = nnx.merge(graph, filled, nnx.State({}))
            return getattr(module, method)(*args)

    return call, parameters


def _initial(
    builder: Callable[[nnx.Rngs], nnx.Module], path: tuple
) -> Callable[[jax.Array], jax.Array]:
    def initial(key: jax.Array) -> jax.Array:
        state = nnx.state(_build(builder, key), nnx.Param)
        return dict(nnx.to_flat_state(state))[path][...]

    return initial
