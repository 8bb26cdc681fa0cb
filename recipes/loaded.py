"""A trained model by the name of its files: a run's folder, safetensors, or GGUF."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshpar import InputError, Model
from meshpar.models.convert.stored_config import config_of_sizes
from meshpar.models.convert.weights import read_weights
from meshpar.models.presets import build_config

_TOKENIZER = "tokenizer.json"


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> Any:
        """Tokens, or what has them as `ids`."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text."""


class Bytes:
    """A token for every byte, as `meshpar train` has it without a tokenizer.

    Example:
        >>> Bytes().decode(Bytes().encode("to be"))
        'to be'
    """

    def encode(self, text: str) -> list[int]:
        """Its bytes."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Bytes that are no text become a replacement character."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model and its values, none of them read yet.

    Args:
        model: It.
        params: Tree of what parts can be read of.
        model_state: The same of what is no parameter.
        tokenizer: Its own.
        stop_tokens: Tokens that end a text.
    """

    model: Model
    params: Any
    model_state: Any
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...] = ()


def load(
    path: str | Path, *, step: int | None = None, tokenizer: str | Path | None = None
) -> Loaded:
    """What is in a folder or a file.

    Args:
        path: The folder of a run, of its checkpoints or of one of them; a folder with
            `config.json` and safetensors; or a `.gguf` file.
        step: Which checkpoint; the newest when absent.
        tokenizer: A `tokenizer.json` in place of the model's own.

    Raises:
        InputError: It is none of these, or something is missing in it.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"no {str(path)!r}; name a run's folder, or a model's")
    own = None if tokenizer is None else read_tokenizer(Path(tokenizer))
    if path.suffix == ".gguf" or (path / "config.json").is_file():
        if step is not None:
            raise InputError(f"{str(path)!r} is no checkpoint: leave step={step} out")
        weights = read_weights(path)
        return Loaded(
            model=weights.model,
            params=weights.params,
            model_state=weights.model_state,
            tokenizer=own or _their_tokenizer(path),
            stop_tokens=_stop_tokens(path),
        )
    return _checkpoint(path, step, own)


def read_tokenizer(path: Path) -> Tokenizer:
    """A file of the `tokenizers` package.

    Raises:
        InputError: It is not there, or is none, or the package is not installed.
    """
    if not path.is_file():
        raise InputError(f"no tokenizer {str(path)!r}; name a tokenizer.json")
    try:
        from tokenizers import Tokenizer as Theirs
    except ModuleNotFoundError as error:
        raise InputError(
            f"{str(path)!r} needs tokenizers: pip install 'meshpar[convert]'"
        ) from error
    try:
        return Theirs.from_file(str(path))
    except Exception as error:  # It raises nothing narrower.
        raise InputError(f"{str(path)!r} is no tokenizer: {error}") from error


def _checkpoint(path: Path, step: int | None, own: Tokenizer | None) -> Loaded:
    from meshpar.train.checkpoint_arrays import read_arrays

    contents, arrays = read_arrays(path, step)
    sizes = contents.config.get("model_sizes")
    if not sizes:
        raise InputError(
            f"the checkpoint of step {contents.step} in {contents.directory!r} does "
            "not say what its model is; generate with meshpar.generate"
        )
    named = contents.config.get("tokenizer")
    if own is None and named:
        own = read_tokenizer(Path(named))
    return Loaded(
        model=build_config(config_of_sizes(sizes)),
        params=arrays["params"],
        model_state=arrays.get("model_state", {}),
        tokenizer=own or Bytes(),
    )


def _their_tokenizer(path: Path) -> Tokenizer:
    if path.suffix == ".gguf":
        from meshpar.models.convert.gguf_file import GGUFFile
        from meshpar.models.convert.gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(GGUFFile(path))
    return read_tokenizer(path / _TOKENIZER)


def _stop_tokens(path: Path) -> tuple[int, ...]:
    """What a model's files say ends a text."""
    if path.suffix == ".gguf":
        from meshpar.models.convert.gguf_file import GGUFFile

        end = GGUFFile(path).said("tokenizer.ggml.eos_token_id")
        return () if end is None else (int(end),)
    for name in ("generation_config.json", "config.json"):
        file = path / name
        if file.is_file():
            found = json.loads(file.read_text()).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
    return ()
