"""A process's place is what its scheduler says; who does not come is named."""

import contextlib
import errno
import json
import re
import socket
import threading
import time
from dataclasses import replace

import pytest

from meshpar import InputError
from meshpar.distributed import DistributedError, Place, Processes, find_place, start
from meshpar.distributed.cluster import first_node
from meshpar.distributed.collectives_check import check_collectives
from meshpar.distributed.endings import exit_status
from meshpar.distributed.lines import Lines
from meshpar.distributed.roll_call import (
    Greeting,
    _listen,
    _refuse_late,
    bound_host,
    call_roll,
    refusal,
)
from meshpar.distributed.start import _ended_after
from meshpar.recipes.command import main
from tests.marks import slow
from tests.multiprocess.children import free_port
from tests.refusals import check_words, names

SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NODELIST": "gpu[07-10]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
POD = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t0.svc,t1.svc"}


@pytest.mark.parametrize(
    ("variables", "coordinator", "of", "device"),
    [
        (SLURM, "gpu07:62344", (2, 4), None),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "gpu07:62344", (2, 4), 0),
        (OPEN_MPI, "10.96.0.1:62624", (3, 4), 1),
        ({**OPEN_MPI, "CUDA_VISIBLE_DEVICES": "5"}, "10.96.0.1:62624", (3, 4), None),
        (POD, "t0.svc:8476", (1, 2), None),
    ],
)
def test_each_scheduler_says_which_process_this_is(variables, coordinator, of, device):
    place = find_place(variables)
    assert place.coordinator == coordinator
    assert (place.process_id, place.num_processes) == of
    assert place.local_device == device


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {name: text for name, text in SLURM.items() if "STEP" not in name},
        {**POD, "TPU_WORKER_HOSTNAMES": "localhost"},
    ],
)
def test_a_process_alone_joins_nobody(variables):
    assert find_place(variables) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a-1,b", "a-1"),
        ("n[001-015],m", "n001"),
        ("n[001,007-015]-ib", "n001-ib"),
    ],
)
def test_the_first_node_of_a_list_is_process_0s(nodes, first):
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (
            dict(coordinator="a:1"),
            ("processes.incomplete_options", "num_processes", "process_id"),
        ),
        (
            dict(coordinator="a", num_processes=2, process_id=0),
            ("processes.bad_coordinator", "'a'", "HOST:PORT"),
        ),
        (
            dict(coordinator="a:1", num_processes=2, process_id=2),
            ("processes.process_id_too_large", 2, 0, 1),
        ),
        (
            dict(coordinator="a:1", num_processes=0, process_id=0),
            ("value.not_whole_number", "num_processes", 0, 1),
        ),
    ],
)
def test_what_contradicts_itself_is_refused_before_anything_starts(
    options, refusal, refuses
):
    with refuses(*refusal):
        start(**options)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        (
            {**SLURM, "SLURM_LOCALID": "a", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
            "SLURM_LOCALID",
        ),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": ""}, "OMPI_COMM_WORLD_LOCAL_RANK"),
    ],
)
def test_a_variable_that_is_no_number_is_named(variables, name, refuses):
    with refuses("value.not_whole_number", name, repr(variables[name])):
        find_place(variables)


def test_open_mpi_5_on_several_hosts_needs_a_coordinator_by_hand(refuses):
    variables = {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": ""}
    unknown = "processes.unknown_first_host", 4, "$OMPI_COMM_WORLD_RANK"
    with refuses(*unknown, kind=DistributedError):
        find_place(variables)
    variables["OMPI_COMM_WORLD_LOCAL_SIZE"] = "4"
    assert find_place(variables).host == "localhost"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """What takes seconds of waiting takes less."""
    monkeypatch.setattr("meshpar.distributed.roll_call._PORT_S", 0.1)
    monkeypatch.setattr("meshpar.distributed.roll_call._RETRY_S", 0.02)
    monkeypatch.setattr("meshpar.distributed.processes._LINGER_S", 0.1)
    monkeypatch.setattr("meshpar.distributed.processes._GRACE_S", 0.1)


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InputError("no such preset"), 2),
        (DistributedError("not come", key="processes.not_all_came"), 75),
        (DistributedError("another", key="processes.count_mismatch", status=2), 2),
        (FileNotFoundError(errno.ENOENT, "no such file"), 2),
        (OSError(errno.ESTALE, "stale file handle"), 75),
        (caused(InputError("cannot read"), OSError(errno.EIO, "broken")), 75),
        (caused(InputError("cannot read"), OSError(errno.EACCES, "denied")), 2),
        (RuntimeError("a collective broke"), 75),
    ],
)
def test_what_may_pass_ends_with_another_status_than_bad_input(error, status):
    assert exit_status(error) == status


