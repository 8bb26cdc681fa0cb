"""Connect the processes of a run, and compare their options."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshpar import InputError, distributed, emulate
from meshpar.distributed import Processes
from meshpar.recipes.config import RunConfig
from meshpar.train.faults import StopRequest
from meshpar.train.folder_in_use import FolderInUse, folder_in_use

_OWN = ("process_id",)
"""Options that differ from process to process."""

_APPEARS_S = 70.0
"""Within which a file that one host writes is seen by another: NFS keeps what it knows
of a folder for up to 60 s (`acdirmax` in nfs(5))."""


def join(config: RunConfig) -> Processes:
    """Joins the processes that the options or the scheduler speak of, if any.

    Raises:
        InputError: They do not come together.
    """
    processes = distributed.start(
        coordinator=config.coordinator,
        num_processes=config.num_processes,
        process_id=config.process_id,
        emulate=config.emulate or None,
        job=os.environ.get("SLURM_JOB_ID", ""),
        timeout_s=config.start_timeout,
        heartbeat_s=config.heartbeat,
    )
    if config.emulate and processes.num_processes == 1:
        emulate(config.emulate)
    return processes


def agreed(config: RunConfig, processes: Processes) -> RunConfig:
    """The options with the folder that process 0 has chosen where none is given.

    Raises:
        InputError: Another process has other options.
    """
    refuse_different(processes.gather(config.values()))
    if config.out is None:
        here = str(Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
        config = replace(config, out=Path(processes.gather(here)[0]))
    check_shared(config.folder, processes)
    return config


def check_shared(folder: Path, processes: Processes) -> None:
    """Refuse processes that do not all see the folder of their run.

    Each host writes its part of a checkpoint there: apart they are two halves of one.

    Args:
        folder: Of the run; made if it is not there.
        processes: Which tell one another.

    Raises:
        InputError: One does not see what process 0 has written there.
    """
    if processes.num_processes == 1:
        return
    proof = folder / f".shared-{uuid.uuid4().hex}"
    try:
        if processes.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            proof.touch()
        name = processes.gather(proof.name)[0]
        is_seen = processes.gather(_appears(folder / name))
    finally:
        if processes.is_first:
            with contextlib.suppress(OSError):
                proof.unlink(missing_ok=True)
    hosts = [number for number, seen in enumerate(is_seen) if not seen]
    if hosts:
        raise InputError(
            f"process {hosts[0]} does not see the file that process 0 wrote in "
            f"{str(folder)!r}: give all a folder that they share, by its absolute path",
            key="processes.folder_not_shared",
        )


@contextlib.contextmanager
def run_folder(config: RunConfig, processes: Processes) -> Iterator[FolderInUse | None]:
    """Lock the folder of a run for as long as the run lasts.

    Process 0 locks it for all; to the others this is None.

    Raises:
        InputError: Another run has locked it, or nothing can be written there.
    """
    if not processes.is_first:
        yield None
        return
    with folder_in_use(config.folder) as found:
        yield found


def _appears(path: Path) -> bool:
    """Return True if a file is there, or appears within a network's delay."""
    deadline = time.monotonic() + _APPEARS_S
    while not path.exists():
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # Networks look anew.
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def refuse_different(options: Sequence[Mapping[str, Any]]) -> None:
    """Names the first option that two processes have not in common.

    Args:
        options: Of each process.

    Raises:
        InputError: There is one.
    """
    for process, other in enumerate(options):
        for name, value in options[0].items():
            if name not in _OWN and other.get(name) != value:
                raise InputError(
                    f"process {process} was started with {name}={other.get(name)!r}, "
                    f"process 0 with {name}={value!r}: give all the same options but "
                    "--process-id",
                    key="processes.different_options",
                )


def after_step(
    processes: Processes, stop: StopRequest, data_s: float
) -> tuple[bool, list[float]]:
    """Return whether any process was asked to stop, and how long each waited.

    Args:
        processes: Which tell one another.
        stop: This one's.
        data_s: For how long this one waited for its batch.
    """
    signals, waited = zip(*processes.gather([stop.signal, data_s]), strict=True)
    return _noted(stop, signals), list(waited)


def agreed_stop(processes: Processes, stop: StopRequest) -> bool:
    """Return True if any process was asked to stop, so that all do."""
    return _noted(stop, processes.gather(stop.signal))


def _noted(stop: StopRequest, signals: Sequence[int | None]) -> bool:
    noted = [one for one in signals if one is not None]
    if noted and stop.signal is None:
        stop.signal = noted[0]
    return bool(noted)
