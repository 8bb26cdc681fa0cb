"""Cut a traced loss between its equal blocks: embed, one block, head.

Where the parameters of the blocks are a list of equal trees, the operations of block
`i` are those that depend on its parameters and on no later block's. Neighbours are
compared operation by operation; what differs from block to block of their operands is
the stream. Where parameters are stacked, the body of the `lax.scan` that takes them is
the block.

What a block reads besides its parameters and the stream is computed again inside it if
it depends on the batch alone (masks, positions), gets a key of its own if it is a
random key, and else flows beside the stream (the output of an encoder).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun

from meshpar.errors import InputError
from meshpar.model.loss_program import LossProgram, Operation
from meshpar.trace.operations import operation_line
from meshpar.trace.walk import Loop

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
    """

    program: LossProgram
    first: tuple[int, ...]
    last: tuple[int, ...]
    per_example: tuple[bool, ...]
    block: Callable[[Sequence[Any], Values, Sequence[Any], MakeKey, Any], list[Any]]

    def embed(self, known: Values) -> list[Any]:
        """Return the stream before the first block."""
        return self.program.run(known, self.first)

    def head(self, known: Values, stream: Sequence[Any]) -> list[Any]:
        """Return the results of the loss from the stream after the last block."""
        after = dict(zip(self.last, stream, strict=True))
        return self.program.run({**known, **after}, self.program.results)


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
    facts = _Facts(program, arguments, blocks)
    found = _scanned(facts) if arguments.stacked else _listed(facts)
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


class _Facts:
    """What each number of a trace depends on."""

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


def _listed(facts: _Facts) -> Cut:
    """Cut between blocks whose parameters are a list of trees."""
    layers = _layer_operations(facts)
    if len(layers) < 2:
        raise facts.refuse(
            f"there is {len(layers)} block, and blocks are found by comparing 2",
            None,
            "model.too_few_blocks",
        )
    matches = [
        _Match(facts, at, layers[at], layers[at + 1]) for at in range(len(layers) - 1)
    ]
    for at, match in enumerate(matches[:-1]):
        if not match.is_whole:
            raise facts.refuse(
                f"blocks {at} and {at + 1} differ: {match.difference}",
                match.first_unmatched,
                "model.blocks_differ",
            )
    first, last = matches[0], matches[-1]
    param_uses = [
        at for at, one in enumerate(layers[0]) if facts.leaves.intersection(one.read)
    ]
    begin = max(param_uses) + 1
    if last.length < begin:
        raise facts.refuse(
            f"blocks {len(layers) - 2} and {len(layers) - 1} differ: {last.difference}",
            last.first_unmatched,
            "model.blocks_differ",
        )
    sizes = {
        end: _crossing_bytes(facts, layers, end)
        for end in range(begin, last.length + 1)
    }
    for end in sorted(sizes, key=lambda end: (sizes[end], -end)):
        found = _ListedBlock.find(facts, layers, matches, end)
        if found is not None:
            return found.cut()
    raise facts.refuse(
        "the first block starts from something that no other one does",
        first.first_unmatched or layers[0][0],
        "model.blocks_differ",
    )


def _layer_operations(facts: _Facts) -> list[list[Operation]]:
    """Return the operations of each block: those that depend on no later one."""
    level: dict[int, int] = {}
    for layer, leaves in enumerate(facts.arguments.layers):
        level.update(dict.fromkeys(leaves, layer))
    operations: list[list[Operation]] = [[] for _ in facts.arguments.layers]
    for operation in facts.program.operations:
        levels = {level.get(number, -1) for number in operation.read}
        own = max(levels, default=-1)
        level.update(dict.fromkeys(operation.results, own))
        if own < 0:
            continue
        operations[own].append(operation)
        skipped = levels - {own, own - 1, -1}
        if skipped and own < len(operations) - 1:
            raise facts.refuse(
                f"block {own} reads what block {min(skipped)} made, past the one "
                "before it; a stream goes from each block to the next",
                operation,
                "model.blocks_skip",
            )
    for layer, found in enumerate(operations):
        if not found:
            raise facts.refuse(
                f"the loss does not use the parameters of block {layer}, or only "
                "together with a later one's",
                None,
                "model.blocks_not_used",
            )
    return operations


