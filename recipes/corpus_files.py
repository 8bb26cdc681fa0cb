"""Token files of a run's data; texts are tokenized first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshpar.data.megatron import read_megatron
from meshpar.data.sources import WITH_FIELDS, DataSource, check_weights
from meshpar.data.token_files import TokenFile, read_nanogpt
from meshpar.data.tokenizer import TokenCache
from meshpar.distributed import Processes
from meshpar.errors import DataError
from meshpar.recipes.config import RunConfig
from meshpar.recipes.model import model_sizes
from meshpar.recipes.tokenizer import load_tokenizer, refuse_bytes

Files = list[tuple[DataSource, list[TokenFile]]]
"""The files of each source."""


def source_files(
    config: RunConfig,
    processes: Processes,
    told: Callable[[str], None],
    on_file: Callable[[], None],
) -> Files:
    """The files of tokens, those of texts made by the first process.

    Args:
        config: The run's, its folder decided.
        processes: Which share the folder.
        told: Takes lines on what takes long.
        on_file: Called, on all processes, before a file is opened, and while it is
            tokenized.

    Raises:
        DataError: Data are missing or broken.
    """
    wrong: tuple[str, str] | None = None  # The message and the key.
    files = None

    def is_at_a_file() -> bool:
        """The others wait for as long as the first gets on."""
        on_file()
        return bool(processes.gather(True)[0])

    if processes.is_first:
        try:
            files = _files(config, told, is_at_a_file)
        except DataError as error:
            wrong = str(error), error.key
        processes.gather(False)
    else:
        while is_at_a_file():
            pass
    wrong = processes.gather(wrong)[0]
    if wrong is not None:
        message, key = wrong
        raise DataError(message, key=key)
    return _files(config, told, on_file) if files is None else files


def _files(
    config: RunConfig, told: Callable[[str], None], on_file: Callable[[], Any]
) -> Files:
    cache = TokenCache(
        folder=config.data_cache or config.folder / "tokens",
        tokenizer=load_tokenizer(config),
        on_bad_line=config.on_bad_line,
        told=told,
        gets_on=on_file,
    )
    _check_folder(cache.folder)
    sources = [DataSource.parse(text) for text in config.data]
    check_weights(sources)
    held_out = [DataSource.parse(text) for text in config.validation_data]
    files: Files = []
    for source in [*sources, *held_out]:
        if Path(source.path).resolve() == config.folder.resolve():
            raise DataError(
                f"{source.path!r} is both --data and --out; give the run a folder of "
                "its own, which may lie in that of the data",
                key="data.folder_is_of_run",
            )
        opened, found = [], source.files(not_data(config))
        _check_field(source, {format for _, format in found})
        for one in found:
            on_file()
            opened.append(_opened(*one, source, cache, config))
        files.append((source, opened))
    return files


def _check_field(source: DataSource, formats: set[str]) -> None:
    if source.field != DataSource.field and not formats & WITH_FIELDS:
        raise DataError(
            f"field={source.field} of {source.path!r}, which is {', '.join(formats)}: "
            f"only {' and '.join(sorted(WITH_FIELDS))} have fields; leave it out",
            key="data.field_without_effect",
        )


def _check_folder(folder: Path) -> None:
    for one in (folder, *folder.parents):
        if one.exists() and not one.is_dir():
            raise DataError(
                f"the tokens of texts go into {str(folder)!r}, but {str(one)!r} is a "
                "file; name a folder in --data-cache",
                key="data.folder_is_file",
            )


def not_data(config: RunConfig) -> list[Path]:
    """Return True for files in a folder of data that hold no data."""
    paths = config.folder, config.data_cache, config.tokenizer
    return [path for path in paths if path is not None]


def _opened(
    path: Path, format: str, source: DataSource, cache: TokenCache, config: RunConfig
) -> TokenFile:
    if format == "megatron":
        return read_megatron(path)
    if format == "nanogpt":
        return read_nanogpt(path, _document_end(path, config))
    if config.eos is not None and config.tokenizer is None:
        raise DataError(
            f"{str(path)!r} is read as bytes, whose documents end with a NUL, but "
            f"--eos {config.eos} is given; leave it out, or give a --tokenizer",
            key="data.eos_of_bytes",
        )
    refuse_bytes(config)
    vocab = model_sizes(config)["vocab"]
    if cache.tokenizer.vocab > vocab:
        raise DataError(
            f"{str(path)!r} is read as {cache.tokenizer.name}, of which there are "
            f"{cache.tokenizer.vocab}, but the model has a vocabulary of {vocab}; give "
            f"a model that has {cache.tokenizer.vocab} or more",
            key="data.vocabulary_too_large",
        )
    return cache.tokenized(path, format, source.field)


def _document_end(path: Path, config: RunConfig) -> int | None:
    """Return the token that ends a document of a flat file; None unless packed."""
    if not config.pack:
        return None
    if config.tokenizer is not None:
        return load_tokenizer(config).eos
    if config.eos is None or not config.eos.isdecimal():
        raise DataError(
            f"{str(path)!r} does not say where its documents end, as --pack needs; "
            "give the number of the token that ends them, such as --eos 50256",
            key="data.no_end_of_documents",
        )
    vocab = model_sizes(config)["vocab"]
    if int(config.eos) >= vocab:
        raise DataError(
            f"--eos {config.eos}: the model has tokens from 0 to below {vocab}; give "
            f"the one that ends the documents of {str(path)!r}",
            key="data.eos_beyond_vocabulary",
        )
    return int(config.eos)
