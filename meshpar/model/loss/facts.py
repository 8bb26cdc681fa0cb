"""The parts that a traced loss is cut into, and the dependences of its values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.errors import InputError
from meshpar.model.loss.drop_ins import Shapes
from meshpar.model.loss.program import LossProgram, Operation
from meshpar.trace.operations import operation_line

Values = dict[int, Any]
"""Number of a value in the trace -> its array."""

MakeKey = Callable[[int, tuple[int, ...]], jax.Array]
"""(index of a key that a block reads, its shape) -> the key."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A loss as the functions of the model contract, on flat lists of arrays.

    Args:
        program: The traced loss.
        first: Numbers of the stream before the first block.
        last: Numbers of the stream after the last block.
        per_example: For each array of the stream whether its leading dim holds the
            examples; False where it is the same for all.
        block: (the layer's parameters, known arrays of the batch, stream, make_key,
            layer) -> stream.
        shared: Shapes that are drawn once for all examples.
    """

    program: LossProgram
    first: tuple[int, ...]
    last: tuple[int, ...]
    per_example: tuple[bool, ...]
    block: Callable[[Sequence[Any], Values, Sequence[Any], MakeKey, Any], list[Any]]
    shared: Shapes = frozenset()

    def embed(self, known: Values) -> list[Any]:
        """Return the stream before the first block."""
        return self.program.run(known, self.first)

    def head(self, known: Values, stream: Sequence[Any]) -> list[Any]:
        """Return the results of the loss from the stream after the last block."""
        after = dict(zip(self.last, stream, strict=True))
        return self.program.run({**known, **after}, self.program.results)

    def carrying(self, numbers: Sequence[int], per_example: Sequence[bool]) -> Cut:
        """Return the cut with further arrays in its stream, which no block changes."""
        own = len(self.first)

        def block(
            params: Sequence[Any],
            batch: Values,
            stream: Sequence[Any],
            make_key: MakeKey,
            layer: Any,
        ) -> list[Any]:
            after = self.block(params, batch, stream[:own], make_key, layer)
            return [*after, *stream[own:]]

        return replace(
            self,
            first=(*self.first, *numbers),
            last=(*self.last, *numbers),
            per_example=(*self.per_example, *per_example),
            block=block,
        )


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Numbers of the arguments of a traced loss.

    Args:
        ends: Parameters and state outside the blocks.
        layers: Those of each block, in one order; a single list of stacked ones where
            the model holds them so.
        num_layers: Number of blocks.
        stacked: Whether they are stacked.
        batch: Arrays of the batch.
        key: Data of the random key; None without any.
    """

    ends: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]
    num_layers: int
    stacked: bool
    batch: tuple[int, ...]
    key: int | None

    @property
    def inputs(self) -> tuple[int, ...]:
        """Numbers of the batch and of the key."""
        return self.batch if self.key is None else (*self.batch, self.key)


class TraceFacts:
    """The dependences of each number of a trace."""

    def __init__(self, program: LossProgram, arguments: Arguments, blocks: str) -> None:
        self.program, self.arguments, self.blocks = program, arguments, blocks
        self.key_argument = () if arguments.key is None else (arguments.key,)
        leaves = list(itertools.chain(*arguments.layers))
        self.leaves = set(leaves)
        self.from_blocks = program.reached(leaves)
        self.from_ends = program.reached(arguments.ends)
        self.from_batch = program.reached(arguments.batch)
        self.from_key = program.reached(self.key_argument)

    def is_free(self, number: int) -> bool:
        """Return True if a value depends on the batch and constants alone."""
        return not (
            number in self.from_blocks
            or number in self.from_ends
            or number in self.from_key
        )

    def is_drawn(self, number: int) -> bool:
        """Return True for random keys and what is drawn of them outside the blocks."""
        return number in self.from_key and not (
            number in self.from_blocks or number in self.from_ends
        )

    def is_key(self, number: int) -> bool:
        """Return True for a random key from outside the blocks."""
        return (
            self.program.is_key(number)
            and number in self.from_key
            and number not in self.from_blocks
        )

    def is_per_example(self, number: int) -> bool:
        """Return True if the leading dim of a value holds the examples."""
        return number in self.from_batch or number in self.from_key

    def refuse(self, problem: str, operation: Operation | None, key: str) -> InputError:
        """Return the error for blocks that cannot be cut."""
        line = operation and operation_line(operation.equation)
        where = f" ({line})" if line else ""
        return InputError(
            f"blocks={self.blocks!r}: {problem}{where}; leave blocks= out, which gives "
            "every layout without stages, or write the model with meshpar.from_nnx",
            key=key,
        )


def in_stream(cut: Cut, arrays: Sequence[Any], examples: int) -> Any:
    """Return a stream with the example first in each array: one, or a tuple of them.

    Args:
        cut: The cut loss.
        arrays: Its stream, as the trace has it: the leading dim may hold examples
            times tokens, or nothing that the examples have.
        examples: Number of examples.
    """
    stream = []
    for array, per_example in zip(arrays, cut.per_example, strict=True):
        if not per_example:
            stream.append(jnp.broadcast_to(array, (examples, *array.shape)))
        elif array.ndim and array.shape[0] == examples:
            stream.append(array)
        elif array.ndim and array.shape[0] % examples == 0:
            rows = array.shape[0] // examples
            stream.append(array.reshape(examples, rows, *array.shape[1:]))
        else:
            raise InputError(
                f"an array of shape {array.shape} flows between the blocks, but the "
                f"batch has {examples} examples here; put the example first",
                key="model.blocks_join_examples",
            )
    return stream[0] if len(stream) == 1 else tuple(stream)


def from_stream(cut: Cut, numbers: Sequence[int], stream: Any) -> list[Any]:
    """Return the arrays of a stream as the trace has them; undoes `in_stream`.

    Args:
        cut: The cut loss.
        numbers: Their numbers in the trace.
        stream: From `in_stream`.
    """
    arrays = stream if isinstance(stream, tuple) else (stream,)
    values = []
    for array, number, per_example in zip(
        arrays, numbers, cut.per_example, strict=True
    ):
        aval = cut.program.avals[number]
        value = array.reshape(aval.shape) if per_example else array[0]
        values.append(value.astype(aval.dtype))
    return values


def known_batch(
    arguments: Arguments, names: Sequence[str], batch: Mapping[str, Any]
) -> Values:
    """Return the arrays of a batch by their numbers."""
    pairs = zip(arguments.batch, names, strict=True)
    return {number: batch[name] for number, name in pairs}
