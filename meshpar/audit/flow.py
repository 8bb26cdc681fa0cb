"""Control and data flow of a compiled program: loops, branches, uses of a value.

GSPMD may name a collective after the operation that makes what it moves (Shardy, from
jax 0.12) or after the one that needs it. `uses` reads the latter from the program.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshpar.audit.hlo import Computation, HloError, Instruction, Program
from meshpar.collectives import RUNNING_TIMES

_ASYNC_STARTS = {
    "async-start": "calls",
    "call-start": "to_apply",
    "custom-call-start": "called_computations",
}
"""Opcode -> the attribute that names what it runs."""

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# JAX wraps a name in the transform of what it stands in: `jvp(running-times-2)/while`.
_TOLD = re.compile(rf"[/(]{RUNNING_TIMES}(\d+)\)*/while$")


@dataclass(frozen=True)
class Place:
    """Where a computation runs.

    Args:
        executions: Times in one run of the program: the product of the trip counts of
            the loops around it.
        in_branch: Whether it is inside a conditional, or a loop that may end before its
            trip count (`may_end_early`), so that it may not run on every device.
        counted: Whether every trip count was known; an unknown one counts as 1.
        in_loop: Whether a loop is around it.
        fused: Whether it is part of a fusion, so that its values are never stored.
    """

    executions: int = 1
    in_branch: bool = False
    counted: bool = True
    in_loop: bool = False
    fused: bool = False


def places(program: Program) -> dict[str, list[Place]]:
    """Return the places of every computation that runs, one for each call chain.

    Raises:
        HloError: A computation is used that is not there.
    """
    found: dict[str, list[Place]] = defaultdict(list)
    waiting = [(program.entry, Place())]
    while waiting:
        name, place = waiting.pop()
        found[name].append(place)
        computation = program.computations[name]
        for instruction in computation.instructions:
            for callee, at in called(program, computation, instruction, place):
                program.computation(callee, used_by=instruction)
                waiting.append((callee, at))
    return dict(found)


def called(
    program: Program, computation: Computation, instruction: Instruction, place: Place
) -> Iterator[tuple[str, Place]]:
    """Yield the computations that an instruction runs, each with its place."""
    opcode = instruction.opcode
    if opcode == "while":
        trips = trip_count(program, computation, instruction)
        counted = place.counted and trips is not None
        in_branch = place.in_branch or may_end_early(program, instruction)
        inside = replace(place, counted=counted, in_loop=True, in_branch=in_branch)
        times = place.executions * (1 if trips is None else trips)
        yield _callee(instruction, "body"), replace(inside, executions=times)
        times += place.executions
        yield _callee(instruction, "condition"), replace(inside, executions=times)
    elif opcode == "conditional":
        listed = instruction.attribute(r"branch_computations=\{([^}]*)\}")
        if listed is not None:
            branches = [name.strip().lstrip("%") for name in listed.split(",")]
        else:
            sides = ("true_computation", "false_computation")
            branches = [_callee(instruction, side) for side in sides]
        for branch in branches:
            yield branch, replace(place, in_branch=True)
    elif opcode == "fusion":
        yield _callee(instruction, "calls"), replace(place, fused=True)
    elif opcode == "call":
        yield _callee(instruction, "to_apply"), place
    elif (wrapped := wrapped_by(instruction)) is not None:
        yield wrapped, place


def wrapped_by(instruction: Instruction) -> str | None:
    """Return the computation that an asynchronous start runs; None of any other.

    XLA:TPU starts what it gives to a SparseCore by a call, of which libtpu 0.0.52 makes
    a custom call.
    """
    name = _ASYNC_STARTS.get(instruction.opcode)
    if name is None:
        return None
    return instruction.attribute(rf"{name}=\{{?%?([\w.\-]+)")


def trip_count(
    program: Program, computation: Computation, loop: Instruction
) -> int | None:
    """Return the iterations of a while loop; None if the text does not say.

    XLA notes the number where it knows it, and our own program in a loop's path
    (`meshpar.collectives.running_times`). Otherwise it is read from the loop: its
    condition is that a counter is below a constant, and nothing else; the counter
    starts from a constant and goes up in steps of 1. Of a loop that may end early it is
    the most.
    """
    known = _KNOWN.search(loop.attributes) or _TOLD.search(loop.op_path)
    if known:
        return int(known[1])
    counter, limit = _counter_and_limit(program, loop)
    if counter is None or limit is None or not _counts_up(program, loop, counter):
        return None
    state = program.operand(computation, loop, 0)
    if state.opcode != "tuple":
        return None
    start = _constant(program, _Value(computation, state), counter)
    return None if start is None else max(limit - start, 0)


def may_end_early(program: Program, loop: Instruction) -> bool:
    """Return True if a loop also ends when its counter reaches a computed value.

    Devices may differ in that value, as ranks of a pipeline do of which some are idle.
    """
    tests = _tests(program, loop)
    return len(tests) > 1 and _counter_and_limit(program, loop)[0] is not None


def _callee(instruction: Instruction, name: str) -> str:
    callee = instruction.attribute(rf"{name}=%?([\w.\-]+)")
    if callee is None:
        problem = f"a {instruction.opcode} without {name}="
        raise HloError(instruction.line, instruction.name, problem)
    return callee


@dataclass(frozen=True)
class _Value:
    """An instruction, and the fusion that its computation is the inside of, if any."""

    computation: Computation
    instruction: Instruction
    user: _Value | None = None

    def operand(self, program: Program, index: int) -> _Value:
        """Return the instruction that gives an operand."""
        found = program.operand(self.computation, self.instruction, index)
        return replace(self, instruction=found)


def _origin(program: Program, value: _Value) -> _Value:
    """Return where a value is made, past copies and through fusions."""
    while True:
        instruction = value.instruction
        if instruction.opcode in ("copy", "bitcast", "convert"):
            value = value.operand(program, 0)
        elif instruction.opcode in ("fusion", "call"):
            name = "calls" if instruction.opcode == "fusion" else "to_apply"
            inside = program.computation(_callee(instruction, name), instruction)
            value = _Value(inside, inside.root, value)
        elif instruction.opcode == "parameter" and value.user is not None:
            value = value.user.operand(program, int(instruction.operands[0]))
        else:
            return value


def _constant(program: Program, value: _Value, index: int) -> int | None:
    made = _origin(program, value.operand(program, index)).instruction
    text = made.operands[0] if made.opcode == "constant" else ""
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _element(program: Program, value: _Value, index: int) -> int | None:
    """Return the index of the loop's state that an operand is, or None."""
    made = _origin(program, value.operand(program, index)).instruction
    if made.opcode != "get-tuple-element":
        return None
    return int(made.attribute(r"index=(\d+)") or 0)


