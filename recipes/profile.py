"""A trace of some steps, for XProf (TensorBoard) and Perfetto."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from meshpar.recipes import report
from meshpar.recipes.config import RunConfig

_UNTRACED = 2
"""Steps before: the first compiles, and the second may still allocate."""


class Profile:
    """Traces steps, each under its number.

    Every process writes its own trace: `plugins/profile/TIME/HOST.xplane.pb`, which
    XProf reads, and `perfetto_trace.json.gz` for https://ui.perfetto.dev. Of several
    processes, which may share a host, each has a folder of its own.

    Args:
        config: How many, `profile`, and the folder of the run.
        first: The first step of this start.
    """

    def __init__(self, config: RunConfig, *, first: int) -> None:
        self._traced = range(first + _UNTRACED, first + _UNTRACED + config.profile)
        self._folder = config.folder / "profile"
        if jax.process_count() > 1:
            self._folder /= f"process{jax.process_index()}"
        self._is_on = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one step."""
        if number not in self._traced:
            yield
            return
        if not self._is_on:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._is_on = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            yield
        if number == self._traced[-1]:
            self._stop()

    def _stop(self) -> None:
        self._is_on = False
        jax.profiler.stop_trace()
        report.log_profiled(self._traced, self._folder)

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if not self._is_on:
            return
        try:
            self._stop()
        except Exception as failed:
            if kind is None:
                raise
            # What ended the run is not to be lost behind it.
            report.log_warning(f"no trace is written: {failed}")
