"""All processes of a job come together at process 0, or each is told who did not.

JAX's own service ends a job that is not complete with a stack trace and no name, and
two of them on one port take each other's processes. So process 0 calls the roll on the
job's port first, and keeps that port, and the connections, for as long as the job runs;
JAX's service gets a free port of its own.
"""

from __future__ import annotations

import contextlib
import ipaddress
import queue
import socket
import threading
import time
from dataclasses import dataclass, fields
from typing import Any, cast

from meshpar.distributed.cluster import Place
from meshpar.distributed.endings import BAD_INPUT, LOST, DistributedError
from meshpar.distributed.lines import Lines

_RETRY_S = 0.2
_GREETING_S = 5.0
"""For a process that has connected to say which it is."""

_GREETING_BYTES = 1 << 13
_POLL_S = 0.05

_PORT_S = 5.0
"""For the job that had the port before to let it go."""


@dataclass(frozen=True, kw_only=True)
class Roll:
    """Who is there, and how to reach them.

    Args:
        hosts: The host of each process.
        service: HOST:PORT for JAX's own service.
        peers: The connection to each other process, process 0's only to all.
        listener: What holds the port; process 0's.
        bound: HOST:PORT that JAX's own service listens on; process 0's, and None for
            all addresses of its machine.
    """

    hosts: tuple[str, ...]
    service: str
    peers: dict[int, Lines]
    listener: socket.socket | None = None
    bound: str | None = None


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """Message with which a process introduces itself to process 0."""

    process_id: int
    num_processes: int
    host: str
    job: str

    @classmethod
    def parse(cls, message: dict[str, Any]) -> Greeting | None:
        """Parse a greeting; None if the message is not a valid one."""
        values = {one.name: message.get(one.name) for one in fields(cls)}
        process, number = values["process_id"], values["num_processes"]
        if type(process) is not int or type(number) is not int:  # True is an int too.
            return None
        if not all(isinstance(values[name], str) for name in ("host", "job")):
            return None
        return cls(**cast(Any, values)) if 0 <= process < number else None


def call_roll(place: Place, *, job: str, timeout_s: float) -> Roll:
    """Wait for all processes of a job.

    Args:
        place: Of this one.
        job: What all processes of this job have in common and those of another not.
        timeout_s: How long to wait.

    Raises:
        DistributedError: Not all came, the port is another's, or one does not belong.
    """
    deadline = time.monotonic() + timeout_s
    if place.process_id:
        return _answer(place, job, deadline, timeout_s)
    return _call(place, job, deadline, timeout_s)


def _call(place: Place, job: str, deadline: float, timeout_s: float) -> Roll:
    listener = _listen(place)
    hosts = {0: socket.gethostname()}
    peers: dict[int, Lines] = {}
    came: queue.SimpleQueue[tuple[Lines, Greeting]] = queue.SimpleQueue()
    while len(hosts) < place.num_processes:
        if time.monotonic() > deadline:
            refused = _missing(place, hosts, timeout_s)
            for peer in peers.values():
                _refuse(peer, refused)
            listener.close()
            raise refused
        _accept(listener, came)
        while not came.empty():
            _welcome(place, job, *came.get(), hosts, peers)
    service_port = free_port()
    in_order = [hosts[process] for process in range(place.num_processes)]
    for peer in peers.values():
        with contextlib.suppress(OSError):  # Its end is noticed by who watches.
            peer.send(hosts=in_order, service_port=service_port)
    service = _address(place.host, service_port)
    late = threading.Thread(
        target=_refuse_late, args=(place, job, hosts, listener), daemon=True
    )
    late.start()
    host = bound_host(place.host)
    return Roll(
        hosts=tuple(in_order),
        service=service,
        peers=peers,
        listener=listener,
        bound=_address(host, service_port) if host else None,
    )