def _tests(program: Program, loop: Instruction) -> tuple[_Value, ...]:
    """Return the conditions for a loop to go on."""
    condition = program.computation(_callee(loop, "condition"), used_by=loop)
    test = _origin(program, _Value(condition, condition.root))
    if test.instruction.opcode != "and":
        return (test,)
    return tuple(_origin(program, test.operand(program, index)) for index in (0, 1))


def _counter_and_limit(
    program: Program, loop: Instruction
) -> tuple[int | None, int | None]:
    """Return the counter's index in the loop's state, and its constant limit.

    Every test is of that element alone; neither is known of any other condition.
    """
    tests = _tests(program, loop)
    counters = {
        _element(program, test, 0)
        if test.instruction.opcode == "compare"
        and test.instruction.attribute(r"direction=(\w+)") == "LT"
        else None
        for test in tests
    }
    if len(counters) > 1 or None in counters:
        return None, None
    limits = [_constant(program, test, 1) for test in tests]
    known = [limit for limit in limits if limit is not None]
    return (counters.pop(), min(known)) if known else (None, None)


def _counts_up(program: Program, loop: Instruction, counter: int) -> bool:
    body = program.computation(_callee(loop, "body"), used_by=loop)
    if body.root.opcode != "tuple":
        return False
    step = _origin(program, _Value(body, body.root).operand(program, counter))
    return step.instruction.opcode == "add" and (
        (_element(program, step, 0), _constant(program, step, 1)) == (counter, 1)
        or (_element(program, step, 1), _constant(program, step, 0)) == (counter, 1)
    )


_LAYS_OUT = (
    r"broadcast_in_dim|convert_element_type|copy|device_put|reshape|sharding_constraint"
    r"|squeeze|transpose|while"
)
_NAMES_NO_NEED = re.compile(rf"(?:{_LAYS_OUT})?(?:\.\d+)?")
"""End of a path that names no operation, or one that only lays a value out."""

_PASSES_ON = ("-done", "bitcast", "convert", "copy", "reshape", "transpose")

Use = tuple[str, str]
"""JAX's path of an operation, and its `file:line`."""


def names_no_need(operation: str) -> bool:
    """Return True if an operation only lays its value out, by the end of its path.

    Example:
        >>> [names_no_need(name) for name in ("", "squeeze", "reshape.7", "cumsum")]
        [True, True, True, False]
    """
    return _NAMES_NO_NEED.fullmatch(operation) is not None


def uses(
    program: Program, computation: Computation, value: Instruction
) -> tuple[Use, ...]:
    """Return the operations that use a value, each once, if the text names them."""
    found = _uses(program, computation, {value.name})
    return tuple(dict.fromkeys(found))


def _uses(program: Program, computation: Computation, names: set[str]) -> Iterator[Use]:
    """Yield uses of any of `names`, in text order; `names` grows with it."""
    for user in computation.instructions:
        if not names & set(user.operands):
            continue
        inside, passes = _inside(program, user, names)
        yield from inside
        if passes or (not inside and _passes_on(user)):
            names.add(user.name)
        elif not inside and user.op_path:
            before, _, last = user.op_path.rpartition("/")
            # A matmul that absorbed a transpose has taken over its name.
            renamed = _is_matmul(user) and last == "transpose"
            path = f"{before}/dot_general" if renamed else user.op_path
            yield path, program.source(user)


def _inside(
    program: Program, user: Instruction, names: set[str]
) -> tuple[list[Use], bool]:
    """Return the uses inside a fusion, and True if the value also leaves it."""
    callee = user.attribute(r"calls=%?([\w.\-]+)")
    if user.opcode != "fusion" or callee not in program.computations:
        return [], False
    fused = program.computations[callee]
    given = {
        parameter.name
        for parameter in fused.instructions
        if parameter.opcode == "parameter"
        and user.operands[int(parameter.operands[0])] in names
    }
    found = list(_uses(program, fused, given))
    return found, fused.root.name in given


def _passes_on(user: Instruction) -> bool:
    if _is_matmul(user) or user.opcode in ("while", "call", "conditional"):
        return False
    last = user.op_path.split("/")[-1]
    return user.opcode.endswith(_PASSES_ON) or names_no_need(last)


def _is_matmul(user: Instruction) -> bool:
    target = user.attribute(r'custom_call_target="([^"]*)"') or ""
    return user.opcode in ("dot", "convolution") or target.startswith("__cublas")
