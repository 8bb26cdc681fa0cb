"""Which device holds which shard of a parameter: arithmetic, without devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshpar.layout import Layout
from meshpar.lint.rows import ParameterRow, row_of
from meshpar.model.contract import Model
from meshpar.parallel.pipeline.program import arranged_for
from meshpar.parallel.zero import parameter_specs
from meshpar.rules.presets import default_rules
from meshpar.rules.rules import Rules, entry_axes


@dataclass(frozen=True, kw_only=True)
class Shards:
    """A parameter cut into shards, numbered row-major over its dims.

    Args:
        row: Its shapes, mesh axes and bytes, as `meshpar lint` has them.
        state_mesh_axes: Mesh axes of each dim of the optimizer's state of it.
        counts: Parts of each dim.
        of_device: The shard of each device, devices numbered row-major over the mesh.
        places: The layer at each place of a leading `layers` dim, -1 for none; ()
            where there is no such dim.
    """

    row: ParameterRow
    state_mesh_axes: tuple[str | tuple[str, ...] | None, ...]
    counts: tuple[int, ...]
    of_device: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def number(self) -> int:
        """Shards in all; 1 where every device has the whole."""
        return math.prod(self.counts)

    @property
    def copies(self) -> int:
        """Devices that hold the same shard."""
        return len(self.of_device) // self.number

    def slices(self, shard: int) -> tuple[slice, ...]:
        """What of each dim a shard is."""
        index = np.unravel_index(shard, self.counts)
        return tuple(
            slice(int(at) * size, (int(at) + 1) * size)
            for at, size in zip(index, self.row.local_shape, strict=True)
        )


def shards_of(
    model: Model, layout: Layout, rules: Rules | None = None
) -> tuple[Shards, ...]:
    """Every parameter's shards as a training step stores them between steps.

    Args:
        model: The model.
        layout: The size of every mesh axis, and how a step runs.
        rules: Logical axis -> mesh axes; `default_rules(layout)` when absent.

    Raises:
        InputError: The layers cannot be cut into stages.
        RuleError: A parameter cannot be laid out.

    Example:
        >>> from meshpar.models.presets import build
        >>> head = shards_of(build("tiny"), Layout(data=2, tensor=2))[-1]
        >>> head.row.mesh_axes, head.of_device, head.slices(1)[0]
        (('tensor', None), (0, 1, 0, 1), slice(128, 256, None))
    """
    rules = rules or default_rules(layout)
    stored = arranged_for(model, layout).flat_parameters()
    found = []
    for path, parameter in stored.items():
        row = row_of(path, parameter, layout, rules)
        state = parameter_specs(path, parameter, layout, rules)["state_spec"]
        entries = [entry_axes(entry) for entry in row.mesh_axes]
        shape = layout.mesh_shape
        found.append(
            Shards(
                row=row,
                state_mesh_axes=tuple(state),
                counts=tuple(_size(axes, shape) for axes in entries),
                of_device=_of_device(entries, shape),
                places=parameter.places,
            )
        )
    return tuple(found)


def _size(mesh_axes: Sequence[str], shape: Mapping[str, int]) -> int:
    return math.prod(shape[axis] for axis in mesh_axes)


def _of_device(
    entries: Sequence[Sequence[str]], shape: Mapping[str, int]
) -> tuple[int, ...]:
    """Each dim's part by its mesh axes, the first of them slowest; then all dims'."""
    position = dict(zip(shape, np.indices(tuple(shape.values())), strict=True))
    shard = np.zeros(tuple(shape.values()), int)
    for axis in (axis for axes in entries for axis in axes):
        shard = shard * shape[axis] + position[axis]
    return tuple(map(int, shard.ravel()))
