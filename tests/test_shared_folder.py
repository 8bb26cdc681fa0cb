"""Processes that would make two halves of one run are told so before it begins."""

import shutil
import threading

import pytest

from meshpar.distributed.start import _settings, refuse_other_settings
from meshpar.recipes import joined
from meshpar.recipes.joined import check_shared


class Both:
    """One of two processes, in threads: each gathers what both give."""

    num_processes = 2

    def __init__(self, number, values, barrier):
        self.is_first, self._number = number == 0, number
        self._values, self._barrier = values, barrier

    def gather(self, value):
        self._values[self._number] = value
        self._barrier.wait(10)
        found = list(self._values)
        self._barrier.wait(10)
        return found


def checked(folders):
    """What two processes raise, each with its own folder of the run."""
    values, barrier, raised = [None, None], threading.Barrier(2), [None, None]

    def one(number):
        try:
            check_shared(folders[number], Both(number, values, barrier))
        except Exception as error:
            raised[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return raised


def test_hosts_without_the_same_folder_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(joined, "_APPEARS_S", 0.1)
    shared = tmp_path / "run"
    assert checked([shared, shared]) == [None, None]
    assert list(shared.iterdir()) == []
    shutil.copytree(shared, tmp_path / "other")
    for error in checked([shared, tmp_path / "other"]):
        assert error.key == "processes.folder_not_shared"
        assert "process 1" in str(error)
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("name", _settings())
def test_a_process_with_another_setting_is_named(name, refuses):
    ours = _settings()
    refuse_other_settings([ours, dict(ours)])
    for other in ({**ours, name: "another"}, {k: ours[k] for k in ours if k != name}):
        with refuses("processes.different_settings", "process 2", name):
            refuse_other_settings([ours, ours, other])
