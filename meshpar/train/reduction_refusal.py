"""Where gradients cannot be summed by host, or nothing would change."""

from __future__ import annotations

import itertools

import numpy as np
from jax.sharding import Mesh

from meshpar.errors import InputError
from meshpar.layout import BATCH_AXES
from meshpar.mesh import hosts_of
from meshpar.parallel.by_host import host_groups
from meshpar.train.step_options import StepOptions


def refuse_by_host(options: StepOptions) -> None:
    """Refuses sums by host where they are not to be had, or nothing would change.

    Raises:
        InputError: They are asked for there.
    """
    if options.gradient_reduction == "flat":
        return
    asked = f"gradient_reduction={options.gradient_reduction!r}"
    if options.gradient_reduction != "by_host":
        raise InputError(
            f"{asked}: must be 'flat' or 'by_host'",
            key="step.unknown_gradient_reduction",
        )
    layout, mesh = options.layout, options.mesh
    if not isinstance(mesh, Mesh) or options.platform != "cpu":
        raise InputError(
            f"{asked} is for CPUs that are there: GPUs and TPUs sum inside a host "
            "first by themselves; leave it out",
            key="step.by_host_not_on_cpu",
        )
    hosts = np.array(hosts_of(mesh)).reshape(mesh.devices.shape)
    # Under local steps nothing is summed over `data`.
    is_local = layout.sync_every > 1
    over = [
        axis
        for axis in BATCH_AXES
        if layout.mesh_shape[axis] > 1 and not (is_local and axis == "data")
    ]
    sums = [
        axes
        for number in range(1, len(over) + 1)
        for axes in itertools.combinations(over, number)
    ]
    if all(host_groups(hosts, axes) is None for axes in sums):
        raise InputError(
            f"layout {str(layout)!r}: {asked} changes nothing, as no sum of gradients "
            "goes over several devices of each of several hosts (there are "
            f"{len(set(hosts.flat))} here); leave it out",
            key="step.by_host_without_effect",
        )
