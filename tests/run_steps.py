"""Runs of the recipe that share their compiled steps, or compute none.

A run makes its step anew, though most runs that tests begin train the same small model
in the same layout: what they ask is what a run does around its steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from meshpar import TrainState, TrainStep
from meshpar.recipes import bubble, pretrain
from meshpar.recipes.config import RunConfig
from meshpar.recipes.step import make_step
from tests.states import begin_with_zeros

SMALL = dict(
    preset="test",
    model="vocab=256,layers=1",
    seq=16,
    global_batch=8,
    sample_tokens=1,
    decay_steps=7,
)
"""Options of a small run; under `data=2` files share its step."""

_OF_STEP = (
    *("layout", "schedule", "preset", "model", "dtype", "from_weights", "tokenizer"),
    *("data", "sync_every", "outer_optimizer", "outer_learning_rate", "mesh_order"),
    *("outer_momentum", "gradient_reduction", "learning_rate", "optimizer"),
    *("learning_rate_schedule", "warmup_steps", "cooldown_steps", "final_rate_ratio"),
    *("max_grad_norm", "ema_decay"),
)

_made = functools.cache(make_step)


def shared_step(config: RunConfig) -> TrainStep:
    """Return the step of a run, the same for the same options that it depends on."""
    options = {name: getattr(config, name) for name in _OF_STEP}
    return _made(RunConfig(**options, steps=config.decay_steps or config.steps))


@pytest.fixture(scope="module")
def shared_steps() -> Iterator[None]:
    """Lets the runs of a file share their steps."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pretrain, bubble):
            patch.setattr(module, "make_step", shared_step)
        yield


def counted_step(state: TrainState, loss: float = 5.5) -> tuple[TrainState, dict]:
    """Return what a step gives that only counts: its state, and a row of metrics."""
    row = {"loss": loss, "grad_norm": loss, "tokens_per_s": 1.0, "step_s": 1.0}
    row["weight_sum"] = 1.0
    row["skipped"] = float(not np.isfinite(loss))
    return replace(state, step=state.step + 1), row


def compute_nothing(
    monkeypatch: pytest.MonkeyPatch, timed_step: Callable[..., Any]
) -> None:
    """Lets runs begin with zeros, take such steps, and compile no program.

    Args:
        monkeypatch: For as long as it lasts.
        timed_step: In the place of `pretrain.timed_step`.
    """

    def of_one_rate(config: RunConfig) -> TrainStep:
        rate, steps = RunConfig.learning_rate, SMALL["decay_steps"]
        return shared_step(replace(config, learning_rate=rate, decay_steps=steps))

    begin_with_zeros(monkeypatch)
    monkeypatch.setattr(pretrain, "make_step", of_one_rate)
    monkeypatch.setattr(pretrain, "timed_step", timed_step)
    monkeypatch.setattr(pretrain, "validate", lambda *args: 5.25)
    monkeypatch.setattr(pretrain, "sample", lambda *args: np.array([65]))
