"""A conversation as the text that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from meshpar import InputError
from meshpar.errors import install_extra
from meshpar.foreign_files import OverdueError, deadline
from meshpar.models.convert.stored_chat import DEFAULT, WITH_TOOLS, stored_templates

_REASONING = ("reasoning_content", "thinking", "reasoning")
_MOST_S = 8.0
"""Time limit of a template, in seconds; usual ones take a millisecond."""

_ENDLESS = (OverdueError, MemoryError, RecursionError, OverflowError)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    today: date | None = None,
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
        today: The day of `strftime_now`; the clock's when absent.
        more: What else the template may ask for, such as `bos_token`.

    Raises:
        InputError: The template refuses the conversation, is no template, or fails; a
            value is not one of JSON's kinds; or jinja2 is not installed.

    Example:
        >>> template = "{% for one in messages %}<{{ one.role }}>{% endfor %}"
        >>> render_chat(template, [{"role": "user", "content": "Hi"}])
        '<user>'
    """
    environment = _environment()
    given = {
        **more,
        "messages": [*messages],
        "tools": tools,
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }
    values = {name: _plain(value, name) for name, value in given.items()}
    values["messages"] = [_with_reasoning(one) for one in values["messages"]]
    if today is not None:
        values["strftime_now"] = environment.format_date(today)
    return _rendered(environment, _compiled(environment, template), values)


def _environment() -> ModuleType:
    """Return the module of Transformers' Jinja environment."""
    try:
        from meshpar.models.convert import chat_environment
    except ModuleNotFoundError as error:
        raise InputError(
            f"chat templates need jinja2: {install_extra('convert')}",
            key="data.missing_package",
        ) from error
    return chat_environment


def _compiled(environment: ModuleType, template: str) -> Any:
    """Return the program of a template, whose `render` takes its values."""
    try:
        with deadline(_MOST_S):
            return environment.compiled(template)
    except _ENDLESS as error:
        raise _without_end(error) from error
    except Exception as error:  # Jinja's, and of Python's compiler behind it.
        line = getattr(error, "lineno", None)
        raise InputError(
            f"the chat template is not one that Transformers reads{_at_line(line)}: "
            f"{_one_line(error)}",
            key="data.bad_chat_template",
        ) from error


def _rendered(environment: ModuleType, program: Any, values: Mapping[str, Any]) -> str:
    try:
        with deadline(_MOST_S):
            return program.render(values)
    except _ENDLESS as error:
        raise _without_end(error) from error
    except environment.MessagesRefused as error:
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


def _plain(value: Any, where: str) -> Any:
    """Return a value as JSON's kinds: a template could call the methods of others.

    Args:
        value: Arrays become lists, and subclasses of text and numbers lose their class.
        where: Its place in the conversation, for error messages.

    Raises:
        InputError: It holds something of another kind.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # Of an Enum, its value and not its name.
    if isinstance(value, np.bool_):
        return bool(value)
    for kind, scalar in ((int, np.integer), (float, np.floating)):
        if isinstance(value, (kind, scalar)):
            return kind(value)
    if isinstance(value, Mapping):
        return {
            _plain(key, f"a key of {where}"): _plain(one, f"{where}[{key!r}]")
            for key, one in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = (_plain(one, f"{where}[{at}]") for at, one in enumerate(value))
        return tuple(items) if isinstance(value, tuple) else [*items]
    if hasattr(type(value), "__array__") and not isinstance(value, np.generic):
        return _plain(np.asarray(value).tolist(), where)
    raise InputError(
        f"{where} is of type {type(value).__name__}, which no chat template reads: "
        "give text, numbers, lists or dicts",
        key="data.unknown_chat_value",
    )


def _with_reasoning(message: Any) -> Any:
    """Return a message without nulls, its reasoning under the names that are in use."""
    if not isinstance(message, dict):
        return message
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[name] for name in _REASONING if name in kept), None)
    if reasoning is None:
        return kept
    return {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _at_line(line: int | None) -> str:
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
        today: The day of `strftime_now`; the clock's when absent. Rows to train on
            need one: else a run over midnight trains on other tokens.
    """

    text: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    with_tools: str = ""
    today: date | None = None

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
            today=self.today,
            **self.tokens,
        )


def read_template(path: str | Path) -> ChatTemplate:
    """The template of a model's folder or GGUF file.

    Of several it is the one named `default`, and with tools the one named `tool_use`.

    Raises:
        InputError: It has none, or none of that name, or cannot be read.
    """
    path = Path(path)
    texts, tokens = stored_templates(path)
    names = sorted(name for name, text in texts.items() if text)
    if not names:
        raise InputError(
            f"{str(path)!r} has no chat template; take a model that was trained on "
            "conversations, or train on text",
            key="data.no_chat_template",
        )
    if DEFAULT not in names:
        wanted = "write the one to take into its chat_template.jinja"
        if path.suffix == ".gguf":
            wanted = f"take the folder of its model, and {wanted}"
        raise InputError(
            f"{str(path)!r} has no chat template named {DEFAULT}, but "
            f"{', '.join(names)}: {wanted}",
            key="data.no_default_chat_template",
        )
    return ChatTemplate(texts[DEFAULT], tokens, texts.get(WITH_TOOLS, ""))
