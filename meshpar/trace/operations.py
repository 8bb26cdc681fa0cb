"""List the operations of a traced function, with the split of every array by GSPMD.

Some programs make XLA abort the whole process, so they must be found before it runs;
and the reason of a collective follows from the operation that it serves. Shardings are
followed forwards from constraints and arguments as far as they are plain; an unknown
split counts as whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from meshpar.trace.splits import RULES, Split, elementwise, sharding_split, split_by
from meshpar.trace.walk import (
    Loop,
    Program,
    array_shape,
    called_program,
    dims_more,
    programs_in,
    source_line,
    walk,
    without_constants,
)

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<")


@dataclass(frozen=True)
class Region:
    """Mesh axes around an operation: those that are manual, and those left to GSPMD."""

    manual: frozenset[str] = frozenset()
    automatic: frozenset[str] = frozenset()

    @property
    def partly_manual(self) -> bool:
        """True if some mesh axes are manual and others are not."""
        return bool(self.manual and self.automatic)


@dataclass(frozen=True)
class Value:
    """One array of a traced function, as far as it is followed.

    Args:
        split: The mesh axes that split its dims; None if that is not known.
        weight: Path of the one weight that it is made of; "" if it is made of numbers
            that are equal everywhere, such as a broadcast literal; None otherwise.
        maker: The equation that makes it; None of an argument.
        line: `file:line` of that equation.
        operands: Operands of that equation; empty if `split` does not follow from them.
    """

    split: Split | None = None
    weight: str | None = None
    maker: JaxprEqn | None = None
    line: str = ""
    operands: tuple[Value, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Operation:
    """One operation, its operands and results, and where it stands.

    Args:
        equation: Its equation.
        operands: Its operands, as far as they are followed.
        results: Its results, as far as they are followed.
        region: Mesh axes around it.
        source: `file:line` of the operation, or of the call that runs it.
        path: Its name stack, after those of the calls and loops around it.
        times: How often it runs: the lengths of the scans around it, multiplied.
    """

    equation: JaxprEqn
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    region: Region
    source: str
    path: str
    times: int = 1

    @property
    def name(self) -> str:
        """Name of its primitive."""
        return self.equation.primitive.name

    @property
    def given(self) -> tuple[tuple[Value, Any], ...]:
        """Each operand, with its variable or literal."""
        return tuple(zip(self.operands, self.equation.invars, strict=True))


@dataclass(frozen=True)
class _Place:
    """Surroundings of the operations that a walk comes to."""

    visit: Callable[[Operation], None]
    region: Region = Region()
    source: str = ""
    path: str = ""
    times: int = 1


def operations(
    program: ClosedJaxpr,
    arguments: Sequence[Any] = (),
    weights: Sequence[str | None] = (),
) -> list[Operation]:
    """Return every operation of a traced function, with those inside loops and calls.

    Args:
        program: `jax.jit(f).trace(...).jaxpr`.
        arguments: Sharding, or None, of each flat argument; none is known if empty.
        weights: Path of each argument that is a weight, None of the others; none is a
            weight if empty.
    """
    found: list[Operation] = []
    none = (None,) * len(program.jaxpr.invars)
    values = [
        Value(sharding_split(sharding, len(array_shape(var))), weight)
        for sharding, weight, var in zip(
            arguments or none, weights or none, program.jaxpr.invars, strict=True
        )
    ]
    _walk(program, values, _Place(found.append))
    return found


def shape_or_none(atom: Any) -> tuple[int, ...] | None:
    """Return the shape of an array; None of what is none, such as a token."""
    return getattr(atom.aval, "shape", None)


def operation_line(equation: JaxprEqn) -> str:
    """Return `file:line` of the innermost frame outside of installed packages."""
    return source_line(equation, _LIBRARIES)


def _walk(program: Program, arguments: Sequence[Value], around: _Place) -> list[Value]:
    def apply(equation: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        source = operation_line(equation) or around.source
        path = f"{around.path}/{equation.source_info.name_stack}"
        here = replace(around, source=source, path=path)
        results = _results(equation, tuple(operands), here)
        around.visit(
            Operation(
                equation,
                tuple(operands),
                tuple(results),
                region=here.region,
                source=source,
                path=path,
                times=here.times,
            )
        )
        return results

    jaxpr = without_constants(program)
    constants = [Value()] * len(jaxpr.constvars)
    return walk(jaxpr, arguments, apply, lambda value: Value(weight=""), constants)


def _results(
    equation: JaxprEqn, operands: tuple[Value, ...], here: _Place
) -> Sequence[Value]:
    name, loop = equation.primitive.name, Loop.parse(equation)
    if name in ("device_put", "optimization_barrier"):  # of several arrays at once
        return operands
    if name == "shard_map":
        return _shard_map(equation, operands, here)
    if loop is not None and loop.condition is None:
        return _scan(loop, equation, operands, here)
    if loop is not None:
        return _walk(loop.body, operands[loop.num_condition_consts :], here)
    if name == "cond":
        first, *_ = [
            _walk(branch, operands[1:], here) for branch in programs_in(equation)
        ]
        return first
    inner = called_program(equation)
    if inner is not None:
        shardings = equation.params.get("in_shardings") or [None] * len(operands)
        return _walk(inner, _given(inner, operands, shardings), here)
    if name == "pallas_call":  # Its blocks are no arrays in a device's memory.
        return [Value(maker=equation, line=here.source)] * len(equation.outvars)
    return _computed(equation, operands, here)


def _computed(
    equation: JaxprEqn, operands: tuple[Value, ...], here: _Place
) -> Sequence[Value]:
    if not equation.outvars:
        return ()
    if equation.primitive.name == "sharding_constraint":
        num_dims = len(array_shape(equation.outvars[0]))
        split = sharding_split(equation.params["sharding"], num_dims)
    else:
        rule = RULES.get(equation.primitive.name, elementwise)
        split = rule(equation, tuple(operand.split for operand in operands))
    weight, line = _weight(equation, operands), here.source
    made = Value(split, weight, equation, line, operands)
    return (made,) * len(equation.outvars)


def _weight(equation: JaxprEqn, operands: tuple[Value, ...]) -> str | None:
    """Return the path of the one weight that all operands are made of (`Value`)."""
    found: set[str] = set()
    for operand, atom in zip(operands, equation.invars, strict=True):
        weight = "" if shape_or_none(atom) == () else operand.weight
        if weight is None:
            return None
        found.add(weight)
    return max(found, default=None) if len(found - {""}) <= 1 else None


def _given(
    program: Program, operands: Sequence[Value], shardings: Sequence[Any]
) -> list[Value]:
    """Return the operands of a call, split by its `in_shardings` where it has some."""
    variables = without_constants(program).invars
    splits = [
        sharding_split(sharding, len(array_shape(var)))
        for var, sharding in zip(variables, shardings, strict=True)
    ]
    return [
        _with_split(operand, split) if split else operand
        for operand, split in zip(operands, splits, strict=True)
    ]


def _with_split(value: Value, split: Split | None) -> Value:
    return replace(value, split=split, operands=())


def _shard_map(
    equation: JaxprEqn, operands: tuple[Value, ...], here: _Place
) -> list[Value]:
    params = equation.params
    sizes = dict(params["mesh"].shape)
    newly = params.get("newly_manual_axes", params.get("manual_axes", ()))
    manual = here.region.manual | {axis for axis in newly if sizes[axis] > 1}
    automatic = {axis for axis, size in sizes.items() if size > 1} - manual
    kept = [
        _with_split(value, value.split and tuple(a - manual for a in value.split))
        for value in operands
    ]
    region = Region(frozenset(manual), frozenset(automatic))
    outs = _walk(params["jaxpr"], kept, replace(here, region=region))
    made = Value(maker=equation, line=here.source)
    return [
        replace(
            made,
            weight=out.weight,
            split=_outside(out.split, spec, len(array_shape(var)), sizes, region),
        )
        for out, spec, var in zip(
            outs, params["out_specs"], equation.outvars, strict=True
        )
    ]


def _outside(
    inside: Split | None,
    spec: PartitionSpec,
    num_dims: int,
    sizes: Mapping[str, int],
    region: Region,
) -> Split | None:
    """Return the split of a `shard_map`'s result, over manual axes by its spec."""
    if inside is None and region.automatic:
        return None
    whole: Split = (frozenset(),) * num_dims
    return tuple(
        automatic | manual
        for automatic, manual in zip(
            inside or whole, split_by(spec, num_dims, sizes), strict=True
        )
    )


def _scan(
    loop: Loop, equation: JaxprEqn, operands: tuple[Value, ...], here: _Place
) -> list[Value]:
    body = without_constants(loop.body)
    given = [
        _with_split(value, value.split and value.split[count:])
        for value, count in zip(
            operands, dims_more(equation.invars, body.invars), strict=True
        )
    ]
    carried = range(loop.num_consts, loop.num_consts + loop.num_carried)
    if not all(_is_split(given[at].split) for at in carried):
        # Without a split of its own an array has that of the iteration before.
        outs = _walk(loop.body, given, replace(here, visit=lambda operation: None))
        for at, out in zip(carried, outs, strict=False):
            if not _is_split(given[at].split):
                given[at] = _with_split(given[at], out.split)
    often = replace(here, times=here.times * equation.params["length"])
    outs = _walk(loop.body, given, often)
    made = Value(maker=equation, line=here.source)
    return [
        # The split of a scalar that the iterations stack is empty, and known.
        replace(
            made,
            split=None if out.split is None else (frozenset(),) * count + out.split,
        )
        for out, count in zip(
            outs, dims_more(equation.outvars, body.outvars), strict=True
        )
    ]


def _is_split(split: Split | None) -> bool:
    return split is not None and any(split)
