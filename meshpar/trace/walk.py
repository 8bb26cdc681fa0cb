"""Walk traced programs: every other module that reads a jaxpr is a domain of this walk.

A domain says what an operation makes of what is known of its operands. The walk knows
the order of operations, literals and constants, and how calls and loops hand values on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from meshpar.trace.primitives import CALLS

Program = ClosedJaxpr | Jaxpr
V = TypeVar("V")


def walk(
    program: Program,
    given: Sequence[V],
    apply: Callable[[JaxprEqn, list[V]], Sequence[V]],
    literal: Callable[[Any], V],
    constants: Sequence[V] | None = None,
) -> list[V]:
    """Return what is known of the results of a program.

    Args:
        program: The program.
        given: What is known of its arguments.
        apply: (operation, known of its operands) -> known of its results.
        literal: Known of a value that the program holds; None is a value left open.
        constants: Known of the arrays that it closes over, in place of `literal`.

    Example:
        >>> import jax.numpy as jnp
        >>> program = jax.make_jaxpr(lambda x, y: (x * y, y + 1.0))(2.0, 3.0)
        >>> walk(program, ["x", "y"], lambda equation, known: ["".join(known)], str)
        ['xy', 'y1.0']
    """
    jaxpr = without_constants(program)
    if constants is None:
        values = getattr(program, "consts", (None,) * len(jaxpr.constvars))
        constants = [literal(value) for value in values]
    known: dict[Any, V] = dict(zip(jaxpr.constvars, constants, strict=True))
    known.update(zip(jaxpr.invars, given, strict=True))

    def read(atom: Any) -> V:
        return literal(atom.val) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        results = apply(equation, [read(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def steps(program: Program) -> list[JaxprEqn]:
    """Return the operations of a program, without those of the programs inside it."""
    return without_constants(program).eqns


def equations(program: Program) -> Iterator[JaxprEqn]:
    """Yield every operation, an outer one before those inside it."""
    for equation in steps(program):
        yield equation
        for inner in programs_in(equation):
            yield from equations(inner)


def programs_in(equation: JaxprEqn) -> list[Program]:
    """Return the programs that an operation holds, such as a loop's body."""
    leaves = jax.tree.leaves(
        list(equation.params.values()),
        is_leaf=lambda node: isinstance(node, ClosedJaxpr | Jaxpr),
    )
    return [leaf for leaf in leaves if isinstance(leaf, ClosedJaxpr | Jaxpr)]


