"""Steps of SLURM, and launchers of several processes that are not supported."""

import pytest

from meshpar.distributed import DistributedError, find_place
from meshpar.distributed.cluster import Place, first_node
from meshpar.distributed.roll_call import Greeting, late_refusal
from tests.refusals import check_words

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "gpu[07-10]",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


def test_an_interactive_step_of_one_task_is_alone_whatever_its_job_has():
    interactive = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    assert find_place(interactive) is None


@pytest.mark.parametrize("tasks", [2, 3])
def test_a_step_has_its_own_tasks_and_not_those_of_its_job(tasks):
    place = find_place({**STEP, "SLURM_STEP_NUM_TASKS": str(tasks)})
    assert (place.process_id, place.num_processes) == (1, tasks)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("rack[1-2]n[03-04]", "rack1n03"),
        ("r[5,7]n[1-2]-ib,s[1-9]", "r5n1-ib"),
        ("r[05]n[1]", "r05n1"),
        ("a[1-2][3-4]", "a13"),
    ],
)
def test_node_lists_may_have_several_brackets(nodes, first):
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["", "n[1-", "n]1", "[", ",a"])
def test_a_list_that_names_no_node_is_refused(nodes, refuses):
    with refuses("processes.no_node_named", repr(nodes), kind=DistributedError):
        first_node(nodes)


LAUNCHERS = {
    "torchrun": ("WORLD_SIZE", "RANK"),
    "mpiexec of MPICH": ("PMI_SIZE", "PMI_RANK"),
    "mpiexec of MVAPICH": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    "jsrun": ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    "flux run": ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_processes_of_another_launcher_do_not_each_train_alone(launcher, refuses):
    size, rank = LAUNCHERS[launcher]
    told = f"{size}=4", f"{rank}=2", "--coordinator", f"${size}", f"${rank}"
    with refuses("processes.unknown_launcher", *told, kind=DistributedError):
        find_place({size: "4", rank: "2"})


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("number", ["1", "0", "", "some"])
def test_one_process_of_them_is_alone(launcher, number):
    size, rank = LAUNCHERS[launcher]
    assert find_place({size: number, rank: "0"}) is None
    assert find_place({size: "4"}) is None  # Whoever sets it starts nothing by it.


def test_a_launcher_inside_an_interactive_step_is_found_too(refuses):
    alone = {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
    mpirun = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
    place = find_place({**alone, **mpirun, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert (place.process_id, place.num_processes) == (3, 4)
    torchrun = {"WORLD_SIZE": "4", "RANK": "3"}
    told = "processes.unknown_launcher", "torchrun", "$MASTER_ADDR"
    with refuses(*told, kind=DistributedError):
        find_place({**alone, **torchrun})


def test_pods_of_an_indexed_job_are_left_to_kubernetes():
    pod = {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert find_place({**pod, "WORLD_SIZE": "4", "RANK": "1"}) is None


def test_srun_is_understood_also_where_it_speaks_pmi():
    assert find_place({**STEP, "PMI_SIZE": "4", "PMI_RANK": "1"}).num_processes == 4


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (2, ("processes.too_late", "process 1", "a1", "b1", "from 0 to 1")),
        (3, ("processes.count_mismatch", "num_processes=3", "has 2")),
    ],
)
def test_a_number_given_twice_is_told_with_both_who_have_it(number, told, snapshot):
    place = Place(coordinator="a0:1", num_processes=2, process_id=0)
    late = Greeting(process_id=1, num_processes=number, host="b1", job="")
    error = late_refusal(place, "", late, {0: "a0", 1: "a1"})
    key, *values = told
    assert error.key == key
    check_words(str(error), key, values, snapshot)