def _refuse_late(
    place: Place, job: str, hosts: dict[int, str], listener: socket.socket
) -> None:
    """Refuse processes that come once all are there, until the listener is closed.

    One of this job has been started again alone, before the others have ended.
    """
    came: queue.SimpleQueue[tuple[Lines, Greeting]] = queue.SimpleQueue()
    while True:
        try:
            listener.settimeout(None)
            connection = listener.accept()[0]
        except OSError:  # It is closed, perhaps before the first of these lines.
            return
        _hear(connection, came)
        while not came.empty():
            lines, greeting = came.get()
            _refuse(lines, late_refusal(place, job, greeting, hosts))


def late_refusal(
    place: Place, job: str, greeting: Greeting, hosts: dict[int, str]
) -> DistributedError:
    """Return the error of a process that comes once all of process 0's job are there.

    It has a number that is taken. Another start may mend it: where one process alone
    was started again, before the others have ended.
    """
    process = greeting.process_id
    return _stranger(place, job, greeting) or DistributedError(
        f"process {process} on {greeting.host} tries to join the job at "
        f"{place.coordinator}, whose {place.num_processes} processes have all joined, "
        f"process {process} on {hosts[process]}; give each process a number of its own "
        f"from 0 to {place.num_processes - 1}, and start one again only once the "
        "others have ended",
        key="processes.too_late",
    )


def bound_host(host: str) -> str:
    """Return the address that a service listens on for those that name a host.

    That of the loopback where the host is this machine to itself, the host where it is
    an address of this machine, and else "", all addresses: others may resolve a name to
    another of them, and an address may be that of a gateway.

    Example:
        >>> bound_host("localhost"), bound_host("127.0.0.1"), bound_host("node-7")
        ('127.0.0.1', '127.0.0.1', '')
    """
    if host == "localhost":
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:  # Of another machine.
            return ""
    return str(address)


def _listen(place: Place) -> socket.socket:
    host = bound_host(place.host)
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    tried_until = time.monotonic() + _PORT_S
    while True:
        try:
            return socket.create_server(
                (host, place.port),
                family=family,
                dualstack_ipv6=both,
                backlog=place.num_processes,
            )
        except OSError as error:
            if time.monotonic() > tried_until:
                raise DistributedError(
                    f"port {place.port} of {socket.gethostname()} cannot be had "
                    f"({error.strerror}): another job, or an earlier start of this "
                    "one, has it; end that one, or give another port in --coordinator",
                    status=BAD_INPUT,
                    key="processes.port_taken",
                ) from error
            time.sleep(_RETRY_S)


def _accept(
    listener: socket.socket, came: queue.SimpleQueue[tuple[Lines, Greeting]]
) -> None:
    """Hand a connection to a thread, so that a silent process delays nobody."""
    listener.settimeout(_POLL_S)
    try:
        connection = listener.accept()[0]
    except TimeoutError:
        return
    except OSError:  # It was gone at once, or there are too many.
        time.sleep(_POLL_S)
        return
    threading.Thread(target=_hear, args=(connection, came), daemon=True).start()


def _hear(
    connection: socket.socket, came: queue.SimpleQueue[tuple[Lines, Greeting]]
) -> None:
    """Queue the connection of a process of this job; close any other."""
    connection.settimeout(_GREETING_S)
    with contextlib.suppress(OSError):
        lines = Lines(connection)
        greeting = Greeting.parse(lines.receive(_GREETING_S, _GREETING_BYTES) or {})
        if greeting is not None:
            came.put((lines, greeting))
            return
    connection.close()


def _welcome(
    place: Place,
    job: str,
    lines: Lines,
    greeting: Greeting,
    hosts: dict[int, str],
    peers: dict[int, Lines],
) -> None:
    """Take the process that has connected, or refuse it."""
    refused = refusal(place, job, greeting, hosts)
    if refused:
        _refuse(lines, refused)
        return
    hosts[greeting.process_id] = greeting.host
    peers[greeting.process_id] = lines


def _refuse(lines: Lines, refused: DistributedError) -> None:
    with contextlib.suppress(OSError):
        lines.send(refused=str(refused), status=refused.status, key=refused.key)
    lines.close()


