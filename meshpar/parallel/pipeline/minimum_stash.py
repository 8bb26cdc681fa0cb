"""The fewest bytes that one program must hand to another, by a minimum cut.

Reference: Ford and Fulkerson, "Maximal Flow through a Network", 1956; solved by
`scipy.sparse.csgraph.maximum_flow`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from meshpar.trace.primitives import ELEMENTWISE, MOVES, RESHAPES, UNCHANGED

CHEAP = ELEMENTWISE | UNCHANGED | RESHAPES | MOVES | {"iota", "optimization_barrier"}
"""Operations that the second program may compute again."""

_SOURCE, _SINK = 0, 1
_Edge = tuple[int, int, float]


def minimum_stash(
    jaxpr: Jaxpr,
    first: Sequence[JaxprEqn],
    second: Sequence[JaxprEqn],
    results: Sequence[Any],
    free: set[Var],
) -> list[Var]:
    """Return the fewest bytes of the first program from which the second follows.

    A graph has an edge through every variable, of its bytes. Edges without a limit lead
    to it from what its cheap operation reads, or from the source if its operation is
    not cheap or it is an argument; and from what the second program reads to the sink.
    The order is that of the program, so every process makes the same.

    Args:
        jaxpr: The program that was cut.
        first: Operations of the first program.
        second: Operations of the second alone.
        results: Results of the second.
        free: Arguments that the second has too.
    """
    maker = {var: equation for equation in first for var in equation.outvars}
    given = dict.fromkeys(var for var in jaxpr.invars if var not in free)
    read = read_by(second, results)
    sources = [var for var in (*given, *maker) if var in read]
    if not sources:
        return []
    numbers = _numbered(sources, maker, given)
    edges = [*_edges(numbers, maker, sources)]
    reached = _source_side(edges, 2 + 2 * len(numbers))
    return [
        var
        for var, place in numbers.items()
        if place in reached and place + 1 not in reached
    ]


def read_by(equations: Iterable[JaxprEqn], results: Iterable[Any]) -> set[Var]:
    """Return the variables that operations or results read."""
    atoms = [atom for equation in equations for atom in equation.invars]
    return {atom for atom in (*atoms, *results) if isinstance(atom, Var)}


def atom_shape(atom: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a variable or literal."""
    return jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)


def _numbered(
    variables: Sequence[Var], maker: dict[Var, JaxprEqn], given: dict[Var, None]
) -> dict[Var, int]:
    """Return a node for each of the variables and all that they can be made from."""
    numbers: dict[Var, int] = {}
    left = [*reversed(variables)]
    while left:
        var = left.pop()
        if var in numbers:
            continue
        numbers[var] = 2 + 2 * len(numbers)
        equation = maker.get(var)
        if equation is not None and equation.primitive.name in CHEAP:
            left += [
                atom
                for atom in equation.invars
                if isinstance(atom, Var) and (atom in maker or atom in given)
            ]
    return numbers


def _edges(
    numbers: dict[Var, int], maker: dict[Var, JaxprEqn], sources: Sequence[Var]
) -> Iterator[_Edge]:
    for var in sources:
        yield numbers[var] + 1, _SINK, np.inf
    for var, place in numbers.items():
        yield place, place + 1, _num_bytes(var)
        equation = maker.get(var)
        if equation is None or equation.primitive.name not in CHEAP:
            yield _SOURCE, place, np.inf
            continue
        operands = {atom for atom in equation.invars if isinstance(atom, Var)}
        for atom in operands & numbers.keys():
            yield numbers[atom] + 1, place, np.inf


def _num_bytes(var: Var) -> int:
    shape = atom_shape(var)
    itemsize = getattr(shape.dtype, "itemsize", 8)  # keys of random numbers have none
    return int(np.prod(shape.shape, dtype=np.int64)) * itemsize + 1


def _source_side(edges: Sequence[_Edge], num_nodes: int) -> set[int]:
    """Return the nodes on the source's side of a minimum cut."""
    from scipy.sparse import csr_array  # here: only a split backward needs it
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    tails, heads, limits = (np.array(column) for column in zip(*edges, strict=True))
    finite = limits[np.isfinite(limits)]
    # Capacities are of 32 bits; an edge without a limit holds more than all others.
    unit = max(1.0, finite.sum() / 2**29)
    limits = np.where(np.isfinite(limits), np.ceil(limits / unit), 2**30)
    graph = csr_array(
        (limits.astype(np.int32), (tails, heads)), shape=(num_nodes, num_nodes)
    )
    left = graph - maximum_flow(graph, _SOURCE, _SINK).flow
    left.eliminate_zeros()
    return {*breadth_first_order(left, _SOURCE, return_predecessors=False).tolist()}
