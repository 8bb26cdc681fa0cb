"""Whether a model treats every example by itself, found by running it in two halves.

A trace says which operations join examples only where it knows them, and nothing of a
backward that a user wrote. So a small instance of a model, one layer of each group on a
few examples, runs once whole and once in halves, as two devices would run it: forward,
and backward from the same random gradients. What the halves give side by side, or added
up, is what the whole gives, or layouts would train different models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh

from meshpar.layout import MESH_AXES
from meshpar.model.contract import Model
from meshpar.model.tracing import one_layer_shapes, one_layer_state, tracing_scope

EXAMPLES = 8
"""In a small batch, half of them in each half."""

MOST_VALUES = 2**25
"""Parameters of the ends and one layer of each group that are still run: 128 MiB."""

BOUND = 1e-3
"""Relative, in the largest value of an array. Models that keep examples apart differ by
rounding alone, of fp32 by some 1e-7; means, maxima, sorting and the like by 2e-2."""

COARSE_BOUND = 2e-2
"""Of programs with numbers of 16 bits, whose sums are rounded by up to 2^-8."""

_CANCELLED = 1e-2
"""Share of the bound, relative in the largest gradient of any parameter, below which a
difference of gradients is rounding: the terms of the gradient of a bias before a batch
norm cancel."""

_HALVES = "data"
_QUICKLY = {"xla_backend_optimization_level": 0}
"""What is compiled here runs once, on few numbers."""


def num_values(model: Model) -> int:
    """Count the values of the ends' parameters and of one layer of each group."""
    return sum(x.size for x in jax.tree.leaves(one_layer_shapes(model)))


def what_halves_change(
    model: Model, batch: Mapping[str, jax.ShapeDtypeStruct], *, logits: bool = False
) -> str | None:
    """Return what differs where a model runs on halves of a batch; None if nothing.

    Args:
        model: The model.
        batch: Shapes of a small batch of an even number of examples.
        logits: Whether `logits` is asked, in place of the loss and its gradients.

    Raises:
        ValueError: Loss or gradients are not finite on random numbers.
        Exception: What the model's functions raise on such a batch.
    """
    given = _random_arguments(model, batch)
    cpu = jax.local_devices(backend="cpu")[0]

    one_each = np.array(cpu).reshape((1,) * len(MESH_AXES))
    mesh = Mesh(one_each, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))

    def run(parts: int) -> Any:
        function = functools.partial(_run, model, parts, logits=logits)
        # Functions may name mesh axes, of one device each.
        with jax.set_mesh(mesh), jax.default_device(cpu):
            program = jax.jit(function, compiler_options=_QUICKLY).trace(*given)
            is_coarse = any(name in str(program.jaxpr) for name in ("bf16[", "f16["))
            found = program.lower().compile()(*given)
            return jax.device_get(found), is_coarse

    # In a thread of its own: outside the mesh and the trace of the step that asks.
    with ThreadPoolExecutor(1) as thread:
        (whole, is_coarse), (halves, _) = thread.map(run, (1, 2))
    if not all(np.isfinite(one).all() for one in jax.tree.leaves(whole["sums"])):
        raise ValueError("its results on random inputs are not finite")
    bound = COARSE_BOUND if is_coarse else BOUND
    gradients = jax.tree.leaves(whole["sums"].get("parameters", ()))
    largest = max((np.abs(one).max(initial=0) for one in gradients), default=0)
    for (path, one), other in zip(
        jax.tree.leaves_with_path(whole), jax.tree.leaves(halves), strict=True
    ):
        is_gradient = path[1].key == "parameters"
        rounding = _CANCELLED * bound * largest if is_gradient else 0
        if not _close(one, other, bound, rounding):
            return _in_words(path)
    return None


def _run(
    model: Model,
    parts: int,
    params: Any,
    state: Any,
    batch: Any,
    cotangents: jax.Array,
    *,
    logits: bool,
) -> dict[str, Any]:
    """Run a model on parts of a batch, as so many devices; what they give together."""
    examples = jnp.arange(len(cotangents), dtype=jnp.uint32)
    cut = jax.tree.map(
        lambda x: x.reshape(parts, -1, *x.shape[1:]), (batch, examples, cotangents)
    )
    device = functools.partial(_device, model, params, state, logits=logits)
    found = jax.vmap(device, axis_name=_HALVES)(*cut)
    joined = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found["examples"])
    return {"examples": joined, "sums": jax.tree.map(lambda x: x[0], found["sums"])}


