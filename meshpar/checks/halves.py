"""Run a small model whole and in two halves of its batch, and compare the results.

A trace shows what joins examples only in operations that are known, and nothing of a
backward that a user wrote. So a small instance of a model, one layer of each group on a
few examples, runs once whole and once in halves, as two devices would run it: forward,
and backward from the same random gradients. The results of the halves, concatenated or
added up, must equal those of the whole, or layouts would train different models.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh

from meshpar.layout import MESH_AXES
from meshpar.model.contract import Model, default_axes
from meshpar.model.tracing import one_layer_shapes, one_layer_state, tracing_scope
from meshpar.rules.rules import LogicalAxes, is_axes

EXAMPLES = 8
"""In a small batch, half of them in each half."""

MOST_VALUES = 2**25
"""Parameters of the ends and one layer of each group that are still run: 128 MiB."""

BOUND = 1e-3
"""Relative, in the largest value of an array. Models that keep examples apart differ by
rounding alone, of fp32 by some 1e-7; means, maxima, sorting and the like by 2e-2."""

COARSE_BOUND = 2e-2
"""Relative bound for programs with 16-bit numbers, whose sums round by up to 2^-8."""

_CANCELLED = 1e-2
"""Share of the bound, relative in the largest gradient of any parameter, below which a
difference of gradients is rounding: the terms of the gradient of a bias before a batch
norm cancel."""

CANNOT_RUN = (KeyError, TypeError, ValueError, NotImplementedError, RuntimeError)
"""Exceptions of a model's functions, and of operations that `vmap` cannot map."""

_QUICKLY = {"xla_backend_optimization_level": 0}
"""Compile fast: each program runs once, on a small batch."""


def check_small(model: Model, batch: Mapping[str, Any]) -> None:
    """Raise if a model or a batch is too large to run before training.

    Args:
        model: Of which the ends and one layer of each group count.
        batch: Arrays or their shapes.

    Raises:
        ValueError: Names the number and the limit.
    """
    number = sum(x.size for x in jax.tree.leaves(one_layer_shapes(model)))
    if number > MOST_VALUES:
        raise ValueError(f"{number:,} parameters of one layer, above {MOST_VALUES:,}")
    values, limit = sum(math.prod(x.shape) for x in batch.values()), MOST_VALUES // 8
    if values > limit:
        raise ValueError(f"{values:,} numbers of a small batch, above {limit:,}")


class Cut:
    """How two devices share a batch; here each has half of the examples."""

    mesh_axis = "data"
    unit = "examples"
    """Name of the shared unit in errors."""

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of `Scope` that describe one device's share."""
        return {"batch_axes": (self.mesh_axis,)}

    def dim(self, name: str) -> int | None:
        """Dim along which an array of the batch is split; None if it is replicated."""
        return 0

    def stream_dim(self, logical_axes: LogicalAxes) -> int | None:
        """Dim along which an array of the stream is split; None if it is replicated."""
        return 0

    def examples(self, numbers: jax.Array, parts: int) -> tuple[jax.Array, int | None]:
        """Return the numbers of each part's examples, and the dim of the parts."""
        return numbers.reshape(parts, -1), 0


def what_halves_change(
    model: Model,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    cut: Cut | None = None,
    *,
    logits: bool = False,
    ends_only: bool = False,
) -> str | None:
    """Return what differs where a model runs on halves of a batch; None if nothing.

    Args:
        model: The model.
        batch: Shapes of a small batch that splits evenly.
        cut: What the halves are; of the examples when absent.
        logits: Whether `logits` is asked, in place of the loss and its gradients.
        ends_only: Whether the head is given what `embed` makes.

    Raises:
        ValueError: Loss or gradients are not finite on random numbers.
        Exception: What the model's functions raise on such a batch.
    """
    given, cut = _random_arguments(model, batch), cut or Cut()
    cpu = jax.local_devices(backend="cpu")[0]

    one_each = np.array(cpu).reshape((1,) * len(MESH_AXES))
    mesh = Mesh(one_each, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))

    def run(parts: int) -> Any:
        device = _Device(
            model=model, cut=cut, parts=parts, logits=logits, ends_only=ends_only
        )
        function = functools.partial(_run, device)
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
    different = _first_difference(whole, halves, COARSE_BOUND if is_coarse else BOUND)
    return None if different is None else _in_words(different, cut)


