"""The processes of a running job: what they tell one another, and their common end."""

from __future__ import annotations

import contextlib
import faulthandler
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from meshpar.distributed.endings import LOST, DistributedError, end_now, exit_status
from meshpar.distributed.lines import Lines
from meshpar.distributed.roll_call import Roll
from meshpar.errors import InputError

_GRACE_S = 2.0
"""Between the news that another has failed and the end: this one may fail alike."""

_MOST_BETWEEN_S = 1.0
"""Between two beats, and between two looks for those of the others."""

_LINGER_S = 4.0
"""For others to end before process 0 does, whose end JAX tells by a stack trace."""


class Processes:
    """The processes of this job; one if no more were started.

    A process that dies, or that is not heard of for `heartbeat_s`, ends all others with
    one line and status 75 (`LOST`): a collective would wait for it for ever.

    Attributes:
        process_id: Which this is.
        num_processes: How many there are.
        hosts: The host of each.
    """

    def __init__(
        self,
        process_id: int = 0,
        roll: Roll | None = None,
        *,
        heartbeat_s: float = 30.0,
        end: Callable[[int], None] = end_now,
    ) -> None:
        self.process_id = process_id
        self.hosts = roll.hosts if roll else ("",)
        self.num_processes = len(self.hosts)
        self.heartbeat_s = heartbeat_s
        self._roll, self._end = roll, end
        self._changed = threading.Condition()
        self._given: dict[int, dict[int, Any]] = {}
        self._gathered: dict[int, list[Any]] = {}
        self._number = 0
        self._left: set[int] = set()
        self._gone: set[int] = set()
        self._silent: set[int] = set()
        self._lost: str | None = None
        self._lost_status = LOST
        self._is_closed = threading.Event()
        self._peers = roll.peers if roll else {}
        self._heard = dict.fromkeys(self._peers, time.monotonic())
        for process, lines in self._peers.items():
            self._start_thread(self._listen, process, lines)
        if self._peers:
            self._start_thread(self._beat)

    @property
    def is_first(self) -> bool:
        """True for process 0, which prints and writes for all."""
        return self.process_id == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes in order; each waits for all.

        Over the job's own connections, not the devices: a round trip to process 0.

        Args:
            value: What JSON can hold.

        Raises:
            DistributedError: A process is lost.
        """
        if self._roll is None:
            return [value]
        self._number += 1
        number = self._number
        if self.is_first:
            self._take(0, number, value)
        else:
            with contextlib.suppress(OSError):  # The listener tells why.
                self._peers[0].send(number=number, value=value)
        with self._changed:
            self._changed.wait_for(lambda: number in self._gathered or self._lost)
            if number not in self._gathered:
                raise DistributedError(
                    self._lost or "",
                    status=self._lost_status,
                    key="processes.lost_process",
                )
            return self._gathered.pop(number)

    def end_all(self, why: str, *, with_stacks: bool = False) -> None:
        """End every process of the job with one line and status 75.

        Args:
            why: What this process says of itself.
            with_stacks: Whether each writes the stacks of its threads before.
        """
        where = f" on {self.hosts[self.process_id]}" if self._roll else ""
        what = f"process {self.process_id}{where}: {why}"
        # From any other process it goes by way of process 0 to all.
        self._tell(ended=what, with_stacks=with_stacks)
        self._end_together(what, with_stacks)

    def _end_together(self, what: str, with_stacks: bool) -> None:
        if self._lost:
            return
        if with_stacks:
            faulthandler.dump_traceback(file=2, all_threads=True)
        self._lose(what, grace_s=_GRACE_S)

    def close(self, reason: str | None = None, *, status: int = LOST) -> None:
        """Leave the others: all at the same point, or for a `reason` that ends them.

        Without one JAX's own service is left too, which waits for all.

        Args:
            reason: What has gone wrong here.
            status: Exit status of the others, that a new start may do better or not.
        """
        if self._roll is None or self._is_closed.is_set():
            return
        if reason is None and self._lost is None:
            with contextlib.suppress(DistributedError):
                self.gather("closing")
        self._is_closed.set()
        for lines in self._peers.values():
            with contextlib.suppress(OSError):
                lines.send(left=reason, status=status)
        if reason is None and self._lost is None:
            import jax

            jax.distributed.shutdown()
        else:
            self._linger()
        for lines in self._peers.values():
            lines.close()
        if self._roll.listener:
            with contextlib.suppress(OSError):
                self._roll.listener.shutdown(socket.SHUT_RDWR)  # Ends who accepts.
            self._roll.listener.close()

    @contextlib.contextmanager
    def ending_all_on_errors(self) -> Iterator[None]:
        """End all other processes too if an error is raised inside."""
        try:
            yield
        except BaseException as error:
            self._leave_for(error)
            raise

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: object
    ) -> None:
        if error is None:
            self.close()
        else:
            self._leave_for(error)

    def _leave_for(self, error: BaseException) -> None:
        """Leave the others because of an error, which ends them too."""
        is_own = isinstance(error, InputError) and not isinstance(
            error, DistributedError
        )
        may_be_lost = self._roll is not None and isinstance(error, Exception)
        if may_be_lost and not is_own:
            # A lost process breaks collectives before it is known here.
            with self._changed:
                self._changed.wait_for(lambda: self._lost, timeout=1.0)
        if self._lost and not is_own:  # What this process fails of, in most cases.
            self._is_closed.set()
            self._end_process(self._lost, self._lost_status)
        reason = " ".join(str(error).split()) or type(error).__name__
        self.close(reason, status=exit_status(error))

    def _listen(self, process: int, lines: Lines) -> None:
        """Take what one process sends until it leaves or is lost."""
        why, end = "has ended without a word: killed, or its machine is gone", {}
        while True:
            try:
                message = lines.receive()
            except OSError:
                message = None
            if message is None:
                break
            self._heard[process] = time.monotonic()
            if message.get("left"):
                why = f"has ended: {message['left']}"
                end = {"grace_s": _GRACE_S, "status": message["status"]}
                break
            if "left" in message:
                self._left.add(process)
            if "ended" in message:
                if self.is_first:
                    self._tell(**message)
                self._end_together(message["ended"], message["with_stacks"])
            if "lost" in message:
                self._lose(message["lost"], message["grace_s"], message["status"])
            if "values" in message:
                with self._changed:
                    self._gathered[message["number"]] = message["values"]
                    self._changed.notify_all()
            elif "value" in message:
                self._take(process, message["number"], message["value"])
        with self._changed:
            self._gone.add(process)
            self._changed.notify_all()
        if process not in self._left:
            self._lose(f"process {process} on {self.hosts[process]} {why}", **end)

    def _take(self, process: int, number: int, value: Any) -> None:
        """Collect a value of each process in process 0, and send all to all."""
        with self._changed:
            given = self._given.setdefault(number, {})
            given[process] = value
            if len(given) < self.num_processes:
                return
            del self._given[number]
            values = [given[one] for one in range(self.num_processes)]
            self._gathered[number] = values
            self._changed.notify_all()
        self._tell(number=number, values=values)

    def _tell(self, **message: Any) -> None:
        for lines in self._peers.values():
            with contextlib.suppress(OSError):
                lines.send(**message)

    def _beat(self) -> None:
        """Send heartbeats, and lose a process that was silent for too long."""
        between_s = min(self.heartbeat_s / 4, _MOST_BETWEEN_S)
        while not self._is_closed.wait(between_s):
            self._tell(alive=True)
            now = time.monotonic()
            for process, heard in self._heard.items():
                if process not in self._left and now - heard > self.heartbeat_s:
                    self._silent.add(process)
                    self._lose(
                        f"process {process} on {self.hosts[process]} was not heard of "
                        f"for {now - heard:.0f} s"
                    )
                    return

    def _lose(self, what: str, grace_s: float = 0.0, status: int = LOST) -> None:
        """Tell all what is lost, and end this process."""
        with self._changed:
            if self._lost or self._is_closed.is_set():
                return
            self._lost, self._lost_status = what, status
            self._changed.notify_all()
        if self.is_first:
            self._tell(lost=what, grace_s=grace_s, status=status)
        if not self._is_closed.wait(grace_s):
            self._end_process(what, status)

    def _end_process(self, what: str, status: int) -> None:
        line = f"meshpar: {what}; process {self.process_id} ends"
        if status == LOST:
            line += ": start all again, with --resume auto to go on from the newest "
            line += "checkpoint"
        print(line, file=sys.stderr, flush=True)
        self._linger()
        self._end(status)

    def _linger(self) -> None:
        if self._roll is not None and self.is_first:
            with self._changed:
                everyone = set(self._peers) - self._silent  # Who is stuck stays so.
                self._changed.wait_for(lambda: self._gone >= everyone, _LINGER_S)

    @staticmethod
    def _start_thread(run: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=run, args=arguments, daemon=True).start()