def _device(
    model: Model,
    params: Any,
    state: Any,
    batch: Any,
    examples: jax.Array,
    cotangents: jax.Array,
    *,
    logits: bool,
) -> dict[str, Any]:
    """Run a model on the examples of one device: what is of each, and sums over all."""
    of_ends, of_layers = state
    outside = tracing_scope(
        batch, of_ends, examples, training=not logits, batch_axes=(_HALVES,)
    )

    def forward(params: Any) -> tuple[Any, list]:
        ends, layers = params
        x, streams, sums, others = model.embed(ends, outside.batch, outside), [], [], []
        streams.append(x)
        for group, layer, of_layer in zip(model.groups, layers, of_layers, strict=True):
            if group.enter is not None:
                x = group.enter(ends, x, outside)
                streams.append(x)
            x, of_group = group.run(layer, x, outside.at_layer(0, of_layer))
            streams.append(x)
            sums.append({name: of_group[name] for name in group.auxiliary})
            others.append({k: v for k, v in of_group.items() if k not in sums[-1]})
        if logits and model.logits is not None:
            return model.logits(ends, x, outside), []
        head = model.loss_sums(ends, x, outside.batch, outside)
        return (streams, sums, head), others

    if logits:
        return {"examples": {"logits": forward(params)[0]}, "sums": {}}
    (streams, sums, loss), vjp, others = jax.vjp(forward, params, has_aux=True)
    loss_sum, weight_sum = lax.psum(loss, _HALVES)
    share = 1 / jnp.where(weight_sum == 0, jnp.inf, weight_sum)
    of_sums = [
        {name: share * group.auxiliary[name] for name in of_group}
        for group, of_group in zip(model.groups, sums, strict=True)
    ]
    of_streams = jax.tree.map(functools.partial(_cotangent, cotangents), streams)
    [gradients] = vjp((of_streams, of_sums, (share, -loss_sum * share**2)))
    return {
        "examples": {"stream": streams},
        "sums": {
            "auxiliary": lax.psum([sums, others], _HALVES),
            "loss": loss_sum * share,
            "parameters": lax.psum(gradients, _HALVES),
        },
    }


def _cotangent(numbers: jax.Array, x: jax.Array) -> jax.Array:
    """Random gradients of an array of the stream, of each example its own."""
    size = math.prod(x.shape[1:])
    wide = numbers[:, jnp.arange(size) % numbers.shape[1]] / EXAMPLES
    return wide.reshape(x.shape).astype(x.dtype)


def _random_arguments(model: Model, batch: Mapping[str, Any]) -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    params = jax.tree.map(
        functools.partial(_parameter, random), one_layer_shapes(model)
    )
    state = jax.tree.map(functools.partial(_parameter, random), one_layer_state(model))
    vocabulary = _vocabulary(model)
    arrays = {
        name: _input(random, model.known_inputs.get(name), vocabulary, shape)
        for name, shape in batch.items()
    }
    number = next(iter(arrays.values())).shape[0]
    cotangents = random.standard_normal((number, 1009)).astype(np.float32)
    return params, state, arrays, cotangents


def _parameter(random: np.random.Generator, like: Any) -> np.ndarray:
    """Values near those of trained models; matrices keep the size of what they take."""
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        return np.zeros(like.shape, like.dtype)
    values = random.standard_normal(like.shape)
    if jnp.iscomplexobj(jnp.zeros((), like.dtype)):
        values = values + 1j * random.standard_normal(like.shape)
    matrix = len(like.shape) > 1
    values = values / math.sqrt(like.shape[0]) if matrix else 1 + values / 4
    return values.astype(like.dtype)


def _vocabulary(model: Model) -> int:
    """The fewest numbers that any parameter has for a token; 2 where none has."""
    sizes = [
        size
        for parameter in model.flat_parameters().values()
        for name, size in zip(parameter.logical_axes, parameter.shape, strict=True)
        if name == "vocab"
    ]
    return min(sizes, default=2)


def _input(
    random: np.random.Generator, declared: Any, vocabulary: int, shape: Any
) -> np.ndarray:
    size = shape.shape
    if jnp.issubdtype(shape.dtype, jnp.bool_):
        return random.integers(0, 2, size).astype(bool)
    if jnp.issubdtype(shape.dtype, jnp.integer):
        below = getattr(declared, "below", None) or vocabulary
        return random.integers(0, min(below, 2**15), size).astype(shape.dtype)
    if declared is not None and declared.is_weight:
        return random.uniform(0.5, 1.5, size).astype(shape.dtype)
    return random.standard_normal(size).astype(shape.dtype)


def _close(one: Any, other: Any, bound: float, rounding: float) -> bool:
    """Whether two arrays are alike but for rounding; where both are NaN they are.

    Args:
        one: An array.
        other: One of its shape.
        bound: Of their difference, relative in the largest value of both.
        rounding: A difference that is none, whatever their values.
    """
    one, other = (np.asarray(x, np.complex128) for x in (one, other))
    known = np.isfinite(one) & np.isfinite(other)
    if not (known | (np.isfinite(one) == np.isfinite(other))).all():
        return False
    one, other = np.where(known, one, 0), np.where(known, other, 0)
    largest = max(np.abs(one).max(initial=0), np.abs(other).max(initial=0))
    return bool(np.abs(one - other).max(initial=0) <= max(bound * largest, rounding))


def _in_words(path: tuple) -> str:
    """Name a result of `_run` by its path there."""
    kind, rest = path[1].key, path[2:]
    if kind == "stream":
        return "the stream of some examples depends on others"
    if kind == "logits":
        return "the logits of some examples depend on others"
    if kind == "loss":
        return "the loss is no mean over examples"
    if kind == "auxiliary":
        name = jax.tree_util.keystr(rest[-1:], simple=True)
        return f"the sum {name!r} is no sum over examples"
    name = jax.tree_util.keystr(rest[1:], simple=True, separator=".")
    return f"the gradient of parameter {name!r} is no sum over examples"
