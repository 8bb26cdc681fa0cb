"""Threads of a run share a few of the C library's heaps."""

import os
import platform
import re
import subprocess
import sys

import pytest

_COUNTED = """
import ctypes, sys, threading
{first}
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
all_there = threading.Barrier(16)
def allocate():
    all_there.wait()
    libc.malloc(1000)
    all_there.wait()  # One that has ended would leave its heap to the next.
threads = [threading.Thread(target=allocate) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


def num_heaps(first, told_in, **environment):
    usual = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    subprocess.run(
        [sys.executable, "-c", _COUNTED.format(first=first), str(told_in)],
        check=True,
        env={**usual, **environment},
    )
    return len(re.findall("<heap nr=", told_in.read_text()))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="heaps of glibc")
def test_threads_share_as_many_heaps_as_there_are_cores(tmp_path):
    ours = "from meshpar.train.heap import share_heaps; share_heaps()"
    few = max(os.cpu_count() or 1, 2)
    assert num_heaps("", tmp_path / "by_itself") > 5
    assert num_heaps(ours, tmp_path / "ours") <= few
    told = num_heaps(ours, tmp_path / "told", MALLOC_ARENA_MAX="5")
    assert told == 5
