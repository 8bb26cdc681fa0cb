"""Folders of runs: checkpoints, and the options that a folder keeps."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import optax
import pytest

from meshpar import make_train_step
from meshpar.cli import inspect
from meshpar.errors import InputError
from meshpar.foreign_files import parse_toml
from meshpar.model.lora import LoRA
from meshpar.models.convert.export import export
from meshpar.models.convert.run_files import keep_files
from meshpar.models.presets import PRESETS, build_config
from meshpar.recipes import pretrain
from meshpar.recipes.config import RunConfig
from meshpar.recipes.config_file import SAVED
from meshpar.recipes.elastic import fitted
from meshpar.recipes.options import parse_arguments
from meshpar.recipes.resume import (
    changes,
    data_position,
    rate_change,
    read_description,
    refuse_other,
)
from meshpar.recipes.step import make_step
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.checkpoint.contents import read_contents
from meshpar.train.checkpoint.files import NAME, write_checksums
from meshpar.train.step import TrainStep
from tests.bpe import write_bpe
from tests.file_fuzz.cases import captured
from tests.file_fuzz.kind import Kind, change_one_of
from tests.file_fuzz.models import WORDS, _model, read_model
from tests.file_fuzz.mutations import Random, changed_bytes, changed_toml
from tests.run_steps import compute_nothing, counted_step
from tests.states import drawn, zeros_of

CONFIG = dataclasses.replace(PRESETS["test"], vocab=384)


@cache
def _step() -> TrainStep:
    """The step of the run of `_trained`."""
    config = RunConfig(preset="test", model="vocab=384", seq=16, global_batch=8)
    return make_step(dataclasses.replace(config, layout="data=1"))


def _runs(above: Path) -> Iterator[Path]:
    yield _trained(above / "trained")
    yield _tuned(above / "tuned")


def _trained(folder: Path) -> Path:
    """A run of `meshpar train` that has saved after steps 1 and 2."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    text, model = folder.parent / "text.txt", folder.parent / "model"
    text.write_text(f"{WORDS}\n" * 200)
    tokenizer = write_bpe(folder.parent / "tokenizer.json", [WORDS], vocab=260)
    config = RunConfig(
        **dict(preset="test", model="vocab=384", seq=16, global_batch=8, steps=2),
        **dict(layout="data=1", data=text, out=folder, save_every=1, emulate=0),
        tokenizer=tokenizer,
    )
    with pytest.MonkeyPatch.context() as patch, captured():
        compute_nothing(patch, lambda step, state, batch: counted_step(state))
        patch.setattr(TrainStep, "init", lambda step, seed=0: drawn(step, scale=0.3))
        pretrain.pretrain(config)
    keep_files(folder, started_from=_model(model, "smollm2"))
    return folder


def _tuned(folder: Path) -> Path:
    """What `recipes.finetune` keeps of LoRA."""
    model, lora = build_config(CONFIG), LoRA(rank=2, alpha=4.0)
    step = make_train_step(lora.model(model), optax.sgd(0.1), "data=1")
    said = {
        "model_sizes": dataclasses.asdict(CONFIG),
        "lora": dataclasses.asdict(lora),
        **{"layout": "data=1", "seed": 0, "steps": 1, "global_batch": 2, "seq": 16},
        **{"learning_rate": 1e-3, "text": ["a.txt"], "data": "crc32 0"},
        **{"chat_date": "2026-01-02", "eos": "0", "stop_tokens": [0]},
        "tokenizer": str(folder / "tokenizer.json"),
    }
    keep_files(folder, tokenizer=folder.parent / "tokenizer.json")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(zeros_of(step), said)
    return folder


_ONCE = ("tokenizer.json", "base/config.json", "base/generation_config.json")
_OF_STEP = (
    *("run/metadata",) * 6,
    *("state/_METADATA", "state/_sharding", "state/manifest.ocdbt"),
    *("state/array_metadatas/process_0", "_CHECKPOINT_METADATA", NAME),
)


def _change_run(random: Random, folder: Path) -> None:
    """Change a file of the newest step; half of all have checksums of what is there."""
    step = max((folder / "checkpoints").iterdir(), key=lambda one: one.name)
    if random.random() < 0.1:
        change_one_of(random, folder, _ONCE)
        return
    if random.random() < 0.2:
        chunks = sorted(path for path in step.glob("state/**/d/*") if path.is_file())
        file = chunks[random.integers(len(chunks))]
        file.write_bytes(changed_bytes(random, file.read_bytes()))
    else:
        file = change_one_of(random, step, _OF_STEP)
    if file.name != NAME and random.random() < 0.7:
        (step / NAME).unlink()
        if random.random() < 0.7:
            write_checksums(step)


def _read_run(folder: Path) -> str:
    """Inspect, load and export, and go on as `meshpar train --resume` does."""
    told: list[str] = []
    refused: list[Exception] = []
    for read in (_inspected, read_model, _exported, _resumed):
        try:
            told.append(read(folder))
        except (InputError, OSError) as error:
            refused.append(error)
    if refused:
        raise refused[0]
    return " ".join(told)


def _inspected(folder: Path) -> str:
    found = read_contents(folder)
    with captured() as (out, _):
        inspect._print(found)
    return out.getvalue() + json.dumps(found.as_dict())


def _exported(folder: Path) -> str:
    with tempfile.TemporaryDirectory(dir=folder) as to:
        return str(export(folder, to))


