"""Load a trained model from a run's folder, safetensors or GGUF."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshpar import InputError, Model
from meshpar.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    TokenNumbers,
    read_tokenizer,
    whole_texts_tokenizer,
)
from meshpar.errors import local_path
from meshpar.foreign_files import read_json_object
from meshpar.models.convert.gguf_file import GGUFFile
from meshpar.models.convert.gguf_tokenizer import gguf_tokenizer
from meshpar.models.convert.run_files import TOKENIZER, kept_tokenizer, run_folder
from meshpar.models.convert.source import Source
from meshpar.models.convert.weights import open_source, read_weights


class Tokenizer(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> Any:
        """Tokens, or what has them as `ids`."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text."""


@dataclass(frozen=True)
class OfRun:
    """Tokenizer of a run's data, for one text at a time.

    Args:
        tokenizer: It.

    Example:
        >>> OfRun(ByteTokenizer()).decode(OfRun(ByteTokenizer()).encode("to be"))
        'to be'
    """

    tokenizer: ByteTokenizer | FileTokenizer

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones around it."""
        return self.tokenizer.encode([text])[0].tolist()

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text."""
        return self.tokenizer.decode([token for token in tokens if token < self._vocab])

    @property
    def _vocab(self) -> int:
        return self.tokenizer.vocab


@dataclass(frozen=True)
class WithoutTokenizer:
    """In the place of a tokenizer, of a run on files of tokens that has none.

    Args:
        where: The run, for messages.
    """

    where: str

    def encode(self, text: str) -> list[int]:
        """Refuses a text.

        Raises:
            InputError: Always.
        """
        raise InputError(
            f"{self.where!r} was trained on files of tokens, and nothing says which "
            f"tokens the text {text[:40]!r} is; give their tokenizer: --tokenizer "
            "tokenizer.json",
            key="data.no_tokenizer",
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """The numbers."""
        return TokenNumbers().decode(tokens)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model and its values, none of them read yet.

    Args:
        model: It.
        config: Of it.
        params: Tree of what parts can be read of.
        model_state: The same of what is no parameter.
        tokenizer: Its own.
        stop_tokens: Tokens that end a text.
        start_tokens: What its decoder begins with, where the files say so.
        tokenizer_file: Of a run, where its tokenizer is; None for bytes.
    """

    model: Model
    config: Any
    params: Any
    model_state: Any
    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...] = ()
    start_tokens: tuple[int, ...] | None = None
    tokenizer_file: Path | None = None


def load(
    path: str | Path,
    *,
    step: int | None = None,
    tokenizer: str | Path | None = None,
    average: bool = False,
) -> Loaded:
    """Load the model of a folder or file.

    Args:
        path: The folder of a run, of its checkpoints or of one of them; a folder with
            `config.json` and safetensors; or a `.gguf` file.
        step: Which checkpoint; the newest when absent.
        tokenizer: A `tokenizer.json` in place of the model's own.
        average: Load the run's average of the parameters in place of the trained ones.

    Raises:
        InputError: It is none of these, something is missing in it, or it has no
            average.
    """
    path = local_path("--from", path)
    if not path.exists():
        raise InputError(
            f"no {str(path)!r}; name a run's folder, or a model's",
            key="weights.no_such_file",
        )
    if path.suffix == ".gguf" or (path / "config.json").is_file():
        if step is not None:
            raise InputError(
                f"{str(path)!r} is no checkpoint: leave step={step} out",
                key="weights.step_without_checkpoint",
            )
        if average:
            raise InputError(
                f"{str(path)!r} is no checkpoint of a run, and keeps no average of its "
                "parameters; leave --average out",
                key="checkpoint.no_average",
            )
        source = open_source(path)
        weights = read_weights(path, source=source)
        return Loaded(
            model=weights.model,
            config=weights.config,
            params=weights.params,
            model_state=weights.model_state,
            tokenizer=_their_tokenizer(path, source)
            if tokenizer is None
            else whole_texts_tokenizer(Path(tokenizer)),
            stop_tokens=_stop_tokens(path, source),
            start_tokens=_start_tokens(path),
        )
    given = None if tokenizer is None else Path(tokenizer)
    return _checkpoint(path, step, given, average)


def _checkpoint(
    path: Path, step: int | None, tokenizer: Path | None, average: bool
) -> Loaded:
    from meshpar.models.convert.run import read_checkpoint

    instead = "generate with meshpar.generate"
    found = read_checkpoint(path, step, instead=instead, average=average)
    contents = found.contents
    if tokenizer is None:
        run = run_folder(contents.directory)
        instead = "give --tokenizer FILE, its tokenizer.json"
        tokenizer = kept_tokenizer(run, contents.config, instead=instead)
    reader, ends = _reader(contents.config, tokenizer, path)
    return Loaded(
        model=found.model,
        config=found.config,
        params=found.params,
        model_state=found.model_state,
        tokenizer=reader,
        stop_tokens=ends,
        tokenizer_file=tokenizer,
    )


def _reader(
    said: Mapping[str, Any], tokenizer: Path | None, run: Path
) -> tuple[Tokenizer, tuple[int, ...]]:
    """Return a run's tokenizer, and the tokens that end a text."""
    from meshpar.models.convert.run import has_token_files

    eos, ends = said.get("eos"), tuple(said.get("stop_tokens") or ())
    if tokenizer is None and has_token_files(said):
        if not ends and eos and eos.isdecimal():
            ends = (int(eos),)
        return WithoutTokenizer(str(run)), ends
    # Beside a run's copy of its tokenizer no other file says what ends a document.
    named = str(ends[0]) if ends else eos
    tokens = read_tokenizer(tokenizer, named if tokenizer else None)
    return OfRun(tokens), ends or (tokens.eos,)


def _their_tokenizer(path: Path, source: Source) -> Tokenizer:
    if isinstance(source, GGUFFile):
        return gguf_tokenizer(source)
    return whole_texts_tokenizer(path / TOKENIZER)


def _stop_tokens(path: Path, source: Source) -> tuple[int, ...]:
    """Return the tokens that end a text, from the model's files."""
    if isinstance(source, GGUFFile):
        end = source.metadata("tokenizer.ggml.eos_token_id")
        return () if end is None else _tokens(path, "eos_token_id", [end])
    return _said(path, "eos_token_id") or ()


def _start_tokens(path: Path) -> tuple[int, ...] | None:
    """Return the tokens that the decoder begins with, from the model's files."""
    return None if path.suffix == ".gguf" else _said(path, "decoder_start_token_id")


def _said(folder: Path, name: str) -> tuple[int, ...] | None:
    """Tokens that a folder's settings name; None where they do not.

    Raises:
        InputError: A file of them cannot be read, or they are no tokens.
    """
    for setting in ("generation_config.json", "config.json"):
        file = folder / setting
        found = _object(file).get(name) if file.is_file() else None
        if found is not None:
            return _tokens(file, name, found if isinstance(found, list) else [found])
    return None


def _tokens(file: Path, name: str, found: list[Any]) -> tuple[int, ...]:
    for one in found:
        if isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < 1 << 31:
            raise InputError(
                f"{str(file)!r}: {name} is {reprlib.repr(found)}; give a token's "
                "number, or a list of them",
                key="weights.bad_token_number",
            )
    return tuple(found)


def _object(file: Path) -> dict[str, Any]:
    return read_json_object(
        file,
        key="weights.unreadable_json",
        shape_key="weights.not_json_object",
        way_out="; mend it, or move it away",
    )
