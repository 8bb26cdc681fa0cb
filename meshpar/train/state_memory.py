"""Bytes of a training step's states, by formula and as the compiler's arguments.

A formula is values, bytes of one, and what ZeRO and the rules split them over
(Rajbhandari et al. 2020, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.model.parameter import is_parameter
from meshpar.parallel.zero import Stored
from meshpar.rules.rules import spec_axes
from meshpar.train.local_steps import WithOuter
from meshpar.train.optimizer_state import Mastered, inner_state
from meshpar.train.step import TrainStep


@dataclass(frozen=True, kw_only=True)
class Part:
    """Bytes of one kind of array on one device.

    Args:
        name: Its name.
        formula_bytes: Bytes by arithmetic.
        compiled_bytes: Bytes in the compiled program, if the compiler tells them apart.
        how: The formula in words.
        memory: `device` or `host`.
    """

    name: str
    formula_bytes: int
    compiled_bytes: int | None
    how: str
    memory: str = "device"


def states(step: TrainStep) -> list[Part]:
    """Return the parts of parameters, optimizer state and master copy."""
    opt_state, lies = step.state_shapes.opt_state, step.shardings.opt_state
    inner, inner_lies = inner_state(opt_state), inner_state(lies)
    parts = [_parameters(step)]
    if isinstance(inner, WithOuter):
        replicas = step.layout.data
        parts.append(_optimizer(step, inner.inner, inner_lies.inner, replicas=replicas))
        parts.append(_outer_optimizer(step, inner, inner_lies))
    else:
        parts.append(_optimizer(step, inner, inner_lies))
    if isinstance(opt_state, Mastered):
        parts.append(_master_copy(step, opt_state.master, lies.master))
    return parts


def step_gradient_bytes(step: TrainStep) -> int:
    """Return the bytes of all gradients as a step adds them up."""
    value_bytes = jnp.dtype(step.placement.gradient_dtype).itemsize
    return _by_formula(step, lambda stored: stored.gradient_spec, value_bytes)


def local_bytes(shapes: Any, shardings: Any) -> int:
    """Return the bytes of a tree of arrays on one device."""

    def num_bytes(shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> int:
        return math.prod(sharding.shard_shape(shape.shape)) * shape.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(num_bytes, shapes, shardings)))


def _parameters(step: TrainStep) -> Part:
    shapes = step.state_shapes.params
    value_bytes = jax.tree.leaves(shapes)[0].dtype.itemsize
    return Part(
        name="parameters",
        formula_bytes=_by_formula(step, lambda stored: stored.spec, value_bytes),
        compiled_bytes=local_bytes(shapes, step.shardings.params),
        how=f"{value_bytes} bytes a value, split with zero=3",
    )


def _optimizer(
    step: TrainStep, shapes: Any, shardings: Any, *, replicas: int = 1
) -> Part:
    per_value = _values_per_parameter(shapes, sum(_sizes(step)) * replicas)
    return Part(
        name="optimizer",
        formula_bytes=round(_fp32_bytes(step) * per_value),
        compiled_bytes=local_bytes(shapes, shardings),
        how=f"{per_value:.3g} fp32 values for each, split with zero=1, 2, 3",
        memory=step.layout.optimizer_memory,
    )


def _outer_optimizer(step: TrainStep, shapes: WithOuter, shardings: Any) -> Part:
    beside = _values_per_parameter(shapes.outer, sum(_sizes(step)))
    compiled = local_bytes(shapes.start, shardings.start)
    compiled += local_bytes(shapes.outer, shardings.outer)
    return Part(
        name="outer optimizer",
        formula_bytes=round(_fp32_bytes(step) * (1 + beside)),
        compiled_bytes=compiled,
        how=f"the common parameters and {beside:.3g} values for each, fp32",
    )


def _master_copy(step: TrainStep, shapes: Any, shardings: Any) -> Part:
    return Part(
        name="master copy",
        formula_bytes=_fp32_bytes(step),
        compiled_bytes=local_bytes(shapes, shardings),
        how="4 bytes a value, split as the optimizer state",
        memory=step.layout.optimizer_memory,
    )


def _fp32_bytes(step: TrainStep) -> int:
    """Return the bytes of one fp32 value a parameter, split as optimizer state."""
    return _by_formula(step, lambda stored: stored.state_spec, 4)


def _by_formula(
    step: TrainStep, spec: Callable[[Stored], PartitionSpec], value_bytes: int
) -> int:
    """Return the bytes of one value a parameter, split by one of its specs."""
    placed = jax.tree.leaves(step.placement.stored)
    total = 0
    for size, stored in zip(_sizes(step), placed, strict=True):
        axes = spec_axes(spec(stored))
        total += size * value_bytes // math.prod(step.mesh.shape[a] for a in axes)
    return total


def _sizes(step: TrainStep) -> Iterator[int]:
    """Values of each parameter."""
    for parameter in jax.tree.leaves(step.model.parameters, is_leaf=is_parameter):
        yield math.prod(parameter.stacked_shape)


def _values_per_parameter(inner: Any, num_values: int) -> float:
    """fp32 values of optimizer state for each value of a parameter."""
    sizes = (
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(inner)
    )
    return sum(sizes) / 4 / num_values
