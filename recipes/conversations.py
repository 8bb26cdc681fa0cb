"""Conversations as rows to train on: only what the assistant says counts.

A file has a JSON object a line, with `messages`: a list of objects with `role` and
`content`. The text of each is what the model's own chat template makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshpar.data.documents import split_lines
from meshpar.errors import DataError
from meshpar.foreign_files import parse_json, read_text
from meshpar.models.convert.chat_template import ChatTemplate
from meshpar.train.data import HostBatch

_MOST_BYTES = 1 << 30
"""All conversations are in memory."""

Messages = Sequence[Mapping[str, str]]


def read_conversations(path: Path) -> list[Messages]:
    """The conversations of a file, in order.

    Raises:
        DataError: It cannot be read, or a line holds none.
    """
    text = read_text(path, key="data.unreadable_file", most=_MOST_BYTES, kind=DataError)
    lines = split_lines(text)
    found = [
        _messages(line, f"{str(path)!r}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if len(found) < 2:
        raise DataError(
            f"{str(path)!r} has {len(found)} conversations; give 2 or more, of which "
            "some are held out",
            key="data.too_few_conversations",
        )
    return found


@dataclass(frozen=True)
class ConversationRows:
    """A row for each conversation, cut or filled to `seq` tokens.

    Args:
        conversations: Their messages.
        template: Of the model.
        encode: Text -> tokens, without special ones around them.
        seq: Tokens of a row.
    """

    conversations: Sequence[Messages]
    template: ChatTemplate
    encode: Any
    seq: int

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> HostBatch:
        """Tokens, successors and weights, (seq,) each."""
        tokens, said = self._tokens(self.conversations[int(index)])
        tokens, said = tokens[: self.seq + 1], said[: self.seq + 1]
        missing = (0, self.seq + 1 - len(tokens))
        padded = np.pad(np.array(tokens, np.int32), missing)
        counts = np.pad(np.array(said, np.float32), missing)
        return {"tokens": padded[:-1], "targets": padded[1:], "weights": counts[1:]}

    def kept(self, index: int) -> Kept:
        """How much of a conversation's answers its row holds."""
        _, said = self._tokens(self.conversations[int(index)])
        return Kept(said=sum(said), kept=sum(said[1 : self.seq + 1]))

    def _tokens(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """All tokens, and which of them the assistant says."""
        tokens = self.encode(self._text(messages, asks=False))
        said = [False] * len(tokens)
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.encode(self._text(messages[:at], asks=True))
            until = self.encode(self._text(messages[: at + 1], asks=False))
            if tokens[: len(before)] != before or tokens[: len(until)] != until:
                raise DataError(
                    f"message {at} of {messages[:1]}: the chat template changes "
                    "earlier text when a message is added, so the assistant's words "
                    "cannot be located; give rows of text instead",
                    key="data.chat_template_changes_text",
                )
            said[len(before) : len(until)] = [True] * (len(until) - len(before))
        return tokens, said

    def _text(self, messages: Messages, *, asks: bool) -> str:
        return self.template.render(messages, add_generation_prompt=asks)


class Kept(NamedTuple):
    """Tokens of answers: of one conversation, or of several.

    Args:
        said: In the conversation.
        kept: In its row, where they count.
    """

    said: int
    kept: int


def check_answers(rows: ConversationRows, what: str, first: int | None = None) -> str:
    """Count the answers that a row is too short for.

    Args:
        rows: All conversations of a kind.
        what: Their kind, for messages: `to train on`, `held out`.
        first: So many of them are looked at; all when absent.

    Returns:
        A line that says how many tokens are cut; empty where none is.

    Raises:
        DataError: No token of an answer is left.
    """
    number = len(rows) if first is None else min(first, len(rows))
    found = [rows.kept(index) for index in range(number)]
    said, kept = (sum(counts) for counts in zip(*found, strict=True))
    cut = sum(one.kept < one.said for one in found)
    lost = sum(not one.kept for one in found)
    if not kept:
        raise DataError(
            f"the {number} conversations {what} have no token of an answer within "
            f"--seq {rows.seq}, of {said}: nothing can be learned of them; give a "
            "longer --seq",
            key="data.no_answer_kept",
        )
    if not cut:
        return ""
    return (
        f"{cut} of {number} conversations {what} are longer than --seq {rows.seq}: "
        f"{said - kept} of {said} tokens of answers are cut, and {lost} conversations "
        "count for nothing"
    )


def _messages(line: str, where: str) -> Messages:
    try:
        found = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where}: no JSON: {error}", key="data.not_json") from error
    messages = found.get("messages") if isinstance(found, dict) else None
    if not (isinstance(messages, list) and messages and all(map(_is_one, messages))):
        raise DataError(
            f"{where}: no 'messages', a list of objects with 'role' and 'content'",
            key="data.no_messages",
        )
    for one in messages:
        try:
            one["content"].encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: character {error.start} of a message's content is half a "
                "surrogate pair, which is no text; leave the line out",
                key="data.unpaired_surrogate",
            ) from error
    if not any(one["role"] == "assistant" for one in messages):
        raise DataError(
            f"{where}: the assistant says nothing; leave the line out",
            key="data.no_assistant",
        )
    return messages


def _is_one(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )
