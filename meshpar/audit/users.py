"""Which operations use a value of a compiled program, past what only lays it out.

GSPMD may name a collective after the operation that makes what it moves (Shardy, from
jax 0.12) or after the one that needs it. What needs it is read from the program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from meshpar.audit.hlo import Computation, Instruction, Program

_LAYS_OUT = (
    r"broadcast_in_dim|convert_element_type|copy|device_put|reshape|sharding_constraint"
    r"|squeeze|transpose|while"
)
_NAMES_NO_NEED = re.compile(rf"(?:{_LAYS_OUT})?(?:\.\d+)?")
"""Of a path without an end, or that ends with what only lays a value out."""

_PASSES_ON = ("-done", "bitcast", "convert", "copy", "reshape", "transpose")

Use = tuple[str, str]
"""JAX's path of an operation, and its `file:line`."""


def names_no_need(operation: str) -> bool:
    """Whether an operation, the last part of a path, needs no value of other devices.

    Example:
        >>> [names_no_need(name) for name in ("", "squeeze", "reshape.7", "cumsum")]
        [True, True, True, False]
    """
    return _NAMES_NO_NEED.fullmatch(operation) is not None


def uses(
    program: Program, computation: Computation, value: Instruction
) -> tuple[Use, ...]:
    """The operations that use a value, each once, as far as the text names them."""
    found = _uses(program, computation, {value.name})
    return tuple(dict.fromkeys(found))


def _uses(program: Program, computation: Computation, names: set[str]) -> Iterator[Use]:
    """Uses of any of those names, in the order of the text; `names` grows with it."""
    for user in computation.instructions:
        if not names & set(user.operands):
            continue
        inside, passes = _inside(program, user, names)
        yield from inside
        if passes or (not inside and _passes_on(user)):
            names.add(user.name)
        elif not inside and user.op_path:
            yield _path(user), program.source_of(user)


def _inside(
    program: Program, user: Instruction, names: set[str]
) -> tuple[list[Use], bool]:
    """Uses in the computation of a fusion, and whether the value goes through it."""
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


def _path(user: Instruction) -> str:
    """Its path; of a matmul that took over a transpose and its name, the matmul's."""
    before, _, last = user.op_path.rpartition("/")
    renamed = _is_matmul(user) and last == "transpose"
    return f"{before}/dot_general" if renamed else user.op_path
