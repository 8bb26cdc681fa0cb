"""The metrics of a step, and where they go: JSON lines, trackers, functions."""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from meshpar import TrainStep
from meshpar.distributed import Processes
from meshpar.hardware.devices import device_from_kind
from meshpar.planner.from_model import traced_workload
from meshpar.recipes.config import RunConfig
from meshpar.recipes.trackers import open_trackers
from meshpar.train.metrics import JsonLines

OnMetrics = Callable[[dict[str, Any]], None]
"""Is given each row as it is written; `step` is in it."""

Callback = Callable[[int, dict[str, Any]], None]
"""Is given the step and the metrics of each row as it is written."""

LOGGER = logging.getLogger("meshpar.recipes.pretrain")


class MetricsLog:
    """Every row of a run, written to all who want it.

    Args:
        config: Which files and trackers.
        on_metrics: Called with every row.
        callbacks: Called with the step and the metrics of every row.
        done: Steps that the run resumes after; TensorBoard forgets later ones.

    Raises:
        InputError: A tracker is not installed, or does not begin.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        on_metrics: OnMetrics | None = None,
        callbacks: Sequence[Callback] = (),
        done: int = 0,
    ) -> None:
        self._trackers = open_trackers(config, done)
        self._failed: set[str] = set()
        self._on_metrics, self._callbacks = on_metrics, callbacks
        self._lines = JsonLines(config.metrics_path)
        self.path = self._lines.path

    def write(self, *, step: int, **row: float | None) -> None:
        """Hands one row to all; None is what cannot be known here."""
        self._lines.write(step=step, **row)
        known = {name: value for name, value in row.items() if value is not None}
        for name, tracker in self._trackers.items():
            try:
                tracker.write(step, known)
            except Exception as error:  # A server that is away ends no run.
                if name not in self._failed:
                    self._failed.add(name)
                    LOGGER.warning("step %d: --tracker %s: %s", step, name, error)
        if self._on_metrics is not None:
            self._on_metrics({"step": step, **row})
        for callback in self._callbacks:
            callback(step, dict(row))

    def __enter__(self) -> MetricsLog:
        self._lines.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for tracker in self._trackers.values():
            tracker.close()
        self._lines.__exit__(*error)


class NoLog:
    """In the place of a log where another process keeps it."""

    def write(self, *, step: int, **row: float | None) -> None:
        """Nothing."""


@contextlib.contextmanager
def metrics_log(
    processes: Processes,
    config: RunConfig,
    on_metrics: OnMetrics | None,
    callbacks: Sequence[Callback],
    done: int,
) -> Iterator[MetricsLog | NoLog]:
    """The log of process 0, open; no log for the others."""
    if not processes.is_first:
        yield NoLog()
        return
    with MetricsLog(
        config, on_metrics=on_metrics, callbacks=callbacks, done=done
    ) as log:
        yield log


class Utilization:
    """Use of the devices in a step: MFU and memory.

        mfu = model FLOPs of a step / (step_s * devices * peak FLOP/s of one)

    Model FLOPs count no recomputation. The peak is the data sheet's of the layout's
    precision (`meshpar/hardware`; fp32 as JAX multiplies by default), so MFU is None
    on a device that is not in that table, such as a CPU.

    Args:
        step: The run's.
        global_batch: Sequences in a step.
        seq: Tokens of one.
    """

    def __init__(self, step: TrainStep, *, global_batch: int, seq: int) -> None:
        devices = list(step.mesh.devices.flat)
        here = jax.process_index()
        self._devices = [one for one in devices if one.process_index == here]
        known = device_from_kind(devices[0].device_kind)
        self.peak_flops = known and known.peak_flops[step.layout.precision]
        self._seconds_at_peak = None
        if self.peak_flops:
            workload = traced_workload(step.model_as_given, seq=seq)
            flops = workload.model_flops(global_batch=global_batch, seq=seq)
            self._seconds_at_peak = flops / (self.peak_flops * len(devices))

    def row(self, step_s: float) -> dict[str, float | None]:
        """MFU of a step of that time, and bytes of memory at their highest so far.

        `memory_bytes` is of the fullest device of this process, None where the backend
        does not tell (CPU); `host_memory_bytes` of this process.
        """
        seconds = self._seconds_at_peak
        return {
            "mfu": None if seconds is None else seconds / step_s,
            "memory_bytes": _device_bytes(self._devices),
            "host_memory_bytes": _host_bytes(),
        }


def _device_bytes(devices: list[jax.Device]) -> int | None:
    stats: list[Mapping[str, int]] = [one.memory_stats() or {} for one in devices]
    peaks = [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]
    return max(peaks, default=None)


def _host_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
