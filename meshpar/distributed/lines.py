"""Objects between two processes: a JSON line each, over one TCP connection."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import Any

from meshpar.foreign_files import parse_json

_LONGEST_BYTES = 1 << 26
"""Limit of a line, as any program may answer on the port."""


class Lines:
    """One end of a connection; any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self._received = b""

    def send(self, **message: Any) -> None:
        """Send one object.

        Raises:
            OSError: The other end is gone.
        """
        data = json.dumps(message).encode() + b"\n"
        with self._sending:
            self._connection.sendall(data)

    def receive(
        self, timeout_s: float | None = None, longest_bytes: int = _LONGEST_BYTES
    ) -> dict[str, Any] | None:
        """Return the next object; None if the other end has closed.

        Args:
            timeout_s: For the whole of it.
            longest_bytes: Of its line.

        Raises:
            TimeoutError: None came in that time.
            OSError: The connection broke, or what comes is no such object.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._received:
            if len(self._received) > longest_bytes:
                raise ConnectionError("a line without an end")
            self._connection.settimeout(_left_s(deadline))
            data = self._connection.recv(1 << 16)
            if not data:
                return None
            self._received += data
        self._connection.settimeout(timeout_s)  # Of what is sent next, too.
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = parse_json(line) if len(line) <= longest_bytes else None
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ConnectionError(f"no message of meshpar: {line[:40]!r}")
        return message

    def close(self) -> None:
        """End the connection; the other end receives None."""
        with contextlib.suppress(OSError):  # It is gone already.
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _left_s(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
