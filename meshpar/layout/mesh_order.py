"""Order of the mesh axes, from the slowest link to the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshpar.errors import InputError, nearest
from meshpar.layout.layout import MESH_AXES


def full_order(order: Sequence[str] | str | None, sizes: Mapping[str, int]) -> tuple:
    """Complete an order of mesh axes: axes that it leaves out come first.

    Args:
        order: Mesh axes, outermost first, or their text (`stage,data,tensor`); None
            for `MESH_AXES`.
        sizes: Size of each mesh axis.

    Raises:
        InputError: An axis is unknown, repeated, or missing although its size is above
            1.

    Example:
        >>> full_order("stage,fsdp", {**dict.fromkeys(MESH_AXES, 1), "fsdp": 8})[-2:]
        ('stage', 'fsdp')
    """
    if order is None:
        return MESH_AXES
    names = tuple(order.split(",")) if isinstance(order, str) else tuple(order)
    for name in names:
        if name not in MESH_AXES:
            raise InputError(
                f"order: no mesh axis {name!r}; {nearest(name, MESH_AXES)}",
                key="mesh.unknown_axis",
            )
        if names.count(name) > 1:
            raise InputError(
                f"order {','.join(names)}: {name!r} is there twice",
                key="mesh.repeated_axis",
            )
    missing = [axis for axis in MESH_AXES if sizes[axis] > 1 and axis not in names]
    if missing:
        raise InputError(
            f"order {','.join(names)} leaves out {', '.join(map(repr, missing))} of "
            "more than one device; name all such mesh axes, outermost first",
            key="mesh.missing_axis",
        )
    return (*(axis for axis in MESH_AXES if axis not in names), *names)
