"""Collectives that XLA:CPU may pair with a loop's, read from a scheduled program."""

import re

from meshpar.audit.hlo import Computation, Instruction, Program, parse_program

_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
)


def beside_loops(text: str) -> list[tuple[str, str]]:
    """Loops, and what comes later, uses a channel of theirs and waits for nothing.

    XLA:CPU orders a collective after a loop by the loop's result alone.
    """
    program = parse_program(text)
    return [
        (loop, later)
        for loop, later in unordered(text)
        if _channel_ids(program, loop) & _channel_ids(program, later)
    ]


def unordered(text: str) -> list[tuple[str, str]]:
    """Loops with collectives, and what comes later, has some too and does not wait."""
    program = parse_program(text)
    assert "is_scheduled=true" in program.text
    found = []
    for computation, loop in _loops(program):
        inside = _channels(program, loop)
        waiting = {loop.name}
        after = computation.instructions.index(loop) + 1
        for later in computation.instructions[after:]:
            if waiting.intersection(later.operands):
                waiting.add(later.name)
            elif inside and _channels(program, later):
                found.append((loop.name, later.name))
    return found


def _channel_ids(program: Program, name: str) -> set[str]:
    """Channels of the instruction of that name."""
    return next(
        _channels(program, instruction)
        for computation in program.computations.values()
        for instruction in computation.instructions
        if instruction.name == name
    )


def _loops(program: Program) -> list[tuple[Computation, Instruction]]:
    return [
        (computation, instruction)
        for computation in program.computations.values()
        for instruction in computation.instructions
        if instruction.opcode in ("while", "conditional", "call")
    ]


def _channels(program: Program, instruction: Instruction) -> set[str]:
    """Channels of a collective, or of all collectives that it runs."""
    if instruction.opcode.startswith(_COLLECTIVES):
        return {instruction.attribute(r"channel_id=(\d+)") or ""}
    called = re.findall(
        r"(?:body|condition|to_apply|calls|\w+_computation)=%([\w.-]+)",
        instruction.attributes,
    )
    for branches in re.findall(
        r"branch_computations={([^}]*)}", instruction.attributes
    ):
        called += re.findall(r"%([\w.-]+)", branches)
    return {
        channel
        for name in called
        for inner in program.computation(name, instruction).instructions
        for channel in _channels(program, inner)
    }
