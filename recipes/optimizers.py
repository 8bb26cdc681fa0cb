"""The optimizer of a run: one of optax by name, its learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from optax import contrib

from meshpar import Layout, Model
from meshpar.optimizers import muon
from meshpar.recipes.config import RunConfig
from meshpar.recipes.optimizer_options import parse_optimizer
from meshpar.rules.sharding import path_name
from meshpar.train.local_steps import nesterov
from meshpar.train.optimizer.average import parameter_average

Rate = Callable[[Any], Any]
Mask = Callable[[Any], Any]

_NO_MATRICES = ("bias", "scale", "_embed", "embedding")
"""Ends of the names of parameters that are no matrices, whatever their shape."""


def make_optimizer(config: RunConfig, model: Model) -> optax.GradientTransformation:
    """Return the optimizer of a run, with the average of its parameters if it has one.

    Args:
        config: Options of the run.
        model: The model, whose logical axes tell Muon what a matrix contracts.
    """
    rate = learning_rate_schedule(config)
    updates = Layout.of(config.layout).updates_each_step
    optimizer = named_optimizer(
        config.optimizer,
        rate if updates == 1 else lambda count: rate(count / updates),
        model,
    )
    if config.ema_decay is None:
        return optimizer
    return optax.chain(optimizer, parameter_average(config.ema_decay))


def named_optimizer(
    text: str, rate: Rate, model: Model
) -> optax.GradientTransformation:
    """Return an optimizer by its name and options (`parse_optimizer`).

    Args:
        text: Name and options.
        rate: Learning rate as a function of the updates done.
        model: The model.
    """
    name, options = parse_optimizer(text)
    mask = None if options["decay_mask"] == "all" else is_matrix
    return _MAKE[name](rate, mask, options, model)


def is_matrix(params: Any) -> Any:
    """Return for each parameter whether it is a matrix; a mask for weight decay.

    A matrix has two or more dims in one layer, and is no bias, scale of a norm, or
    embedding table (it may be the matrix before the logits).
    """

    def one(path: tuple, array: Any) -> bool:
        last = path_name(path).rpartition(".")[2]
        return array.ndim > 1 and not last.endswith(_NO_MATRICES)

    return jax.tree.map_with_path(one, params)


def learning_rate_schedule(config: RunConfig) -> optax.Schedule:
    """Return the learning rate as a function of the steps done.

    It rises linearly over `warmup_steps`, then falls as `learning_rate_schedule` says,
    and has its last value from `decay_steps` on.
    """
    steps = max(config.decay_steps or config.steps, 2)
    warmup, peak = num_warmup_steps(config), config.learning_rate
    kind, end = config.rate_schedule, peak * config.final_rate_ratio
    if kind == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, end)
    parts = [optax.linear_schedule(0.0, peak, warmup), optax.constant_schedule(peak)]
    if kind == "constant":
        return optax.join_schedules(parts, [warmup])
    fall = steps - warmup if kind == "linear" else num_cooldown_steps(config)
    parts.append(optax.linear_schedule(peak, end, fall))
    return optax.join_schedules(parts, [warmup, steps - fall])


def num_warmup_steps(config: RunConfig) -> int:
    """Return the steps of the warm-up: a tenth of the decay steps by default."""
    if config.warmup_steps is not None:
        return config.warmup_steps
    steps = config.decay_steps or config.steps
    return min(max(steps // 10, 1), steps - 1)


def num_cooldown_steps(config: RunConfig) -> int:
    """Return the steps of the decay of `wsd`: a fifth of the decay steps by default."""
    if config.cooldown_steps is not None:
        return config.cooldown_steps
    steps = max(config.decay_steps or config.steps, 2)
    return max(min(steps // 5, steps - num_warmup_steps(config)), 1)


def make_outer_optimizer(config: RunConfig) -> optax.GradientTransformation:
    """Return the outer optimizer of local steps."""
    rate, momentum = config.outer_learning_rate, config.outer_momentum
    if config.outer_optimizer == "adam":
        return optax.adam(rate, b1=momentum)
    if config.outer_optimizer == "sgd":
        return optax.sgd(rate)
    return nesterov(rate, momentum)


def _adamw(
    rate: Rate, mask: Mask | None, options: Mapping[str, Any], model: Model
) -> optax.GradientTransformation:
    return optax.adamw(
        rate,
        b1=options["beta1"],
        b2=options["beta2"],
        eps=options["epsilon"],
        weight_decay=options["weight_decay"],
        mask=mask,
        nesterov=options.get("nesterov", False),
    )


def _lion(
    rate: Rate, mask: Mask | None, options: Mapping[str, Any], model: Model
) -> optax.GradientTransformation:
    decay = options["weight_decay"]
    betas = {"b1": options["beta1"], "b2": options["beta2"]}
    return optax.lion(rate, **betas, weight_decay=decay, mask=mask)


def _adafactor(
    rate: Rate, mask: Mask | None, options: Mapping[str, Any], model: Model
) -> optax.GradientTransformation:
    return optax.adafactor(
        rate,
        min_dim_size_to_factor=options["min_dim_size_to_factor"],
        decay_rate=options["decay_rate"],
        clipping_threshold=options["clipping_threshold"] or None,
        momentum=options["momentum"] or None,
        weight_decay_rate=options["weight_decay"] or None,
        weight_decay_mask=mask,
    )


def _muon(
    rate: Rate, mask: Mask | None, options: Mapping[str, Any], model: Model
) -> optax.GradientTransformation:
    dims = muon_dims(model)

    def dims_of(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: dims.get(path_name(path)), params)

    return muon(
        rate,
        beta=options["momentum"],
        nesterov=options["nesterov"],
        ns_steps=options["ns_steps"],
        eps=options["epsilon"],
        consistent_rms=options["rms"] or None,
        weight_decay=options["weight_decay"],
        weight_decay_mask=mask,
        adam_b1=options["beta1"],
        adam_b2=options["beta2"],
        adam_weight_decay=0.0 if mask else options["weight_decay"],
        muon_weight_dimension_numbers=dims_of,
    )


def muon_dims(model: Model) -> dict[str, contrib.MuonDimensionNumbers]:
    """Return the contracted and the output dims of each matrix that Muon updates.

    Those are the matrices of the blocks. A matrix of several heads is one matrix; each
    expert has its own.
    """
    dims = {}
    parameters = model.flat_parameters()
    for path, parameter in parameters.items():
        axes = parameter.logical_axes
        last = path.rpartition(".")[2]
        if last.endswith(_NO_MATRICES) or "vocab" in axes:
            continue
        own = [
            dim for dim, axis in enumerate(axes) if axis not in ("experts", "layers")
        ]
        if len(own) < 2 or parameter.num_layers is None:
            continue
        splits = len(own) - 1 if axes[own[-1]] == "embed" != axes[own[0]] else 1
        dims[path] = contrib.MuonDimensionNumbers(
            tuple(own[:splits]), tuple(own[splits:])
        )
    return dims


def _sgd(
    rate: Rate, mask: Mask | None, options: Mapping[str, Any], model: Model
) -> optax.GradientTransformation:
    momentum = options["momentum"] or None
    return optax.chain(
        optax.add_decayed_weights(options["weight_decay"], mask),
        optax.sgd(rate, momentum, nesterov=options["nesterov"]),
    )


def _schedule_free(
    rate: Rate, mask: Mask | None, options: Mapping[str, Any], model: Model
) -> optax.GradientTransformation:
    base = _adamw(rate, mask, {**options, "beta1": 0.0}, model)
    return contrib.schedule_free(base, rate, b1=options["beta1"])


_MAKE = {
    "adamw": _adamw,
    "lion": _lion,
    "adafactor": _adafactor,
    "muon": _muon,
    "sgd": _sgd,
    "schedule_free": _schedule_free,
}
"""Name of an optimizer -> the function that makes it."""
