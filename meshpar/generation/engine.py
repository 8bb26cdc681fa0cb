"""Continuous batching: requests join and leave between any two tokens.

A slot of the batch is given to the next request as soon as another ends (Yu et al.
2022, "Orca", section 3). Prompts are taken in chunks; a request whose next token finds
no page left waits, and begins anew from its own tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshpar.errors import InputError
from meshpar.generation.agreement import Agreement, digest
from meshpar.generation.given_rows import given_rows, rounded
from meshpar.generation.pages import PageBook
from meshpar.generation.programs import Programs
from meshpar.generation.request_checks import check_request
from meshpar.generation.requests import Request, Running
from meshpar.generation.sampling import Draws, Sampling

_IDLE = Sampling()


@dataclass(frozen=True)
class Token:
    """A new token of a request.

    Args:
        request: Its number, in the order of `Engine.submit`.
        token: The token; -1 where the request ended without another.
        logprob: Its log-probability.
        finish: Why the request ended with it; None while it goes on.
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
        keep_logits: Whether to keep the logits that each token was drawn from.

    Attributes:
        logits: Number of a request -> fp32 (vocab,) of each new token, where kept.
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
        tokens_per_page = plan.page_size * layout.context
        self._books = [PageBook(plan.num_pages, tokens_per_page) for _ in range(shards)]
        self._waiting: deque[Running] = deque()
        self._running: dict[int, Running] = {}
        self._texts: dict[int, str] = {}
        self._count = 0
        self._submitted, self._agreement = 0, Agreement(programs.mesh)
        with jax.set_mesh(programs.mesh):
            self._pools = programs.empty_pools()

    def submit(self, request: Request) -> int:
        """The request's number; it begins when there is room.

        Raises:
            InputError: It can never have room.
        """
        model, plan = self.programs.placement.model, self.programs.plan
        check_request(request, model, plan, self._books[0])
        running = Running(self._count, request, self._decode)
        self._count += 1
        self._submitted = digest(self._submitted, *request.key)
        self._waiting.append(running)
        return running.number

    def text_of(self, number: int) -> str:
        """The text of a request's new tokens so far, without a tokenizer empty."""
        return self._texts.get(number, "")

    def forget(self, number: int) -> None:
        """Lets go of the text and logits of a request that ended; a server has many.

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
        """Other parameters from the next token on; what was kept is made anew."""
        self._params = params
        self._state = self._state if state is None else state
        for running in sorted(self._running.values(), key=_age, reverse=True):
            self._put_back(running)

    def run(self) -> Iterator[Token]:
        """New tokens, as they come, until no request is left."""
        self._agree()
        while self._waiting or self._running:
            yield from self.step()
        self._agree()  # Another process, with some left, would wait for this one.

    def step(self) -> list[Token]:
        """The tokens of one program: a chunk of prompts if there are, or one of each.

        Raises:
            InputError: The model's logits are NaN, or another process of the mesh has
                other requests.
        """
        self._agree()
        self._admit()
        prompts = [one for one in self._running.values() if one.is_prompt]
        return self._prefill(prompts) if prompts else self._decode_all()

    def _agree(self) -> None:
        """Refuses to go on where another process is at something else."""
        if not self._agreement.is_shared:
            return
        known = [(one.number, one.num_tokens) for one in self._running.values()]
        self._agreement.check(digest(self._submitted, known, len(self._waiting)))

    def _admit(self) -> None:
        while self._waiting:
            found = self._room(self._waiting[0])
            if found is None:
                return
            running = self._waiting.popleft()
            running.slot = found
            running.pages = self._book(found).grow([], running.num_tokens)
            self._running[found] = running

    def _room(self, running: Running) -> int | None:
        """A free slot on the devices that have most pages left; None if none fits."""
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
        num = self.programs.rows_of_prefill
        of_shard = num // len(self._books)
        rows: list[Running | None] = [None] * num
        for shard, book in enumerate(self._books):
            own = [one for one in prompts if self._book(one.slot) is book]
            for at, running in enumerate(sorted(own, key=_age)[:of_shard]):
                rows[shard * of_shard + at] = running
        longest = max(one.num_unwritten for one in rows if one is not None)
        return self._advance(rows, min(self.programs.plan.chunk, rounded(longest)))

    def _decode_all(self) -> list[Token]:
        for running in sorted(self._running.values(), key=_age):
            self._make_room(running)
        slots = range(self.programs.plan.slots)
        if not self._running:
            return []
        return self._advance([self._running.get(slot) for slot in slots], 1)

    def _make_room(self, running: Running) -> None:
        """Pages for the token that is to be written, the youngest giving way."""
        if running.slot < 0:
            return
        book = self._book(running.slot)
        while not book.fits(running.pages, running.num_tokens):
            beside = (
                one for one in self._running.values() if self._book(one.slot) is book
            )
            youngest = max(beside, key=_age)
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
                self._params, self._state, self._pools, tokens, of_rows, Draws.of(given)
            )
        return list(self._taken(rows, of_rows.counts, *map(np.asarray, found)))

    def _taken(
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
            yield self._added(running, token, logprob)
        if bad is not None:
            raise InputError(
                f"the model's logits are NaN or infinite after token {bad.num_tokens} "
                f"of request {bad.number}, which ends; are its parameters those of "
                "the model?",
                key="generation.nonfinite_logits",
            )

    def _added(self, running: Running, token: int, logprob: float) -> Token:
        known = len(running.new)
        running.add(token)
        self._texts[running.number] = running.text
        if running.finish is not None:
            self._leave(running)
        shown = token if len(running.new) > known else -1
        return Token(running.number, shown, logprob, running.finish)


def _age(running: Running) -> int:
    return running.number