def _resumed(folder: Path) -> str:
    if not (folder / SAVED).is_file():
        return ""  # A run of another recipe.
    step = _step()
    config = RunConfig(out=folder, resume=True, layout="data=-1", emulate=0)
    with captured(), Checkpoints(folder / "checkpoints") as checkpoints:
        line, told = fitted(config, 1, 1)
        before = read_description(checkpoints)
        now = {
            **{"model_sizes": json.loads(json.dumps(dataclasses.asdict(CONFIG)))},
            **{"layout": line, "seed": 0, "steps": 9, "data": "a", "seq": 16},
        }
        done = checkpoints.step_read or 0
        refuse_other(before, now, done)
        state = checkpoints.restore(step.state_shapes, step.shardings)
        lines = [told, *changes(before, now), *rate_change(config, before, done)]
        return f"{lines} {data_position(before, now, done)} {int(state.step)}"


def _kept_options(above: Path) -> Iterator[Path]:
    folder = above / "run"
    folder.mkdir(parents=True)
    said = (
        'preset = "tiny"\nsteps = 50\nlayout = "data=2,tensor=2"\nseed = 3\n'
        'text = ["plays"]\ndtype = "bf16"\nlearning_rate = 0.003\npack = false\n'
        'on_bad_step = "stop"\nspike = 8.0\nemulate = 4\n'
        'coordinator = "10.0.0.1:1"\nschedule = "mine.json"\nmesh_order = "data"\n'
    )
    (folder / "config.toml").write_text(said)
    yield folder


def _change_toml(random: Random, folder: Path) -> None:
    file = folder / "config.toml"
    text = file.read_text() + f"log_json = '{folder / 'log.jsonl'}'\n"
    if random.random() < 0.3:
        file.write_bytes(changed_bytes(random, text.encode()))
    else:
        file.write_bytes(changed_toml(random, text, parse_toml))


def _resumed_options(folder: Path) -> str:
    config = parse_arguments(["--out", str(folder), "--resume"], "meshpar train")
    for name in ("log_json", "tensorboard", "data_cache"):
        path = getattr(config, name)
        if path is not None and not path.resolve().is_relative_to(folder.resolve()):
            raise AssertionError(f"the folder decides on {name}={path}")
    if config.coordinator is not None:
        raise AssertionError(f"the folder decides on {config.coordinator}")
    return str(config.values())


def _given_toml(folder: Path) -> str:
    words = ["--config", str(folder / "config.toml")]
    return str(parse_arguments(words, "meshpar train").values())


def _given_yaml(folder: Path) -> str:
    words = ["--config", str(folder / "config.yaml")]
    return str(parse_arguments(words, "meshpar train").values())


def _yaml(above: Path) -> Iterator[Path]:
    above.mkdir(parents=True)
    said = (
        "preset: tiny\nsteps: 50\nlayout: data=2,tensor=2\nseed: 3\n"
        "text: [plays, a.txt]\ndtype: bf16\nlearning_rate: 3.0e-3\npack: no\n"
        "on_bad_step: 'stop'\n"
        'eos: "7"\nspike: 8.0\ndata:\n'
        '  - {path: "a.jsonl", field: text}\n'
        "from_weights: &a mine\nlog_json: *a\n"
    )
    for name, without in (("whole", "data:"), ("data", "text:")):
        folder = above / name
        folder.mkdir()
        left_out = (without, "  -", "eos") if name == "whole" else (without,)
        lines = [line for line in said.splitlines() if not line.startswith(left_out)]
        (folder / "config.yaml").write_text("\n".join(lines) + "\n")
        yield folder


_YAML_VALUES = (
    *("1e400", ".nan", ".inf", "-1", "0", "~", "''", "[]", "{}", "[[1]]", "{a: 1}"),
    *(
        "2024-13-45",
        "2024-01-02",
        "1:2:3",
        "0x10",
        "010",
        "1_000",
        "yes",
        "!!binary aGk=",
    ),
    *("!!python/object:os.system x", "!!set {a, b}", "&x [*x]", "*a", "99999999999999"),
    *("../../outside", "/etc/passwd", "/dev/zero", '"a\\0b"', '"\\ud800"', "'\x7f'"),
    *("x" * 30_000, "[" * 300 + "]" * 300, "? [a]", "<<: *a", "|\n  a\n  b"),
)


def _change_yaml(random: Random, folder: Path) -> None:
    file = folder / "config.yaml"
    lines = file.read_text().splitlines()
    if random.random() < 0.3:
        file.write_bytes(changed_bytes(random, file.read_bytes()))
        return
    at = int(random.integers(len(lines)))
    key = lines[at].partition(":")[0]
    if random.random() < 0.2:
        lines.append(lines[at])
    else:
        lines[at] = f"{key}: {_YAML_VALUES[random.integers(len(_YAML_VALUES))]}"
    file.write_text("\n".join(lines) + "\n")


KINDS = {
    "run": Kind(num=260, examples=_runs, change=_change_run, read=_read_run),
    "resumed": Kind(
        num=120, examples=_kept_options, change=_change_toml, read=_resumed_options
    ),
    "run_toml": Kind(
        num=80, examples=_kept_options, change=_change_toml, read=_given_toml
    ),
    "run_yaml": Kind(num=130, examples=_yaml, change=_change_yaml, read=_given_yaml),
}
"""Name -> a kind of file of a run."""
