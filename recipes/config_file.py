"""A run's configuration as a file: TOML or YAML in, TOML out."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshpar.data.sources import DataSource
from meshpar.errors import InputError, nearest
from meshpar.foreign_files import MOST_OPTIONS_BYTES, parse_toml, parse_yaml, read_text
from meshpar.recipes.config import OPTIONS, PATHS, SEVERAL, START_OPTIONS, RunConfig

SAVED = "config.toml"
"""The file in a run's folder."""


def read_options(path: Path) -> list[str]:
    """The options of a file as words of a command line.

    Args:
        path: Ends in .toml, .yaml or .yml. A key is an option's name, with `_` or `-`;
            a list gives an option several times.

    Raises:
        InputError: There is no such file, it cannot be read, or a key is no option.
    """
    words, given = [], {}
    for key, value in _read(path).items():
        name = str(key).replace("-", "_")
        if name not in OPTIONS:
            raise InputError(
                f"{str(path)!r}: no key {key!r}; {nearest(name, OPTIONS)}",
                key="run.unknown_config_key",
            )
        if name in given:
            raise InputError(
                f"{str(path)!r}: {given[name]!r} and {key!r} are one option; give one",
                key="run.option_under_two_keys",
            )
        given[name] = key
        _check_value_count(path, name, value)
        option = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Mapping) and name in ("data", "validation_data"):
                one = ",".join(f"{key}={value}" for key, value in one.items())
            if isinstance(one, Mapping | list):
                raise InputError(
                    f"{str(path)!r}: {key} is {one!r}; give a text, a number, true or "
                    "false",
                    key="run.bad_config_value",
                )
            words += _words(option, one)
    return words


def _check_value_count(path: Path, name: str, value: Any) -> None:
    if isinstance(value, list) and name not in SEVERAL and len(value) != 1:
        raise InputError(
            f"{str(path)!r}: {name} is {value!r}, {len(value)} values, but it takes 1; "
            f"only {', '.join(SEVERAL)} take several",
            key="run.too_many_values",
        )


def save(config: RunConfig, folder: Path) -> Path:
    """Writes a run's configuration into its folder, and returns the file.

    Folder, `resume`, `stop_after` and what joins processes are left out: with them a
    new run, or the next start of this one, would not be the same. Paths are written in
    full. The file appears whole, or stays as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SAVED
    unfinished = folder / f"{SAVED}.unfinished"
    unfinished.write_text(as_toml(config), encoding="utf-8")
    os.replace(unfinished, path)
    return path


def as_toml(config: RunConfig) -> str:
    """The options of a run, one a line, those without a value as comments.

    Example:
        >>> print(as_toml(RunConfig(steps=5)).splitlines()[5])
        steps = 5
    """
    values = config.values()
    for name in PATHS:
        if name != "out" and values[name] is not None:
            values[name] = str(Path(values[name]).absolute())
    model = values["model"]
    if model is not None and model.endswith(".json"):
        values["model"] = str(Path(model).absolute())
    values["text"] = [str(path.absolute()) for path in config.text]
    for name in ("data", "validation_data"):
        sources = map(DataSource.parse, getattr(config, name))
        values[name] = [str(source.absolute()) for source in sources]
    lines = ["# Read back by --config."]
    for name, value in values.items():
        if name not in START_OPTIONS:
            comment = "# " if value is None else ""
            text = '""' if value is None else _toml_value(value)
            lines.append(f"{comment}{name} = {text}")
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    # JSON escapes what TOML wants escaped, but for DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise InputError(
            f"{str(path)!r} is no .toml, .yaml or .yml file; name one",
            key="run.unknown_config_format",
        )
    text = read_text(path, key="run.unreadable_config", most=MOST_OPTIONS_BYTES)
    found = _toml(path, text) if path.suffix == ".toml" else _yaml(path, text)
    if not isinstance(found, Mapping):
        raise InputError(
            f"{str(path)!r} holds no options; write such as steps: 5",
            key="run.no_options_in_config",
        )
    return found


def _toml(path: Path, text: str) -> Any:
    try:
        return parse_toml(text)
    except ValueError as error:
        raise InputError(
            f"{str(path)!r} is no TOML: {error}", key="run.bad_toml"
        ) from error


def _yaml(path: Path, text: str) -> Any:
    try:
        found, keys = parse_yaml(text)
    except ValueError as error:
        raise InputError(
            f"{str(path)!r} is no YAML: {error}", key="run.bad_yaml"
        ) from error
    for key, times in Counter(keys).items():
        if times > 1:
            raise InputError(
                f"{str(path)!r}: key {key!r} occurs {times} times; give it once",
                key="run.config_key_twice",
            )
    return found or {}


def _words(option: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [option if value else f"--no-{option.removeprefix('--')}"]
    return [f"{option}={value}"]
