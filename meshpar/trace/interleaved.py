"""Two independent programs in one, each one's sends beside the other's matmuls.

A program is cut at the rows that it sends (all-to-alls and permutes): each piece is
what the next sends need, as late as possible, then the sends. Of two programs A and B,
B the one that can send at once, barriers fix this order, in which XLA starts a send
before the matmuls next to it and waits for it after them:

    A0 | sends B0,   B1 | sends A0,   A1 | sends B1,   B2 | sends A1,   ...

For a layer's forward A (attention, rows to experts, experts, rows back) and another
one's backward B (gradients to experts, experts, gradients back, attention) each of the
four sends has matmuls beside it.

Reference: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1 and figure 4
(arXiv 2412.19437), the order inside of a pair of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from meshpar.trace.calls import program_like, without_calls
from meshpar.trace.walk import equations, programs_in, steps

_SENDS = ("all_to_all", "ppermute")
_MATMULS = (
    "conv_general_dilated",
    "dot_general",
    "pallas_call",
    "ragged_dot_general",
    "scan",
    "while",
)
_SMALL = 64
"""Sends of fewer bytes than this part of the largest one are a piece's computation: two
fp32 numbers of a row, next to its values."""


class Call(NamedTuple):
    """A function and its arguments.

    Args:
        function: (*known, *given) -> a tree of arrays.
        known: Arguments that no order applies to, such as parameters.
        given: The others.
    """

    function: Callable[..., Any]
    known: tuple[Any, ...]
    given: tuple[Any, ...]


def interleaved(first: Call, second: Call, once_known: Callable[..., Any]) -> tuple:
    """Return the results of two calls, their operations in the order of the file.

    Args:
        first: A call.
        second: One whose rows are sent first.
        once_known: (tree, arrays) -> the tree, once the arrays are there; for platforms
            that barriers do not order.

    Example:
        >>> import jax.numpy as jnp
        >>> double = Call(lambda w, x: (w * x, x), (2.0,), (jnp.arange(2.0),))
        >>> (y, _), (z, _) = interleaved(double, double, lambda tree, *_: tree)
        >>> y.tolist(), z.tolist()
        ([0.0, 2.0], [0.0, 2.0])
    """
    one, other = _Run.of(first, once_known), _Run.of(second, once_known)
    length = max(len(one.pieces), len(other.pieces))
    ones, others = (
        [*run.pieces, *[_Piece([], [])] * (length - len(run.pieces))]
        for run in (one, other)
    )
    known: list[Any] = []
    known = _beside(other, others[0].computed, one, [], known)
    for at in range(length):
        known = _beside(one, ones[at].computed, other, others[at].sends, known)
        if at + 1 < length:
            known = _beside(other, others[at + 1].computed, one, ones[at].sends, known)
    return one.results(), other.results()


class _Piece(NamedTuple):
    """Operations up to the next sends, and the sends with what is between them."""

    computed: list[JaxprEqn]
    sends: list[JaxprEqn]


@dataclass
class _Run:
    """A program while its pieces run one by one.

    Args:
        jaxpr: Without calls.
        pieces: Its pieces, in order.
        known: Values of its variables so far.
        unordered: Arguments that no order applies to.
        tree: Of its results.
        once_known: As for `interleaved`.
        left: Operations that have not run.
    """

    jaxpr: Jaxpr
    pieces: list[_Piece]
    known: dict[Var, Any]
    unordered: set[Var]
    tree: Any
    once_known: Callable[..., Any]
    left: list[JaxprEqn] = field(default_factory=list)

    @classmethod
    def of(cls, call: Call, once_known: Callable[..., Any]) -> _Run:
        traced, shapes = jax.make_jaxpr(call.function, return_shape=True)(
            *call.known, *call.given
        )
        jaxpr = without_calls(traced.jaxpr)
        arguments = jax.tree.leaves((call.known, call.given))
        known = dict(zip(jaxpr.constvars, traced.consts, strict=True))
        unordered = {*known, *jaxpr.invars[: len(jax.tree.leaves(call.known))]}
        known.update(zip(jaxpr.invars, arguments, strict=True))
        return cls(
            jaxpr=jaxpr,
            pieces=_pieces(jaxpr),
            known=known,
            unordered=unordered,
            tree=jax.tree.structure(shapes),
            once_known=once_known,
            left=[*steps(jaxpr)],
        )

    def ordered(self, operations: Iterable[JaxprEqn]) -> dict[Var, Any]:
        """Return the values that operations read and that an order applies to."""
        return {
            var: self.known[var]
            for var in _read(operations)
            if var not in self.unordered
        }

    def run(
        self, operations: list[JaxprEqn], given: dict[Var, Any], known: Sequence[Any]
    ) -> dict[Var, Any]:
        """Run operations once `known` is there; return what others need of them."""
        if not operations:
            return {}
        own = {*map(id, operations)}
        self.left = [one for one in self.left if id(one) not in own]
        results = (atom for atom in self.jaxpr.outvars if isinstance(atom, Var))
        needed = {*_read(self.left), *results}
        made = [var for one in operations for var in one.outvars if var in needed]
        read = _read(operations)
        program = program_like(self.jaxpr, read, made, operations)
        run = jaxpr_as_fun(ClosedJaxpr(program.replace(constvars=[]), ()))
        values = [given.get(var, self.known[var]) for var in read]
        values = self.once_known(values, *known)
        return dict(zip(made, run(*values), strict=True))

    def results(self) -> Any:
        """Return the results of all pieces."""
        return jax.tree.unflatten(
            self.tree,
            [
                atom.val if isinstance(atom, Literal) else self.known[atom]
                for atom in self.jaxpr.outvars
            ],
        )


def _beside(
    run: _Run,
    computed: list[JaxprEqn],
    sender: _Run,
    sends: list[JaxprEqn],
    known: Sequence[Any],
) -> list[Any]:
    """Run a piece's computation while another program sends.

    Both wait for what came before, and what comes after waits for both.

    Args:
        run: The program that computes.
        computed: Its operations.
        sender: The other one.
        sends: Its operations.
        known: Results of what ran last.

    Returns:
        Results of what ran last.
    """
    given = run.ordered(computed), sender.ordered(sends)
    if computed and sends:
        given = _barrier(*given)
    made = run.run(computed, given[0], known)
    known = [*made.values()] or known
    sent = sender.run(sends, given[1], known)
    if computed and sends:
        made, sent = _barrier(made, sent)
    run.known.update(made)
    sender.known.update(sent)
    return [*sent.values()] or [*known]


def _barrier(
    one: dict[Var, Any], other: dict[Var, Any]
) -> tuple[dict[Var, Any], dict[Var, Any]]:
    values = [*one.values()], [*other.values()]
    after, other_after = lax.optimization_barrier(values)
    return dict(zip(one, after, strict=True)), dict(
        zip(other, other_after, strict=True)
    )


def _pieces(jaxpr: Jaxpr) -> list[_Piece]:
    """Cut a program at its sends; of the last piece nothing is sent."""
    operations = steps(jaxpr)
    sizes = [_sent_bytes(one) for one in operations]
    maker = {var: at for at, one in enumerate(operations) for var in one.outvars}
    left = dict(enumerate(operations))
    pieces: list[_Piece] = []
    for at, size in enumerate(sizes):
        if not size or size * _SMALL < max(sizes) or at not in left:
            continue
        *needed, send = _taken(left, maker, at)
        if pieces and not any(map(_multiplies, needed)):
            pieces[-1].sends.extend((*needed, send))
        else:
            pieces.append(_Piece(needed, [send]))
    return [*pieces, _Piece([*left.values()], [])]


def _taken(
    left: dict[int, JaxprEqn], maker: dict[Var, int], last: int
) -> list[JaxprEqn]:
    """Take what an operation needs, and itself, out of the operations left."""
    found, todo = set(), [last]
    while todo:
        at = todo.pop()
        if at in left and at not in found:
            found.add(at)
            todo += [maker[var] for var in _read([left[at]]) if var in maker]
    return [left.pop(at) for at in sorted(found)]


def _read(operations: Iterable[JaxprEqn]) -> list[Var]:
    """Return the variables that operations read and do not make, in order."""
    read: dict[Var, None] = {}
    made: set[Var] = set()
    for one in operations:
        read.update(
            (atom, None)
            for atom in one.invars
            if isinstance(atom, Var) and atom not in made
        )
        made.update(one.outvars)
    return [*read]


def _sent_bytes(operation: JaxprEqn) -> int:
    if operation.primitive.name not in _SENDS:
        return 0
    return sum(_num_bytes(var.aval) for var in operation.outvars)


def _num_bytes(aval: Any) -> int:
    return int(aval.size * aval.dtype.itemsize)


def _multiplies(operation: JaxprEqn) -> bool:
    inside = (one for program in programs_in(operation) for one in equations(program))
    return any(one.primitive.name in _MATMULS for one in (operation, *inside))
