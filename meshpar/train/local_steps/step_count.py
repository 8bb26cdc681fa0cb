"""How many steps a state has done, known without waiting for the devices."""

from __future__ import annotations

from typing import Any

from meshpar.train.state import TrainState


class StepCount:
    """The number of the last state that was noted; of others it is read.

    Reading it waits until the device has made the state, so that steps would no longer
    be sent ahead.
    """

    def __init__(self) -> None:
        self._noted: Any = None
        self._steps = 0

    def of(self, state: TrainState) -> int:
        """Steps that a state has done."""
        return self._steps if state.step is self._noted else int(state.step)

    def note(self, state: TrainState, steps: int) -> None:
        """Remembers a state's."""
        self._noted, self._steps = state.step, steps
