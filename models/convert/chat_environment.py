"""The Jinja environment of chat templates: what Transformers gives to a template.

Beside Jinja's own it has the tags `generation`, `break` and `continue`, a `tojson` that
escapes nothing, and the functions `raise_exception` and `strftime_now`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class MessagesRefused(TemplateError):
    """Error that a template raises by `raise_exception`."""


class Generation(Extension):
    """`{% generation %}`, around what the assistant says.

    It marks tokens for Transformers; the text is what stands inside. Names that are set
    inside are not known outside.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block as the call of a macro."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """Jinja's, without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *given = args
        named = dict(*given, **values)
        for name in named:
            _check_name(name)
        Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a namespace has no {name!r}: it begins with an underscore"
        )


def format_date(day: date) -> Callable[[str], str]:
    """Return a `strftime_now` for which it is always the midnight that begins a day."""

    def strftime_now(form: str) -> str:
        return day.strftime(form)

    return strftime_now


@functools.lru_cache(maxsize=16)
def compiled(template: str) -> Template:
    """Return a template, ready to render.

    Raises:
        TemplateError: It is no Jinja, or has a tag or a filter that is not there.
    """
    return _environment().from_string(template)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    environment.globals["namespace"] = _Namespace
    return environment


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: Any) -> Any:
    raise MessagesRefused(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)