def test_the_command_ends_with_the_status_of_its_error(refuses_recipe):
    place = f"localhost:{free_port()}"
    words = ["--num-processes", "2", "--process-id", "1", "--start-timeout", "1"]
    words += ["--emulate", "0", "--coordinator", place]
    told = "processes.no_first_process", 0, 1, 2, place
    refuses_recipe(lambda: main(words), *told, status=75, words=False)  # Of a port.


def check_told(error, key, *values, status=75):
    """Of an error that a thread got, which names hosts and ports of this machine."""
    assert (error.key, error.status) == (key, status), error
    check_words(str(error), key, values, None)


def rolls(*places, jobs=None, timeout_s=5.0, apart_s=0.0):
    """What each of several threads gets of the roll call: a roll, or the error."""
    found = [None] * len(places)

    def run(index):
        try:
            job = jobs[index] if jobs else ""
            found[index] = call_roll(places[index], job=job, timeout_s=timeout_s)
        except DistributedError as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(one,)) for one in range(len(places))]
    for thread in threads:
        thread.start()
        time.sleep(apart_s)
    for thread in threads:
        thread.join()
    return found


def places_of(number, *processes):
    port = free_port()
    return [
        Place(coordinator=f"localhost:{port}", num_processes=number, process_id=one)
        for one in processes
    ]


def close(roll):
    for lines in roll.peers.values():
        lines.close()
    if roll.listener:
        with contextlib.suppress(OSError):
            roll.listener.shutdown(socket.SHUT_RDWR)
        roll.listener.close()


def test_processes_that_all_come_know_one_another():
    found = rolls(*places_of(3, 2, 0, 1))
    assert len({roll.service for roll in found}) == 1
    assert all(len(roll.hosts) == 3 for roll in found)
    for roll in found:
        close(roll)


def test_every_process_that_is_there_names_the_one_that_is_not():
    found = rolls(*places_of(4, 0, 1, 3), timeout_s=0.5)
    assert len(set(map(str, found))) == 1
    for error in found:
        check_told(error, "processes.not_all_came", "0.5 s", "process 2", 4)
        assert re.findall(r"(\d+) on \S+", str(error)) == ["0", "1", "3"]


def test_a_process_without_process_0_names_where_it_looked():
    (place,) = places_of(2, 1)
    (error,) = rolls(place, timeout_s=0.2)
    told = "process 1", 2, "process 0", place.coordinator, 0.2
    check_told(error, "processes.no_first_process", *told)


def test_two_jobs_on_one_port_are_one_line_and_the_first_goes_on():
    port = free_port()
    place = dict(coordinator=f"localhost:{port}", num_processes=2)
    first, second, other, third = rolls(
        Place(**place, process_id=0),
        Place(**place, process_id=0),
        Place(**place, process_id=1),
        Place(**place, process_id=1),
        jobs=["a", "b", "b", "a"],
        apart_s=0.1,
    )
    check_told(second, "processes.port_taken", port, status=2)
    check_told(other, "processes.other_job", "'b'", "'a'", status=2)
    assert first.hosts == third.hosts
    close(third)
    close(first)


@pytest.mark.parametrize(
    ("job", "status", "refusal"),
    [
        ("a", 75, ("processes.too_late", "process 1", 2)),
        ("b", 2, ("processes.other_job", "process 1", "'b'", "'a'")),
    ],
)
def test_who_comes_when_all_are_there_is_told_at_once(job, status, refusal):
    first, second = places_of(2, 0, 1)
    here = rolls(first, second, jobs=["a", "a"])
    began = time.monotonic()
    (error,) = rolls(second, jobs=[job], timeout_s=60)
    check_told(error, *refusal, first.coordinator, status=status)
    assert time.monotonic() - began < 30  # Not by its timeout.
    for roll in here:
        close(roll)


GREETING = dict(process_id=1, num_processes=2, host="elsewhere", job="")


