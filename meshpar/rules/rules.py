"""A table of rules as it is written: logical axis -> mesh axes, checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.errors import InputError, RuleError, nearest
from meshpar.layout import MESH_AXES

MeshAxes = tuple[str, ...]
Target = str | Sequence[str] | None
Table = Mapping[str, Target] | Iterable[tuple[str, Target]]


def normalise(table: Table) -> dict[str, MeshAxes]:
    """Return a table with the mesh axes of every rule as a tuple.

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
        axes = rule_axes(target)
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


def rule_axes(target: Target) -> MeshAxes:
    """Return the mesh axes of one rule as a tuple, empty if replicated.

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
    """Return the message for a second rule that could never apply."""
    return (
        f"logical axis {logical_axis!r} has two rules, {rules[logical_axis] or None} "
        f"and {axes or None}; only one can hold: remove the other"
    )


LogicalAxes = tuple[str | None, ...]
"""A name per dim of an array; a dim of None is replicated."""

Split = tuple[tuple[str, ...], ...]
"""The mesh axes of each dim of an array, outermost first; empty for a whole dim."""


def is_axes(node: Any) -> bool:
    """Return True for logical axes, False for a tree that contains them."""
    return isinstance(node, tuple | list) and all(
        name is None or isinstance(name, str) for name in node
    )


# What other code bases call our logical axes, where the spelling alone is no hint.
_SYNONYMS = {
    **dict.fromkeys(("ffw", "ffn", "ff", "intermediate"), "mlp"),
    **dict.fromkeys(("model", "d_model", "hidden", "features"), "embed"),
    **dict.fromkeys(("length", "tokens", "time"), "seq"),
    **dict.fromkeys(("examples", "b"), "batch"),
    **dict.fromkeys(("depth", "stack"), "layers"),
}


@dataclass(frozen=True)
class Rules:
    """Logical axis -> mesh axes, for activations and, where it differs, for parameters.

    One table serves every array. `parameters` holds what differs while a parameter is
    stored: under FSDP a parameter's `embed` dim is split over `fsdp`, and gathered
    before use, while an activation's `embed` dim never is.

    Args:
        table: A mesh axis, several (outermost first), or None for replicated, for each
            logical axis; a mapping or pairs.
        parameters: The entries that differ for stored parameters.
        replicate_if_indivisible: Logical axes that are replicated where their size
            does not divide. Any other such array is an error.
        of_preset: Logical axes whose rules are a preset's, which nobody wrote for this
            model: that it has no use for them is no finding of the lint.

    Raises:
        RuleError: An unknown mesh axis, a mesh axis twice in a rule, two rules for one
            logical axis, or a name in `replicate_if_indivisible` without a rule.

    Example:
        >>> rules = Rules({"batch": ("data", "fsdp"), "embed": None, "mlp": "tensor"},
        ...               parameters={"embed": "fsdp"})
        >>> tuple(rules.spec(("batch", "embed")))
        (('data', 'fsdp'), None)
        >>> tuple(rules.stored.spec(("embed", "mlp")))
        ('fsdp', 'tensor')
    """

    table: Mapping[str, MeshAxes]
    parameters: Mapping[str, MeshAxes] = field(default_factory=dict, kw_only=True)
    replicate_if_indivisible: frozenset[str] = field(
        default_factory=frozenset, kw_only=True
    )
    of_preset: frozenset[str] = field(
        default_factory=frozenset, kw_only=True, compare=False, repr=False
    )

    if TYPE_CHECKING:  # what may be given is wider than what is then held

        def __init__(
            self,
            table: Table,
            *,
            parameters: Table = (),
            replicate_if_indivisible: Iterable[str] = (),
            of_preset: frozenset[str] = frozenset(),
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("table", "parameters"):
            object.__setattr__(self, name, normalise(getattr(self, name)))
        waived = frozenset(self.replicate_if_indivisible)
        object.__setattr__(self, "replicate_if_indivisible", waived)
        for logical_axis in sorted(waived - self.parameters.keys()):
            self.mesh_axes(logical_axis)

    def __hash__(self) -> int:
        tables = (frozenset(self.table.items()), frozenset(self.parameters.items()))
        return hash((*tables, self.replicate_if_indivisible))

    @property
    def stored(self) -> Rules:
        """Rules of stored parameters."""
        table = {**self.table, **self.parameters}
        return replace(self, table=table, parameters={})

    def with_rules(self, **changes: Target) -> Rules:
        """Return these rules with some entries changed or added."""
        table = normalise({**self.table, **changes})
        return replace(self, table=table, of_preset=self.of_preset - changes.keys())

    def mesh_axes(
        self, logical_axis: str, logical_axes: LogicalAxes | None = None
    ) -> MeshAxes:
        """Return the mesh axes of `logical_axis`, outermost first; empty if replicated.

        Raises:
            RuleError: There is no rule for it.
        """
        if logical_axis in self.table:
            return self.table[logical_axis]
        where = f" of {_show(logical_axes)}" if logical_axes else ""
        if logical_axis in self.parameters:
            raise RuleError(
                "unknown",
                f"no rule for logical axis {logical_axis!r}{where}: it has one for "
                "stored parameters only; write None for it in the table if activations "
                "are replicated",
                key="rules.parameters_only",
            )
        hint = _SYNONYMS.get(logical_axis.lower())
        known = nearest(logical_axis, self.table)
        if hint in self.table and "did you mean" not in known:
            known = f"did you mean {hint!r}? {known}"
        raise RuleError(
            "unknown",
            f"no rule for logical axis {logical_axis!r}{where}; {known}",
            key="rules.missing_rule",
        )

    def spec(
        self,
        logical_axes: LogicalAxes,
        shape: Sequence[int] | None = None,
        *,
        mesh_shape: Mapping[str, int] | None = None,
        path: str | None = None,
    ) -> PartitionSpec:
        """Return the `PartitionSpec` of an array.

        Args:
            logical_axes: A name, or None, for each dim.
            shape: The global shape; with `mesh_shape`, divisibility is checked.
            mesh_shape: Size of each mesh axis; an axis of size 1 is left out.
            path: What errors call the array, where it has a name.

        Raises:
            RuleError: An unknown or repeated logical axis, two dims on one mesh axis,
                or a size that does not divide.
        """
        _check_rank(logical_axes, shape, path)
        sizes = dict.fromkeys(MESH_AXES, 0) if mesh_shape is None else mesh_shape
        claimed: dict[str, str] = {}
        entries = []
        for dim in range(len(logical_axes)):
            try:
                axes = self._dim_axes(logical_axes, dim, sizes, claimed)
            except RuleError as error:
                if path is None:
                    raise
                array = _show_array(path, shape, logical_axes)
                message = f"{error}\n    {array}"
                raise RuleError(error.kind, message, key=error.key) from None
            if axes and shape is not None and mesh_shape is not None:
                axes = self._check_divides(logical_axes, shape, dim, axes, sizes, path)
            entries.append(axes[0] if len(axes) == 1 else axes or None)
        return PartitionSpec(*entries)

    def sharding(
        self,
        mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
        logical_axes: LogicalAxes,
        shape: Sequence[int] | None = None,
        *,
        path: str | None = None,
    ) -> NamedSharding:
        """Return `spec` on `mesh`; raises as `spec` does."""
        mesh_shape = dict(mesh.shape)
        spec = self.spec(logical_axes, shape, mesh_shape=mesh_shape, path=path)
        return NamedSharding(mesh, spec)

    def constrain(self, x: jax.Array, logical_axes: LogicalAxes) -> jax.Array:
        """Constrain `x` to the layout of the rules, on the mesh of `jax.set_mesh`.

        Inside a `shard_map`, `x` is this device's part and mesh axes that are manual
        there are left out. Moves nothing by itself; GSPMD inserts what it takes.

        Raises:
            RuleError: As for `spec`.
            RuntimeError: No mesh is set, so that the constraint would do nothing.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise RuntimeError(
                f"constrain({_show(logical_axes)}): no mesh is set, so nothing would "
                "be laid out; run inside `with jax.set_mesh(mesh):`"
            )
        spec = self.spec(logical_axes, x.shape, mesh_shape=auto_mesh_shape())
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def _dim_axes(
        self,
        logical_axes: LogicalAxes,
        dim: int,
        sizes: Mapping[str, int],
        claimed: dict[str, str],
    ) -> MeshAxes:
        logical_axis = logical_axes[dim]
        if logical_axis is None:
            return ()
        if logical_axis in logical_axes[:dim]:
            raise RuleError(
                "repeated",
                f"logical axis {logical_axis!r} names two dims of "
                f"{_show(logical_axes)}; give the dims different names",
                key="rules.repeated_logical_axis",
            )
        rule = self.mesh_axes(logical_axis, logical_axes)
        axes = tuple(axis for axis in rule if sizes.get(axis, 1) != 1)
        for mesh_axis in axes:
            if mesh_axis in claimed:
                raise RuleError(
                    "claimed_twice",
                    f"mesh axis {mesh_axis!r} is claimed by both "
                    f"{claimed[mesh_axis]!r} and {logical_axis!r} in "
                    f"{_show(logical_axes)}; an array can use each mesh axis once",
                    key="rules.claimed_twice",
                )
            claimed[mesh_axis] = logical_axis
        return axes

    def _check_divides(
        self,
        logical_axes: LogicalAxes,
        shape: Sequence[int],
        dim: int,
        axes: MeshAxes,
        sizes: Mapping[str, int],
        path: str | None,
    ) -> MeshAxes:
        logical_axis = logical_axes[dim]
        degree = math.prod(sizes[axis] for axis in axes)
        if shape[dim] % degree == 0:
            return axes
        if logical_axis in self.replicate_if_indivisible:
            return ()
        noun = "mesh axis" if len(axes) == 1 else "mesh axes"
        raise RuleError(
            "indivisible",
            f"logical axis {logical_axis!r} has size {shape[dim]}, which does not "
            f"divide over {noun} {' x '.join(map(repr, axes))} of size {degree}\n"
            f"    {_show_array(path, shape, logical_axes)}; pad it, map "
            f"{logical_axis!r} elsewhere, or replicate_if_indivisible",
            key="layout.indivisible",
        )


