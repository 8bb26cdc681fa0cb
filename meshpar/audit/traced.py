"""A traced function before compilation: which arrays GSPMD will split, and where.

Some programs make XLA abort the whole process, so they must be found before it runs.
Shardings are followed forwards from constraints and arguments, as far as they are
plain; what is not known counts as whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import NamedSharding

from meshpar.audit.split_rules import RULES, Split, elementwise

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
class Operation:
    """One operation, how its operands are split, and where it stands."""

    equation: JaxprEqn
    operands: tuple[Split | None, ...]
    region: Region
    source: str


@dataclass
class _Walk:
    visit: Callable[[Operation], None]
    callers: list[str] = field(default_factory=list)


def operations(jaxpr: ClosedJaxpr, arguments: Sequence[Any]) -> list[Operation]:
    """Every operation of a traced function, those inside loops and calls too.

    Args:
        jaxpr: `jax.jit(f).trace(...).jaxpr`.
        arguments: Sharding, or None, of each flat argument.
    """
    found: list[Operation] = []
    splits = [
        split_of(sharding, len(var.aval.shape))
        for sharding, var in zip(arguments, jaxpr.jaxpr.invars, strict=True)
    ]
    _walk(jaxpr.jaxpr, splits, Region(), _Walk(found.append))
    return found


def split_of(sharding: Any, num_dims: int) -> Split | None:
    """How a `NamedSharding` splits an array; None if that is not known."""
    if not isinstance(sharding, NamedSharding):
        return None
    sizes = dict(sharding.mesh.shape)
    entries = [
        (entry,)
        if isinstance(entry, str)
        else entry
        if isinstance(entry, tuple)
        else ()
        for entry in sharding.spec
    ]
    entries += [()] * (num_dims - len(entries))
    return tuple(
        frozenset(axis for axis in entry if sizes.get(axis, 1) > 1) for entry in entries
    )


def source_of(equation: JaxprEqn) -> str:
    """`file:line` of the innermost frame outside of installed packages."""
    traceback = equation.source_info.traceback
    frames = list(traceback.frames) if traceback is not None else []
    for frame in frames:
        if not any(part in frame.file_name for part in _LIBRARIES):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def _walk(
    jaxpr: Jaxpr, arguments: Sequence[Split | None], region: Region, walk: _Walk
) -> list[Split | None]:
    known: dict[Any, Split | None] = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Split | None:
        return None if isinstance(atom, Literal) else known.get(atom)

    for equation in jaxpr.eqns:
        operands = tuple(read(atom) for atom in equation.invars)
        source = source_of(equation) or (walk.callers[-1] if walk.callers else "")
        walk.visit(Operation(equation, operands, region, source))
        walk.callers.append(source)
        results = _results(equation, operands, region, walk)
        walk.callers.pop()
        known.update(zip(equation.outvars, results, strict=False))
    return [read(atom) for atom in jaxpr.outvars]


def _results(
    equation: JaxprEqn,
    operands: tuple[Split | None, ...],
    region: Region,
    walk: _Walk,
) -> list[Split | None]:
    name, params = equation.primitive.name, equation.params
    if name == "device_put":  # of several arrays at once
        return operands
    if name == "sharding_constraint":
        return [split_of(params["sharding"], len(equation.outvars[0].aval.shape))]
    if name == "shard_map":
        return _shard_map(equation, operands, region, walk)
    if name == "scan":
        return _scan(equation, operands, region, walk)
    if name == "while":
        first = params["cond_nconsts"]
        return _walk(_only(params["body_jaxpr"]), operands[first:], region, walk)
    if name == "cond":
        outs = [
            _walk(_only(branch), operands[1:], region, walk)
            for branch in params["branches"]
        ]
        return outs[0]
    for inner in _inner(params):
        if len(inner.invars) == len(operands):
            shardings = params.get("in_shardings") or [None] * len(operands)
            return _walk(inner, _given(inner, operands, shardings), region, walk)
    if not equation.outvars:
        return []
    rule = RULES.get(name, elementwise)
    return [rule(equation, operands)] * len(equation.outvars)


def _inner(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        value = params.get(name)
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value


def _given(
    inner: Jaxpr, operands: Sequence[Split | None], shardings: Sequence[Any]
) -> list[Split | None]:
    return [
        split_of(sharding, len(var.aval.shape)) or operand
        for var, operand, sharding in zip(
            inner.invars, operands, shardings, strict=True
        )
    ]


def _shard_map(
    equation: JaxprEqn,
    operands: tuple[Split | None, ...],
    region: Region,
    walk: _Walk,
) -> list[Split | None]:
    params = equation.params
    sizes = dict(params["mesh"].shape)
    newly = params.get("newly_manual_axes", params.get("manual_axes", ()))
    manual = region.manual | {axis for axis in newly if sizes[axis] > 1}
    automatic = {axis for axis, size in sizes.items() if size > 1} - manual
    inner = _only(params["jaxpr"])
    kept = [
        operand and tuple(axes - manual for axes in operand) for operand in operands
    ]
    _walk(inner, kept, Region(frozenset(manual), frozenset(automatic)), walk)
    return [None] * len(equation.outvars)


def _scan(
    equation: JaxprEqn,
    operands: tuple[Split | None, ...],
    region: Region,
    walk: _Walk,
) -> list[Split | None]:
    # Versions of JAX disagree on how constants and carries are counted; an array of
    # which an iteration takes a slice, or to which it adds one, has a dim more outside.
    inner = _only(equation.params["jaxpr"])
    given = [
        operand and operand[_dims_more(outside, inside) :]
        for operand, outside, inside in zip(
            operands, equation.invars, inner.invars, strict=True
        )
    ]
    outs = _walk(inner, given, region, walk)
    return [
        out and (frozenset(),) * _dims_more(outside, inside) + out
        for out, outside, inside in zip(
            outs, equation.outvars, inner.outvars, strict=True
        )
    ]


def _dims_more(outside: Any, inside: Any) -> int:
    return len(outside.aval.shape) - len(inside.aval.shape)


def _only(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
