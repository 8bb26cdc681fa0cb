"""A table of rules as it is written: logical axis -> mesh axes, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshpar.errors import InputError
from meshpar.layout import MESH_AXES, nearest

MeshAxes = tuple[str, ...]
Target = str | Sequence[str] | None
Table = Mapping[str, Target] | Iterable[tuple[str, Target]]


class RuleError(InputError):
    """A rule, or an array that the rules cannot lay out.

    `kind` is the lint's word for it: `unknown`, `repeated`, `claimed_twice`,
    `indivisible`, `shadowed`, `rank` or `dead`. The key tells more of them apart.
    """

    def __init__(self, kind: str, message: str, *, key: str) -> None:
        super().__init__(message, key=key)
        self.kind = kind


def normalise(table: Table) -> dict[str, MeshAxes]:
    """A table with the mesh axes of every rule as a tuple, empty if replicated.

    Raises:
        RuleError: An unknown mesh axis, a mesh axis twice in a rule, or two rules for
            one logical axis.
    """
    pairs = table.items() if isinstance(table, Mapping) else table
    if isinstance(table, str) or not isinstance(table, Mapping | Iterable):
        raise InputError(
            f"rules of {table!r}; give logical axis -> mesh axis, such as "
            "{'mlp': 'tensor', 'embed': None}",
            key="rules.not_a_table",
        )
    rules: dict[str, MeshAxes] = {}
    for logical_axis, target in pairs:
        if not isinstance(logical_axis, str):
            raise InputError(
                f"a rule is for {logical_axis!r}; give the name of a logical axis",
                key="rules.axis_not_a_name",
            )
        axes = mesh_axes_of(target)
        if logical_axis in rules:
            message = shadowed_message(logical_axis, rules, axes)
            raise RuleError("shadowed", message, key="rules.shadowed")
        for position, mesh_axis in enumerate(axes):
            if mesh_axis not in MESH_AXES:
                raise RuleError(
                    "unknown",
                    f"rule {logical_axis!r} names no mesh axis: {mesh_axis!r}; "
                    f"{nearest(mesh_axis, MESH_AXES)}",
                    key="rules.unknown_mesh_axis",
                )
            if mesh_axis in axes[:position]:
                raise RuleError(
                    "repeated",
                    f"rule {logical_axis!r} names mesh axis {mesh_axis!r} twice in "
                    f"{axes}; name it once",
                    key="rules.repeated_mesh_axis",
                )
        rules[logical_axis] = axes
    return rules


def mesh_axes_of(target: Target) -> MeshAxes:
    """What is written for one logical axis as a tuple, empty if replicated.

    Raises:
        InputError: It is neither a name, nor several, nor None.
    """
    if not isinstance(target, str | Iterable | None):
        raise InputError(
            f"a rule gives {target!r}; give a mesh axis, a tuple of several, or None "
            "for replicated",
            key="rules.not_mesh_axes",
        )
    return (target,) if isinstance(target, str) else tuple(target or ())


def shadowed_message(
    logical_axis: str, rules: Mapping[str, MeshAxes], axes: MeshAxes
) -> str:
    """The words for a second rule that could never apply."""
    return (
        f"logical axis {logical_axis!r} has two rules, {rules[logical_axis] or None} "
        f"and {axes or None}; only one can hold: remove the other"
    )
