"""Continuous batching: requests join and leave between any two tokens.

A slot of the batch is given to the next request as soon as another ends (Yu et al.
2022, "Orca", section 3). Prompts are read in chunks; a request whose next token finds
no free page waits, and starts again from its own tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from meshpar.errors import InputError, renamed
from meshpar.generation.agreement import Agreement, digest
from meshpar.generation.cache_plan import CachePlan
from meshpar.generation.paged_cache import Rows, Source
from meshpar.generation.programs import Programs
from meshpar.generation.requests import Request, Running, check_request
from meshpar.generation.sampling import Draws, Sampling


@dataclass
class PageBook:
    """The host's record of free pages, for the devices that share a part of the batch.

    Args:
        num_pages: Number of pages.
        tokens_per_page: Tokens of an example in a page, over all its devices.

    Example:
        >>> book = PageBook(num_pages=4, tokens_per_page=16)
        >>> book.grow([], 17)
        [0, 1]
        >>> book.num_free
        2
    """

    num_pages: int
    tokens_per_page: int
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_pages))[::-1]

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Return the number of pages for so many tokens of one example."""
        return -(-tokens // self.tokens_per_page)

    def fits(self, held: list[int], tokens: int) -> bool:
        """Return True if an example that holds pages can grow to so many tokens."""
        return self.needed(tokens) - len(held) <= self.num_free

    def grow(self, held: list[int], tokens: int) -> list[int]:
        """Return the pages of an example that grows to so many tokens.

        Raises:
            InputError: Too few pages are free.
        """
        if not self.fits(held, tokens):
            raise InputError(
                f"{tokens} tokens need {self.needed(tokens)} pages, but only "
                f"{self.num_free} of {self.num_pages} are free beside the "
                f"{len(held)} held",
                key="generation.no_free_pages",
            )
        more = self.needed(tokens) - len(held)
        return held + [self._free.pop() for _ in range(max(0, more))]

    def release(self, held: list[int]) -> None:
        """Free an example's pages."""
        self._free.extend(reversed(held))


_LEAST_CHUNK = 16


def given_rows(
    plan: CachePlan, running: Sequence[Running | None], num_tokens: int
) -> tuple[np.ndarray, Rows]:
    """Return a program's arrays: new tokens, (rows, num_tokens) int32, and the rows.

    Args:
        plan: The cache.
        running: The request of each row, or None.
        num_tokens: Most new tokens of a row.
    """
    tokens = np.zeros((len(running), num_tokens), np.int32)
    tables = np.zeros((len(running), plan.table_pages), np.int32)
    slots, starts, counts = np.zeros((3, len(running)), np.int32)
    of_shard = plan.slots // plan.layout.batch_shards
    for at, one in enumerate(running):
        if one is None:
            continue
        count = min(num_tokens, one.num_unwritten)
        starts[at], counts[at], slots[at] = one.written, count, one.slot % of_shard
        tokens[at, :count] = one.tokens[one.written : one.written + count]
        tables[at, : len(one.pages)] = one.pages
    source = source_rows(plan, running) if plan.max_source else None
    return tokens, Rows(tables, slots, starts, counts, source)


def source_rows(plan: CachePlan, running: Sequence[Running | None]) -> Source:
    """Return the source tokens that encoders have not read yet."""
    unread = [() if one is None else one.unread for one in running]
    longest = max(map(len, unread))
    width = min(rounded(longest), plan.max_source) if longest else 0
    tokens = np.zeros((len(running), width), np.int32)
    for row, new in zip(tokens, unread, strict=True):
        row[: len(new)] = new
    lengths = [0 if one is None else len(one.request.source) for one in running]
    counts = np.array(list(map(len, unread)), np.int32)
    return Source(tokens, counts, np.array(lengths, np.int32))


def rounded(num_tokens: int) -> int:
    """Round up to one of a few sizes, so that few programs are compiled.

    Example:
        >>> rounded(1), rounded(2), rounded(17)
        (1, 16, 32)
    """
    if num_tokens == 1:
        return 1
    size = _LEAST_CHUNK
    while size < num_tokens:
        size *= 2
    return size


_IDLE = Sampling()


@dataclass(frozen=True)
class Token:
    """A new token of a request.

    Args:
        request: The request's number, from `Engine.submit`.
        token: The token; -1 if the request ended without another.
        logprob: Its log-probability.
        finish: Why the request ended; None while it goes on.
    """

    request: int
    token: int
    logprob: float
    finish: str | None


class Engine:
    """Requests that share a model, its parameters and one cache.

    Args:
        programs: The model under a layout.
        params: Placed as `programs.parameter_shardings` says.
        state: The model's own state, placed alike.
        decode: Tokens -> text, for texts to stop at.
        keep_logits: True to keep the logits that each token was drawn from.

    Attributes:
        logits: Number of a request -> fp32 (vocab,) of each new token, if kept.
    """

    def __init__(
        self,
        programs: Programs,
        params: Any,
        state: Any,
        decode: Callable[[Sequence[int]], str] | None = None,
        keep_logits: bool = False,
    ) -> None:
        self.programs, self._decode = programs, decode
        self._keep_logits = keep_logits
        self.logits: dict[int, list[np.ndarray]] = {}
        self._params, self._state = params, state
        plan, layout = programs.plan, programs.plan.layout
        shards = layout.batch_shards
        self._slots_of_shard = plan.slots // shards
        self._books = [
            PageBook(plan.num_pages, plan.tokens_per_page) for _ in range(shards)
        ]
        self._waiting: deque[Running] = deque()
        self._running: dict[int, Running] = {}
        self._texts: dict[int, str] = {}
        self._count = 0
        self._submitted, self._agreement = 0, Agreement(programs.mesh)
        with jax.set_mesh(programs.mesh):
            self._pools = programs.empty_pools()

    def submit(self, request: Request) -> int:
        """Queue a request until there is room; return its number.

        Raises:
            InputError: It can never have room.
        """
        check_request(request, self.programs.placement.model, self.programs.plan)
        running = Running(self._count, request, self._decode)
        self._count += 1
        self._submitted = digest(self._submitted, *request.key)
        self._waiting.append(running)
        return running.number

    def text(self, number: int) -> str:
        """Return the text of a request's new tokens so far; empty without tokenizer."""
        return self._texts.get(number, "")

    text_of = renamed("Engine.text_of", text)

    def forget(self, number: int) -> None:
        """Drop the text and logits of a request that ended; a server has many.

        Raises:
            InputError: It has not ended.
        """
        going_on = (*self._waiting, *self._running.values())
        if number in (one.number for one in going_on):
            raise InputError(
                f"request {number} has not ended; forget it after its last token",
                key="generation.unfinished_request",
            )
        self._texts.pop(number, None)
        self.logits.pop(number, None)

    def update(self, params: Any, state: Any = None) -> None:
        """Take other parameters from the next token on; rebuild the cache with them."""
        self._params = params
        self._state = self._state if state is None else state
        for running in sorted(self._running.values(), key=_age, reverse=True):
            self._put_back(running)

    def run(self) -> Iterator[Token]:
        """Yield new tokens, as they come, until no request is left."""
        self._agree()
        while self._waiting or self._running:
            yield from self.step()
        self._agree()  # Another process, with some left, would wait for this one.

    def step(self) -> list[Token]:
        """Run one program, for a chunk of prompts or one token each; return new tokens.

        Raises:
            InputError: The model's logits are NaN, or another process of the mesh has
                other requests.
        """
        self._agree()
        self._admit()
        prompts = [one for one in self._running.values() if one.is_prompt]
        return self._prefill(prompts) if prompts else self._decode_all()

    def _agree(self) -> None:
        """Check that all processes run the same requests."""
        if not self._agreement.is_shared:
            return
        running = [(one.number, one.num_tokens) for one in self._running.values()]
        self._agreement.check(digest(self._submitted, running, len(self._waiting)))

    def _admit(self) -> None:
        while self._waiting:
            slot = self._free_slot(self._waiting[0])
            if slot is None:
                return
            running = self._waiting.popleft()
            running.slot = slot
            running.pages = self._book(slot).grow([], running.num_tokens)
            self._running[slot] = running

    def _free_slot(self, running: Running) -> int | None:
        """Return a free slot where most pages are left; None if none fits."""
        free = [
            slot
            for slot in range(self.programs.plan.slots)
            if slot not in self._running
            and self._book(slot).fits([], running.num_tokens + 1)
        ]
        return max(free, key=lambda slot: self._book(slot).num_free, default=None)

    def _book(self, slot: int) -> PageBook:
        return self._books[slot // self._slots_of_shard]

    def _prefill(self, prompts: list[Running]) -> list[Token]:
        """Run one prefill of the oldest prompts of each shard.

        Others whose next chunk has the same padded length join them.
        """
        least = self.programs.num_prefill_rows // len(self._books)
        of_shards = [
            sorted((one for one in prompts if self._book(one.slot) is book), key=_age)
            for book in self._books
        ]
        width = max(self._width(one) for own in of_shards for one in own[:least])
        taken = [
            own[:least] + [one for one in own[least:] if self._width(one) == width]
            for own in of_shards
        ]
        count = self.programs.prefill_rows(width, max(map(len, taken)))
        rows: list[Running | None] = []
        for own in taken:
            rows += [*own[:count], *(None for _ in range(count - len(own)))]
        longest = max(one.num_unwritten for one in rows if one is not None)
        return self._advance(rows, min(self.programs.plan.chunk, rounded(longest)))

    def _width(self, running: Running) -> int:
        """Return the tokens of a prompt's next row, padded, or those of its source."""
        own = min(self.programs.plan.chunk, rounded(running.num_unwritten))
        return max(own, rounded(len(running.unread))) if running.unread else own

    def _decode_all(self) -> list[Token]:
        for running in sorted(self._running.values(), key=_age):
            self._make_room(running)
        slots = range(self.programs.plan.slots)
        if not self._running:
            return []
        return self._advance([self._running.get(slot) for slot in slots], 1)

    def _make_room(self, running: Running) -> None:
        """Grow a request's pages for its next token; the youngest requests give way."""
        if running.slot < 0:
            return
        book = self._book(running.slot)
        while not book.fits(running.pages, running.num_tokens):
            sharing = (
                one for one in self._running.values() if self._book(one.slot) is book
            )
            youngest = max(sharing, key=_age)
            self._put_back(youngest)
            if youngest is running:
                return
        running.pages = book.grow(running.pages, running.num_tokens)

    def _put_back(self, running: Running) -> None:
        self._leave(running)
        running.written, running.has_read = 0, False
        self._waiting.appendleft(running)

    def _leave(self, running: Running) -> None:
        self._book(running.slot).release(running.pages)
        del self._running[running.slot]
        running.slot, running.pages = -1, []

    def _advance(self, rows: list[Running | None], num_tokens: int) -> list[Token]:
        given = [_IDLE if one is None else one.request.sampling for one in rows]
        programs = self.programs
        tokens, of_rows = given_rows(programs.plan, rows, num_tokens)
        with jax.set_mesh(programs.mesh):
            program = programs.advance(
                random=any(one.temperature > 0 for one in given),
                truncated=any(one.temperature > 0 and one.truncates for one in given),
                with_logits=self._keep_logits,
            )
            *found, self._pools = program(
                *(self._params, self._state, self._pools, tokens, of_rows),
                Draws.from_rows(given),
            )
        return list(self._record(rows, of_rows.counts, *map(np.asarray, found)))

    def _record(
        self,
        rows: Iterable[Running | None],
        counts: Any,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        logits: Any = None,
    ) -> Iterator[Token]:
        bad: Running | None = None
        for at, (running, count, token, logprob) in enumerate(
            zip(rows, counts, tokens.tolist(), logprobs.tolist(), strict=True)
        ):
            if running is None:
                continue
            running.written, running.has_read = running.written + int(count), True
            if running.num_unwritten:
                continue
            if not np.isfinite(logprob):
                running.finish = "error"
                self._leave(running)
                bad = bad or running
                continue
            if logits is not None:
                self.logits.setdefault(running.number, []).append(logits[at])
            yield self._add(running, token, logprob)
        if bad is not None:
            raise InputError(
                f"the model's logits are NaN or infinite after token {bad.num_tokens} "
                f"of request {bad.number}, which ends; are its parameters those of "
                "the model?",
                key="generation.nonfinite_logits",
            )

    def _add(self, running: Running, token: int, logprob: float) -> Token:
        num_before = len(running.new)
        running.add(token)
        self._texts[running.number] = running.text
        if running.finish is not None:
            self._leave(running)
        shown = token if len(running.new) > num_before else -1
        return Token(running.number, shown, logprob, running.finish)


def _age(running: Running) -> int:
    return running.number
