"""Cut a loss between blocks whose parameters are a list of equal trees.

The operations of block `i` are those that depend on its parameters and on no later
block's. Neighbours are compared operation by operation; what differs from block to
block of their operands is the stream.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal

from meshpar.model.loss.facts import Cut, MakeKey, TraceFacts, Values
from meshpar.model.loss.program import LossProgram, Operation, alike, same_array

Layers = list[list[Operation]]
"""The operations of each block."""


def listed_blocks(facts: TraceFacts) -> Cut:
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
        at
        for at, operation in enumerate(layers[0])
        if facts.leaves.intersection(operation.read)
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
        block = _ListedBlock.find(facts, layers, matches, end)
        if block is not None:
            return block.cut()
    raise facts.refuse(
        "the first block starts from something that no other one does",
        first.first_unmatched or layers[0][0],
        "model.blocks_differ",
    )


def _layer_operations(facts: TraceFacts) -> Layers:
    """Return the operations of each block: those that depend on no later one."""
    level: dict[int, int] = {}
    for layer, leaves in enumerate(facts.arguments.layers):
        level.update(dict.fromkeys(leaves, layer))
    operations: list[list[Operation]] = [[] for _ in facts.arguments.layers]
    for operation in facts.program.operations:
        levels = {level.get(number, -1) for number in operation.read}
        layer = max(levels, default=-1)
        level.update(dict.fromkeys(operation.results, layer))
        if layer < 0:
            continue
        operations[layer].append(operation)
        skipped = levels - {layer, layer - 1, -1}
        if skipped and layer < len(operations) - 1:
            raise facts.refuse(
                f"block {layer} reads what block {min(skipped)} made, past the one "
                "before it; a stream goes from each block to the next",
                operation,
                "model.blocks_skip",
            )
    for layer, inside in enumerate(operations):
        if not inside:
            raise facts.refuse(
                f"the loss does not use the parameters of block {layer}, or only "
                "together with a later one's",
                None,
                "model.blocks_not_used",
            )
    return operations


def _crossing_bytes(facts: TraceFacts, layers: Layers, end: int) -> float:
    """Return the bytes that cross the end of block 0, were it after `end` operations.

    What the operations after it use counts too, as those would be of the next block.
    """
    made = set(itertools.chain(*(operation.results for operation in layers[0][:end])))
    later = itertools.chain(layers[0][end:], *layers[1:])
    used = made.intersection(itertools.chain(*(operation.read for operation in later)))
    avals = (facts.program.avals[number] for number in used)
    return sum(
        math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4) for aval in avals
    )


class _Match:
    """The operations of two neighbouring blocks, compared one by one.

    Attributes:
        length: How many agree, from the first on.
        results: Number in the first block -> its counterpart in the second.
        outside: Number that the second block reads -> what the first reads there.
        shared: Numbers that both blocks read.
        difference: The first difference, in words.
    """

    def __init__(
        self,
        facts: TraceFacts,
        layer: int,
        first: list[Operation],
        second: list[Operation],
    ) -> None:
        self.results: dict[int, int] = {}
        self.outside: dict[int, int] = {}
        self.shared: set[int] = set()
        self.difference = "one has more operations"
        self._facts = facts
        pairs = facts.arguments.layers[layer : layer + 2]
        self._leaves = dict(zip(*pairs, strict=True))
        self._others = set(pairs[1])
        self._first, self._second = first, second
        self.length = 0
        for a, b in zip(first, second, strict=False):
            if not self._agree(a, b):
                break
            self.results.update(zip(a.results, b.results, strict=True))
            self.length += 1

    @property
    def is_whole(self) -> bool:
        """True if both blocks are equal to their ends."""
        return self.length == len(self._first) == len(self._second)

    @property
    def first_unmatched(self) -> Operation | None:
        """The first operation of the second block without a counterpart."""
        return self._second[self.length] if self.length < len(self._second) else None

    def _agree(self, a: Operation, b: Operation) -> bool:
        outside = dict(self.outside)
        if not _same_operation(self._facts.program, a, b):
            names = [operation.equation.primitive.name for operation in (a, b)]
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
        if u == v:
            self.shared.add(v)
        elif _same_value(facts, u, v):
            return True
        return self.outside.setdefault(v, u) == u


def _same_operation(program: LossProgram, a: Operation, b: Operation) -> bool:
    """Return True if two operations do the same to operands of the same shapes."""

    def shapes(operation: Operation) -> list[str]:
        numbers = *operation.read, *operation.results
        return [str(program.avals[number]) for number in numbers]

    x, y = a.equation, b.equation
    return (
        x.primitive is y.primitive
        and shapes(a) == shapes(b)
        and alike(x.params, y.params)
    )


def _same_literal(u: Any, v: Any) -> bool:
    if not (isinstance(u, Literal) and isinstance(v, Literal)):
        return False
    return str(u.aval) == str(v.aval) and same_array(u.val, v.val)


def _same_value(facts: TraceFacts, u: int, v: int) -> bool:
    """Return True if two values from outside the blocks are computed alike.

    Any key is like any other: a block gets keys of its own.
    """
    program = facts.program
    if u in facts.from_blocks or v in facts.from_blocks:
        return False
    if u == v or (facts.is_key(u) and facts.is_key(v)):
        return True
    constants = program.constant(u), program.constant(v)
    if constants[0] is not None or constants[1] is not None:
        return same_array(*constants)
    a, b = program.maker.get(u), program.maker.get(v)
    if a is None or b is None or a.results.index(u) != b.results.index(v):
        return False
    return _same_operation(program, a, b) and all(
        _same_literal(x, y)
        if isinstance(x, Literal) or isinstance(y, Literal)
        else _same_value(facts, x, y)
        for x, y in zip(a.operands, b.operands, strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class _ListedBlock:
    """The operations of one block, with the numbers that they have in the second.

    Args:
        facts: Facts of the trace.
        operations: Of the block: those between its stream and that of the next.
        before: Numbers of the stream before it.
        after: Numbers of the stream after it.
        first: Those before the first block.
        last: Those after the last block.
    """

    facts: TraceFacts
    operations: list[Operation]
    before: tuple[int, ...]
    after: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]

    @classmethod
    def find(
        cls,
        facts: TraceFacts,
        layers: Layers,
        matches: list[_Match],
        end: int,
    ) -> _ListedBlock | None:
        """Return the block that ends after `end` operations; None if there is none."""
        early, late = layers[0][:end], layers[0][end:]
        operations = [*late, *layers[1][:end]]
        made = set(itertools.chain(*(operation.results for operation in early)))
        before = _stream_numbers(facts, operations, matches[0].shared)
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
        keys = _key_numbers(self.facts, self.operations, self.before)

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


def _stream_numbers(
    facts: TraceFacts, operations: list[Operation], shared: set[int]
) -> tuple[int, ...]:
    """Return what a block reads that is neither its own nor computed again inside it.

    Args:
        facts: Facts of the trace.
        operations: Operations of the block.
        shared: Numbers that several blocks read, such as one mask drawn for all.
    """
    return tuple(
        number
        for number in _read_outside(operations)
        if number not in facts.leaves
        and not facts.is_free(number)
        and (number in shared or not facts.is_drawn(number))
        and not facts.is_key(number)
    )


def _read_outside(operations: list[Operation]) -> list[int]:
    made = set(itertools.chain(*(operation.results for operation in operations)))
    read = dict.fromkeys(itertools.chain(*(operation.read for operation in operations)))
    return [number for number in read if number not in made]


def _key_numbers(
    facts: TraceFacts, operations: list[Operation], stream: Sequence[int]
) -> tuple[int, ...]:
    """Return the keys that a block draws from, itself or by what it computes again."""
    keys: dict[int, None] = {}
    todo = [number for number in _read_outside(operations) if number not in stream]
    while todo:
        number = todo.pop(0)
        if facts.is_key(number):
            keys[number] = None
        elif facts.is_drawn(number):
            todo += facts.program.maker[number].read
    return tuple(keys)


def _first_stream(
    facts: TraceFacts, match: _Match, made: set[int], late: list[Operation]
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
    before: dict[int, int] = {}
    makers = {number: operation for operation in late for number in operation.results}

    def pair(u: Any, v: Any) -> bool:
        if isinstance(u, Literal) or isinstance(v, Literal):
            return _same_literal(u, v)
        if v in made:
            return before.setdefault(v, u) == u
        if v not in makers:
            return _same_value(facts, u, v)
        a, b = facts.program.maker.get(u), makers[v]
        return (
            a is not None
            and a.results.index(u) == b.results.index(v)
            and _same_operation(facts.program, a, b)
            and all(map(pair, a.operands, b.operands))
        )

    return before if all(pair(u, v) for v, u in match.outside.items()) else None


def _chained(facts: TraceFacts, matches: list[_Match]) -> bool:
    """Return True if each block reads of the one before what the next reads of it."""
    for before, after in itertools.pairwise(matches):
        for v, u in after.outside.items():
            counterpart = before.results.get(u, u)
            if counterpart != v and not _same_value(facts, counterpart, v):
                return False
    return True
