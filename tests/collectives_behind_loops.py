"""Collectives that XLA:CPU may pair with a loop's, read from a scheduled program."""

import re

from meshpar.audit.hlo import Computation, Instruction, Program, parse_program

_KINDS = {
    **dict.fromkeys(
        ("all-reduce", "reduce-scatter", "all-gather", "all-to-all"), "replica_groups"
    ),
    "collective-permute": "source_target_pairs",
}
"""Opcode -> the attribute that says which devices meet."""
_NAME = re.compile(r"%([\w.\-]+)")


def behind_loops(text: str) -> list[tuple[str, str]]:
    """(collective, loop) where one stands behind the other and does not need it.

    Only where the loop has a collective of the same channel and devices.
    """
    program = parse_program(text)
    found = []
    for computation in program.computations.values():
        found += _in_order(program, computation)
    return found


def _in_order(program: Program, computation: Computation) -> list[tuple[str, str]]:
    found, loops = [], {}
    needed: dict[str, set[str]] = {}  # the loops that an instruction waits for
    for one in computation.instructions:
        needed[one.name] = set().union(*(needed.get(o, set()) for o in one.operands))
        rendezvous = _rendezvous(program, one)
        found += [
            (one.name, loop)
            for loop, of_loop in loops.items()
            if rendezvous & of_loop and loop not in needed[one.name]
        ]
        if one.opcode == "while" and rendezvous:
            loops[one.name] = rendezvous
            needed[one.name].add(one.name)
    return found


def _rendezvous(program: Program, one: Instruction) -> set[tuple[str | None, ...]]:
    """Channel and devices of each collective that an instruction is or calls."""
    if one.opcode in _KINDS:
        devices = one.attribute(rf"{_KINDS[one.opcode]}=(\S+?)(?:,? |,?$)")
        return {(one.attribute(r"channel_id=(\d+)"), devices)}
    called = set(_NAME.findall(one.attributes)) & program.computations.keys()
    inside = (program.computations[name].instructions for name in called)
    return {
        key for ones in inside for each in ones for key in _rendezvous(program, each)
    }
