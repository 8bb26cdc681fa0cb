"""What is asked for, and what comes back."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshpar.errors import InputError, whole_number
from meshpar.generation.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Request:
    """Tokens to go on from.

    Args:
        tokens: The prompt, at least one; what a decoder begins with, where there is a
            source.
        max_tokens: Most tokens to add.
        sampling: How they are chosen.
        stop_tokens: Tokens after which it ends; they are not part of the result.
        stop: Texts before which it ends.
        source: What an encoder reads, of a model that has one.

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
        if isinstance(self.stop, str) or not all(map(_is_text, self.stop)):
            raise InputError(
                f"stop={self.stop!r}: give a list of texts, none of them empty",
                key="generation.stop_not_texts",
            )

    @property
    def key(self) -> tuple[Any, ...]:
        """Plain values, alike for two requests alone that are."""
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


def _is_text(one: object) -> bool:
    return isinstance(one, str) and one != ""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What was generated of one request.

    Args:
        prompt: As given, text or tokens.
        text: The new tokens' text; empty without a tokenizer.
        tokens: The new tokens.
        logprobs: The log-probability of each under the model's own distribution.
        finish: Why it ended: `stop`, or `length`.
    """

    prompt: Any
    text: str
    tokens: list[int]
    logprobs: list[float]
    finish: str


@dataclass
class Running:
    """A request on its way.

    Args:
        number: In the order in which requests came.
        request: What was asked for.
        decode: Tokens -> text, where there is a tokenizer.
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
        """Its source, until an encoder has read it."""
        return () if self.has_read else self.request.source

    @property
    def num_unwritten(self) -> int:
        """Tokens that are not in the cache yet: one, while it generates."""
        return self.num_tokens - self.written

    @property
    def is_prompt(self) -> bool:
        """Whether more than the newest token is to be taken in."""
        return self.num_unwritten > 1 or bool(self.unread)

    @property
    def num_tokens(self) -> int:
        """How many those are."""
        return len(self.request.tokens) + len(self.new)

    def add(self, token: int) -> None:
        """One more token; ends the request where that is its last."""
        if token in self.request.stop_tokens:
            self.finish = "stop"
            return
        self.new.append(token)
        if self.decode is not None:
            self._stop_at_text()
        if self.finish is None and len(self.new) == self.request.max_tokens:
            self.finish = "length"

    def _stop_at_text(self) -> None:
        self.text = self._decoded()
        found = [self.text.find(one) for one in self.request.stop if one in self.text]
        if found:
            self.text = self.text[: min(found)]
            self.finish = "stop"

    def _decoded(self) -> str:
        """The new tokens' text, as it follows the prompt's: with its first space."""
        if self.decode is None:
            return ""
        prompt, whole = self.decode(self.request.tokens), self.decode(self.tokens)
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        return self.decode(self.new)
