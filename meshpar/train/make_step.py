"""A training step from a model and a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.mesh import make_mesh, platform_of
from meshpar.model.contract import Model, check_model
from meshpar.parallel.pipeline.program import with_costs
from meshpar.parallel.remat import check_residual_names
from meshpar.rules.presets import default_rules
from meshpar.rules.rules import Rules, check_rules
from meshpar.schedules import OwnSchedule
from meshpar.train.idle_axes import warn_of_idle_tensor
from meshpar.train.local_steps.outer_optimizer import nesterov
from meshpar.train.reduction_refusal import refuse_by_host
from meshpar.train.refusals import (
    experts_refusal,
    inputs_refusal,
    refuse,
    refuse_schedule,
)
from meshpar.train.step import TrainStep
from meshpar.train.step_options import StepOptions


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout | str,
    *,
    rules: Rules | None = None,
    devices: Sequence[jax.Device] | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    max_grad_norm: float | None = None,
    gradient_dtype: Literal["fp32", "bf16"] = "fp32",
    compiler_options: Mapping[str, Any] | None = None,
    schedule: OwnSchedule | None = None,
    layer_costs: Sequence[float] | None = None,
    outer_optimizer: optax.GradientTransformation | None = None,
    gradient_reduction: Literal["flat", "by_host"] = "flat",
    check: bool = True,
) -> TrainStep:
    """A training step of `model` laid out as `layout` says.

    Args:
        model: A model under the contract (`meshpar.model.contract`).
        optimizer: An optax optimizer. It sees each layer's parameters by themselves,
            of the layer's own shape, whatever stacks them; what it holds of a parameter
            has its dims, all (Adam) or some of them (Adafactor), and lies as they do.
            It gets the loss as `value`, for `optax.contrib.reduce_on_plateau`. One that
            raises on a layer's shapes, as it closes over a mask of all layers, is given
            the stacked arrays where they hold the layers first to last.
        layout: The layout or its text form; a -1 absorbs the remaining devices.
        rules: Logical axis -> mesh axes; `default_rules(layout)` when absent.
        devices: Devices to use; JAX's by default: the first of them, with a warning,
            where the layout needs fewer.
        mesh: A mesh with meshpar's six axes, instead of `devices`. On an
            `absent_mesh` the step can be audited for an absent target, not run.
        max_grad_norm: Scale gradients down to this global norm; None for no limit.
        gradient_dtype: In which gradients are kept, and added up over microbatches and
            devices; bf16 halves memory and traffic, and loses small contributions.
        compiler_options: XLA's options for every program of the step, as `jax.jit`
            takes them, over those that the platform has
            (`meshpar.hardware.compiler_options`); None as a value leaves one out.
        schedule: The pipeline's, instead of one that the layout names: a
            `meshpar.schedules.Schedule`, one order a rank such as `["0F0", "0B0"]`,
            or a CSV file with one row a rank.
        layer_costs: What each layer costs, in any unit, for `splits=cost`; the model's
            own (`BlockGroup.costs`) or its matmul FLOPs when absent.
        outer_optimizer: With local steps (`sync_every`), an optax optimizer of the
            parameters that all replicas have in common; it gets start less the mean
            of the replicas as its gradient, each layer by itself as `optimizer`, and
            no loss (`value` is NaN). SGD of rate 0.7 with Nesterov momentum 0.9 when
            absent (`meshpar.train.local_steps`).
        gradient_reduction: On CPUs of several processes `by_host` sums gradients inside
            each host, then across, which sends less between hosts and more in all
            (`meshpar.parallel.by_host`); GPUs and TPUs do so by themselves.
        check: Whether a model that may join the examples of a batch is refused where
            devices or microbatches have some each. What its trace leaves open costs
            some seconds once, as a small instance runs
            (`meshpar.model.examples_apart`).

    Raises:
        RuleError: A parameter cannot be laid out, or a rule for activations uses `data`
            or `fsdp` for anything but the batch, or the layout splits experts that the
            model does not have.
        InputError: `model` or `optimizer` is something else, or the layout does not
            fit the devices, or asks for what is not built, or `max_grad_norm` is not
            positive, or the optimizer has large state of no parameter while the layout
            splits states, or what it does to each layer cannot be told
            (`optax.flatten`, noise), or the layout
            splits or averages what an input with a gradient needs whole (`context`,
            `sync_every`), or `schedule` is wrong (who waits for what, which
            work is missing or doubled) or made for other sizes.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> from flax import nnx
        >>> from meshpar import Input, from_nnx
        >>> class Ends(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.out = nnx.Linear(8, 1, rngs=rngs)
        ...     def embed(self, batch, scope):
        ...         return batch["x"]
        ...     def head(self, stream, batch, scope):
        ...         losses = (self.out(stream)[:, 0] - batch["y"]) ** 2
        ...         return losses.sum(), jnp.float32(losses.size)
        >>> class Block(nnx.Module):
        ...     def __init__(self, rngs):
        ...         axes = {"out_sharding": ("embed", "mlp")}
        ...         self.up = nnx.Linear(8, 8, kernel_metadata=axes, rngs=rngs)
        ...     def __call__(self, stream, scope):
        ...         return jnp.tanh(self.up(stream))
        >>> x = Input(("batch", None), shape=(None, 8))
        >>> inputs = {"x": x, "y": Input(("batch",))}
        >>> model = from_nnx(ends=Ends, block=Block, num_layers=2, inputs=inputs)
        >>> step = make_train_step(model, optax.adam(1e-3), "data=-1")
        >>> state = step.init(seed=0)
        >>> state, metrics = step(state, dict(x=np.ones((8, 8)), y=np.ones(8)))
        >>> sorted(metrics)
        ['grad_norm', 'loss', 'skipped', 'weight_sum']
    """
    check_model(model)
    _check_optimizer(optimizer)
    layout = Layout.of(layout)
    if mesh is None:
        mesh = make_mesh(layout, devices)
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise InputError(
            f"mesh is a {type(mesh).__name__}; give one of make_mesh(layout)",
            key="mesh.not_a_mesh",
        )
    layout = layout.resolve(mesh.size)
    if schedule is not None:
        refuse_schedule(layout)
    if layer_costs is not None:
        model = with_costs(model, layer_costs, layout)
    check_residual_names(model, layout.remat)
    rules = default_rules(layout) if rules is None else rules
    check_rules(rules)
    options = StepOptions(
        model=model,
        optimizer=optimizer,
        layout=layout,
        rules=rules,
        mesh=mesh,
        platform=platform_of(mesh),
        max_grad_norm=max_grad_norm,
        gradient_dtype=gradient_dtype,
        compiler_options=compiler_options,
        schedule=schedule,
        outer_optimizer=outer_optimizer,
        gradient_reduction=gradient_reduction,
        check=check,
    )
    refuse(options)
    refused = experts_refusal(model, layout)
    if refused is not None:
        raise refused
    refused_input = inputs_refusal(model, layout)
    if refused_input is not None:
        raise refused_input
    outer_optimizer = outer_optimizer_of(layout, outer_optimizer)
    refuse_by_host(options)
    step = TrainStep(replace(options, outer_optimizer=outer_optimizer))
    warn_of_idle_tensor(model, step.placement)
    return step


def _check_optimizer(optimizer: Any, name: str = "optimizer") -> None:
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InputError(
            f"{name} is {optimizer!r}; give an optax optimizer, such as "
            "optax.adamw(1e-3)",
            key="optimizer.not_an_optimizer",
        )


def outer_optimizer_of(
    layout: Layout, outer_optimizer: optax.GradientTransformation | None
) -> optax.GradientTransformation | None:
    """The outer optimizer of a layout's local steps; None without any.

    Raises:
        InputError: One is given, but the layout has no local steps.
    """
    if outer_optimizer is not None:
        _check_optimizer(outer_optimizer, "outer_optimizer")
    if layout.sync_every > 1:
        return outer_optimizer or nesterov()
    if outer_optimizer is not None:
        raise InputError(
            f"layout {str(layout)!r} has sync_every=1: it averages the gradients of "
            "every step, and no outer optimizer runs; leave outer_optimizer out, or "
            "set sync_every to 2 or more",
            key="optimizer.outer_without_local_steps",
        )
    return None
