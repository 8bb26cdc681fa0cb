"""How often each computation of a program runs, and inside which branches."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshpar.audit.hlo import Computation, HloError, Instruction, Program

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Place:
    """Where a computation runs.

    Args:
        executions: Times in one run of the program: the product of the trip counts of
            the loops around it.
        in_branch: Whether it is inside a conditional, so that it may not run.
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
    """Every place of every computation that runs; one for each way it is reached.

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
            for callee, at in _called(program, computation, instruction, place):
                program.computation(callee, used_by=instruction)
                waiting.append((callee, at))
    return dict(found)


def _called(
    program: Program, computation: Computation, instruction: Instruction, place: Place
) -> Iterator[tuple[str, Place]]:
    opcode = instruction.opcode
    if opcode == "while":
        trips = trip_count(program, computation, instruction)
        counted = place.counted and trips is not None
        inside = replace(place, counted=counted, in_loop=True)
        times = place.executions * (1 if trips is None else trips)
        yield _callee(instruction, "body"), replace(inside, executions=times)
        times += place.executions
        yield _callee(instruction, "condition"), replace(inside, executions=times)
    elif opcode == "conditional":
        for branch in _branches(instruction):
            yield branch, replace(place, in_branch=True)
    elif opcode == "fusion":
        yield _callee(instruction, "calls"), replace(place, fused=True)
    elif opcode in ("call", "async-start"):
        # A call names what it applies, an asynchronous one what it wraps.
        name = "to_apply" if opcode == "call" else "calls"
        yield _callee(instruction, name), place


def trip_count(
    program: Program, computation: Computation, loop: Instruction
) -> int | None:
    """Iterations of a while loop; None if the text does not say.

    XLA notes the number where it knows it. Otherwise it is read from a condition that
    compares a counter, from a constant up in steps of 1, with a constant.
    """
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known[1])
    condition = program.computation(_callee(loop, "condition"), used_by=loop)
    limits = _constants(program, condition)
    if len(limits) != 1 or not _compares_below(program, condition):
        return None
    start = _start(program, computation, loop, condition)
    return None if start is None else max(limits[0] - start, 0)


def _callee(instruction: Instruction, name: str) -> str:
    callee = instruction.attribute(rf"{name}=%?([\w.\-]+)")
    if callee is None:
        problem = f"a {instruction.opcode} without {name}="
        raise HloError(instruction.line, instruction.name, problem)
    return callee


def _branches(instruction: Instruction) -> list[str]:
    listed = instruction.attribute(r"branch_computations=\{([^}]*)\}")
    if listed is not None:
        return [name.strip().lstrip("%") for name in listed.split(",")]
    return [_callee(instruction, f"{which}_computation") for which in ("true", "false")]


def _inside(program: Program, computation: Computation) -> Iterator[Instruction]:
    for instruction in computation.instructions:
        yield instruction
        if instruction.opcode in ("fusion", "call"):
            name = "calls" if instruction.opcode == "fusion" else "to_apply"
            callee = program.computation(_callee(instruction, name), instruction)
            yield from _inside(program, callee)


def _constants(program: Program, condition: Computation) -> list[int]:
    texts = [
        instruction.operands[0]
        for instruction in _inside(program, condition)
        if instruction.opcode == "constant"
    ]
    return [int(text) for text in texts if re.fullmatch(r"-?\d+", text)]


def _compares_below(program: Program, condition: Computation) -> bool:
    return any(
        instruction.opcode == "compare"
        and instruction.attribute(r"direction=(\w+)") == "LT"
        for instruction in _inside(program, condition)
    )


def _start(
    program: Program,
    computation: Computation,
    loop: Instruction,
    condition: Computation,
) -> int | None:
    index = next(
        (
            instruction.attribute(r"index=(\d+)")
            for instruction in condition.instructions
            if instruction.opcode == "get-tuple-element"
        ),
        None,
    )
    state = program.operand(computation, loop, 0)
    if index is None or state.opcode != "tuple":
        return None
    counter = program.operand(computation, state, int(index))
    while counter.opcode in ("copy", "bitcast", "convert"):
        counter = program.operand(computation, counter, 0)
    text = counter.operands[0] if counter.opcode == "constant" else ""
    return int(text) if re.fullmatch(r"-?\d+", text) else None
