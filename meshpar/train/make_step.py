"""Make a training step: check the arguments, and keep them as `StepOptions`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, Literal

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from meshpar.checks.sequences import check_context, check_per_token
from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.machine.mesh import make_mesh, mesh_platform
from meshpar.model.contract import Model, check_model
from meshpar.parallel.grids.space import check_space, splits_tokens
from meshpar.parallel.pipeline.stages import with_costs
from meshpar.parallel.placement import DTYPES
from meshpar.parallel.remat import check_residual_names
from meshpar.rules.presets import default_rules
from meshpar.rules.rules import Rules, check_rules
from meshpar.schedules import OwnSchedule
from meshpar.train.local_steps import nesterov
from meshpar.train.optimizer_state import (
    StateSpec,
    WholeStateWarning,
    whole_state_message,
)
from meshpar.train.refusals import (
    experts_refusal,
    inputs_refusal,
    refuse,
    refuse_by_host,
    refuse_schedule,
    refuse_uneven_hosts,
    warn_idle_tensor,
)
from meshpar.train.step import TrainStep
from meshpar.train.step_programs import StepOptions


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
    devices_per_host: int | None = None,
    state_spec: StateSpec | None = None,
    unroll_optimizer: bool = False,
    check: bool = True,
) -> TrainStep:
    """Return the training step of `model` under `layout`.

    Args:
        model: A model under the contract (`meshpar.model.contract`).
        optimizer: An optax optimizer. It sees each layer's parameters by themselves,
            of the layer's own shape, whatever stacks them; its state of a parameter
            that has the parameter's dims, all (Adam) or some of them (Adafactor), is
            sharded as they are. It gets the loss as `value`, for
            `optax.contrib.reduce_on_plateau`. One that raises on a layer's shapes, as
            it closes over a mask of all layers, gets the stacked arrays where they
            hold the layers first to last.
        layout: The layout or its text form; a -1 absorbs the remaining devices.
        rules: Logical axis -> mesh axes; `default_rules(layout)` when absent.
        devices: Devices to use; JAX's by default: the first of them, with a warning,
            where the layout needs fewer.
        mesh: A mesh with meshpar's six axes, instead of `devices`. On an
            `absent_mesh` the step can be audited for an absent target, not run.
        max_grad_norm: Scale gradients down to this global norm; None for no limit.
        gradient_dtype: Dtype of gradients, in which they are added up over
            microbatches and devices; bf16 halves memory and traffic, and loses small
            contributions.
        compiler_options: XLA's options for every program of the step, as `jax.jit`
            takes them, over those of the platform
            (`meshpar.hardware.platforms`); None as a value leaves one out.
        schedule: Schedule of the pipeline, instead of one that the layout names: a
            `meshpar.schedules.Schedule`, one order a rank such as `["0F0", "0B0"]`,
            or a CSV file with one row a rank.
        layer_costs: Cost of each layer, in any unit, for `splits=cost`; the model's
            own (`BlockGroup.costs`) or its matmul FLOPs when absent.
        outer_optimizer: With local steps (`sync_every`), an optax optimizer of the
            parameters that all replicas have in common; it gets start less the mean
            of the replicas as its gradient, each layer by itself as `optimizer`, and
            no loss (`value` is NaN). SGD of rate 0.7 with Nesterov momentum 0.9 when
            absent (`meshpar.train.local_steps`).
        gradient_reduction: On CPUs of several processes `by_host` sums gradients inside
            each host, then across, which sends less between hosts and more in all
            (`meshpar.parallel.reduction`); GPUs and TPUs do so by themselves.
        devices_per_host: Devices that share the fast links of a host, for virtual
            devices; read from the devices, or the target of an audit, when absent. Rows
            are sent to experts once per host
            (`meshpar.parallel.expert.host_exchange`).
        state_spec: Sharding of optimizer state that has other dims than its parameter,
            such as a preconditioner or blocks of 8-bit values: (path in the optimizer's
            state, shape for one layer) -> PartitionSpec over mesh axes, or None for the
            default. By default such state is whole on every device, with a warning if
            it is large while the layout splits states.
        unroll_optimizer: Give the optimizer each layer as a parameter of its own, at
            paths such as `blocks.up.0`: for one that looks at several parameters at
            once or counts them (distributed Shampoo, noise). Its program grows with
            the number of layers.
        check: Whether a model that may join the examples of a batch is refused where
            devices or microbatches have some each. Where its trace leaves that open, a
            small instance runs once, which takes some seconds
            (`meshpar.checks.examples`).

    Raises:
        RuleError: A parameter cannot be laid out, or a rule for activations uses `data`
            or `fsdp` for anything but the batch, or the layout splits experts that the
            model does not have.
        InputError: `model` or `optimizer` is something else, or the layout does not
            fit the devices, or asks for what is not supported, or `max_grad_norm` is
            not positive, or the optimizer has large state of no parameter while the
            layout splits states, or its effect on each layer cannot be told
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
    elif not isinstance(mesh, Mesh | AbstractMesh):
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
        platform=mesh_platform(mesh),
        max_grad_norm=max_grad_norm,
        gradient_dtype=gradient_dtype,
        compiler_options=compiler_options,
        schedule=schedule,
        outer_optimizer=outer_optimizer,
        gradient_reduction=gradient_reduction,
        devices_per_host=devices_per_host,
        state_spec=state_spec,
        unroll_optimizer=unroll_optimizer,
        check=check,
    )
    step = TrainStep(_checked(options).with_execution())
    warn_idle_tensor(model, step.placement)
    for path, num_bytes in step.whole_states():
        message = whole_state_message(path, num_bytes)
        warnings.warn(message, WholeStateWarning, stacklevel=2)
    return step