@pytest.mark.parametrize(
    "greeting",
    [
        b"",  # Silent.
        b"GET / HTTP/1.1\r\n",
        b"[" * 5000 + b"\n",
        b"x" * 100_000,
        b"[1]\n",
        b'{"process_id": 1}\n',
        *(
            json.dumps({**GREETING, **wrong}).encode() + b"\n"
            for wrong in (
                dict(process_id="1"),
                dict(process_id=True),
                dict(process_id=1.0),
                dict(process_id=-1),
                dict(process_id=2),
                dict(process_id=[1]),
                dict(num_processes=None),
                dict(num_processes=1e400),
                dict(host=5),
                dict(job={}),
            )
        ),
    ],
)
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_strangers_on_the_port_do_not_hold_up_the_roll(greeting, monkeypatch):
    monkeypatch.setattr("meshpar.distributed.roll_call._GREETING_S", 60.0)
    places = places_of(2, 0, 1)
    found = []
    calls = [
        threading.Thread(
            target=lambda one=one: found.append(call_roll(one, job="", timeout_s=30))
        )
        for one in places
    ]
    calls[0].start()
    strangers = [connected(places[0]) for _ in range(3)]
    for stranger in strangers:
        with contextlib.suppress(OSError):
            stranger.sendall(greeting)
    strangers[2].setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0" + b"\0" * 4
    )
    strangers[2].close()  # By a reset.
    calls[1].start()
    for call in calls:
        call.join()
    assert len(found) == 2
    for stranger in strangers:
        stranger.close()
    for roll in found:
        close(roll)


def connected(place):
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((place.host, place.port), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def test_a_line_has_one_deadline_as_a_whole():
    here, there = tcp_pair()
    is_over = threading.Event()

    def drip():
        with contextlib.suppress(OSError):
            while not is_over.wait(0.05):
                there.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        Lines(here).receive(0.2)
    is_over.set()
    thread.join()
    here.close()
    there.close()


def tcp_pair():
    with socket.create_server(("localhost", 0)) as server:
        there = socket.create_connection(server.getsockname())
        return server.accept()[0], there


@pytest.mark.parametrize("number", [2, 4])
def test_a_process_of_a_smaller_or_larger_job_does_not_belong(number):
    place = Place(coordinator="localhost:1", num_processes=3, process_id=0)
    greeting = Greeting(process_id=1, num_processes=number, host="there", job="a")
    refused = refusal(place, "a", greeting, {0: "here"})
    assert refused and f"num_processes={number}" in str(refused)
    same = replace(greeting, num_processes=3)
    assert refusal(place, "a", same, {0: "here"}) is None


@pytest.mark.parametrize(
    ("greeting", "refusal"),
    [
        (
            dict(num_processes=3, process_id=1),
            ("processes.count_mismatch", "process 1", "num_processes=3", 2),
        ),
        (
            dict(num_processes=2, process_id=0),
            ("processes.process_id_taken", "process 0", 0, 1),
        ),
    ],
)
def test_a_process_that_does_not_belong_is_told_why(greeting, refusal, monkeypatch):
    port = free_port()
    places = [
        Place(coordinator=f"localhost:{port}", num_processes=2, process_id=0),
        Place(coordinator=f"localhost:{port}", num_processes=3, process_id=1),
    ]
    if greeting["process_id"] == 0:
        places[1] = Place(
            coordinator=f"localhost:{port}", num_processes=2, process_id=1
        )
        send = "meshpar.distributed.roll_call.Lines.send"
        plain = call_roll.__globals__["Lines"].send

        def as_0(self, **message):
            if "process_id" in message:
                message["process_id"] = 0
            plain(self, **message)

        monkeypatch.setattr(send, as_0)
    first, second = rolls(*places, timeout_s=0.5)
    check_told(first, "processes.not_all_came", "process 1", 2)
    check_told(second, *refusal, status=2)


@pytest.fixture
def three(request):
    """The processes of a job of three, as three objects, and what ended each."""
    ended = {}
    rolled = rolls(*places_of(3, 0, 1, 2))
    processes = [
        Processes(
            process,
            rolled[process],
            heartbeat_s=getattr(request, "param", 5.0),
            end=lambda status, process=process: ended.setdefault(process, status),
        )
        for process in range(3)
    ]
    yield processes, ended
    for roll in rolled:
        close(roll)


def in_threads(*calls):
    found = [None] * len(calls)

    def run(index):
        try:
            found[index] = calls[index]()
        except DistributedError as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(one,)) for one in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    return found


def test_what_each_gives_all_get_in_order(three):
    processes, ended = three
    for turn in range(3):
        calls = [
            lambda one=one, turn=turn: one.gather([one.process_id, turn])
            for one in processes
        ]
        found = in_threads(*calls)
        assert found == [[[0, turn], [1, turn], [2, turn]]] * 3
    assert not ended