def without_constants(program: Program) -> Jaxpr:
    """Return the program with the arrays that it closes over as variables."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def called_program(equation: JaxprEqn) -> Program | None:
    """Return what a call runs on its own operands; None if the operation is no call."""
    if equation.primitive.name not in CALLS:
        return None
    sizes = len(equation.invars), len(equation.outvars)
    for inner in programs_in(equation):
        jaxpr = without_constants(inner)
        if (len(jaxpr.invars), len(jaxpr.outvars)) == sizes:
            return inner
    return None


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A `scan` or `while`: its body runs on constants, carried values and slices.

    Args:
        body: (constants, carried, slices) -> (carried, slices).
        condition: (its constants, carried) -> whether to go on; None for a `scan`.
        num_condition_consts: Operands of the condition alone, which come first.
        num_consts: Operands that every iteration takes as they are.
        num_carried: Values that one iteration hands to the next.
        length: Number of iterations; None where the trace does not know it.
        expected_length: Iterations that `expect_iterations` tells of a `while`.

    Example:
        >>> import jax.numpy as jnp
        >>> def add(a, b, c):
        ...     return jax.lax.scan(lambda a, b: (a + b * c, a), a, b)
        >>> program = jax.make_jaxpr(add)(1.0, jnp.arange(3.0), 2.0)
        >>> loop = Loop.parse(steps(program)[-1])
        >>> loop.num_consts, loop.num_carried, loop.length
        (1, 1, 3)
    """

    body: Program
    condition: Program | None
    num_condition_consts: int
    num_consts: int
    num_carried: int
    length: int | None
    expected_length: float | None = None

    @classmethod
    def parse(cls, equation: JaxprEqn) -> Loop | None:
        """Return the loop that an operation is; None if it is none."""
        params: Mapping[str, Any] = equation.params
        if equation.primitive.name == "while":
            consts = params["cond_nconsts"], params["body_nconsts"]
            return cls(
                body=params["body_jaxpr"],
                condition=params["cond_jaxpr"],
                num_condition_consts=consts[0],
                num_consts=consts[1],
                num_carried=len(equation.invars) - sum(consts),
                length=None,
                expected_length=_expected_iterations(params["cond_jaxpr"]),
            )
        if equation.primitive.name != "scan":
            return None
        # JAX 0.12 has no `num_consts` and `num_carry`. An array of which an iteration
        # takes or makes a slice has one dim more outside.
        jaxpr = without_constants(params["jaxpr"])
        num_slices = sum(dims_more(equation.invars, jaxpr.invars))
        num_made = sum(dims_more(equation.outvars, jaxpr.outvars))
        num_carried = len(equation.outvars) - num_made
        return cls(
            body=params["jaxpr"],
            condition=None,
            num_condition_consts=0,
            num_consts=len(equation.invars) - num_slices - num_carried,
            num_carried=num_carried,
            length=params["length"],
        )

    def split(self, operands: Sequence[V]) -> tuple[list[V], list[V], list[V]]:
        """Return the body's constants, what it carries, and what it takes slices of."""
        given = list(operands[self.num_condition_consts :])
        last = self.num_consts + self.num_carried
        return given[: self.num_consts], given[self.num_consts : last], given[last:]

    def carried(
        self,
        run: Callable[[list[V]], list[V]],
        carried: list[V],
        join: Callable[[list[V], list[V]], list[V]],
    ) -> tuple[list[V], list[V]]:
        """Return what is known of carried values in every iteration, and of slices.

        Args:
            run: Known of carried values -> known of all results of the body.
            carried: Known before the first iteration.
            join: Known before and after an iteration -> what holds for both.
        """
        while True:
            results = run(carried)
            joined = join(carried, results[: self.num_carried])
            if joined == carried:
                return carried, results[self.num_carried :]
            carried = joined


_EXPECTED = "meshpar.iterations="


def expect_iterations(index: jax.Array, number: float) -> jax.Array:
    """Return a loop's index, which tells in a trace how often the loop should run.

    Args:
        index: Read by the condition of a `lax.while_loop`.
        number: Iterations that a count of its work assumes.
    """
    return checkpoint_name(index, f"{_EXPECTED}{number}")


def _expected_iterations(condition: Program) -> float | None:
    for equation in steps(condition):
        name = equation.params.get("name") if equation.primitive.name == "name" else ""
        if str(name).startswith(_EXPECTED):
            return float(str(name).removeprefix(_EXPECTED))
    return None


def dims_more(outside: Sequence[Any], inside: Sequence[Any]) -> list[int]:
    """Return how many dims each array has outside of a scan that it lacks inside."""
    return [
        len(one.aval.shape) - len(other.aval.shape)
        for one, other in zip(outside, inside, strict=True)
    ]


def sources(equation: JaxprEqn, operands: Sequence[V]) -> Sequence[V]:
    """Return the operands whose values the results are made of: no places of slices."""
    return operands[:1] if equation.primitive.name == "dynamic_slice" else operands


def collective_axes(equation: JaxprEqn) -> tuple[str, ...]:
    """Return the manual mesh axes that a collective runs over; () for any other."""
    if equation.primitive.name == "axis_index":
        return ()
    params: Mapping[str, Any] = equation.params
    axes = params.get("axes", params.get("axis_name", ()))
    axes = (axes,) if isinstance(axes, str) else axes
    return tuple(axis for axis in axes if isinstance(axis, str))


def array_shape(atom: Any) -> tuple[int, ...]:
    """Return the shape of a variable or literal that is an array."""
    return tuple(atom.aval.shape)


def array_dtype(atom: Any) -> Any:
    """Return the dtype of a variable or literal that is an array."""
    return atom.aval.dtype


def source_line(equation: JaxprEqn, libraries: Sequence[str]) -> str:
    """Return `file:line` of the innermost frame outside of libraries; "" if none is.

    Args:
        equation: The operation.
        libraries: Parts of the paths of files that are not meant.
    """
    traceback = equation.source_info.traceback
    frames: Sequence[Any] = traceback.frames if traceback is not None else ()
    for frame in frames:
        if not any(part in frame.file_name for part in libraries):
            return f"{frame.file_name}:{frame.line_num}"
    return ""