def _crossing_bytes(facts: _Facts, layers: list[list[Operation]], end: int) -> float:
    """Return the bytes that cross the end of block 0, were it after `end` operations.

    What the operations after it use counts too, as those would be of the next block.
    """
    made = set(itertools.chain(*(one.results for one in layers[0][:end])))
    later = itertools.chain(layers[0][end:], *layers[1:])
    used = made.intersection(itertools.chain(*(one.read for one in later)))
    return sum(_bytes(facts.program.avals[number]) for number in used)


def _bytes(aval: Any) -> float:
    itemsize = getattr(aval.dtype, "itemsize", 4)
    return math.prod(aval.shape) * itemsize


class _Match:
    """The operations of two neighbouring blocks, compared one by one.

    Attributes:
        length: How many agree, from the first on.
        results: Number in the first block -> its counterpart in the second.
        outside: Number that the first block reads -> what the second reads there.
        difference: The first difference, in words.
    """

    def __init__(
        self, facts: _Facts, layer: int, one: list[Operation], other: list[Operation]
    ) -> None:
        self.results: dict[int, int] = {}
        self.outside: dict[int, int] = {}
        self.difference = "one has more operations"
        self._facts = facts
        pairs = facts.arguments.layers[layer : layer + 2]
        self._leaves = dict(zip(*pairs, strict=True))
        self._others = set(pairs[1])
        self._one, self._other = one, other
        self.length = 0
        for a, b in zip(one, other, strict=False):
            if not self._agree(a, b):
                break
            self.results.update(zip(a.results, b.results, strict=True))
            self.length += 1

    @property
    def is_whole(self) -> bool:
        """True if both blocks are equal to their ends."""
        return self.length == len(self._one) == len(self._other)

    @property
    def first_unmatched(self) -> Operation | None:
        """The first operation of the second block without a counterpart."""
        return self._other[self.length] if self.length < len(self._other) else None

    def _agree(self, a: Operation, b: Operation) -> bool:
        outside = dict(self.outside)
        if not _same_operation(self._facts.program, a, b):
            names = [one.equation.primitive.name for one in (a, b)]
            self.difference = f"operation {self.length} is {names[0]} and {names[1]}"
            if names[0] == names[1]:
                self.difference += ", with other sizes or options"
            return False
        if len(a.operands) == len(b.operands) and all(
            self._same(u, v) for u, v in zip(a.operands, b.operands, strict=True)
        ):
            return True
        self.outside = outside
        name = a.equation.primitive.name
        self.difference = f"operation {self.length}, {name}, reads other values"
        return False

    def _same(self, u: Any, v: Any) -> bool:
        facts = self._facts
        if isinstance(u, Literal) or isinstance(v, Literal):
            return _same_literal(u, v)
        if u in self.results:
            return self.results[u] == v
        if u in self._leaves or v in self._others:
            return self._leaves.get(u) == v
        if facts.is_free(u) and facts.is_free(v):
            return _same_free(facts.program, u, v)
        if facts.is_key(u) and facts.is_key(v):
            return True
        return self.outside.setdefault(u, v) == v


def _same_operation(program: LossProgram, a: Operation, b: Operation) -> bool:
    """Return True if two operations do the same to operands of the same shapes."""

    def shapes(one: Operation) -> list[str]:
        return [str(program.avals[number]) for number in (*one.read, *one.results)]

    x, y = a.equation, b.equation
    return x.primitive is y.primitive and shapes(a) == shapes(b) and _same_options(x, y)


def _same_options(x: JaxprEqn, y: JaxprEqn) -> bool:
    if x.params.keys() != y.params.keys():
        return False
    return all(_same_option(x.params[name], y.params[name]) for name in x.params)


def _same_option(x: Any, y: Any) -> bool:
    """Return True if two options of an operation are equal, but for addresses."""
    if isinstance(x, ClosedJaxpr) and isinstance(y, ClosedJaxpr):
        pairs = itertools.zip_longest(x.consts, y.consts)
        if not all(_same_array(one, other) for one, other in pairs):
            return False
    if callable(x) and callable(y):
        return True  # Rules of derivatives; the program beside them is compared.
    texts = [re.sub(r"0x[0-9a-f]+", "", str(one)) for one in (x, y)]
    return texts[0] == texts[1]


