"""Fine-tune a pretrained model on a text or on conversations, whole or with LoRA.

    python -m recipes.finetune --from SmolLM2-135M-Instruct.Q4_1.gguf --out runs/tuned
    python -m recipes.finetune --from my_model --chat mine.jsonl --layout tensor=2
    meshpar export runs/tuned --to tuned-hf

`--from` is a folder that transformers wrote, a GGUF file or a run's folder. The text is
twelve of Shakespeare's plays by default, with two held out; `--rank 0` trains every
weight.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from meshpar import InputError, Layout, TrainState, TrainStep, emulate, make_train_step
from meshpar.data.batches import mixed
from meshpar.errors import escape_unencodable, print_end
from meshpar.machine.emulate import num_cpu_devices
from meshpar.models.convert.chat_template import read_template
from meshpar.models.convert.run_files import TOKENIZER, keep_files
from meshpar.recipes.conversations import (
    ConversationRows,
    check_answers,
    read_conversations,
)
from meshpar.recipes.elastic import newest_description
from meshpar.recipes.finetune_config import FinetuneConfig
from meshpar.recipes.loaded import Loaded, OfRun, WithoutTokenizer, load
from meshpar.recipes.optimizers import named_optimizer
from meshpar.recipes.options import parse_words, with_values
from meshpar.recipes.resume import changes, read_description, refuse_other_optimizer
from meshpar.recipes.run_log import on_console
from meshpar.recipes.texts import SHAKESPEARE, split_texts
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.data import TokenWindows, ordered_batches, padded_batches, read_texts
from meshpar.train.folder_in_use import folder_in_use

LOGGER = logging.getLogger("meshpar.recipes.finetune")

HELD_OUT = 10  # one conversation of so many
_KEPT = ("from_weights", "model_sizes", "lora", "seed")
"""Settings that a resumed run must keep."""
LORA_RATE, FULL_RATE = 1e-3, 5e-5


@dataclass(frozen=True, kw_only=True)
class Finetuned:
    """How a run ended.

    Args:
        before, after: Mean loss per token of held-out rows.
        folder: Where its checkpoint is.
    """

    before: float
    after: float
    folder: Path


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the recipe; 0 done, 2 on bad input."""
    escape_unencodable(sys.stdout)
    try:
        words = with_values(sys.argv[1:] if argv is None else argv)
        names = [field.name for field in dataclasses.fields(FinetuneConfig)]
        config = parse_words(
            FinetuneConfig, words, known=names, prog="finetune", description=__doc__
        )
        finetune(config)
    except Exception as error:
        return print_end("finetune", error)
    return 0


def finetune(config: FinetuneConfig, *, console: bool = True) -> Finetuned:
    """Trains, validates before and after, and saves.

    Args:
        config: The run.
        console: Print what the run logs (logger `meshpar.recipes.finetune`).

    Raises:
        InputError: Something of the run cannot be.
    """
    with on_console() if console else nullcontext():
        return _finetuned(config)


def _finetuned(config: FinetuneConfig) -> Finetuned:
    layout = Layout.parse(config.layout)
    layout.check_sizes()
    if config.emulate:
        needed = max(layout.num_devices, num_cpu_devices())
        emulate(needed if config.emulate < 0 else config.emulate)
    loaded = load(config.from_weights, tokenizer=config.tokenizer)
    chat_date = template_date(config)
    train, held_out = tokenized_rows(config, loaded, chat_date)
    step = make_step(config, loaded)
    description = described(config, loaded, step, chat_date)
    with (
        folder_in_use(config.out) as folder,
        Checkpoints(
            config.out / "checkpoints", layer_orders=step.layer_orders
        ) as checkpoints,
    ):
        refuse_other_run(config, description, checkpoints)

        def save(state: TrainState) -> None:
            checkpoints.save(state, description, wait=False)
            folder.refuse_deleted()

        state = first_state(config, loaded, step, checkpoints)
        keep_tokenizer(config, loaded)
        _log_sizes(step, state)
        before = validate(config, step, state, held_out)
        state = trained(config, step, state, train, held_out, save=save)
        after = validate(config, step, state, held_out)
        checkpoints.save(state, description)
        folder.refuse_deleted()
    LOGGER.info(f"saved in {config.out}; meshpar export {config.out} --to FOLDER")
    return Finetuned(before=before, after=after, folder=config.out)


