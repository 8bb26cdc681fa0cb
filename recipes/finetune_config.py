"""The configuration of a fine-tuning run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from meshpar import InputError, Layout
from meshpar.errors import local_path, whole_number
from meshpar.model.lora import TARGETS, LoRA
from meshpar.recipes.optimizer_options import parse_optimizer


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """A run of the recipe.

    Args:
        from_weights: Folder of a model, GGUF file, or folder of a run.
        out: Folder of the run.
        text: Text file, or folder of .txt files; Shakespeare's plays by default.
        chat: File of conversations as JSON lines, instead of text.
        tokenizer: A tokenizer.json instead of the model's, or for a run on token files,
            which has none.
        layout: Layout of the run.
        rank: Rank of LoRA's matrices; 0 trains all weights.
        alpha: Scale of LoRA: its product is multiplied by alpha / rank.
        targets: Matrices that LoRA changes, by parts of their paths.
        steps: Total number of optimizer steps.
        global_batch: Rows per step.
        seq: Tokens per row.
        optimizer: Optimizer and its options, as `meshpar train` takes them.
        learning_rate: Peak learning rate, after a tenth of the steps; then a cosine
            decays to 0. By default 1e-3 with LoRA and 5e-5 without.
        validation_rows: Number of held-out rows to evaluate.
        validate_every: Steps between evaluations.
        save_every: Steps between checkpoints; the newest two are kept.
        seed: Seed of the order of rows and of LoRA's initial values.
        resume: Resume from the newest checkpoint of --out, or start if there is none
            (True and "auto" are the same).
        emulate: Number of virtual CPU devices; 0 uses the real devices, -1 as many
            virtual ones as the layout needs.

    Raises:
        InputError: A number is out of its range.
    """

    from_weights: Annotated[Path, tyro.conf.arg(aliases=("--from",))]
    out: Path = Path("runs/finetuned")
    text: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    chat: Path | None = None
    tokenizer: Path | None = None
    layout: str = "data=1"
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = TARGETS
    steps: int = 40
    global_batch: int = 8
    seq: int = 128
    optimizer: str = "adamw,beta2=0.999,weight_decay=0.0001"
    learning_rate: float | None = None
    validation_rows: int = 16
    validate_every: int = 20
    save_every: int = 200
    seed: int = 0
    resume: bool | Literal["auto"] = False
    emulate: int = -1

    def __post_init__(self) -> None:
        for name in ("from_weights", "out", "chat", "tokenizer"):
            if (path := getattr(self, name)) is not None:
                local_path(f"--{name.replace('_', '-')}", path)
        for path in self.text:
            local_path("--text", path)
        for name in (
            *("steps", "global_batch", "seq"),
            *("validation_rows", "validate_every", "save_every"),
        ):
            whole_number(name, getattr(self, name))
        for name in ("rank", "seed"):
            whole_number(name, getattr(self, name), 0)
        parse_optimizer(self.optimizer)
        if self.text and self.chat:
            raise InputError(
                f"text {str(self.text[0])!r} and chat {str(self.chat)!r} are both "
                "given; give one of them",
                key="run.text_and_chat",
            )

    @property
    def lora(self) -> LoRA | None:
        """LoRA settings, or None if all parameters are trained."""
        if self.rank == 0:
            return None
        precision: Any = Layout.parse(self.layout).precision
        return LoRA(
            rank=self.rank,
            alpha=self.alpha,
            targets=self.targets,
            frozen_dtype=precision,
        )
