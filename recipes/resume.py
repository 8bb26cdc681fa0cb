"""Changes that a resumed run may make, and its position in the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshpar import InputError, Layout
from meshpar.recipes.config import RunConfig
from meshpar.recipes.optimizer_options import FIRST_DEFAULT, state_parts
from meshpar.recipes.optimizers import learning_rate_schedule
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.checkpoint.contents import check_description

Description = Mapping[str, Any]
"""Description of a run in its checkpoint."""

_TOLD = (
    *("layout", "precision", "steps", "decay_steps", "global_batch", "seq"),
    *("learning_rate", "text", "sources", "data", "validation_data", "tokenizer"),
    *("eos", "pack", "schedule", "optimizer", "learning_rate_schedule"),
    *("warmup_steps", "cooldown_steps", "final_rate_ratio", "max_grad_norm"),
    "ema_decay",
)
"""Options whose changes are printed."""

_OF_RATE = (
    *("steps", "decay_steps", "learning_rate", "learning_rate_schedule"),
    *("warmup_steps", "cooldown_steps", "final_rate_ratio"),
    *("optimizer", "ema_decay", "validate_with"),
)
"""Options that the learning rate depends on, and those they are checked with."""


@dataclass(frozen=True)
class Position:
    """Where a start of a run stands in its text.

    Args:
        step: Its first step.
        windows: Windows of the text's order that came before it.
    """

    step: int = 0
    windows: int = 0

    def after(self, done: int, global_batch: int) -> int:
        """Windows used up when `done` steps are done."""
        return self.windows + (done - self.step) * global_batch


def read_description(checkpoints: Checkpoints) -> dict[str, Any]:
    """Return what the newest good checkpoint says of its run.

    Raises:
        CheckpointError: There is none, it cannot be read, or it says what no run does.
    """
    found = checkpoints.run_of_latest()
    step, where = checkpoints.step_read, str(checkpoints.directory)
    check_description(found, f"checkpoint of step {step} in {where!r}")
    return found


def refuse_other(before: Description, now: Description, done: int) -> None:
    """Names what may not change.

    Args:
        before: Of the checkpoint.
        now: Of this start.
        done: Steps done.

    Raises:
        InputError: Another model, seed or optimizer, or fewer steps than are done.
    """
    sizes, wanted = before.get("model_sizes", {}), now["model_sizes"]
    for name, size in sizes.items():  # In an order that no run changes.
        if size != wanted.get(name, size):
            raise InputError(
                f"the checkpoint's model has {name}={size}, not {wanted[name]}: "
                "its parameters are of that model; give the same model, or start "
                "another run",
                key="run.changed_model",
            )
    refuse_other_replicas(before, now)
    if before.get("seed", now["seed"]) != now["seed"]:
        raise InputError(
            f"the checkpoint was made with seed={before['seed']}, not {now['seed']}: "
            "initial values, the order of the text and every random number follow from "
            "it; leave --seed out, or start another run",
            key="run.changed_seed",
        )
    refuse_other_optimizer(before, now)
    if done > now["steps"]:
        raise InputError(
            f"the checkpoint is at step {done}, beyond steps={now['steps']}; give at "
            f"least --steps {done}",
            key="run.too_few_steps",
        )


def refuse_other_optimizer(before: Description, now: Description) -> None:
    """Refuses an optimizer whose state has other arrays than the checkpoint's.

    Raises:
        InputError: It has.
    """
    texts = [said.get("optimizer", FIRST_DEFAULT) for said in (before, now)]
    had, has = (
        state_parts(text, said.get("ema_decay"))
        for text, said in zip(texts, (before, now), strict=True)
    )
    for name, value in had.items():
        if value != has[name]:
            raise InputError(
                f"the checkpoint has the optimizer state of {name}={value}, not "
                f"{has[name]} (--optimizer {texts[0]} before, {texts[1]} now): give "
                "the same, or export its weights and start another run with --from",
                key="run.changed_optimizer",
            )


def refuse_other_replicas(before: Description, now: Description) -> None:
    """Refuses another number of replicas that train by themselves.

    Raises:
        InputError: Each has an optimizer state of its own, which others lack.
    """
    if "layout" not in before:
        return
    had, has = _replicas(before["layout"]), _replicas(now["layout"])
    if had != has:
        raise InputError(
            f"the checkpoint has the states of {had} replicas (layout "
            f"{before['layout']}), but layout {now['layout']} has {has}: keep 'data' "
            "and whether there are local steps (sync_every above 1); all else may "
            "change",
            key="run.changed_replicas",
        )


def _replicas(line: str) -> int:
    """States of the optimizer that a layout has."""
    layout = Layout.parse(line)
    return layout.data if layout.sync_every > 1 else 1


def changes(before: Description, now: Description) -> list[str]:
    """Each option that is another one now, with both values.

    Example:
        >>> changes({"steps": 5, "seq": 128}, {"steps": 9, "seq": 128})
        ['steps 5 -> 9']
    """
    return [
        f"{name} {_text(before[name])} -> {_text(now[name])}"
        for name in _TOLD
        if name in before and name in now and before[name] != now[name]
    ]


def data_position(before: Description, now: Description, done: int) -> Position:
    """Where the data go on: windows that were used stay used, whatever the batch.

    Another text, or windows of another length, begin at their own beginning.

    Example:
        >>> before = {"data": "a", "windows": 40, "seq": 8}
        >>> data_position(before, {"data": "a", "seq": 8}, done=5)
        Position(step=5, windows=40)
        >>> data_position(before, {"data": "b", "seq": 8}, done=5)
        Position(step=5, windows=0)
    """
    if (before.get("data", now["data"]), before.get("seq")) != (
        now["data"],
        now["seq"],
    ):
        return Position(step=done)
    # Before 0.2 a checkpoint did not say, and its batch was of one size throughout.
    windows = before.get("windows", done * before.get("global_batch", 0))
    return Position(step=done, windows=windows)


def rate_change(
    config: RunConfig, before: Description, done: int, skipped: float = 0
) -> list[str]:
    """How the learning rate of the next step differs from the earlier run's, if so.

    Its curve is over `decay_steps`, which are `steps` unless they are given: more steps
    stretch it, and the run goes on where the new curve is by then.

    Args:
        config: Of this start.
        before: What the checkpoint says of its run.
        done: Steps done.
        skipped: Of them those that changed nothing, which the curve does not count;
            the mean of replicas that skip each for itself.

    Example:
        >>> before = {"steps": 20, "decay_steps": None, "learning_rate": 0.01}
        >>> config = RunConfig(steps=40, learning_rate=0.01)
        >>> rate_change(config, before, done=20)[0][:38]
        'learning rate of step 20 0.001 -> 0.00'
    """
    if not {"steps", "decay_steps", "learning_rate"} <= before.keys():
        return []
    default = RunConfig().values()
    earlier = replace(
        config, **{name: before.get(name, default[name]) for name in _OF_RATE}
    )
    then, now = (
        float(learning_rate_schedule(one)(done - skipped)) for one in (earlier, config)
    )
    if then == now:
        return []
    told = f"learning rate of step {done} {then:.3g} -> {now:.3g}"
    steps = earlier.decay_steps or earlier.steps
    if steps != (config.decay_steps or config.steps):
        told += f" (--decay-steps {steps} keeps its curve)"
    return [told]


def _text(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)