def _first_difference(whole: Any, halves: Any, bound: float) -> tuple | None:
    """Return the path of the first result that differs; None if all agree."""
    gradients = jax.tree.leaves(whole["sums"].get("parameters", ()))
    largest = max((np.abs(one).max(initial=0) for one in gradients), default=0)
    for (path, one), other in zip(
        jax.tree.leaves_with_path(whole), jax.tree.leaves(halves), strict=True
    ):
        is_gradient = path[1].key == "parameters"
        rounding = _CANCELLED * bound * largest if is_gradient else 0
        if not _close(one, other, bound, rounding):
            return path
    return None


@dataclass(frozen=True, kw_only=True)
class _Device:
    """One of the devices that share a batch."""

    model: Model
    cut: Cut
    parts: int
    logits: bool
    ends_only: bool

    def results(
        self,
        params: Any,
        state: Any,
        batch: Any,
        examples: jax.Array,
        cotangents: Any,
    ) -> dict[str, Any]:
        """Return this device's arrays, and sums over both devices."""
        if self.logits:
            logits, _ = self._forward(state, batch, examples, params)
            return {"own": {"logits": logits}, "sums": {}}
        forward = functools.partial(self._forward, state, batch, examples)
        (streams, sums, loss), vjp, others = jax.vjp(forward, params, has_aux=True)
        axis, groups = self.cut.mesh_axis, self.model.groups
        loss_sum, weight_sum = lax.psum(loss, axis)
        share = 1 / jnp.where(weight_sum == 0, jnp.inf, weight_sum)
        of_sums = [
            {name: share * group.auxiliary[name] for name in of_group}
            for group, of_group in zip(groups, sums, strict=False)
        ]
        [gradients] = vjp((cotangents, of_sums, (share, -loss_sum * share**2)))
        return {
            "own": {"stream": streams},
            "sums": {
                "auxiliary": lax.psum([sums, others], axis),
                "loss": loss_sum * share,
                "parameters": lax.psum(gradients, axis),
            },
        }

    def streams(
        self, params: Any, state: Any, batch: Any, examples: jax.Array
    ) -> list[Any]:
        """The streams alone, for their shapes."""
        (streams, *_), _ = self._forward(state, batch, examples, params)
        return streams

    def _forward(
        self, state: Any, batch: Any, examples: jax.Array, params: Any
    ) -> tuple[Any, list]:
        (ends, layers), (of_ends, of_layers), model = params, state, self.model
        fields = self.cut.fields if self.parts > 1 else {}
        outside = tracing_scope(
            batch, of_ends, examples, training=not self.logits, **fields
        )
        x, streams, sums, others = model.embed(ends, outside.batch, outside), [], [], []
        streams.append(x)
        groups = () if self.ends_only else model.groups
        for group, layer, of_layer in zip(groups, layers, of_layers, strict=False):
            if group.enter is not None:
                x = group.enter(ends, x, outside)
                streams.append(x)
            x, of_group = group.run(layer, x, outside.at_layer(0, of_layer))
            streams.append(x)
            sums.append({name: of_group[name] for name in group.auxiliary})
            others.append({k: v for k, v in of_group.items() if k not in sums[-1]})
        if self.logits and model.logits is not None:
            return model.logits(ends, x, outside), []
        head = model.loss_sums(ends, x, outside.batch, outside)
        return (streams, sums, head), others