def refusal(
    place: Place, job: str, greeting: Greeting, hosts: dict[int, str]
) -> DistributedError | None:
    """Return the error if a process does not belong to process 0's job, else None."""
    process = greeting.process_id
    stranger = _stranger(place, job, greeting)
    if stranger is not None or process not in hosts:
        return stranger
    return DistributedError(
        f"process {process} on {greeting.host} comes to the job at "
        f"{place.coordinator}, which has its process {process} on {hosts[process]} "
        f"already; number them from 0 to {place.num_processes - 1}, and give each job "
        "a port of its own in --coordinator",
        status=BAD_INPUT,
        key="processes.process_id_taken",
    )


def _stranger(place: Place, job: str, greeting: Greeting) -> DistributedError | None:
    """Return the error of a process of another job, or of one of another size."""
    who = f"process {greeting.process_id} on {greeting.host}"
    if greeting.job != job:
        return DistributedError(
            f"{who} is of another job than the job at {place.coordinator}: "
            f"{greeting.job!r}, not {job!r}; give each job a port of its own in "
            "--coordinator",
            status=BAD_INPUT,
            key="processes.other_job",
        )
    if greeting.num_processes != place.num_processes:
        return DistributedError(
            f"{who} has num_processes={greeting.num_processes}, but the job at "
            f"{place.coordinator} has {place.num_processes}; start all with the same "
            "number",
            status=BAD_INPUT,
            key="processes.count_mismatch",
        )
    return None


def _missing(place: Place, hosts: dict[int, str], timeout_s: float) -> DistributedError:
    absent = [one for one in range(place.num_processes) if one not in hosts]
    here = ", ".join(f"{one} on {hosts[one]}" for one in sorted(hosts))
    first = ", ".join(map(str, absent[:8]))
    more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
    return DistributedError(
        f"after {timeout_s:g} s process {first}{more} of {place.num_processes} "
        f"({place.found_by}) has not come to {place.coordinator}; there are {here}; "
        "start all within that time, or give a longer --start-timeout",
        key="processes.not_all_came",
    )


def _answer(place: Place, job: str, deadline: float, timeout_s: float) -> Roll:
    lines = _connect(place, job, deadline, timeout_s)
    message: dict[str, Any] = {}
    with contextlib.suppress(OSError):  # Nothing came, or the connection broke.
        # Process 0 may have started when this one had waited for long.
        message = lines.receive(timeout_s + _GREETING_S) or {}
    if _is_roll(message, place.num_processes):
        service = _address(place.host, message["service_port"])
        return Roll(hosts=tuple(message["hosts"]), service=service, peers={0: lines})
    lines.close()
    status = BAD_INPUT if message.get("status") == BAD_INPUT else LOST
    if isinstance(refused := message.get("refused"), str):
        key = message.get("key")
        raise DistributedError(
            refused,
            status=status,
            key=key if isinstance(key, str) else "processes.refused",
        )
    raise DistributedError(
        f"what answers at {place.coordinator} does not call the roll: it is no "
        "process 0 of this job, or it has ended; see what it said, or give another "
        "port in --coordinator",
        status=status,
        key="processes.no_roll_call",
    )


def _is_roll(message: dict[str, Any], number: int) -> bool:
    hosts, port = message.get("hosts"), message.get("service_port")
    if type(port) is not int or not 0 < port < 65536 or not isinstance(hosts, list):
        return False
    return len(hosts) == number and all(isinstance(one, str) for one in hosts)


def _connect(place: Place, job: str, deadline: float, timeout_s: float) -> Lines:
    while True:
        try:
            address = (place.host, place.port)
            lines = Lines(socket.create_connection(address, timeout=_GREETING_S))
            lines.send(
                process_id=place.process_id,
                num_processes=place.num_processes,
                host=socket.gethostname(),
                job=job,
            )
            return lines
        except OSError as error:
            if time.monotonic() > deadline:
                raise DistributedError(
                    f"process {place.process_id} of {place.num_processes} "
                    f"({place.found_by}) found no process 0 at {place.coordinator} in "
                    f"{timeout_s:g} s: {error.strerror or error}; start it there, or "
                    "correct --coordinator",
                    key="processes.no_first_process",
                ) from error
            time.sleep(_RETRY_S)


def free_port() -> int:
    """Return a port of this host that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