def _same_array(x: Any, y: Any) -> bool:
    if x is None or y is None:
        return x is y
    is_inexact = jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return x is y or np.array_equal(x, y, equal_nan=bool(is_inexact))


def _same_literal(u: Any, v: Any) -> bool:
    if not (isinstance(u, Literal) and isinstance(v, Literal)):
        return False
    return str(u.aval) == str(v.aval) and _same_array(u.val, v.val)


def _same_free(program: LossProgram, u: int, v: int) -> bool:
    """Return True if two values of the batch alone are computed alike."""
    if u == v:
        return True
    constants = program.constant(u), program.constant(v)
    if constants[0] is not None or constants[1] is not None:
        return _same_array(*constants)
    a, b = program.maker.get(u), program.maker.get(v)
    if a is None or b is None or a.results.index(u) != b.results.index(v):
        return False
    return _same_operation(program, a, b) and all(
        _same_literal(x, y)
        if isinstance(x, Literal) or isinstance(y, Literal)
        else _same_free(program, x, y)
        for x, y in zip(a.operands, b.operands, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class _ListedBlock:
    """The block that every layer's operations are, as the second one has it.

    Args:
        facts: Facts of the trace.
        operations: Of the block: those between its stream and that of the next.
        before: Numbers of the stream before it.
        after: Numbers of the stream after it.
        first: Those before the first block.
        last: Those after the last block.
    """

    facts: _Facts
    operations: list[Operation]
    before: tuple[int, ...]
    after: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]

    @classmethod
    def find(
        cls,
        facts: _Facts,
        layers: list[list[Operation]],
        matches: list[_Match],
        end: int,
    ) -> _ListedBlock | None:
        """Return the block that ends after `end` operations; None if there is none."""
        early, late = layers[0][:end], layers[0][end:]
        operations = [*late, *layers[1][:end]]
        made = set(itertools.chain(*(one.results for one in early)))
        before = _stream_numbers(facts, operations)
        first = _first_stream(facts, matches[0], made, late)
        if first is None or any(
            number in made and number not in first for number in before
        ):
            return None
        if not _chained(facts, matches):
            return None
        after = tuple(matches[0].results.get(number, number) for number in before)
        last = before
        for match in matches:
            last = tuple(match.results.get(number, number) for number in last)
        return cls(
            facts=facts,
            operations=operations,
            before=before,
            after=after,
            first=tuple(first.get(number, number) for number in before),
            last=last,
        )

    def cut(self) -> Cut:
        """Return the loss cut between such blocks."""
        program = self.facts.program
        leaves = self.facts.arguments.layers[1]
        keys = _key_numbers(self.facts, self.operations)

        def block(
            params: Sequence[Any],
            batch: Values,
            stream: Sequence[Any],
            make_key: MakeKey,
            layer: Any,
        ) -> list[Any]:
            known = {**batch, **dict(zip(self.before, stream, strict=True))}
            known.update(zip(leaves, params, strict=True))
            for index, number in enumerate(keys):
                known[number] = make_key(index, program.avals[number].shape)
            return program.run(known, self.after)

        return Cut(
            program=program,
            first=self.first,
            last=self.last,
            per_example=tuple(map(self.facts.is_per_example, self.before)),
            block=block,
        )


def _stream_numbers(facts: _Facts, operations: list[Operation]) -> tuple[int, ...]:
    """Return what a block reads that is no parameter, key or value of the batch."""
    made = set(itertools.chain(*(one.results for one in operations)))
    read = dict.fromkeys(itertools.chain(*(one.read for one in operations)))
    return tuple(
        number
        for number in read
        if number not in made
        and number not in facts.leaves
        and not facts.is_free(number)
        and not facts.is_key(number)
    )


def _key_numbers(facts: _Facts, operations: list[Operation]) -> tuple[int, ...]:
    made = set(itertools.chain(*(one.results for one in operations)))
    read = dict.fromkeys(itertools.chain(*(one.read for one in operations)))
    return tuple(one for one in read if one not in made and facts.is_key(one))


def _first_stream(
    facts: _Facts, match: _Match, made: set[int], late: list[Operation]
) -> dict[int, int] | None:
    """Return what stands before the first block for each number made by it.

    Operations without parameters at the beginning of a block look like the end of the
    one before; those before the first block are found among the embedding's.

    Args:
        facts: Facts of the trace.
        match: Of the first two blocks.
        made: Numbers that the first block makes.
        late: Operations that depend on the first block, but belong to the second.
    """
    found: dict[int, int] = {}
    of_second = {number: one for one in late for number in one.results}

    def pair(u: Any, v: Any) -> bool:
        if isinstance(u, Literal) or isinstance(v, Literal):
            return _same_literal(u, v)
        if v in made:
            return found.setdefault(v, u) == u
        if v not in of_second:
            free = facts.is_free(u) and facts.is_free(v)
            return u == v or (free and _same_free(facts.program, u, v))
        a, b = facts.program.maker.get(u), of_second[v]
        return (
            a is not None
            and a.results.index(u) == b.results.index(v)
            and _same_operation(facts.program, a, b)
            and all(map(pair, a.operands, b.operands))
        )

    return found if all(pair(u, v) for u, v in match.outside.items()) else None


def _chained(facts: _Facts, matches: list[_Match]) -> bool:
    """Return True if each block reads of the one before what the next reads of it."""
    for before, after in itertools.pairwise(matches):
        for u, v in after.outside.items():
            if before.results.get(u, u) != v:
                return False
    return True


def _scanned(facts: _Facts) -> Cut:
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


def _find_scan(facts: _Facts) -> tuple[Operation, Loop]:
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


def _stacked_source(facts: _Facts, number: Any) -> int | None:
    """Return the stacked parameter that a scanned array is, cast or as it is."""
    while not isinstance(number, Literal) and number not in facts.leaves:
        maker: Any = facts.program.maker.get(number)
        if maker is None or maker.equation.primitive.name != "convert_element_type":
            return None
        number = maker.operands[0]
    return None if isinstance(number, Literal) else number


def in_stream(cut: Cut, arrays: Sequence[Any], examples: int) -> Any:
    """Return a stream with the example first in each array: one, or a tuple of them.

    Args:
        cut: The cut loss.
        arrays: Its stream, as the trace has it: the leading dim may hold examples
            times tokens, or nothing that the examples have.
        examples: Number of examples.
    """
    found = []
    for array, per_example in zip(arrays, cut.per_example, strict=True):
        if not per_example:
            found.append(jnp.broadcast_to(array, (examples, *array.shape)))
        elif array.ndim and array.shape[0] == examples:
            found.append(array)
        elif array.ndim and array.shape[0] % examples == 0:
            rows = array.shape[0] // examples
            found.append(array.reshape(examples, rows, *array.shape[1:]))
        else:
            raise InputError(
                f"an array of shape {array.shape} flows between the blocks, but the "
                f"batch has {examples} examples here; put the example first",
                key="model.blocks_join_examples",
            )
    return found[0] if len(found) == 1 else tuple(found)


def from_stream(cut: Cut, numbers: Sequence[int], stream: Any) -> list[Any]:
    """Return the arrays of a stream as the trace has them; undoes `in_stream`.

    Args:
        cut: The cut loss.
        numbers: Their numbers in the trace.
        stream: From `in_stream`.
    """
    arrays = stream if isinstance(stream, tuple) else (stream,)
    found = []
    for array, number, per_example in zip(
        arrays, numbers, cut.per_example, strict=True
    ):
        aval = cut.program.avals[number]
        own = array.reshape(aval.shape) if per_example else array[0]
        found.append(own.astype(aval.dtype))
    return found


def known_batch(
    arguments: Arguments, names: Sequence[str], batch: Mapping[str, Any]
) -> Values:
    """Return the arrays of a batch by their numbers."""
    pairs = zip(arguments.batch, names, strict=True)
    return {number: batch[name] for number, name in pairs}