def _run(
    device: _Device, params: Any, state: Any, batch: Any, numbers: jax.Array
) -> dict[str, Any]:
    """Run a model on parts of a batch, one for each device, and join their results."""
    cut, parts = device.cut, device.parts
    examples = jnp.arange(next(iter(batch.values())).shape[0], dtype=jnp.uint32)
    whole = replace(device, parts=1)
    streams, dims = [], []
    if not device.logits:
        streams = jax.eval_shape(whole.streams, params, state, batch, examples)
        dims = _stream_dims(device, streams)

    def cotangent(x: Any) -> jax.Array:
        values = numbers[jnp.arange(math.prod(x.shape)) % numbers.size] / EXAMPLES
        return values.reshape(x.shape).astype(x.dtype)

    cotangents = [
        _cut(cotangent(x), dim, parts)
        if dim is not None
        # A replicated array would count its cotangent twice.
        else jnp.zeros((parts, *x.shape), x.dtype)
        for x, dim in zip(jax.tree.leaves(streams), dims, strict=True)
    ]
    given = {name: _cut(x, cut.dim(name), parts) for name, x in batch.items()}
    of_batch = {name: None if cut.dim(name) is None else 0 for name in batch}
    own_examples, mapped = cut.examples(examples, parts)
    found = jax.vmap(
        functools.partial(device.results, params, state),
        in_axes=(of_batch, mapped, 0),
        axis_name=cut.mesh_axis,
    )(given, own_examples, jax.tree.structure(streams).unflatten(cotangents))
    own, tree = jax.tree.flatten(found["own"])
    dims = dims or [0] * len(own)
    joined = [
        x[0] if dim is None else jnp.concatenate(list(x), dim)
        for x, dim in zip(own, dims, strict=True)
    ]
    sums = jax.tree.map(lambda x: x[0], found["sums"])
    return {"own": tree.unflatten(joined), "sums": sums}


def _stream_dims(device: _Device, streams: list[Any]) -> list[int | None]:
    """Return the dim that is cut of each array of the streams, in order of leaves."""
    groups = device.model.groups
    declared = [groups[0].stream]
    for group in () if device.ends_only else groups:
        declared += [group.stream] * (1 if group.enter is None else 2)
    dims: list[int | None] = []
    for axes, stream in zip(declared, streams, strict=True):
        if axes is None:
            axes = jax.tree.map(lambda x: default_axes(x.ndim), stream)
        for one in jax.tree.leaves(axes, is_leaf=is_axes):
            dims.append(device.cut.stream_dim(one))
    return dims


def _cut(x: jax.Array, dim: int | None, parts: int) -> jax.Array:
    """Return an array as (parts, ...), cut along a dim; whole if the dim is None."""
    return x if dim is None else jnp.stack(jnp.split(x, parts, dim))


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
    return params, state, arrays, random.standard_normal(10_007).astype(np.float32)


def _parameter(random: np.random.Generator, like: Any) -> np.ndarray:
    """Return values near those of trained models; matrices keep the size of inputs."""
    if not jnp.issubdtype(like.dtype, jnp.inexact):
        return np.zeros(like.shape, like.dtype)
    values = random.standard_normal(like.shape)
    if jnp.iscomplexobj(jnp.zeros((), like.dtype)):
        values = values + 1j * random.standard_normal(like.shape)
    matrix = len(like.shape) > 1
    values = values / math.sqrt(like.shape[0]) if matrix else 1 + values / 4
    return values.astype(like.dtype)


def _vocabulary(model: Model) -> int:
    """Return the smallest vocabulary of any parameter; 2 if none has one."""
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
    """Return True if two arrays are equal but for rounding, NaN to NaN.

    Args:
        one: An array.
        other: An array of its shape.
        bound: Largest difference, relative to the largest value of both.
        rounding: Absolute difference that always passes.
    """
    one, other = (np.asarray(x, np.complex128) for x in (one, other))
    finite = np.isfinite(one) & np.isfinite(other)
    if not (finite | (np.isfinite(one) == np.isfinite(other))).all():
        return False
    one, other = np.where(finite, one, 0), np.where(finite, other, 0)
    largest = max(np.abs(one).max(initial=0), np.abs(other).max(initial=0))
    return bool(np.abs(one - other).max(initial=0) <= max(bound * largest, rounding))


def _in_words(path: tuple, cut: Cut) -> str:
    """Name a result of `_run` by its path there."""
    kind, rest = path[1].key, path[2:]
    if kind == "stream":
        return f"the stream of some {cut.unit} depends on others"
    if kind == "logits":
        return f"the logits of some {cut.unit} depend on others"
    if kind == "loss":
        return f"the loss is not a mean over {cut.unit}"
    if kind == "auxiliary":
        name = jax.tree_util.keystr(rest[-1:], simple=True)
        return f"the sum {name!r} is not a sum over {cut.unit}"
    name = jax.tree_util.keystr(rest[1:], simple=True, separator=".")
    return f"the gradient of parameter {name!r} is not a sum over {cut.unit}"
