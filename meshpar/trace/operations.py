"""A traced function before compilation: which arrays GSPMD will split, and where.

Some programs make XLA abort the whole process, so they must be found before it runs;
and the reason of a collective follows from the operation that it serves. Shardings are
followed forwards from constraints and arguments, as far as they are
plain; what is not known counts as whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import PartitionSpec

from meshpar.hardware.attention_choice import words_of_scope
from meshpar.trace.splits import (
    RULES,
    Split,
    elementwise,
    split_by,
    split_of,
)
from meshpar.trace.walk import array_shape, scan_counts, without_constants

_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<")


@dataclass(frozen=True)
class Region:
    """Where an operation stands: mesh axes that are manual, and those left to GSPMD."""

    manual: frozenset[str] = frozenset()
    automatic: frozenset[str] = frozenset()

    @property
    def partly_manual(self) -> bool:
        """Whether some mesh axes are manual and others are not."""
        return bool(self.manual and self.automatic)


@dataclass(frozen=True)
class Value:
    """One array of a traced function, as far as it is followed.

    Args:
        split: How it is split; None if that is not known.
        weight: Path of the one weight that it is made of, "" if of numbers that are
            alike everywhere, such as a literal spread out; None if of anything else.
        maker: The equation that makes it; None of an argument.
        line: `file:line` of that.
        operands: Of that equation; empty where `split` does not follow from them.
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
        equation: Its own.
        operands: As far as they are followed.
        results: Alike.
        region: Mesh axes there.
        source: `file:line` of it, or of the call that it is of.
        path: Its name stack behind those of the calls and loops around it.
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
        """Of its primitive."""
        return self.equation.primitive.name

    @property
    def given(self) -> tuple[tuple[Value, Any], ...]:
        """Each operand, and its variable or literal."""
        return tuple(zip(self.operands, self.equation.invars, strict=True))


@dataclass(frozen=True)
class _Place:
    """Where a walk is: what is around the operations that it comes to."""

    visit: Callable[[Operation], None]
    region: Region = Region()
    source: str = ""
    path: str = ""
    times: int = 1


def operations(
    jaxpr: ClosedJaxpr,
    arguments: Sequence[Any] = (),
    weights: Sequence[str | None] = (),
) -> list[Operation]:
    """Every operation of a traced function, those inside loops and calls too.

    Args:
        jaxpr: `jax.jit(f).trace(...).jaxpr`.
        arguments: Sharding, or None, of each flat argument; none is known if empty.
        weights: Path of each that is a weight, None of the others; none are if empty.
    """
    found: list[Operation] = []
    none = (None,) * len(jaxpr.jaxpr.invars)
    values = [
        Value(split_of(sharding, len(var.aval.shape)), weight)
        for sharding, weight, var in zip(
            arguments or none, weights or none, jaxpr.jaxpr.invars, strict=True
        )
    ]
    _walk(jaxpr.jaxpr, values, _Place(found.append))
    return found


def fallbacks(traced: Sequence[Operation]) -> tuple[str, ...]:
    """A sentence for each attention that runs in another form than it might."""
    paths = {str(operation.equation.source_info.name_stack) for operation in traced}
    return tuple(sorted({words for path in paths if (words := words_of_scope(path))}))


def shape_of(atom: Any) -> tuple[int, ...] | None:
    """Shape of an array; None of what is none, such as a token."""
    return getattr(atom.aval, "shape", None)


def source_of(equation: JaxprEqn) -> str:
    """`file:line` of the innermost frame outside of installed packages."""
    traceback = equation.source_info.traceback
    frames: Sequence[Any] = traceback.frames if traceback is not None else ()
    for frame in frames:
        if not any(part in frame.file_name for part in _LIBRARIES):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def _walk(jaxpr: Jaxpr, arguments: Sequence[Value], around: _Place) -> list[Value]:
    known: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Value:
        if isinstance(atom, Literal):
            return Value(weight="")
        return known.get(atom, Value())

    for equation in jaxpr.eqns:
        operands = tuple(read(atom) for atom in equation.invars)
        source = source_of(equation) or around.source
        path = f"{around.path}/{equation.source_info.name_stack}"
        here = replace(around, source=source, path=path)
        results = tuple(_results(equation, operands, here))
        around.visit(
            Operation(
                equation,
                operands,
                results,
                region=here.region,
                source=source,
                path=path,
                times=here.times,
            )
        )
        known.update(zip(equation.outvars, results, strict=False))
    return [read(atom) for atom in jaxpr.outvars]