def auto_mesh_shape() -> dict[str, int]:
    """Return the sizes of the mesh axes left to GSPMD; manual ones count as 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return {
        axis: size if axis in mesh.auto_axes else 1 for axis, size in mesh.shape.items()
    }


def array_split(
    rules: Rules | None, logical_axes: LogicalAxes, shape: Sequence[int]
) -> Split:
    """Return how rules split an array over the mesh axes of GSPMD; whole without any.

    Raises:
        RuleError: As for `Rules.spec`.
    """
    if rules is None:
        return ((),) * len(shape)
    spec = rules.spec(logical_axes, shape, mesh_shape=auto_mesh_shape())
    return tuple(entry_axes(entry) for entry in spec)


def degree(mesh_axes: Sequence[str]) -> int:
    """Return the number of devices along some mesh axes of GSPMD."""
    sizes = auto_mesh_shape()
    return math.prod(sizes[axis] for axis in mesh_axes)


def ruled_degree(rules: Rules, logical_axis: str) -> int:
    """Return the number of devices that the rules split a logical axis over."""
    sizes = auto_mesh_shape()
    return degree([axis for axis in rules.mesh_axes(logical_axis) if axis in sizes])


def _check_rank(
    logical_axes: LogicalAxes, shape: Sequence[int] | None, path: str | None
) -> None:
    if shape is not None and len(shape) != len(logical_axes):
        raise RuleError(
            "rank",
            f"{path or 'array'}: shape {tuple(shape)} has {len(shape)} dims, but "
            f"{_show(logical_axes)} names {len(logical_axes)}; name every dim, or "
            "write None",
            key="rules.rank",
        )


def _show_array(
    path: str | None, shape: Sequence[int] | None, logical_axes: LogicalAxes
) -> str:
    dims = "" if shape is None else f"shape {tuple(shape)} as "
    return f"{path or 'array'}: {dims}{_show(logical_axes)}"


def _show(logical_axes: LogicalAxes | None) -> str:
    return str(tuple(logical_axes or ()))


def check_rules(rules: Any) -> None:
    """Refuse an object that is not `Rules`.

    Raises:
        InputError: They are something else.
    """
    if not isinstance(rules, Rules):
        raise InputError(
            f"rules is a {type(rules).__name__}; give meshpar.Rules, such as "
            "meshpar.FSDP_TENSOR, or meshpar.Rules({'embed': 'tensor', ...})",
            key="rules.not_rules",
        )


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Return the mesh axes that a spec names, in order of dims."""
    return tuple(axis for entry in spec for axis in entry_axes(entry))


def entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes that a spec names for one dim."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
