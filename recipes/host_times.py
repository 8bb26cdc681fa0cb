"""Times of each process's steps: waits for data, and slow devices."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from meshpar.recipes import report
from meshpar.recipes.data_waits import DataWaits
from meshpar.recipes.run import Run
from meshpar.train.faults import probe_s, slow_ones
from meshpar.train.metrics import JsonLines

NAME = "processes.jsonl"
"""The file in a run's folder: a row for each process at each look."""


class HostTimes:
    """The times of the steps since the last look, of every process.

    Args:
        run: Whose processes; of several each look adds a row for each to
            OUT/processes.jsonl: `step`, `process`, `host`, `step_s` and `data_s`
            (medians), and `probe_s`, each device's time for the same matmuls.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._waits = DataWaits(hosts=run.processes.hosts)
        self._steps_s: list[float] = []
        self._data_s: list[float] = []

    def note(self, step_s: float, waited_s: Sequence[float]) -> float:
        """Takes a step, and each process's wait before it; returns the longest."""
        self._steps_s.append(step_s)
        self._data_s.append(waited_s[self._run.processes.process_id])
        return self._waits.note(step_s, waited_s)

    def look(self, done: int) -> None:
        """Logs what is slow. All processes take part."""
        report.log_waits(done, self._waits.line())
        step_s, data_s = map(statistics.median, (self._steps_s, self._data_s))
        self._steps_s, self._data_s = [], []
        devices = self._devices()
        if not devices:
            return
        processes = self._run.processes
        told = processes.gather([step_s, data_s, probe_s(devices)])
        if not processes.is_first:
            return
        for line in slow_ones([one[2] for one in told], processes.hosts):
            report.log_waits(done, line)
        if processes.num_processes > 1:
            try:
                self._write(done, told)
            except OSError as error:
                line = f"times of processes are not written: {error}; the run goes on"
                report.log_line(line)

    def _write(
        self, done: int, told: Sequence[tuple[float, float, list[float]]]
    ) -> None:
        hosts, path = self._run.processes.hosts, self._run.config.folder / NAME
        kept_bytes = path.stat().st_size if path.exists() else 0
        with _cut_if_raised(path, kept_bytes), JsonLines(path) as rows:
            for process, (step_s, data_s, probes_s) in enumerate(told):
                times = {"step_s": step_s, "data_s": data_s, "probe_s": max(probes_s)}
                rows.write(step=done - 1, process=process, host=hosts[process], **times)

    def _devices(self) -> list[jax.Device]:
        """This process's, unless all share one machine's cores."""
        devices = self._run.step.mesh.devices.flat
        here = [one for one in devices if one.process_index == jax.process_index()]
        is_alone = self._run.processes.num_processes == 1
        return [] if is_alone and here[0].platform == "cpu" else here


@contextlib.contextmanager
def _cut_if_raised(path: Path, kept_bytes: int) -> Iterator[None]:
    """Leaves no half of a row, which nobody could read."""
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(path, kept_bytes)
        raise
