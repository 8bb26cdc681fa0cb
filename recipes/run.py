"""A run, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from meshpar import TrainStep
from meshpar.data.sources import DataSource
from meshpar.distributed import Processes
from meshpar.recipes.config import START_OPTIONS, RunConfig
from meshpar.recipes.corpus import Corpus
from meshpar.recipes.goodput import Goodput
from meshpar.recipes.model import model_sizes
from meshpar.recipes.phases import Phases
from meshpar.recipes.resume import Position
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.faults import StepWatch
from meshpar.train.folder_in_use import FolderInUse

PROGRAM = ("meshpar", "train")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run but for its state, which every step replaces."""

    config: RunConfig
    step: TrainStep
    texts: Corpus
    checkpoints: Checkpoints
    console: Console
    position: Position = Position()
    program: Sequence[str] = PROGRAM
    processes: Processes = field(default_factory=Processes)
    num_rollbacks: int = 0
    phases: Phases = field(default_factory=Phases)
    goodput: Goodput = field(default_factory=lambda: Goodput(Phases()))
    watch: StepWatch = field(default_factory=lambda: StepWatch("skip"))
    folder: FolderInUse | None = None

    def description(self, done: int = 0) -> dict[str, Any]:
        """Return the run's description for a checkpoint after `done` steps."""
        values = self.config.values()
        return {
            **{name: values[name] for name in values if name not in START_OPTIONS},
            "model_sizes": model_sizes(self.config),
            "precision": self.step.layout.precision,
            "text": [str(path.resolve()) for path in self.config.text],
            **_from_any_folder(self.config),
            "data": self.texts.fingerprint,
            "formats": list(self.texts.formats),
            "stop_tokens": list(self.texts.stop_tokens),
            "windows": self.position.after(done, self.config.global_batch),
            "layout": str(self.step.layout),
            "layout_asked": self.config.layout,
        }


def _from_any_folder(config: RunConfig) -> dict[str, Any]:
    """Where the data and their tokenizer are."""
    sources, held_out = (
        [str(DataSource.parse(text).absolute()) for text in texts]
        for texts in (config.data, config.validation_data)
    )
    tokenizer = config.tokenizer and str(config.tokenizer.absolute())
    return {"sources": sources, "validation_data": held_out, "tokenizer": tokenizer}


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended.

    Args:
        steps_done: Steps done in all.
        validation_loss: Mean loss per token of the validation text; None where it was
            stopped before.
        signal: What stopped it, such as 2 for Ctrl-C; None where nothing did.
        folder: Where checkpoints, metrics and configuration are.
    """

    steps_done: int
    validation_loss: float | None
    signal: int | None
    folder: Path