def _results(
    equation: JaxprEqn, operands: tuple[Value, ...], here: _Place
) -> Sequence[Value]:
    name, params = equation.primitive.name, equation.params
    if name in ("device_put", "optimization_barrier"):  # of several arrays at once
        return operands
    if name == "shard_map":
        return _shard_map(equation, operands, here)
    if name == "scan":
        return _scan(equation, operands, here)
    if name == "pallas_call":  # of blocks in a device's memory, not of its arrays
        return [Value(maker=equation, line=here.source)] * len(equation.outvars)
    if name == "while":
        first = params["cond_nconsts"]
        return _walk(without_constants(params["body_jaxpr"]), operands[first:], here)
    if name == "cond":
        outs = [
            _walk(without_constants(branch), operands[1:], here)
            for branch in params["branches"]
        ]
        return outs[0]
    for inner in _called(equation):
        if len(inner.invars) == len(operands):
            shardings = params.get("in_shardings") or [None] * len(operands)
            return _walk(inner, _given(inner, operands, shardings), here)
    return _computed(equation, operands, here)


def _computed(
    equation: JaxprEqn, operands: tuple[Value, ...], here: _Place
) -> Sequence[Value]:
    if not equation.outvars:
        return ()
    if equation.primitive.name == "sharding_constraint":
        num_dims = len(array_shape(equation.outvars[0]))
        split = split_of(equation.params["sharding"], num_dims)
    else:
        rule = RULES.get(equation.primitive.name, elementwise)
        split = rule(equation, tuple(operand.split for operand in operands))
    weight, line = _weight(equation, operands), here.source
    made = Value(split, weight, equation, line, operands)
    return (made,) * len(equation.outvars)


def _weight(equation: JaxprEqn, operands: tuple[Value, ...]) -> str | None:
    """The one weight that all operands are made of, but for numbers alike."""
    found: set[str] = set()
    for operand, atom in zip(operands, equation.invars, strict=True):
        weight = "" if shape_of(atom) == () else operand.weight
        if weight is None:
            return None
        found.add(weight)
    return max(found, default=None) if len(found - {""}) <= 1 else None


def _called(equation: JaxprEqn) -> list[Jaxpr]:
    """What a call runs, by the names that JAX's own calls give it."""
    found = (equation.params.get(name) for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"))
    programs = [one for one in found if isinstance(one, ClosedJaxpr | Jaxpr)]
    return [without_constants(one) for one in programs]


def _given(
    inner: Jaxpr, operands: Sequence[Value], shardings: Sequence[Any]
) -> list[Value]:
    splits = [
        split_of(sharding, len(array_shape(var)))
        for var, sharding in zip(inner.invars, shardings, strict=True)
    ]
    return [
        _lying(operand, split) if split else operand
        for operand, split in zip(operands, splits, strict=True)
    ]


def _lying(value: Value, split: Split | None) -> Value:
    return replace(value, split=split, operands=())


def _shard_map(
    equation: JaxprEqn, operands: tuple[Value, ...], here: _Place
) -> list[Value]:
    params = equation.params
    sizes = dict(params["mesh"].shape)
    newly = params.get("newly_manual_axes", params.get("manual_axes", ()))
    manual = here.region.manual | {axis for axis in newly if sizes[axis] > 1}
    automatic = {axis for axis, size in sizes.items() if size > 1} - manual
    inner = without_constants(params["jaxpr"])
    kept = [
        _lying(value, value.split and tuple(a - manual for a in value.split))
        for value in operands
    ]
    region = Region(frozenset(manual), frozenset(automatic))
    outs = _walk(inner, kept, replace(here, region=region))
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
    """How a `shard_map`'s result lies: over its manual mesh axes as its spec says."""
    if inside is None and region.automatic:
        return None
    whole: Split = (frozenset(),) * num_dims
    return tuple(
        automatic | manual
        for automatic, manual in zip(
            inside or whole, split_by(spec, num_dims, sizes), strict=True
        )
    )


def _scan(equation: JaxprEqn, operands: tuple[Value, ...], here: _Place) -> list[Value]:
    inner = without_constants(equation.params["jaxpr"])
    more = _dims_more(equation.invars, inner.invars)
    given = [
        _lying(value, value.split and value.split[count:])
        for value, count in zip(operands, more, strict=True)
    ]
    added = _dims_more(equation.outvars, inner.outvars)
    consts, carries = scan_counts(equation)
    carried = range(consts, consts + carries)
    if not all(_is_split(given[at].split) for at in carried):
        # An array that may lie anyhow lies as one iteration hands it to the next.
        outs = _walk(inner, given, replace(here, visit=lambda operation: None))
        passed_on = [out for out, count in zip(outs, added, strict=True) if not count]
        for at, out in zip(carried, passed_on, strict=True):
            if not _is_split(given[at].split):
                given[at] = _lying(given[at], out.split)
    often = replace(here, times=here.times * equation.params["length"])
    outs = _walk(inner, given, often)
    made = Value(maker=equation, line=here.source)
    return [
        # Of a scalar that the iterations stack, the split is empty, and known.
        replace(
            made,
            split=None if out.split is None else (frozenset(),) * count + out.split,
        )
        for out, count in zip(outs, added, strict=True)
    ]


def _is_split(split: Split | None) -> bool:
    return split is not None and any(split)


def _dims_more(outside: Sequence[Any], inside: Sequence[Any]) -> list[int]:
    return [
        len(one.aval.shape) - len(other.aval.shape)
        for one, other in zip(outside, inside, strict=True)
    ]
