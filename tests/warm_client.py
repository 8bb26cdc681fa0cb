"""Stands for `python` in a test: has its words run by the warm interpreter (`warm.py`).

Usage: python -I -S warm_client.py SOCKET WORD ...
It ends as the program does, by its status or its signal, and passes signals on.
"""

import json
import os
import signal
import socket
import sys


def main() -> int:
    """Return the status of the program, once it has ended."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        program = {
            "words": sys.argv[2:],
            "folder": os.getcwd(),
            "environment": dict(os.environ),
        }
        request = json.dumps(program).encode() + b"\n"
        sent = socket.send_fds(server, [request], [0, 1, 2])
        server.sendall(request[sent:])
        answers = server.makefile()
        child = int(answers.readline())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda number, _: os.kill(child, number))
        status = int(answers.readline())
    if status < 0:
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main())