@pytest.mark.parametrize("dead", [0, 1])
def test_a_process_that_dies_ends_the_others_with_one_line(dead, three, capsys):
    processes, ended = three
    for lines in processes[dead]._peers.values():
        lines.close()
    alive = [one for one in processes if one.process_id != dead]
    errors = in_threads(*[lambda one=one: one.gather(0) for one in alive])
    assert all(isinstance(error, DistributedError) for error in errors)
    deadline = time.monotonic() + 10
    while len(ended.keys() - {dead}) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {one.process_id: ended[one.process_id] for one in alive} == {
        one.process_id: 75 for one in alive
    }
    assert names(capsys.readouterr().err, f"process {dead}")


@pytest.mark.parametrize(
    ("error", "status"), [(InputError("no such text"), 2), (OSError("broken"), 75)]
)
def test_a_process_that_fails_alone_ends_the_others_with_its_reason(
    error, status, three, capsys
):
    processes, ended = three
    with pytest.raises(type(error)), processes[1]:
        raise error
    deadline = time.monotonic() + 10
    while {0, 2} - ended.keys() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended == {0: status, 2: status}
    told = capsys.readouterr().err
    failed = rf"process 1 \D*{re.escape(processes[1].hosts[1])}.*: {error}"
    assert len(re.findall(failed, told)) == 2
    assert ("--resume auto" in told) == (status == 75)


OWN_ERROR = InputError("no such text"), 2
NO_FILE = FileNotFoundError(errno.ENOENT, "no such file"), 2
BROKEN = OSError(errno.EIO, "broken"), 75


@pytest.mark.parametrize(
    ("failing", "error", "status"),
    [
        (0, *OWN_ERROR),
        (1, *BROKEN),
        slow(1, *OWN_ERROR),
        slow(0, *NO_FILE),
        slow(1, *NO_FILE),
        slow(0, *BROKEN),
    ],
)
def test_those_that_wait_in_gather_end_with_the_status_of_the_one_that_fails(
    failing, error, status, three
):
    processes, ended = three
    others = [one for one in processes if one.process_id != failing]

    def gathers(process):
        with process:
            process.gather(0)

    def fails():
        while not all(one._number for one in others):  # They are about to wait.
            time.sleep(0.01)
        with contextlib.suppress(type(error)), processes[failing]:
            raise error

    found = in_threads(fails, *[lambda one=one: gathers(one) for one in others])
    assert [one.status for one in found[1:]] == [status] * 2
    assert ended == {one.process_id: status for one in others}


@pytest.mark.parametrize("three", [1.0], indirect=True)
def test_a_process_that_is_silent_is_lost(three, capsys):
    processes, ended = three
    processes[2]._is_closed.set()  # Its beat stops, and its connections stay.
    deadline = time.monotonic() + 10
    while {0, 1} - ended.keys() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended == {0: 75, 1: 75}
    told = capsys.readouterr().err
    assert re.search(r"process 2 on \S+ .*; process 0\b", told)
    assert re.search(r"process 2 on \S+ .*; process 1\b", told)


def test_a_start_of_jax_that_does_not_end_ends_all_with_their_stacks():
    ended, told = threading.Event(), []

    class Ending:
        def end_all(self, why, *, with_stacks):
            told.append((why, with_stacks))
            ended.set()

    with _ended_after(0.05, Ending()):
        assert ended.wait(20)
    ((why, with_stacks),) = told
    assert names(why, "0.05 s") and with_stacks
    with _ended_after(60.0, Ending()):
        pass
    assert len(told) == 1


def test_collectives_between_all_devices_are_exact():
    assert check_collectives() is None


def test_a_wrong_collective_is_found(monkeypatch):
    from meshpar.distributed import collectives_check

    kinds = dict(collectives_check._KINDS)
    collective, expected = kinds["reduce-scatter"]
    kinds["reduce-scatter"] = lambda row: collective(row).at[5].add(1), expected
    monkeypatch.setattr(collectives_check, "_KINDS", kinds)
    found = check_collectives()
    told = "reduce-scatter", "4,194,304 bytes", "1 processes", "1 wrong", "131,072"
    assert all(names(found, one) for one in told), found


def test_a_listener_that_is_closed_at_once_ends_who_listens():
    listener = socket.socket()
    listener.close()
    _refuse_late(places_of(2, 0)[0], "", {}, listener)


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("node-7", ""),
        ("192.0.2.1", ""),  # of nobody (RFC 5737)
    ],
)
def test_a_service_listens_on_the_address_that_is_named(host, bound):
    assert bound_host(host) == bound
    place = Place(coordinator=f"{host}:{free_port()}", num_processes=1, process_id=0)
    with _listen(place) as listener:
        address = listener.getsockname()[0]
    assert (address in ("127.0.0.1", "::ffff:127.0.0.1")) is bool(bound)
