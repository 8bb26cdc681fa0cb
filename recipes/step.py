"""The compiled step of a run."""

from __future__ import annotations

import time
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from meshpar import (
    MESH_AXES,
    InputError,
    Layout,
    TrainState,
    TrainStep,
    batch_shapes,
    make_mesh,
    make_train_step,
)
from meshpar.recipes.config import RunConfig
from meshpar.recipes.model import build_model
from meshpar.recipes.optimizer_options import keeps_average
from meshpar.recipes.optimizers import make_optimizer, make_outer_optimizer


def audited(
    layout: Layout, mesh: AbstractMesh | None
) -> tuple[TrainStep, dict[str, jax.ShapeDtypeStruct]]:
    """The step and the batch of the default options: `meshpar audit --recipe`."""
    config = RunConfig(layout=str(layout))
    return make_step(config, mesh), batch_shapes(config.global_batch, config.seq)


def make_step(config: RunConfig, mesh: Mesh | AbstractMesh | None = None) -> TrainStep:
    """The compiled step of a run, on real devices or on a mesh without any."""
    layout = Layout.parse(config.layout)
    if config.dtype:
        layout = replace(layout, precision=config.dtype)
    if config.sync_every:
        layout = replace(layout, sync_every=config.sync_every)
    if mesh is None:
        mesh = make_mesh(layout, mesh_devices(layout), order=config.mesh_order)
    model = build_model(config)
    return make_train_step(
        model,
        make_optimizer(config, model),
        layout,
        mesh=mesh,
        max_grad_norm=config.max_grad_norm or None,
        schedule=config.schedule,
        gradient_reduction=config.gradient_reduction,
        outer_optimizer=make_outer_optimizer(config) if layout.sync_every > 1 else None,
    )


def check_intervals(config: RunConfig, layout: Layout) -> None:
    """Refuses local steps that no average would follow, and options of none.

    Raises:
        InputError: There are such.
    """
    every, steps = layout.sync_every, config.steps
    if steps % every:
        near = max(steps - steps % every, every)
        raise InputError(
            f"--steps {steps} is no multiple of sync_every={every}: the last "
            f"{steps % every} would be in no average; give --steps {near}",
            key="run.steps_not_multiple",
        )
    given = [name for name in config.changed() if name.startswith("outer_")]
    if every == 1 and given:
        raise InputError(
            f"--{given[0].replace('_', '-')} is given, but sync_every=1 has no outer "
            "optimizer; leave it out, or give --sync-every 2 or more",
            key="run.option_without_local_steps",
        )
    if every > 1 and keeps_average(config.optimizer, config.ema_decay):
        raise InputError(
            f"optimizer={config.optimizer!r} with ema_decay={config.ema_decay} "
            f"averages the parameters, and with sync_every={every} each replica would "
            "have another average; leave ema_decay out, or train without local steps",
            key="run.average_with_local_steps",
        )


def mesh_devices(layout: Layout) -> list[jax.Device]:
    """The first devices, as many as the layout needs; all of them for a -1.

    Raises:
        InputError: There are too few.
    """
    devices = jax.devices()
    if any(getattr(layout, mesh_axis) == -1 for mesh_axis in MESH_AXES):
        layout.resolve(len(devices))
        return devices
    needed = layout.num_devices
    processes = jax.process_count()
    if processes > 1 and needed != len(devices):
        raise InputError(
            f"layout {str(layout)!r} needs {needed} devices, but {processes} processes "
            f"of {jax.local_device_count()} have {len(devices)}: every process needs "
            "devices of the layout; change the layout, the number of processes, or "
            "--emulate",
            key="processes.without_devices",
        )
    if needed > len(devices):
        raise InputError(
            f"layout {str(layout)!r} needs {needed} devices, but there are "
            f"{len(devices)} here ({devices[0].device_kind}); run it on a machine with "
            f"{needed}, or give --emulate {needed} for virtual CPU devices",
            key="layout.wrong_device_count",
        )
    return devices[:needed]


def timed_step(
    step: TrainStep, state: TrainState, batch: dict[str, np.ndarray]
) -> tuple[TrainState, dict[str, float]]:
    """One step, and its row of metrics."""
    start = time.perf_counter()
    placed = step.place(batch)
    state, metrics = step(state, placed)
    row = {name: float(value) for name, value in metrics.items()}
    step_s = time.perf_counter() - start
    tokens_per_s = placed["tokens"].size / step_s
    return state, {**row, "tokens_per_s": tokens_per_s, "step_s": step_s}
