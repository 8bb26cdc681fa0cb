"""Whatever happens to a run, it loses nothing that it saved: `kill_matrix`."""

import os
import signal
from dataclasses import replace

import pytest

from tests import warm
from tests.marks import slow
from tests.multiprocess.kill_cases import CASES, Row
from tests.multiprocess.kill_matrix import table_of
from tests.multiprocess.runs import (
    Setting,
    gone_on,
    is_saving,
    newest,
    rows_of,
    running,
    wait,
    whole_run,
)


@pytest.fixture(scope="module")
def losses(tmp_path_factory, small_text):
    """Of a run that nothing happens to."""
    return whole_run(small_text, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("name", [slow(name) for name in CASES])
def test_a_run_goes_on_or_stops_with_a_reason(name, losses, small_text, tmp_path):
    if name == "full-disk" and os.geteuid():
        pytest.skip("only root may mount a small disk")
    setting = Setting(small_text, losses, tmp_path, interpreter=warm.words())
    CASES[name](setting)  # Raises where it does not.


def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(
    small_text, tmp_path
):
    """The steps after it are done again, with the losses that they had before."""
    setting = Setting(small_text, [], tmp_path, interpreter=warm.words())
    with running(setting, save_every=8) as (child,):
        wait(lambda: newest(setting.out) >= 8, [child])
        wait(lambda: is_saving(setting.out), [child])
        child.process.kill()
        child.ended(-signal.SIGKILL)
    saved = newest(setting.out)
    assert saved % 8 == 0
    losses = [row["loss"] for row in rows_of(setting.log)]
    assert len(losses) >= saved >= 8
    gone_on(replace(setting, losses=losses), after=saved)
    # The new start has done four more steps, and saved the last.
    assert newest(setting.out) == saved + 4


def test_the_table_of_cases_has_a_line_of_each():
    lines = table_of([Row("a fault", "it ended", 4, None, 1.25, None)]).splitlines()
    assert lines[2] == "| a fault | it ended | 4 | - | 1.2 | - |"
