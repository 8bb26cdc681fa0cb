"""A conversation as the text that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshpar import InputError
from meshpar.deadline import OverdueError, deadline
from meshpar.foreign_files import read_json_object, read_text

_MOST_S = 8.0
"""What a template may take; usual ones take a millisecond."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    **tokens: str,
) -> str:
    """The text of a conversation under a model's chat template.

    Args:
        template: Jinja, of `chat_template.jinja`, `tokenizer_config.json` or a GGUF.
        messages: Each with a `role` and a `content`.
        add_generation_prompt: Whether the answer's beginning is added.
        tokens: What the template calls `bos_token` and so on.

    Raises:
        InputError: The template refuses the conversation, or jinja2 is not installed.

    Example:
        >>> template = "{% for one in messages %}<{{ one.role }}>{% endfor %}"
        >>> render_chat(template, [{"role": "user", "content": "Hi"}])
        '<user>'
    """
    try:
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError as error:
        raise InputError(
            "chat templates need jinja2: pip install 'meshpar[convert]'",
            key="data.missing_package",
        ) from error

    def refuse(message: str) -> Any:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    try:
        with deadline(_MOST_S):
            return environment.from_string(template).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **tokens
            )
    except (OverdueError, MemoryError, RecursionError, OverflowError) as error:
        raise InputError(
            f"the chat template does not end: {type(error).__name__} after at most "
            f"{_MOST_S:.0f} s; take another",
            key="data.chat_template_without_end",
        ) from error
    except TemplateError as error:
        raise InputError(
            f"the chat template refuses the messages: {error}",
            key="data.chat_template_refuses",
        ) from error


@dataclass(frozen=True)
class ChatTemplate:
    """A model's own template, and what it calls its special tokens.

    Args:
        text: Jinja.
        tokens: Such as `bos_token` -> its text.
    """

    text: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation, as `render_chat` makes it."""
        return render_chat(
            self.text,
            messages,
            add_generation_prompt=add_generation_prompt,
            **self.tokens,
        )


def read_template(path: str | Path) -> ChatTemplate:
    """The template of a model's folder or GGUF file.

    Raises:
        InputError: It has none.
    """
    path = Path(path)
    found = _of_gguf(path) if path.suffix == ".gguf" else _of_folder(path)
    if not found.text:
        raise InputError(
            f"{str(path)!r} has no chat template; take a model that was trained on "
            "conversations, or train on text",
            key="data.no_chat_template",
        )
    return found


def _of_gguf(path: Path) -> ChatTemplate:
    from meshpar.models.convert.gguf_file import GGUFFile

    file = GGUFFile(path)
    words = file.said("tokenizer.ggml.tokens", [])
    numbers = {
        f"{name}_token": file.said(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos")
    }
    tokens = {key: words[at] for key, at in numbers.items() if at is not None}
    return ChatTemplate(file.said("tokenizer.chat_template", ""), tokens)


def _of_folder(path: Path) -> ChatTemplate:
    said: dict[str, Any] = {}
    config, alone = path / "tokenizer_config.json", path / "chat_template.jinja"
    if config.is_file():
        said = read_json_object(
            config,
            key="data.unreadable_tokenizer_config",
            shape_key="data.unreadable_tokenizer_config",
        )
    text = said.get("chat_template") or ""
    if alone.is_file():
        text = read_text(alone, key="data.unreadable_chat_template")
    tokens = {key: said.get(key) for key in ("bos_token", "eos_token")}
    words = {
        key: one["content"] if isinstance(one, dict) else one
        for key, one in tokens.items()
        if one
    }
    return ChatTemplate(text if isinstance(text, str) else "", words)
