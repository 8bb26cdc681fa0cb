"""What each layer of a model costs: matmul FLOPs of its forward, read from its jaxpr.

A block is one function of all its layers; layers differ where it branches on
`scope.layer` (`lax.cond`, `lax.switch`): that index is known for each layer, and with
it the branch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import InputError
from meshpar.model.contract import BlockGroup, Model
from meshpar.model.tracing import (
    one_layer_shapes,
    one_layer_state,
    traced_batch,
    traced_streams,
    tracing,
    tracing_scope,
)
from meshpar.trace.walk import programs_in, without_constants

SEQ = 8
"""Tokens of the sequence that is traced; every model takes so short a one."""

Values = Sequence[Any]
"""A value for each variable, None where it is not known."""


def layer_costs(model: Model, *, seq: int = SEQ) -> tuple[float, ...]:
    """FLOPs of the matmuls of every layer's forward on one example, nothing run.

    Args:
        model: The model, its groups of blocks in order.
        seq: Tokens of the example; as long as in training where layers differ in how
            they attend.

    Raises:
        InputError: The model cannot be traced on tokens, targets and weights alone, or
            has matmuls in a `while_loop`.

    Example:
        >>> from meshpar.models.presets import build
        >>> costs = layer_costs(build("test", layers=3))
        >>> len(costs), len(set(costs))
        (3, 1)
    """
    problem = f"no layer's cost can be measured on a batch of shape {(1, seq)}"
    with tracing(problem, "give layer_costs="):
        streams = traced_streams(model, 1, seq)
        (_, params), (_, states) = one_layer_shapes(model), one_layer_state(model)
        batch = traced_batch(model, 1, seq)
        return tuple(
            cost
            for group, param, stream, state in zip(
                model.groups, params, streams, states, strict=True
            )
            for cost in _costs(group, param, stream, state, batch)
        )


def _costs(
    group: BlockGroup, params: Any, x: Any, state: Any, batch: Any
) -> list[float]:
    def call(layer: jax.Array, params: Any, x: Any, state: Any, batch: Any) -> Any:
        return group.run(params, x, tracing_scope(batch, state, layer=layer))

    layer = jax.ShapeDtypeStruct((), jnp.int32)
    program = jax.make_jaxpr(call)(layer, params, x, state, batch)
    unknown = [None] * (len(program.jaxpr.invars) - 1)
    return [
        float(_walk(program, [jnp.int32(index), *unknown])[0])
        for index in range(group.num_layers)
    ]


def _walk(program: Any, arguments: Values) -> tuple[int, list[Any]]:
    """FLOPs of a program, and its results as far as they are known."""
    jaxpr, consts = without_constants(program), getattr(program, "consts", ())
    known = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else known.get(atom)

    total = 0
    for equation in jaxpr.eqns:
        flops, results = _equation(equation, [value(atom) for atom in equation.invars])
        total += flops
        known.update(zip(equation.outvars, results, strict=True))
    return total, [value(atom) for atom in jaxpr.outvars]


def _equation(equation: Any, values: Values) -> tuple[int, list[Any]]:
    params, name = equation.params, equation.primitive.name
    unknown = [None] * len(equation.outvars)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return _matmul(equation, math.prod(shape[dim] for dim in contracted)), unknown
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        out_features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return _matmul(equation, math.prod(kernel) // out_features), unknown
    if name == "cond":
        index, *operands = values
        if index is not None:
            return _walk(params["branches"][int(index)], operands)
        branches = [_walk(branch, operands)[0] for branch in params["branches"]]
        return max(branches), unknown
    if name == "scan":
        inner = params["jaxpr"]
        arguments = [None] * len(without_constants(inner).invars)
        return params["length"] * _walk(inner, arguments)[0], unknown
    called = programs_in(equation)
    if called:
        flops, results = _called(called, values, unknown)
        if flops and name == "while":
            raise InputError(
                "a layer has matmuls in a while_loop, whose number of iterations the "
                "trace does not know",
                key="model.unknown_trip_count",
            )
        return flops, results
    return 0, _evaluated(equation, values, unknown)


def _called(called: list[Any], values: Values, unknown: list) -> tuple[int, list[Any]]:
    """A call of one program (`jit`, `checkpoint`, ...), or one iteration of a loop."""
    counts = [len(without_constants(inner).invars) for inner in called]
    if counts == [len(values)]:
        return _walk(called[0], values)
    walks = [
        _walk(inner, [None] * count)
        for inner, count in zip(called, counts, strict=True)
    ]
    return sum(flops for flops, _ in walks), unknown


def _evaluated(equation: Any, values: Values, unknown: list) -> list[Any]:
    """The results where all operands are known: what becomes of the layer's index."""
    if not values or any(value is None for value in values) or equation.effects:
        return unknown
    with jax.ensure_compile_time_eval():
        results = equation.primitive.bind(*values, **equation.params)
    return list(results) if equation.primitive.multiple_results else [results]


def _matmul(equation: Any, contracted: int) -> int:
    return 2 * contracted * math.prod(equation.outvars[0].aval.shape)
