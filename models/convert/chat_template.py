"""A conversation as the text that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshpar import InputError
from meshpar.deadline import OverdueError, deadline
from meshpar.models.convert.stored_chat import DEFAULT, WITH_TOOLS, stored_templates

_REASONING = ("reasoning_content", "thinking", "reasoning")
_MOST_S = 8.0
"""What a template may take; usual ones take a millisecond."""

_ENDLESS = (OverdueError, MemoryError, RecursionError, OverflowError)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    **more: Any,
) -> str:
    """The text of a conversation under a model's chat template, as Transformers has it.

    Args:
        template: Jinja, of `chat_template.jinja`, `tokenizer_config.json` or a GGUF.
        messages: Each with a `role` and a `content`; a key that is None is as if it
            was not there.
        add_generation_prompt: Whether the answer's beginning is added.
        tools: JSON schemas of the functions that may be called.
        documents: What may be cited, each with a `title` and a `text`.
        more: What else the template may ask for, such as `bos_token`.

    Raises:
        InputError: The template refuses the conversation, is no template, or fails; or
            jinja2 is not installed.

    Example:
        >>> template = "{% for one in messages %}<{{ one.role }}>{% endfor %}"
        >>> render_chat(template, [{"role": "user", "content": "Hi"}])
        '<user>'
    """
    try:
        from meshpar.models.convert.chat_environment import MessagesRefused, compiled
    except ModuleNotFoundError as error:
        raise InputError(
            "chat templates need jinja2: pip install 'meshpar[convert]'",
            key="data.missing_package",
        ) from error
    given = {
        **more,
        "messages": [_with_reasoning(_plain(one)) for one in messages],
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        with deadline(_MOST_S):
            program = compiled(template)
    except _ENDLESS as error:
        raise _without_end(error) from error
    except Exception as error:  # Jinja's, and of Python's compiler behind it.
        line = getattr(error, "lineno", None)
        raise InputError(
            f"the chat template is not one that Transformers reads{_of_line(line)}: "
            f"{_one_line(error)}",
            key="data.bad_chat_template",
        ) from error
    try:
        with deadline(_MOST_S):
            return program.render(
                {name: _plain(value) for name, value in given.items()}
            )
    except _ENDLESS as error:
        raise _without_end(error) from error
    except MessagesRefused as error:
        raise InputError(
            f"the chat template refuses the messages: {_one_line(error)}",
            key="data.chat_template_refuses",
        ) from error
    except Exception as error:  # A template is a program of others.
        raise InputError(
            f"the chat template fails: {type(error).__name__}: {_one_line(error)}; "
            "either it asks for what the messages do not have, or it is at fault",
            key="data.chat_template_fails",
        ) from error


def _without_end(error: Exception) -> InputError:
    return InputError(
        f"the chat template does not end: {type(error).__name__} after at most "
        f"{_MOST_S:.0f} s; take another",
        key="data.chat_template_without_end",
    )


def _plain(value: Any) -> Any:
    """Return JSON's kinds of values: a template could call the methods of others."""
    if isinstance(value, np.generic):
        return _plain(value.item())
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, list):
        return [*map(_plain, value)]
    return f"<{type(value).__name__}>"


def _with_reasoning(message: Any) -> Any:
    """Return a message without nulls, its reasoning under the names that are in use."""
    if not isinstance(message, dict):
        return message
    said = {key: value for key, value in message.items() if value is not None}
    reasoning = next((said[name] for name in _REASONING if name in said), None)
    if reasoning is None:
        return said
    return {"thinking": reasoning, **said, "reasoning_content": reasoning}


def _of_line(line: int | None) -> str:
    return "" if line is None else f", line {line}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@dataclass(frozen=True)
class ChatTemplate:
    """A model's own template, and what it calls its special tokens.

    Args:
        text: Jinja.
        tokens: Such as `bos_token` -> its text.
        with_tools: What takes its place where there are tools, if it is another.
    """

    text: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    with_tools: str = ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation, as `render_chat` makes it."""
        return render_chat(
            self.with_tools or self.text if tools is not None else self.text,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            **self.tokens,
        )


def read_template(path: str | Path) -> ChatTemplate:
    """The template of a model's folder or GGUF file.

    Of several it is the one named `default`, and with tools the one named `tool_use`.

    Raises:
        InputError: It has none, or none of that name, or cannot be read.
    """
    texts, tokens = stored_templates(Path(path))
    if not any(texts.values()):
        raise InputError(
            f"{str(path)!r} has no chat template; take a model that was trained on "
            "conversations, or train on text",
            key="data.no_chat_template",
        )
    if not texts.get(DEFAULT):
        raise InputError(
            f"{str(path)!r} has chat templates {', '.join(sorted(texts))}, none of "
            f"which is named {DEFAULT}: write the one to take into "
            "chat_template.jinja",
            key="data.no_default_chat_template",
        )
    return ChatTemplate(texts[DEFAULT], tokens, texts.get(WITH_TOOLS, ""))
