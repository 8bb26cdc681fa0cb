"""How the processes of a job join, before the first JAX operation of any."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from meshpar.distributed.cluster import Place, find_place, is_kubernetes_pod
from meshpar.distributed.endings import BAD_INPUT, LOST, DistributedError
from meshpar.distributed.processes import Processes
from meshpar.distributed.roll_call import Roll, call_roll, free_port
from meshpar.errors import InputError
from meshpar.hardware.platforms import platform_named
from meshpar.machine.emulate import prepare

_NUMERIC_OPTIONS = (
    *("jax_threefry_partitionable", "jax_default_prng_impl", "jax_enable_x64"),
    *("jax_default_matmul_precision", "jax_numpy_dtype_promotion"),
    *("jax_numpy_rank_promotion", "jax_random_seed_offset"),
)
"""JAX's options on which the numbers depend that a program computes."""


def start(
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    emulate: int | None = None,
    job: str = "",
    timeout_s: float = 50.0,
    heartbeat_s: float = 30.0,
) -> Processes:
    """Join the processes of this job; does nothing if this is the only one.

    SLURM, Open MPI, TPU pods and Kubernetes are found by themselves. On CPUs each kind
    of collective is then checked once with 4 MiB of whole numbers, as gloo has been
    reported to return wrong ones.

    Args:
        coordinator: HOST:PORT of process 0, by hand; with `num_processes` and
            `process_id`, or none of the three.
        num_processes: How many are started.
        process_id: Which of them this is.
        emulate: Virtual CPU devices of each process; the machine's own when absent.
        job: What the processes of this job have in common and those of another not.
        timeout_s: How long to wait for all of them.
        heartbeat_s: After how much silence one of them ends the others.

    Raises:
        InputError: Not all came in time, named by number; the port is another job's;
            JAX has started already; the three are not given together; or a process has
            other versions or settings of JAX.
        DistributedError: A collective returns wrong numbers.

    Example:
        >>> start().num_processes
        1
    """
    if emulate:
        prepare(emulate)
    place = _place(coordinator, num_processes, process_id)
    if place is None and is_kubernetes_pod():
        return _start_kubernetes(job, timeout_s, heartbeat_s)
    if place is None or place.num_processes == 1:
        return Processes()
    roll = call_roll(place, job=job, timeout_s=timeout_s)
    processes = Processes(place.process_id, roll, heartbeat_s=heartbeat_s)
    with processes.ending_all_on_errors(), _ended_after(2 * timeout_s, processes):
        refuse_other_settings(processes.gather(_settings()))
        _start_jax(place, roll, timeout_s, heartbeat_s)
        _check_collectives(processes)
    return processes


def _settings() -> dict[str, Any]:
    """Return the versions and settings that decide what numbers a process computes."""
    import jax

    versions = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    options = {name: getattr(jax.config, name) for name in _NUMERIC_OPTIONS}
    with contextlib.suppress(PackageNotFoundError):  # Of a checkout.
        versions["meshpar"] = version("meshpar")
    return {**versions, **options}


def refuse_other_settings(settings: Sequence[Mapping[str, Any]]) -> None:
    """Refuse processes whose versions, or JAX's settings, would compute other numbers.

    Args:
        settings: Of each process, by name.

    Raises:
        InputError: Names the first that differs, both processes and both values.
    """
    for process, other in enumerate(settings):
        for name, value in settings[0].items():
            if name not in other or other[name] != value:
                raise InputError(
                    f"process {process} has {name}={other.get(name)!r}, process 0 has "
                    f"{name}={value!r}: they would not train one model; give "
                    "all the same versions, JAX options and JAX_ variables",
                    key="processes.different_settings",
                )


@contextlib.contextmanager
def _ended_after(limit_s: float, processes: Processes) -> Iterator[None]:
    """End all processes, with their stacks, if the body takes too long."""
    what = f"JAX's start and a first collective of each kind took over {limit_s:g} s"
    timer = threading.Timer(limit_s, lambda: processes.end_all(what, with_stacks=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _place(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> Place | None:
    given = {
        "coordinator": coordinator,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    absent = [name for name, value in given.items() if value is None]
    if len(absent) == len(given):
        return find_place()
    if coordinator is None or num_processes is None or process_id is None:
        raise InputError(
            f"{', '.join(absent)} must be given too: a process joins by hand with "
            "coordinator, num_processes and process_id together",
            key="processes.incomplete_options",
        )
    return Place(
        coordinator=coordinator, num_processes=num_processes, process_id=process_id
    )


def _start_jax(place: Place, roll: Roll, timeout_s: float, heartbeat_s: float) -> None:
    import jax

    _use_gloo()
    try:
        jax.distributed.initialize(
            roll.service,
            place.num_processes,
            place.process_id,
            local_device_ids=place.local_device,
            cluster_detection_method="deactivate",
            coordinator_bind_address=roll.bound,
            initialization_timeout=max(int(timeout_s), 1),
            # Ours end the job first, with a line.
            heartbeat_timeout_seconds=100 + int(2 * heartbeat_s),
            shutdown_timeout_seconds=30,
        )
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        raise InputError(
            "JAX has started already, alone; call meshpar.distributed.start before the "
            "first JAX operation",
            key="processes.jax_already_started",
        ) from error


def _check_collectives(processes: Processes) -> None:
    import jax

    from meshpar.distributed.collectives_check import check_collectives

    is_host = platform_named(jax.default_backend()).is_host
    wrong = check_collectives() if is_host else None
    found = [one for one in processes.gather(wrong) if one]
    if found:
        raise DistributedError(
            found[0], status=BAD_INPUT, key="processes.wrong_collective"
        )


def _start_kubernetes(job: str, timeout_s: float, heartbeat_s: float) -> Processes:
    """Join the pods of an indexed Job or JobSet, which JAX finds through Kubernetes.

    Once JAX has joined them, process 0 tells all where the roll is called.
    """
    import jax

    _use_gloo()
    try:
        jax.distributed.initialize(initialization_timeout=max(int(timeout_s), 1))
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DistributedError(
            f"JAX cannot ask Kubernetes for the pods of this Job ({reason}): pip "
            "install 'jax[k8s]' and let the Job read pods, or give --coordinator "
            "HOST:PORT --num-processes N --process-id $JOB_COMPLETION_INDEX",
            status=BAD_INPUT if isinstance(error, ValueError) else LOST,
            key="processes.kubernetes_unavailable",
        ) from error
    if jax.process_count() == 1:
        return Processes()
    place = Place(
        coordinator=_meeting_point(),
        num_processes=jax.process_count(),
        process_id=jax.process_index(),
        found_by="Kubernetes",
    )
    roll = call_roll(place, job=job, timeout_s=timeout_s)
    processes = Processes(place.process_id, roll, heartbeat_s=heartbeat_s)
    with processes.ending_all_on_errors(), _ended_after(2 * timeout_s, processes):
        _check_collectives(processes)
    return processes


def _meeting_point() -> str:
    """Return HOST:PORT that process 0 chooses and sends to all."""
    import numpy as np
    from jax.experimental import multihost_utils

    host = socket.gethostbyname(socket.gethostname())
    text = f"{host}:{free_port()}".encode().ljust(64)
    told = multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))
    return bytes(np.asarray(told)).decode().strip()


def _use_gloo() -> None:
    import jax

    config = cast(Any, jax.config)  # JAX makes its options when it is imported.
    if config.jax_cpu_collectives_implementation is None:
        config.update("jax_cpu_collectives_implementation", "gloo")
