"""A run's folder is locked for as long as the run lasts."""

import errno
import os
import shutil
import signal
import subprocess
import sys

import pytest

from meshpar.errors import InputError, note_beside
from meshpar.recipes import pretrain
from meshpar.train import folder_in_use as module
from meshpar.train.folder_in_use import folder_in_use
from tests.run_steps import compute_nothing, counted_step

HOLD = """
import fcntl, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(file, fcntl.LOCK_EX)
os.write(file, f"process {os.getpid()} on another".encode())
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(module, "_WAIT_S", 0.2)


@pytest.fixture
def holder(tmp_path):
    """Another process that has locked the folder."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run" / module.NAME)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "locked\n"
            yield process
        finally:
            process.kill()


def test_a_second_run_is_told_who_has_the_folder(tmp_path, holder, refuses):
    told = "run.folder_in_use", tmp_path / "run", f"process {holder.pid}", "--out"
    with refuses(*told, words=False), folder_in_use(tmp_path / "run"):
        pass


def test_a_run_that_was_killed_has_let_its_folder_go(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with folder_in_use(tmp_path / "run"):
        pass


def test_the_next_run_in_this_process_has_it_too(tmp_path, refuses):
    for _ in range(2):
        told = "run.folder_in_use", f"process {os.getpid()}"
        with folder_in_use(tmp_path), refuses(*told, words=False):
            folder_in_use(tmp_path).__enter__()


def test_a_folder_that_is_deleted_meanwhile_is_told(tmp_path, refuses):
    with folder_in_use(tmp_path / "run") as found:
        found.refuse_deleted()
        shutil.rmtree(tmp_path / "run")
        with refuses("run.folder_deleted", tmp_path / "run", "--resume auto"):
            found.refuse_deleted()


def test_a_folder_that_is_moved_meanwhile_is_told_though_another_is_made(
    tmp_path, refuses
):
    with folder_in_use(tmp_path / "run") as found:
        (tmp_path / "run").rename(tmp_path / "old")
        told = "run.folder_deleted", tmp_path / "run"
        with folder_in_use(tmp_path / "run"), refuses(*told):
            found.refuse_deleted()


def failing(number):
    def flock(descriptor, how):
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told(tmp_path, number, monkeypatch):
    monkeypatch.setattr(module.fcntl, "flock", failing(number))
    with pytest.warns(UserWarning, match=os.strerror(number)):
        folder_in_use(tmp_path / "run").__enter__()


def test_a_lock_that_fails_is_no_lock(tmp_path, monkeypatch, refuses):
    monkeypatch.setattr(module.fcntl, "flock", failing(errno.EIO))
    with refuses("checkpoint.folder_not_made", os.strerror(errno.EIO)):
        folder_in_use(tmp_path / "run").__enter__()


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/run", "/dev/null/run"])
def test_a_folder_that_cannot_be_is_told_in_one_line(tmp_path, name, refuses):
    (tmp_path / "file").write_text("")
    with refuses("checkpoint.folder_not_made", name, "--out"):
        folder_in_use(tmp_path / name).__enter__()


OPTIONS = ("--preset", "test", "--model", "vocab=256,layers=1", "--seq", "16")


def trained(folder, text, *options):
    words = [*OPTIONS, "--layout", "data=2", "--text", str(text), "--steps", "3"]
    words += ["--sample-tokens", "0", "--global-batch", "8", "--out", str(folder)]
    return lambda: pretrain.main([*words, *options])


def test_a_second_run_does_not_train_beside_the_first(
    tmp_path, small_text, holder, refuses_recipe
):
    again = trained(tmp_path / "run", small_text, "--resume", "auto")
    told = "run.folder_in_use", tmp_path / "run", f"process {holder.pid}"
    refuses_recipe(again, *told, status=75, words=False)  # It may be free later.


@pytest.mark.parametrize("save_every", ["1", "200"])
def test_a_run_whose_folder_is_deleted_does_not_end_well(
    tmp_path, small_text, save_every, monkeypatch, refuses_recipe
):
    def timed_step(step, state, batch):
        if int(state.step) == 1:
            while (tmp_path / "run").exists():  # A checkpoint may be half written.
                shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return counted_step(state)

    compute_nothing(monkeypatch, timed_step)
    run = trained(tmp_path / "run", small_text, "--save-every", save_every)
    words = save_every == "200"  # With 1, a save that fails may be told as well.
    refuses_recipe(run, "run.folder_deleted", tmp_path / "run", words=words)


def test_what_fails_beside_an_error_is_told_on_its_line(
    tmp_path, small_text, monkeypatch, refuses_recipe
):
    def timed_step(step, state, batch):
        error = InputError("a bad step", key="test.bad_step")
        error.add_note("a note of a library")
        note_beside(error, OSError("checkpoint of step 2 not written"))
        raise error

    compute_nothing(monkeypatch, timed_step)
    told = "a bad step; besides, checkpoint of step 2 not written"
    run = trained(tmp_path / "run", small_text)
    refuses_recipe(run, "test.bad_step", told, words=False)
