"""Which process of which job this is, as its scheduler says."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshpar.distributed.endings import BAD_INPUT, DistributedError
from meshpar.errors import InputError, whole_number

_PORTS = 2**12
"""Ports at the upper end of all, which jobs share out by their numbers."""

_OTHER_LAUNCHERS = (
    ("torchrun", "WORLD_SIZE", "RANK", "$MASTER_ADDR:PORT (not MASTER_PORT)"),
    ("an MPI launcher", "PMI_SIZE", "PMI_RANK", "HOST:PORT"),
    ("MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "HOST:PORT"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "HOST:PORT"),
    ("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "HOST:PORT"),
)
"""Launchers that are not supported: name, the variables of the number of processes and
of this one's, and the coordinator to give by hand."""

_POD_PORT = 8476
"""On TPU pods, whose hosts run one job at a time."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process's place in its job.

    Args:
        coordinator: HOST:PORT at which process 0 awaits the others.
        num_processes: How many there are.
        process_id: Which this is, from 0.
        found_by: Who says so.
        local_device: The only device of this host that is this process's; None where
            all that it sees are.

    Raises:
        InputError: They contradict one another.
    """

    coordinator: str
    num_processes: int
    process_id: int
    found_by: str = "the command line"
    local_device: int | None = None

    def __post_init__(self) -> None:
        whole_number("num_processes", self.num_processes)
        whole_number("process_id", self.process_id, 0)
        if self.process_id >= self.num_processes:
            raise InputError(
                f"process_id={self.process_id} of num_processes={self.num_processes}: "
                f"processes count from 0 to {self.num_processes - 1}",
                key="processes.process_id_too_large",
            )
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise InputError(
                f"coordinator {self.coordinator!r}: must be HOST:PORT of process 0, "
                "such as host0:1234",
                key="processes.bad_coordinator",
            )

    @property
    def host(self) -> str:
        """Host of the coordinator."""
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Port of the coordinator."""
        return int(self.coordinator.rpartition(":")[2])


def is_kubernetes_pod(environment: Mapping[str, str] | None = None) -> bool:
    """Return True in a pod of an indexed Kubernetes Job.

    Args:
        environment: Variables; this process's own when absent.
    """
    variables = os.environ if environment is None else environment
    return {"JOB_COMPLETION_INDEX", "KUBERNETES_SERVICE_HOST"} <= variables.keys()


def find_place(environment: Mapping[str, str] | None = None) -> Place | None:
    """Return the place that SLURM, Open MPI or a TPU pod gives this process, or None.

    Kubernetes tells it to those alone who ask its server, which JAX does in
    `meshpar.distributed.start`.

    Args:
        environment: Variables; this process's own when absent.

    Raises:
        InputError: The variables contradict one another, or a launcher that is not
            supported has started several processes.

    Example:
        >>> find_place({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"})
    """
    variables = os.environ if environment is None else environment
    for find in (_slurm, _open_mpi, _tpu_pod):
        place = find(variables)
        if place is not None and place.num_processes > 1:
            return place
    if not is_kubernetes_pod(variables):
        _refuse_other_launchers(variables)
    return None


def _refuse_other_launchers(variables: Mapping[str, str]) -> None:
    """Refuse to run alone as one of several processes."""
    for launcher, size, rank, coordinator in _OTHER_LAUNCHERS:
        number = variables.get(size, "")
        if rank in variables and number.isdecimal() and int(number) > 1:
            raise DistributedError(
                f"{launcher} has started {number} processes ({size}={number}, "
                f"{rank}={variables[rank]}), which are not joined by themselves; give "
                f"--coordinator {coordinator} --num-processes ${size} --process-id "
                f"${rank}, or, for a process alone, unset {size} and {rank}",
                status=BAD_INPUT,
                key="processes.unknown_launcher",
            )


def _slurm(variables: Mapping[str, str]) -> Place | None:
    """A task of `srun`: https://slurm.schedmd.com/srun.html, output environment.

    The body of a batch script is none: SLURM_STEP_NODELIST is absent there. A step has
    SLURM_STEP_NUM_TASKS tasks; in an interactive one SLURM_NTASKS is of its job.
    """
    size = "STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "NTASKS"
    names = ("JOB_ID", "STEP_NODELIST", size, "PROCID")
    if any(f"SLURM_{name}" not in variables for name in (*names, "LOCALID")):
        return None
    job, nodes, tasks, task = (variables[f"SLURM_{name}"] for name in names)
    per_node = variables.get("SLURM_STEP_TASKS_PER_NODE", "")
    one_each = re.fullmatch(r"1(\(x\d+\))?", per_node) is not None
    return Place(
        coordinator=f"{first_node(nodes)}:{_job_port(job)}",
        num_processes=_number(f"SLURM_{size}", tasks),
        process_id=_number("SLURM_PROCID", task),
        found_by=f"SLURM job {job}",
        local_device=_own_device(variables, "SLURM_LOCALID", alone=one_each),
    )


def first_node(nodes: str) -> str:
    """Return the first name of a SLURM node list.

    Example:
        >>> first_node("gpu[007-012,020],login1")
        'gpu007'
        >>> first_node("rack[2-3]-node[1,5],login1")
        'rack2-node1'
    """
    found = re.match(r"(?:[^,\[\]]|\[[^\[\]]+\])+(?=,|$)", nodes)
    first = re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", found[0]) if found else ""
    if not first:
        raise DistributedError(
            f"SLURM_STEP_NODELIST={nodes!r} names no node",
            status=BAD_INPUT,
            key="processes.no_node_named",
        )
    return first


def _open_mpi(variables: Mapping[str, str]) -> Place | None:
    """A process of `mpirun`, versions 4 and 5.

    Version 4 says where it runs (orte_hnp_uri), version 5 which host runs rank 0
    only to those of that host, so that the coordinator has to be given by hand.
    """
    size = variables.get("OMPI_COMM_WORLD_SIZE")
    rank = variables.get("OMPI_COMM_WORLD_RANK")
    if size is None or rank is None or _number("OMPI_COMM_WORLD_SIZE", size) == 1:
        return None
    uri = variables.get("OMPI_MCA_orte_hnp_uri", "")
    found = re.match(r"(\d+)\..*?tcp6?://\[?([^,\]]+?)(?:[,\]]|:\d+$)", uri)
    local_size = _number(
        "OMPI_COMM_WORLD_LOCAL_SIZE", variables.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0")
    )
    if found:
        host, job = found[2], str(int(found[1]) // _PORTS)
    elif local_size == int(size):
        host, job = "localhost", variables.get("PMIX_NAMESPACE", "0")
    else:
        raise DistributedError(
            f"Open MPI runs {size} processes on several hosts and does not say where "
            "rank 0 is; give --coordinator HOST:PORT --num-processes "
            f"{size} --process-id $OMPI_COMM_WORLD_RANK",
            status=BAD_INPUT,
            key="processes.unknown_first_host",
        )
    local, alone = "OMPI_COMM_WORLD_LOCAL_RANK", local_size == 1
    return Place(
        coordinator=f"{host}:{_job_port(job)}",
        num_processes=int(size),
        process_id=_number("OMPI_COMM_WORLD_RANK", rank),
        found_by="Open MPI",
        local_device=_own_device(variables, local, alone=alone),
    )


def _tpu_pod(variables: Mapping[str, str]) -> Place | None:
    """A host of a pod slice that Kubernetes or a queued resource has set up."""
    workers = variables.get("TPU_PROCESS_ADDRESSES") or variables.get(
        "TPU_WORKER_HOSTNAMES", ""
    )
    worker, hosts = variables.get("TPU_WORKER_ID"), workers.split(",")
    if worker is None or len(hosts) < 2 or "MEGASCALE_NUM_SLICES" in variables:
        return None  # Of several slices JAX knows more.
    return Place(
        coordinator=f"{hosts[0].partition(':')[0]}:{_POD_PORT}",
        num_processes=len(hosts),
        process_id=_number("TPU_WORKER_ID", worker),
        found_by="the TPU pod",
    )


def _own_device(variables: Mapping[str, str], name: str, *, alone: bool) -> int | None:
    """Return the only GPU of this process; None if it has all GPUs it sees.

    `name` is of the variable that numbers the processes of a host.
    """
    seen = variables.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    return None if alone or len(seen) < 2 else _number(name, variables.get(name, "0"))


def _job_port(job: str) -> int:
    number = int(job) if job.isdecimal() else sum(map(ord, job))
    return 65536 - _PORTS + number % _PORTS


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise DistributedError(
            f"{name}={text!r}: must be a whole number",
            status=BAD_INPUT,
            key="value.not_whole_number",
        )
    return int(text)
