"""Files of others that are changed at random are read, or refused in one line."""

import pytest

from tests.file_fuzz.kinds import kinds
from tests.file_fuzz.process import run
from tests.file_fuzz.wrong import READERS

KINDS = kinds()
LEAST_TAKEN = 0.03


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_changed_file_ends_a_reader_or_leads_it_outside(kind, tmp_path):
    """`python -m tests.file_fuzz KIND --seed 0 --only N FOLDER` runs a case again."""
    found = run("tests.file_fuzz", kind, "--seed", "0", folder=tmp_path)
    print(kind, found.counts)
    assert found.status == 0, found.told
    assert found.counts["fault"] == 0
    assert found.counts["taken"] >= LEAST_TAKEN * KINDS[kind].num
    assert sum(found.counts.values()) == KINDS[kind].num


def test_two_thousand_files_are_changed():
    assert sum(kind.num for kind in KINDS.values()) >= 2000


def test_a_reader_that_leaves_its_folder_hangs_or_raises_is_found(tmp_path):
    found = run("tests.file_fuzz", "wrong", "--seconds", "0.5", folder=tmp_path)
    assert found.status == 1, found.told
    assert found.counts == {"taken": 1, "refused": 0, "fault": len(READERS) - 1}
    for number in range(len(READERS) - 1):
        assert f"fault wrong --seed 0 --only {number}\n" in found.told
