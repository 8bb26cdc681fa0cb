"""Cut a traced loss between its equal blocks: embed, one block, head.

Where the parameters of the blocks are a list of equal trees, `listed_blocks` finds the
operations of each. Where they are stacked, the body of the `lax.scan` that takes them
is the block.

What a block reads besides its parameters and the stream is computed again inside it if
it depends on the batch alone (masks, positions), gets a key of its own if it is a
random key, and else flows beside the stream (the output of an encoder).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal, jaxpr_as_fun

from meshpar.errors import InputError
from meshpar.model.loss.facts import Arguments, Cut, MakeKey, TraceFacts, Values
from meshpar.model.loss.listed_blocks import listed_blocks
from meshpar.model.loss.program import LossProgram, Operation
from meshpar.trace.walk import Loop


def cut(program: LossProgram, arguments: Arguments, blocks: str) -> Cut:
    """Return a traced loss cut between its blocks.

    Args:
        program: The trace.
        arguments: Its arguments.
        blocks: Path of the blocks, for errors.

    Raises:
        InputError: The blocks are not equal, not one after another, or not alone with
            their parameters.
    """
    facts = TraceFacts(program, arguments, blocks)
    found = _scanned(facts) if arguments.stacked else listed_blocks(facts)
    known = (*arguments.ends, *arguments.batch, *facts.key_argument)
    for wanted, after, part in (
        (found.first, (), "what the first block reads"),
        (program.results, found.last, "the loss"),
    ):
        try:
            program.needed(wanted, (*known, *after))
        except LookupError:
            raise InputError(
                f"blocks={blocks!r}: {part} depends on what a block keeps to itself, "
                "besides the stream that the last one returns; return it in the "
                "stream of every block, or write the model with meshpar.from_nnx",
                key="model.blocks_leak",
            ) from None
    return found


def _scanned(facts: TraceFacts) -> Cut:
    """Cut around the `lax.scan` that runs over stacked parameters."""
    operation, loop = _find_scan(facts)
    program, operands = facts.program, operation.operands
    num_fixed = loop.num_consts + loop.num_carried
    consts, slices = operands[: loop.num_consts], operands[num_fixed:]
    carried = operands[loop.num_consts : num_fixed]
    beside = tuple(
        number
        for number in dict.fromkeys(consts)
        if not isinstance(number, Literal)
        and not facts.is_free(number)
        and not facts.is_key(number)
    )
    literals = [one for one in carried if isinstance(one, Literal)]
    if literals:
        raise facts.refuse(
            f"its lax.scan carries the number {literals[0].val}; carry arrays with the "
            "example first, and count layers with a scanned jnp.arange",
            operation,
            "model.blocks_carry_number",
        )
    body = jaxpr_as_fun(operation.equation.params["jaxpr"])
    leaves = {number: at for at, number in enumerate(facts.arguments.layers[0])}
    for number in slices:
        if isinstance(number, Literal) or not (
            facts.is_free(number)
            or facts.is_key(number)
            or _stacked_source(facts, number) is not None
        ):
            raise facts.refuse(
                "its lax.scan runs over an array that is neither a parameter under "
                "that path, nor a key, nor a function of the batch alone",
                operation,
                "model.blocks_scan_over",
            )

    def block(
        params: Sequence[Any],
        batch: Values,
        stream: Sequence[Any],
        make_key: MakeKey,
        layer: Any,
    ) -> list[Any]:
        own, others = stream[: len(carried)], stream[len(carried) :]
        known = {**batch, **dict(zip(beside, others, strict=True))}
        indices = itertools.count()

        def fixed(number: Any) -> Any:
            if not isinstance(number, Literal) and facts.is_key(number):
                return make_key(next(indices), program.avals[number].shape)
            return program.run(known, [number])[0]

        def sliced(number: int) -> Any:
            if facts.is_key(number):
                return make_key(next(indices), program.avals[number].shape[1:])
            source = _stacked_source(facts, number)
            if source is not None:
                value = params[leaves[source]]
                return value.astype(program.avals[number].dtype)
            return program.run(known, [number])[0][layer]

        results = body(*map(fixed, consts), *own, *map(sliced, slices))
        return [*results[: loop.num_carried], *others]

    return Cut(
        program=program,
        first=(*carried, *beside),
        last=(*operation.results[: loop.num_carried], *beside),
        per_example=(
            *(True for _ in carried),
            *map(facts.is_per_example, beside),
        ),
        block=block,
    )


def _find_scan(facts: TraceFacts) -> tuple[Operation, Loop]:
    """Return the loop that runs over the stacked parameters."""
    for operation in facts.program.operations:
        loop = Loop.parse(operation.equation)
        if loop is None or operation.equation.primitive.name != "scan":
            continue
        slices = operation.operands[loop.num_consts + loop.num_carried :]
        if any(_stacked_source(facts, number) is not None for number in slices):
            if loop.length != facts.arguments.num_layers:
                raise facts.refuse(
                    f"its lax.scan runs {loop.length} times over "
                    f"{facts.arguments.num_layers} layers; scan over all of them",
                    operation,
                    "model.blocks_scan_length",
                )
            if operation.equation.params["reverse"]:
                raise facts.refuse(
                    "its lax.scan runs backwards; stack the layers first to last",
                    operation,
                    "model.blocks_scan_reversed",
                )
            return operation, loop
    raise facts.refuse(
        "its parameters are stacked, but no lax.scan runs over them",
        None,
        "model.blocks_not_scanned",
    )


def _stacked_source(facts: TraceFacts, number: Any) -> int | None:
    """Return the stacked parameter that a scanned array is, cast or as it is."""
    while not isinstance(number, Literal) and number not in facts.leaves:
        maker: Any = facts.program.maker.get(number)
        if maker is None or maker.equation.primitive.name != "convert_element_type":
            return None
        number = maker.operands[0]
    return None if isinstance(number, Literal) else number
