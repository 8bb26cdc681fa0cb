"""Our weights as a folder that `transformers` loads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from meshpar import InputError
from meshpar.errors import install_extra
from meshpar.foreign_files import read_json_object
from meshpar.models.convert.assembled import fitted
from meshpar.models.convert.families import RUN_ONLY, conversion_table, to_config_json
from meshpar.models.convert.row import Fitted
from meshpar.models.convert.run_files import copy_tokenizer
from meshpar.models.convert.safetensors_folder import INDEX, WHOLE
from meshpar.models.presets import build_config

DTYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
_THEIR_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SHARD_BYTES = 5 * 10**9
_BLOCK_VALUES = 1 << 28
"""Values of an array that are read at once: 1 GiB in fp32."""
_NOT_OURS = (
    *("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("id2label", "label2id"),
)


@dataclass(frozen=True)
class _Array:
    """One of our arrays in one layer, and the tensors that hold it."""

    path: str
    rows: tuple[Fitted, ...]
    layer: int | None


def write_weights(
    folder: str | Path,
    config: Any,
    params: Mapping[str, Any],
    model_state: Mapping[str, Any] | None = None,
    *,
    dtype: str = "fp32",
    like: str | Path | None = None,
    longest_like: str | Path | None = None,
    stop_tokens: Sequence[int] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Writes safetensors, their index where there are several, and a `config.json`.

    One array of ours and one file of theirs are in memory at a time.

    Args:
        folder: Where; made when absent.
        config: Ours.
        params: Nested dict of all parameters, layers first to last.
        model_state: The same of the model's state.
        dtype: Of what is written: `fp32`, `bf16` or `fp16`, rounded to nearest.
        like: A folder whose tokenizer files are copied, and of whose `config.json`
            the longest sequence and special tokens are kept.
        longest_like: A folder of whose `config.json` only the longest sequence is
            kept, where tokens are other ones.
        stop_tokens: Token numbers that end a text; they replace those of `like`. Empty
            writes null.
        shard_bytes: Most bytes of tensors in a file.

    Returns:
        The files of tensors.

    Raises:
        InputError: No model of theirs is like ours, there is no such dtype, an array
            has no place in it, the folder holds a model already, or `like` is no
            folder or has a config that cannot be read.
    """
    if dtype not in DTYPES:
        raise InputError(
            f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}",
            key="weights.unknown_dtype",
        )
    folder = Path(folder)
    described = to_config_json(config)
    kind = described["model_type"]
    described |= _kept(longest_like, kind, _NOT_OURS[:1]) | _kept(like, kind, _NOT_OURS)
    described |= {name: _THEIR_NAMES[dtype] for name in ("dtype", "torch_dtype")}
    if stop_tokens is not None:
        # Where a config says nothing, transformers takes its family's own numbers.
        described = {"bos_token_id": None, **described, **_ends(stop_tokens)}
    if (folder / "config.json").exists():
        raise InputError(
            f"{str(folder)!r} holds a model already; name another folder",
            key="weights.folder_holds_model",
        )
    trees = {**_by_path(params), **_by_path(model_state or {})}
    shards = _shards(config, trees, np.dtype(DTYPES[dtype]).itemsize, shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    files = _write_shards(folder, shards, trees, DTYPES[dtype])
    if like is not None:
        copy_tokenizer(like, folder)
        if stop_tokens is not None:
            _end_generation(folder / "generation_config.json", stop_tokens)
    # Last, so that a folder with a config is whole.
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    return files


def _kept(like: str | Path | None, kind: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the entries of a config that our models do not have."""
    if like is None:
        return {}
    if not Path(like).is_dir():
        raise InputError(
            f"like={str(like)!r}: there is no such folder; name one with the files of "
            "a tokenizer, or leave it out",
            key="weights.no_like_folder",
        )
    file = Path(like) / "config.json"
    if not file.is_file():
        return {}
    said = read_json_object(
        file, key="weights.unreadable_json", shape_key="weights.not_json_object"
    )
    if said.get("model_type") != kind:
        return {}
    return {name: said[name] for name in names if said.get(name) is not None}


def _ends(stop_tokens: Sequence[int]) -> dict[str, Any]:
    """`eos_token_id`, as transformers has it: none, a number or a list."""
    several = list(stop_tokens) if stop_tokens else None
    one = len(stop_tokens) == 1
    return {"eos_token_id": stop_tokens[0] if one else several}


def _end_generation(file: Path, stop_tokens: Sequence[int]) -> None:
    """Writes the tokens that end a text into a generation_config.json that is there."""
    if not file.is_file():
        return
    said = read_json_object(
        file, key="weights.unreadable_json", shape_key="weights.not_json_object"
    )
    file.write_text(json.dumps({**said, **_ends(stop_tokens)}, indent=2) + "\n")


def _shards(
    config: Any, trees: Mapping[str, Any], item_bytes: int, shard_bytes: int
) -> list[list[_Array]]:
    """The arrays of each file."""
    model = build_config(config)
    placed = fitted(conversion_table(config), model)
    _check_placed(config, placed, trees)
    shards: list[list[_Array]] = [[]]
    used = 0
    for path, rows in placed.items():
        if path not in trees:
            if all(row.row.optional for row in rows):
                continue
            raise InputError(
                f"no {path!r} is given, which {config!r} has",
                key="weights.missing_parameter",
            )
        num_layers = _num_layers(model, path, rows[0].row.of_state)
        for layer in range(num_layers or 1):
            bytes_here = item_bytes * sum(
                len(list(row.names(layer))) * math.prod(row.their_shape) for row in rows
            )
            if shards[-1] and used + bytes_here > shard_bytes:
                shards.append([])
                used = 0
            at = layer if num_layers else None
            shards[-1].append(_Array(path, tuple(rows), at))
            used += bytes_here
    return shards


def _check_placed(config: Any, placed: Iterable[str], given: Iterable[str]) -> None:
    lost = sorted(
        path for path in set(given) - set(placed) if not path.endswith(RUN_ONLY)
    )
    if lost:
        raise InputError(
            f"{', '.join(lost)}: given, but no file of a {type(config).__name__} with "
            "these sizes has a place for it; leave it out, or give the config of the "
            "model that has it",
            key="weights.parameter_without_place",
        )


def _num_layers(model: Any, path: str, of_state: bool) -> int | None:
    tree = model.state if of_state else model.parameters
    for key in path.split("."):
        tree = tree[key]
    return tree.num_layers


def _tensors(
    arrays: Sequence[_Array], trees: Mapping[str, Any], dtype: Any
) -> Iterator[tuple[str, np.ndarray]]:
    last = _Block()
    for array in arrays:
        ours = last.layer(trees[array.path], array.layer)
        for row in array.rows:
            for name, theirs in row.write(ours, array.layer or 0):
                yield name, theirs.astype(dtype)


@dataclass
class _Block:
    """The layers of an array that were read last, as many as make 1 GiB.

    A part of a checkpoint's file may hold values of all layers, and is read anew for
    each block, so not one by one.
    """

    value: Any = None
    first: int = 0
    layers: Any = ()

    def layer(self, value: Any, layer: int | None) -> np.ndarray:
        """One layer of an array, or an array that has none."""
        if layer is None:
            return np.asarray(value[...])
        if value is not self.value or layer - self.first not in range(len(self.layers)):
            num = max(1, _BLOCK_VALUES // math.prod(value.shape[1:]))
            self.layers = ()  # Given up before there is another.
            self.layers = np.asarray(value[slice(layer, layer + num)])
            self.value, self.first = value, layer
        return self.layers[layer - self.first]


def _write_shards(
    folder: Path,
    shards: Sequence[Sequence[_Array]],
    trees: Mapping[str, Any],
    dtype: Any,
) -> list[Path]:
    """Write a file of each shard, and an index of several; return the files."""
    count = len(shards)
    names = [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
    files = [folder / name for name in (names if count > 1 else [WHOLE])]
    place: dict[str, str] = {}
    total = 0
    for file, arrays in zip(files, shards, strict=True):
        tensors = dict(_tensors(arrays, trees, dtype))
        _save(tensors, file)
        place |= dict.fromkeys(tensors, file.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": place}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return files


def _save(tensors: Mapping[str, np.ndarray], file: Path) -> None:
    try:
        from safetensors.numpy import save_file
    except ModuleNotFoundError as error:
        raise InputError(
            f"writing safetensors needs safetensors: {install_extra('convert')}",
            key="weights.missing_package",
        ) from error
    save_file(dict(tensors), file, metadata={"format": "pt"})


def _by_path(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping):
            found |= _by_path(value, f"{path}.")
        else:
            found[path] = value
    return found
