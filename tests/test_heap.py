"""Threads of a run share a few of the C library's heaps, and keep little of them."""

import os
import platform
import re
import subprocess
import sys

import pytest

from meshpar.train import heap

_THREADS = """
import ctypes, sys, threading
{first}
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
def freed(num_bytes, times):
    blocks = [ctypes.c_void_p(libc.malloc(num_bytes)) for _ in range(times)]
    for block in reversed(blocks): libc.free(block)
all_there = threading.Barrier(16)
def allocate():
    all_there.wait()
    {then}
    all_there.wait()  # One that has ended would leave its heap to the next.
freed((1 << 25) - 8192, 1)  # Thresholds rise, as in every program of some size.
threads = [threading.Thread(target=allocate) for _ in range(16)]
with {around}:
    for thread in threads: thread.start()
    for thread in threads: thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""
_OF_GLIBC = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="heaps of glibc"
)


def told_of_heaps(told_in, first="", then="libc.malloc(1000)", around="", **variables):
    """What glibc says of its heaps after 16 threads have used them."""
    names = ("MALLOC", "GLIBC_TUNABLES")
    usual = {
        name: value for name, value in os.environ.items() if not name.startswith(names)
    }
    around = around or "threading.Lock()"
    program = _THREADS.format(first=first, then=then, around=around)
    subprocess.run(
        [sys.executable, "-c", program, str(told_in)],
        check=True,
        env={**usual, **variables},
    )
    return told_in.read_text()


def num_heaps(*given, **options):
    return len(re.findall("<heap nr=", told_of_heaps(*given, **options)))


@_OF_GLIBC
def test_threads_share_as_many_heaps_as_there_are_cores(tmp_path):
    ours = "from meshpar.train.heap import share_heaps; share_heaps()"
    few = min(max(len(os.sched_getaffinity(0)), 2), 8)
    assert num_heaps(tmp_path / "by_itself") > 5
    assert num_heaps(tmp_path / "ours", ours) <= few
    assert num_heaps(tmp_path / "told", ours, MALLOC_ARENA_MAX="5") == 5
    tunables = "glibc.malloc.arena_max=5"
    assert num_heaps(tmp_path / "tuned", ours, GLIBC_TUNABLES=tunables) == 5


@pytest.mark.parametrize(("cores", "heaps"), [(1, 2), (4, 4), (96, 8)])
def test_heaps_are_of_the_cores_that_a_process_has(cores, heaps, monkeypatch):
    told = []
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.setattr(heap.os, "cpu_count", lambda: 192)
    monkeypatch.setattr(heap.os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setattr(heap, "_function", lambda name: lambda *one: told.append(one))
    heap.share_heaps()
    assert told == [(heap._ARENA_MAX, heaps)]


@_OF_GLIBC
def test_what_threads_free_goes_back_unless_the_environment_keeps_it(tmp_path):
    def kept_bytes(name, **options):
        found = told_of_heaps(tmp_path / name, then="freed(100_000, 50)", **options)
        return int(re.findall('<system type="current" size="([0-9]+)"', found)[-1])

    ours = {
        "first": "from meshpar.train.heap import returned_early",
        "around": "returned_early()",
    }
    most = 16 * 5_000_000
    tunables = "glibc.malloc.trim_threshold=67108864"
    assert kept_bytes("by_itself") > most // 2
    assert kept_bytes("ours", **ours) < most // 2
    assert kept_bytes("told", **ours, MALLOC_TRIM_THRESHOLD_="67108864") > most // 2
    assert kept_bytes("tuned", **ours, GLIBC_TUNABLES=tunables) > most // 2
