"""Cut a traced loss around the `lax.scan` that runs over stacked parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.extend.core import Literal, jaxpr_as_fun

from meshpar.model.loss.facts import Cut, MakeKey, TraceFacts, Values
from meshpar.model.loss.program import Operation
from meshpar.trace.walk import Loop


def scanned_blocks(facts: TraceFacts) -> Cut:
    """Return a loss cut around the loop over the stacked parameters of its blocks.

    Args:
        facts: Facts of the trace.

    Raises:
        InputError: There is no such loop, or it carries or runs over something that a
            block cannot get.
    """
    return _ScannedBlock.from_trace(facts).cut()


@dataclass(frozen=True, kw_only=True)
class _ScannedBlock:
    """The body of the `lax.scan` over stacked parameters, as a block.

    Args:
        facts: Facts of the trace.
        operation: The loop in the trace.
        loop: Its body and the numbers of its operands.
    """

    facts: TraceFacts
    operation: Operation
    loop: Loop

    @classmethod
    def from_trace(cls, facts: TraceFacts) -> _ScannedBlock:
        """Return the block of a trace.

        Raises:
            InputError: There is no such loop, or it carries or runs over something that
                a block cannot get.
        """
        operation, loop = _find_scan(facts)
        block = cls(facts=facts, operation=operation, loop=loop)
        for operand in block.carried:
            if isinstance(operand, Literal):
                raise facts.refuse(
                    f"its lax.scan carries the number {operand.val}; carry arrays with "
                    "the example first, and count layers with a scanned jnp.arange",
                    operation,
                    "model.blocks_carry_number",
                )
        if not all(map(block._can_slice, block.slices)):
            raise facts.refuse(
                "its lax.scan runs over an array that is neither a parameter under "
                "that path, nor a key, nor a function of the batch alone",
                operation,
                "model.blocks_scan_over",
            )
        return block

    @property
    def consts(self) -> tuple[Any, ...]:
        """Operands that every iteration takes as they are."""
        return self.operation.operands[: self.loop.num_consts]

    @property
    def carried(self) -> tuple[Any, ...]:
        """Operands that one iteration hands to the next."""
        end = self.loop.num_consts + self.loop.num_carried
        return self.operation.operands[self.loop.num_consts : end]

    @property
    def slices(self) -> tuple[Any, ...]:
        """Operands of which every iteration takes a slice."""
        return self.operation.operands[self.loop.num_consts + self.loop.num_carried :]

    @cached_property
    def constant_stream(self) -> tuple[int, ...]:
        """Constants of the loop that must flow with the stream, unchanged."""
        return tuple(
            number
            for number in dict.fromkeys(self.consts)
            if not isinstance(number, Literal)
            and not self.facts.is_free(number)
            and not self.facts.is_key(number)
        )

    def cut(self) -> Cut:
        """Return the loss cut around the loop."""
        after = self.operation.results[: self.loop.num_carried]
        constant = self.constant_stream
        return Cut(
            program=self.facts.program,
            first=(*self.carried, *constant),
            last=(*after, *constant),
            per_example=(
                *(True for _ in self.carried),
                *map(self.facts.is_per_example, constant),
            ),
            block=self.run,
        )

    def run(
        self,
        params: Sequence[Any],
        batch: Values,
        stream: Sequence[Any],
        make_key: MakeKey,
        layer: Any,
    ) -> list[Any]:
        """Return the stream after one iteration (`Cut.block`)."""
        num_carried, program = self.loop.num_carried, self.facts.program
        carried, constant = stream[:num_carried], stream[num_carried:]
        known = {**batch, **dict(zip(self.constant_stream, constant, strict=True))}
        leaves = dict(zip(self.facts.arguments.layers[0], params, strict=True))
        key_indices = itertools.count()

        def value(operand: Any, *, sliced: bool) -> Any:
            if not isinstance(operand, Literal) and self.facts.is_key(operand):
                shape = program.avals[operand].shape
                return make_key(next(key_indices), shape[1:] if sliced else shape)
            source = _stacked_source(self.facts, operand) if sliced else None
            if source is not None:
                return leaves[source].astype(program.avals[operand].dtype)
            (whole,) = program.run(known, [operand])
            return whole[layer] if sliced else whole

        results = jaxpr_as_fun(self.operation.equation.params["jaxpr"])(
            *(value(operand, sliced=False) for operand in self.consts),
            *carried,
            *(value(operand, sliced=True) for operand in self.slices),
        )
        return [*results[:num_carried], *constant]

    def _can_slice(self, operand: Any) -> bool:
        return not isinstance(operand, Literal) and (
            self.facts.is_free(operand)
            or self.facts.is_key(operand)
            or _stacked_source(self.facts, operand) is not None
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
    """Return the stacked parameter that an array is, or is a cast of; None if none."""
    while not isinstance(number, Literal) and number not in facts.leaves:
        maker: Any = facts.program.maker.get(number)
        if maker is None or maker.equation.primitive.name != "convert_element_type":
            return None
        number = maker.operands[0]
    return None if isinstance(number, Literal) else number
