"""A conversation as the text that a model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshpar import InputError


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
            "chat templates need jinja2: pip install 'meshpar[convert]'"
        ) from error

    def refuse(message: str) -> Any:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **tokens
        )
    except TemplateError as error:
        raise InputError(f"the chat template refuses the messages: {error}") from error