def template_date(config: FinetuneConfig) -> date | None:
    """Return the day of `strftime_now` in all rows of a run; None without templates.

    It is the day when the run first read a chat template. A resumed run keeps it, so
    that its rows have the same tokens.
    """
    before = newest_description(config.out / "checkpoints") if config.resume else {}
    if "chat_date" in before:
        return _date(before["chat_date"], config.out)
    return date.today() if config.chat else None


def _date(text: str, run: Path) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise InputError(
            f"the newest checkpoint in {str(run)!r} says chat_date={text[:40]!r}, "
            "which is no date such as 2026-11-26: its file run/metadata was changed",
            key="checkpoint.unreadable",
        ) from error


def tokenized_rows(
    config: FinetuneConfig, loaded: Loaded, chat_date: date | None = None
) -> tuple[Any, Any]:
    """Rows to train on, and rows that are held out.

    Args:
        config: Of the run.
        loaded: Its model and tokenizer.
        chat_date: The day of `strftime_now`; the clock's when absent.
    """

    def encode(text: str) -> list[int]:
        if isinstance(loaded.tokenizer, OfRun | WithoutTokenizer):
            return loaded.tokenizer.encode(text)
        return loaded.tokenizer.encode(text, add_special_tokens=False).ids

    if config.chat is None:
        paths = config.text or (SHAKESPEARE,)
        pairs = [split_texts(read_texts(path)) for path in paths]
        texts = ["\n".join(parts) for parts in zip(*pairs, strict=True)]
        train, held_out = (
            TokenWindows(np.array(encode(text), np.int32), config.seq) for text in texts
        )
        return train, held_out
    template = replace(read_template(config.from_weights), today=chat_date)
    chats = read_conversations(config.chat)
    kept = [chat for at, chat in enumerate(chats) if (at + 1) % HELD_OUT]
    held = chats[HELD_OUT - 1 :: HELD_OUT] or [kept.pop()]
    train, held_out = (
        ConversationRows(part, template, encode, config.seq) for part in (kept, held)
    )
    for line in (
        check_answers(train, "to train on"),
        check_answers(held_out, "held out", config.validation_rows),
    ):
        if line:
            LOGGER.info(line)
    return train, held_out


