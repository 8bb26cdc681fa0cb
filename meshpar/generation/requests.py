"""Requests, their checks, and completions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshpar.errors import InputError, whole_number
from meshpar.generation.cache_plan import CachePlan, tokens_below
from meshpar.generation.sampling import Sampling
from meshpar.model.contract import Model


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    Args:
        tokens: The prompt, at least one; what a decoder begins with, where there is a
            source.
        max_tokens: Most tokens to add.
        sampling: How they are chosen.
        stop_tokens: Tokens after which it ends; they are not part of the result.
        stop: Texts before which it ends.
        source: Tokens that an encoder reads, if the model has one.

    Raises:
        InputError: No tokens, or numbers that are none.
    """

    tokens: tuple[int, ...]
    max_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    source: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (
            ("tokens", tuple),
            ("source", tuple),
            ("stop_tokens", frozenset),
        ):
            object.__setattr__(self, name, kind(_whole(name, getattr(self, name))))
        if not self.tokens:
            raise InputError(
                "a prompt has no tokens; give at least one, such as BOS",
                key="generation.empty_prompt",
            )
        whole_number("max_tokens", self.max_tokens)
        are_texts = all(isinstance(text, str) and text for text in self.stop)
        if isinstance(self.stop, str) or not are_texts:
            raise InputError(
                f"stop={self.stop!r}: give a list of texts, none of them empty",
                key="generation.stop_not_texts",
            )

    @property
    def key(self) -> tuple[Any, ...]:
        """Plain values that are equal for equal requests only."""
        return (
            *(self.tokens, self.source, self.max_tokens, self.sampling),
            *(self.stop, sorted(self.stop_tokens)),
        )


def _whole(name: str, tokens: Iterable[Any]) -> list[int]:
    try:
        return [operator.index(token) for token in tokens]
    except TypeError as error:
        raise InputError(
            f"{name}={tokens!r}: give a list of tokens, which are whole numbers",
            key="generation.tokens_not_whole_numbers",
        ) from error


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The generated continuation of one prompt.

    Args:
        prompt: The prompt as given, text or tokens.
        text: The new tokens' text; empty without a tokenizer.
        tokens: The new tokens.
        logprobs: Log-probability of each under the model's own distribution.
        finish: Why it ended: `stop`, or `length`.
    """

    prompt: Any
    text: str
    tokens: list[int]
    logprobs: list[float]
    finish: str


@dataclass
class Running:
    """A request that waits or runs.

    Args:
        number: Its place in the order of requests.
        request: The request.
        decode: Tokens -> text, if there is a tokenizer.
    """

    number: int
    request: Request
    decode: Callable[[Sequence[int]], str] | None = None
    new: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    written: int = 0
    has_read: bool = False
    slot: int = -1
    text: str = ""
    finish: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and new tokens."""
        return [*self.request.tokens, *self.new]

    @property
    def unread(self) -> tuple[int, ...]:
        """The source tokens that an encoder has not read yet."""
        return () if self.has_read else self.request.source

    @property
    def num_unwritten(self) -> int:
        """Tokens that are not in the cache yet: one, while it generates."""
        return self.num_tokens - self.written

    @property
    def is_prompt(self) -> bool:
        """True if more than the newest token has yet to be read."""
        return self.num_unwritten > 1 or bool(self.unread)

    @property
    def num_tokens(self) -> int:
        """Number of prompt and new tokens."""
        return len(self.request.tokens) + len(self.new)

    def add(self, token: int) -> None:
        """Add a token; end the request if it is its last."""
        if token in self.request.stop_tokens:
            self.finish = "stop"
            return
        self.new.append(token)
        if self.decode is not None:
            self.text = self._decoded()
            stops = [self.text.find(x) for x in self.request.stop if x in self.text]
            if stops:
                self.text = self.text[: min(stops)]
                self.finish = "stop"
        if self.finish is None and len(self.new) == self.request.max_tokens:
            self.finish = "length"

    def _decoded(self) -> str:
        """Return the new tokens' text as it follows the prompt's."""
        if self.decode is None:
            return ""
        prompt, whole = self.decode(self.request.tokens), self.decode(self.tokens)
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        return self.decode(self.new)


def check_request(request: Request, model: Model, plan: CachePlan) -> None:
    """Refuse a request that can never have room, or that is another model's.

    Args:
        request: The request.
        model: The model that is to generate.
        plan: Its cache.
    """
    _check_tokens(request.tokens, tokens_below(model))
    _check_tokens(request.source, tokens_below(model, of_source=True))
    _check_source(len(request.source), plan.max_source)
    most = len(request.tokens) + request.max_tokens
    if most > plan.max_seq:
        raise InputError(
            f"a prompt of {len(request.tokens)} tokens and max_tokens="
            f"{request.max_tokens} make {most}, but max_seq={plan.max_seq}; "
            "shorten it, or raise max_seq",
            key="generation.request_too_long",
        )
    pages = -(-most // plan.tokens_per_page)
    if pages > plan.num_pages:
        raise InputError(
            f"{most} tokens need {pages} pages, but a device "
            f"has num_pages={plan.num_pages}; raise it",
            key="generation.too_few_pages",
        )


def _check_source(num: int, most: int) -> None:
    if num and not most:
        raise InputError(
            f"a source of {num} tokens, but the model has no encoder to read it; give "
            "them as tokens=",
            key="generation.source_without_encoder",
        )
    if num > most:
        raise InputError(
            f"a source of {num} tokens, but max_source={most}; shorten it, or raise "
            "max_source",
            key="generation.source_too_long",
        )
    if most and not num:
        raise InputError(
            f"a source of 0 tokens, but the model's encoder reads one of up to "
            f"max_source={most}; give source=",
            key="generation.missing_source",
        )


def _check_tokens(tokens: tuple[int, ...], below: int | None) -> None:
    for token in tokens:
        if token < 0 or (below is not None and token >= below):
            raise InputError(
                f"a prompt has token {token}, but the model's are from 0 to below "
                f"{below or 2**31}; is the tokenizer the model's own?",
                key="generation.token_outside_vocabulary",
            )
