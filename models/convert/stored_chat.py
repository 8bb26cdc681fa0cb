"""The chat templates and special tokens that a model's folder or GGUF file holds."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from meshpar import InputError
from meshpar.foreign_files import read_json_object, read_text
from meshpar.models.convert.gguf_file import GGUFFile

_T, _D = TypeVar("_T"), TypeVar("_D")

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of templates, where a model has several."""
MORE_TEMPLATES = "additional_chat_templates"
"""A folder in a model's, with the templates that are not the default."""

_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_NEEDED_TOKENS = ("bos", "eos")
"""Tokens that begin and end texts; others that a vocabulary lacks are left out."""
_GGUF_NAMES = {"unk": "unknown", "sep": "seperator", "pad": "padding"}
"""GGUF's names of some special tokens; `seperator` is misspelt there."""

# Class -> the tokens that it has where a config does not speak of them.
_OF_CLASSES: Mapping[str, Mapping[str, str]] = {
    "GPT2Tokenizer": dict.fromkeys(
        ("bos_token", "eos_token", "unk_token"), "<|endoftext|>"
    ),
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(
        ("eos_token", "unk_token", "pad_token"), "<|endoftext|>"
    ),
    "GemmaTokenizer": {
        f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad", "mask")
    },
    "T5Tokenizer": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}


def stored_templates(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the templates of a model's folder or GGUF file, and its special tokens.

    Returns:
        Name -> Jinja, where the only one is named `default`; and such as `bos_token` ->
        its text.

    Raises:
        InputError: It cannot be read, or its beginning or end of a text is a token
            that its vocabulary lacks.
    """
    return _gguf_templates(path) if path.suffix == ".gguf" else _folder_templates(path)


def _gguf_templates(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    file = GGUFFile(path)
    vocabulary = _typed_value(file, "tokenizer.ggml.tokens", list, [])
    tokens = {}
    for name in _TOKENS:
        key = f"tokenizer.ggml.{_GGUF_NAMES.get(name, name)}_token_id"
        at = _typed_value(file, key, int, None)
        if at is None:
            continue
        if 0 <= at < len(vocabulary):
            tokens[f"{name}_token"] = vocabulary[at]
        elif name in _NEEDED_TOKENS:
            raise InputError(
                f"{str(path)!r} has {key}={at}, of {len(vocabulary)} tokens",
                key="data.token_out_of_range",
            )
    start = "tokenizer.chat_template"
    texts = {
        key.removeprefix(f"{start}."): _typed_value(file, key, str, "")
        for key in file.keys
        if key.startswith(f"{start}.")
    }
    return {**texts, DEFAULT: _typed_value(file, start, str, "")}, tokens


def _typed_value(file: GGUFFile, key: str, kind: type[_T], default: _D) -> _T | _D:
    """Return the value of a key, of a type that it has to have."""
    value = file.metadata(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, kind):
        raise InputError(
            f"{file.where!r} has {key}={reprlib.repr(value)}; it must be of type "
            f"{kind.__name__}",
            key="weights.unsupported_gguf_value",
        )
    return value


def _folder_templates(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    config = _object(path / "tokenizer_config.json")
    texts = _templates_by_name(
        config.get("chat_template"), path / "tokenizer_config.json"
    )
    alone = {DEFAULT: path / "chat_template.jinja"}
    for file in sorted((path / MORE_TEMPLATES).glob("*.jinja")):
        alone[file.stem] = file
    read = {name: _text(file) for name, file in alone.items() if file.is_file()}
    # Files of their own take the place of all that the config has.
    return read or texts, _special_tokens(config, path)


def _templates_by_name(stored: Any, file: Path) -> dict[str, str]:
    """Return a config's templates by name: one, a list of them, or an object."""
    if stored is None or isinstance(stored, str):
        return {DEFAULT: stored or ""}
    if isinstance(stored, list):
        named = [one if isinstance(one, dict) else {} for one in stored]
        pairs = [(one.get("name"), one.get("template")) for one in named]
    else:
        pairs = list(stored.items()) if isinstance(stored, dict) else [(None, None)]
    texts = {
        name: text
        for name, text in pairs
        if isinstance(name, str) and isinstance(text, str)
    }
    if len(texts) < len(pairs):
        raise InputError(
            f"{str(file)!r}: chat_template must be a text, or a list of objects with "
            "name and template",
            key="data.bad_chat_template",
        )
    return texts


def _special_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    kind = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    stored = {**_OF_CLASSES.get(kind, {}), **config}
    if "added_tokens_decoder" not in config:
        stored |= _object(folder / "special_tokens_map.json")
    for named in ("extra_special_tokens", "model_specific_special_tokens"):
        more = stored.get(named)
        if isinstance(more, dict):
            stored |= more
    tokens = {}
    for name, value in stored.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _object(file: Path) -> dict[str, Any]:
    """Return the object of a JSON file; empty where there is none."""
    if not file.is_file():
        return {}
    key = "data.unreadable_tokenizer_config"
    return read_json_object(file, key=key, shape_key=key)


def _text(file: Path) -> str:
    return read_text(file, key="data.unreadable_chat_template")