def make_step(config: FinetuneConfig, loaded: Loaded) -> TrainStep:
    """The compiled step: of LoRA's matrices, or of every weight."""
    lora, layout = config.lora, Layout.parse(config.layout)
    model = lora.model(loaded.model) if lora else loaded.model
    rate = optax.warmup_cosine_decay_schedule(
        0.0,
        learning_rate_schedule(config),
        max(config.steps // 10, 1),
        max(config.steps, 2),
    )
    return make_train_step(
        model,
        named_optimizer(config.optimizer, rate, model),
        layout,
        devices=jax.devices()[: layout.num_devices],
        max_grad_norm=1.0,
    )


def refuse_other_run(
    config: FinetuneConfig, now: dict[str, Any], checkpoints: Checkpoints
) -> None:
    """Refuses what is not the run that is in the folder.

    Args:
        config: Of this start.
        now: What its checkpoint would say.
        checkpoints: Of the folder.

    Raises:
        InputError: There is a checkpoint, and nobody said what to do with it, or its
            run had another model, LoRA or seed.
    """
    checkpoints.refuse_links()
    if checkpoints.latest_step is None:
        return
    if not config.resume:
        raise InputError(
            f"{str(config.out)!r} holds a run at step {checkpoints.latest_step}; "
            "add --resume to go on with it, or name another --out",
            key="run.folder_is_taken",
        )
    before, now = read_description(checkpoints), json.loads(json.dumps(now))
    for line in changes(before, now):
        LOGGER.info(f"goes on with {line}")
    refuse_other_optimizer(before, now)
    for name in _KEPT:
        if name in before and before[name] != now[name]:
            raise InputError(
                f"the checkpoint was made with {name}={before[name]}, not {now[name]}: "
                "give the same, or name another --out",
                key="run.changed_option",
            )


def first_state(
    config: FinetuneConfig, loaded: Loaded, step: TrainStep, checkpoints: Checkpoints
) -> TrainState:
    """The model as it is in its files, or as the run left it."""
    if checkpoints.latest_step is not None:
        return checkpoints.restore(step.state_shapes, step.shardings)
    if config.lora is None:
        values, state = loaded.params, loaded.model_state
        return step.init(config.seed, params=values, model_state=state)
    state = config.lora.state(loaded.model, loaded.params, loaded.model_state)
    return step.init(config.seed, model_state=state)


def trained(
    config: FinetuneConfig,
    step: TrainStep,
    state: TrainState,
    train: Any,
    held_out: Any,
    *,
    save: Callable[[TrainState], None],
) -> TrainState:
    """The state after the steps that are left, each on rows of its own number."""
    order = mixed([train], seed=config.seed)
    batches = ordered_batches(order, global_batch=config.global_batch)
    for number in range(int(state.step), config.steps):
        start = time.perf_counter()
        state, metrics = step(state, batches(number))
        loss = float(metrics["loss"])
        seconds = time.perf_counter() - start
        learned = "" if float(metrics["weight_sum"]) else ", no token of it counts"
        LOGGER.info(f"step {number + 1}: loss {loss:.4f}, {seconds:.2f} s{learned}")
        done = number + 1
        if done % config.validate_every == 0 and done < config.steps:
            validate(config, step, state, held_out)
        if done % config.save_every == 0 and done < config.steps:
            save(state)
    return state


def validate(
    config: FinetuneConfig, step: TrainStep, state: TrainState, rows: Any
) -> float:
    """Mean loss per token that counts, over the first of held-out rows."""
    loss_sum = weight_sum = 0.0
    first = [rows[at] for at in range(min(config.validation_rows, len(rows)))]
    for batch in padded_batches(first, config.global_batch):
        found = step.evaluate(state, batch)
        loss_sum += float(found["loss_sum"])
        weight_sum += float(found["weight_sum"])
    mean = loss_sum / max(weight_sum, 1.0)
    LOGGER.info(f"step {int(state.step)}: validation loss {mean:.4f}")
    return mean


def described(
    config: FinetuneConfig,
    loaded: Loaded,
    step: TrainStep,
    chat_date: date | None = None,
) -> dict[str, Any]:
    """Return the run's description, which `export` and `generate` read."""
    lora = config.lora
    said = {
        "from_weights": str(config.from_weights.absolute()),
        "model_sizes": dataclasses.asdict(loaded.config),
        "lora": None if lora is None else dataclasses.asdict(lora),
        "layout": str(step.layout),
        "seed": config.seed,
        "steps": config.steps,
        "global_batch": config.global_batch,
        "seq": config.seq,
        "learning_rate": learning_rate_schedule(config),
        "optimizer": config.optimizer,
        **_data_identity(config),
    }
    if chat_date is not None:
        said["chat_date"] = chat_date.isoformat()
    if loaded.tokenizer_file is not None:
        said["tokenizer"] = str(loaded.tokenizer_file.absolute())
    elif _has_own_tokenizer(loaded):
        said["tokenizer"] = str((config.out / TOKENIZER).absolute())
    if loaded.stop_tokens:
        said["eos"] = str(loaded.stop_tokens[0])
        said["stop_tokens"] = list(loaded.stop_tokens)
    return said


def _data_identity(config: FinetuneConfig) -> dict[str, Any]:
    """Where the texts or conversations are, and what identifies their content."""
    if config.chat is not None:
        paths, content = (config.chat,), config.chat.read_bytes()
    else:
        paths = config.text or (SHAKESPEARE,)
        texts = [read_texts(path).values() for path in paths]
        content = "\n".join(text for one in texts for text in one).encode()
    return {
        "text": [str(path.absolute()) for path in paths],
        "data": f"crc32 {zlib.crc32(content):08x}",
    }


def learning_rate_schedule(config: FinetuneConfig) -> float:
    """The highest of its curve: that given, or that of LoRA or of all weights."""
    return config.learning_rate or (LORA_RATE if config.lora else FULL_RATE)


def keep_tokenizer(config: FinetuneConfig, loaded: Loaded) -> None:
    """Writes the model's tokenizer and settings into the run's folder."""
    keep_files(
        config.out, tokenizer=loaded.tokenizer_file, started_from=config.from_weights
    )
    if _has_own_tokenizer(loaded):
        config.out.mkdir(parents=True, exist_ok=True)
        tokenizer: Any = loaded.tokenizer
        tokenizer.save(str(config.out / TOKENIZER))


def _has_own_tokenizer(loaded: Loaded) -> bool:
    """Return True if the tokenizer is part of the model's files."""
    of_run = isinstance(loaded.tokenizer, OfRun | WithoutTokenizer)
    return loaded.tokenizer_file is None and not of_run


def _log_sizes(step: TrainStep, state: TrainState) -> None:
    trained_, frozen = (
        sum(x.size for x in jax.tree.leaves(tree))
        for tree in (state.params, state.model_state)
    )
    LOGGER.info(f"{step.layout}: {trained_:,} values to train, {frozen:,} that stay")


if __name__ == "__main__":
    sys.exit(main())
