"""Return to an earlier checkpoint after a bad step, and skip the text up to it."""

from __future__ import annotations

from dataclasses import replace

from meshpar import TrainState
from meshpar.recipes import report
from meshpar.recipes.config import RunConfig
from meshpar.recipes.resume import Position
from meshpar.recipes.rows import cut_rows_after
from meshpar.recipes.run import Run
from meshpar.recipes.save import told_if_not_saved
from meshpar.train.faults import BadStepError

_MOST = 10
"""Rollbacks of a run: what needs more of them is no accident."""


def rolled_back(run: Run, bad: BadStepError) -> tuple[Run, TrainState]:
    """The run where it goes on after a bad step.

    Its state is of a checkpoint at least `rollback_steps` before the bad step; its text
    goes on after the bad step's, so that what may have caused it does not come again.

    Raises:
        BadStepError: The policy is another, there is no checkpoint that early, or the
            run has been rolled back too often.
    """
    config, checkpoints, step = run.config, run.checkpoints, run.step
    if config.on_bad_step != "rollback":
        raise BadStepError(
            bad.step,
            f"{bad.why}; {_newest(checkpoints.latest_step, config)}",
            key=bad.key,
        ) from bad
    if run.num_rollbacks == _MOST:
        raise BadStepError(
            bad.step,
            f"{bad.why}, after {_MOST} rollbacks; look for the cause",
            key="run.too_many_rollbacks",
        ) from bad
    run.phases.begin("restoring")
    with told_if_not_saved(run):
        checkpoints.finish()
    most = max(bad.step + 1 - config.rollback_steps, 0)
    if checkpoints.newest_good(at_most=most) is None:
        raise _none_to_go_back_to(bad, most, config) from bad
    state = checkpoints.restore(step.state_shapes, step.shardings)
    back = checkpoints.step_read
    if back is None or back > most:  # What was chosen could not be read.
        raise _none_to_go_back_to(bad, most, config) from bad
    checkpoints.forget_after(back)
    windows = run.position.after(bad.step + 1, config.global_batch)
    cut_rows_after(run, back, done=bad.step + 1)
    report.log_rolled_back(bad, back, windows)
    position = Position(step=back, windows=windows)
    return replace(run, position=position, num_rollbacks=run.num_rollbacks + 1), state


def _newest(step: int | None, config: RunConfig) -> str:
    if step is None:
        end = config.stop_after or config.steps
        first = min(config.save_every or end, end)
        return f"there is no checkpoint yet: the first is of step {first}"
    return f"the newest checkpoint is of step {step}"


def _none_to_go_back_to(
    bad: BadStepError, most: int, config: RunConfig
) -> BadStepError:
    return BadStepError(
        bad.step,
        f"{bad.why}, and no good checkpoint of step {most} or before is left to go "
        f"back to; give a larger --keep than {config.keep}, or --keep-every, or fewer "
        f"--rollback-steps than {config.rollback_steps}",
        key="run.no_checkpoint_before_bad_step",
    )