def _checked(options: StepOptions) -> StepOptions:
    """Refuse what a step does not support; return the options with all defaults.

    Raises:
        InputError: A layout, a mesh or an option is not supported, or does not suit the
            model.
        RuleError: A rule is not supported, or the model lacks the experts to split.
    """
    model, layout, rules = options.model, options.layout, options.rules
    refuse(layout, rules, options.mesh, options.platform)
    _check_options(options)
    if layout.updates_each_microbatch:
        _refuse_whole_batch_options(options)
    for refused in (experts_refusal(model, layout), inputs_refusal(model, layout)):
        if refused is not None:
            raise refused
    outer_optimizer = _outer_optimizer(layout, options.outer_optimizer)
    refuse_by_host(options.gradient_reduction, layout, options.mesh, options.platform)
    refuse_uneven_hosts(options.devices_per_host, options.mesh)
    check_space(model, layout, rules)
    if splits_tokens(model, layout, rules):
        check_context(model, layout, rules)
    if layout.stage > 1:
        check_per_token(model, layout)
    return replace(options, outer_optimizer=outer_optimizer)


def _check_options(options: StepOptions) -> None:
    if options.gradient_dtype not in DTYPES:
        raise InputError(
            f"gradient_dtype={options.gradient_dtype!r}: must be one of "
            f"{', '.join(DTYPES)}",
            key="step.unknown_gradient_dtype",
        )
    norm = options.max_grad_norm
    if norm is not None and not (isinstance(norm, Real) and norm > 0):
        raise InputError(
            f"max_grad_norm={norm!r}: must be positive, or None for no limit",
            key="value.not_positive",
        )


def _refuse_whole_batch_options(options: StepOptions) -> None:
    """Refuse options that need all gradients of a batch at once, or one update of it.

    Raises:
        InputError: One is given.
    """
    given = {
        "max_grad_norm": options.max_grad_norm is not None,
        "gradient_reduction": options.gradient_reduction != "flat",
        "state_spec": options.state_spec is not None,
        "unroll_optimizer": options.unroll_optimizer,
    }
    for name, is_given in given.items():
        if is_given:
            value = getattr(options, name)
            none = " (0 in a recipe's options)" * (name == "max_grad_norm")
            raise InputError(
                f"schedule={options.layout.schedule} updates each stage by itself "
                f"after every microbatch, but {name}={value!r} is for all gradients of "
                f"a batch at once; leave it out{none}, or take schedule=1f1b",
                key="step.needs_one_update",
            )


def _check_optimizer(optimizer: Any, name: str = "optimizer") -> None:
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InputError(
            f"{name} is {optimizer!r}; give an optax optimizer, such as "
            "optax.adamw(1e-3)",
            key="optimizer.not_an_optimizer",
        )


def _outer_optimizer(
    layout: Layout, outer_optimizer: optax.GradientTransformation | None
) -> optax.GradientTransformation | None:
    """Return the outer optimizer of a layout's local steps; None without any."""
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
