"""Save a run; a failed save does not end it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from meshpar import TrainState
from meshpar.recipes import report
from meshpar.recipes.run import Run
from meshpar.train.checkpoint import CheckpointError


def save(run: Run, state: TrainState, done: int) -> None:
    """Saves while the run goes on; the checkpoint before stays until this one is whole.

    Args:
        run: The state's.
        state: After `done` steps.
        done: Steps done.

    Raises:
        InputError: The folder of the run has been deleted; the state is saved.
    """
    with run.phases.during("saving"), told_if_not_saved(run):
        run.checkpoints.save(state, run.description(done), wait=False)
    if run.folder is not None:
        run.folder.refuse_deleted()
    run.goodput.note(done)


@contextlib.contextmanager
def told_if_not_saved(run: Run) -> Iterator[None]:
    """Prints what keeps a checkpoint from being written; the one before it stays."""
    try:
        yield
    except CheckpointError as error:
        report.log_not_saved(error)
