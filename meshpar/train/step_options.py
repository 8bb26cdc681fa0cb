"""What a training step is made of, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import optax
from jax.sharding import AbstractMesh, Mesh

from meshpar.layout import Layout
from meshpar.mesh import absent_mesh
from meshpar.model.contract import Model
from meshpar.rules.rules import Rules
from meshpar.schedules import OwnSchedule


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """A step's options, checked by `make_train_step`, which explains each.

    Args:
        model: As given.
        optimizer: As given.
        layout: Its -1 resolved.
        rules: Logical axis -> mesh axes.
        mesh: The devices, or none of them (`absent_mesh`).
        platform: Their kind: `cpu`, `gpu` or `tpu`.
        max_grad_norm: Global norm that gradients are scaled down to; None for none.
        gradient_dtype: `fp32` or `bf16`.
        compiler_options: XLA's, over those of the platform.
        schedule: The pipeline's, instead of the layout's.
        outer_optimizer: Of local steps; None without them.
        gradient_reduction: `flat` or `by_host`.
        check: Whether a model that may join examples is refused.
    """

    model: Model
    optimizer: optax.GradientTransformation
    layout: Layout
    rules: Rules
    mesh: Mesh | AbstractMesh
    platform: str
    max_grad_norm: float | None = None
    gradient_dtype: str = "fp32"
    compiler_options: Mapping[str, Any] | None = None
    schedule: OwnSchedule | None = None
    outer_optimizer: optax.GradientTransformation | None = None
    gradient_reduction: str = "flat"
    check: bool = True

    def without_devices(self, platform: str) -> StepOptions:
        """The same for absent devices of another platform.

        Compiler options are for the mesh's own compiler, which without devices is this
        platform's.
        """
        is_absent = isinstance(self.mesh, AbstractMesh)
        return replace(
            self,
            mesh=absent_mesh(self.layout),
            platform=platform,
            compiler_options=self.compiler_options if is_absent else None,
            gradient_reduction="flat",  # of hosts that are not there
        )
