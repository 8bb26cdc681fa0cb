"""The end of a process that others may be waiting for."""

from __future__ import annotations

import os
import sys


def leave(status: int) -> int:
    """Ends this process at once where it is one of several and `status` is not 0.

    At the end of Python JAX waits for all processes of `jax.distributed`, which a
    process that fails alone would do for minutes.

    Args:
        status: The exit status.

    Returns:
        It, where there is nobody to wait for.
    """
    jax = sys.modules.get("jax")
    if status and jax is not None and jax.distributed.is_initialized():
        end_now(status)
    return status


def end_now(status: int) -> None:
    """Ends the process without waiting for anybody, with what it has printed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
