"""A command line for each command that is right, and what keeps it from its work."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from meshpar.cli import main as cli
from meshpar.models.presets import PRESETS, build_config
from meshpar.recipes import finetune, pretrain
from meshpar.train.checkpoint import Checkpoints
from tests.bpe import write_bpe
from tests.states import zeros_of
from tests.transformers_cases import write_model

WORDS: Mapping[str, Sequence[str]] = {
    "lint": ["--preset", "tiny", "--layout", "data=2"],
    "name": ["recipes.examples.nanogpt_nnx:model", "--seq", "16"],
    "schedule": ["--schedule", "1f1b", "--stages", "2", "--microbatches", "4"],
    "estimate": ["--preset", "tiny", "--layout", "data=2"],
    "plan": ["--preset", "tiny", "--devices", "2", "--global-batch", "8"],
    "show": ["--preset", "tiny", "--layout", "data=2", "--json"],
    "calibrate": [],
    "audit": ["--preset", "test", "--layout", "data=2"],
    "fuzz": ["--num", "2"],
    "generate": ["--from", "a_model", "--prompt", "To be", "--max-tokens", "2"],
    "inspect": ["a_run"],
    "export": ["a_run", "--to", "exported"],
    "doctor": [],
    "train": [
        *("--preset", "test", "--model", "vocab=256", "--layout", "data=2"),
        *("--text", "a_file.txt", "--seq", "16", "--out", "trained"),
    ],
    "finetune": ["--from", "a_model", "--text", "a_file.txt", "--out", "tuned"],
}
"""Command -> words that it would run with."""

WITHOUT_WORDS = {
    "name": ["--seq", "16"],
    "inspect": [],
    "export": ["--to", "exported"],
}
"""The same without the word that has no option, where that is what is tried."""


_WORK = (
    "meshpar.audit.report:audit",
    "meshpar.calibration.measure:calibrate",
    "meshpar.cli.confirm:confirm",
    "meshpar.cli.generate:start",
    "meshpar.cli.measure:_child",
    "meshpar.cli.report.laid_out:laid_out",
    "meshpar.generation.programs:Programs.from_model",
    "meshpar.recipes.finetune:make_step",
    "meshpar.recipes.pretrain:check_memory",
    "meshpar.testing.equivalence:run_cases",
    "meshpar.testing.layout_cases:draw_cases",
)
"""What compiles, trains, measures or starts a process."""


class ReachedError(BaseException):
    """A command has checked its options and would begin its work."""


def main_of(command: str) -> Callable[[Sequence[str]], int]:
    """Return what runs a command on its words."""
    if command == "finetune":
        return finetune.main
    return lambda words: cli.main([command, *words])


@contextlib.contextmanager
def kept_from_work() -> Iterator[None]:
    """Let no command compile, train, measure, start a process or join others.

    All else runs: parsing, reading of files, the arithmetic of plans, estimates and
    schedules, building of models and of training steps.
    """

    def reached(*args: Any, **options: Any) -> Any:
        raise ReachedError

    def join(config: Any) -> Any:
        given = (config.coordinator, config.num_processes, config.process_id)
        return reached() if any(one is not None for one in given) else joined(config)

    joined = pretrain.join
    with pytest.MonkeyPatch.context() as patch:
        for place in _WORK:
            module, _, path = place.partition(":")
            found: Any = importlib.import_module(module)
            *above, name = path.split(".")
            for one in above:
                found = getattr(found, one)
            patch.setattr(found, name, reached)
        patch.setattr(pretrain, "join", join)
        yield


def write_inputs(folder: Path) -> None:
    """Write the files that the command lines name."""
    from tests.file_fuzz.models import WORDS as TEXT

    folder.mkdir(parents=True)
    (folder / "a_folder").mkdir()
    (folder / "a_file.txt").write_text(f"{TEXT}\n" * 200)
    model = write_model(folder / "a_model", "smollm2")
    write_bpe(model / "tokenizer.json", [TEXT], vocab=260)
    said = {"bos_token": "<|endoftext|>", "chat_template": "{{ messages[0].content }}"}
    (model / "tokenizer_config.json").write_text(json.dumps(said))
    _write_run(folder / "a_run")


def _write_run(folder: Path) -> None:
    import jax
    import optax

    from meshpar import make_train_step

    config = PRESETS["test"]
    devices = jax.devices()[:1]
    model = build_config(config)
    step = make_train_step(model, optax.sgd(0.1), "data=1", devices=devices)
    run = {"layout": "data=1", "model_sizes": dataclasses.asdict(config), "seed": 0}
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(zeros_of(step), run)
