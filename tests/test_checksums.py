"""Checksums find what has changed, whoever has noted them and whoever reads them."""

import json
import os
import zlib

import pytest

from meshpar.train.checkpoint import files
from meshpar.train.checkpoint.files import damage, has_checksums, write_checksums
from tests.refusals import names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files of 0 to 25 bytes, in pieces of 10, each read 4 at a time."""
    monkeypatch.setattr(files, "_PIECE_BYTES", 10)
    monkeypatch.setattr(files, "_CHUNK_BYTES", 4)
    (tmp_path / "below").mkdir()
    for name, size in (("a", 25), ("below/b", 10), ("c", 0)):
        (tmp_path / name).write_bytes(bytes(range(size)))
    return tmp_path


@pytest.mark.parametrize("writers", [1, 2, 3])
@pytest.mark.parametrize("readers", [1, 2, 5])
def test_every_byte_is_noted_once_and_read_once(writers, readers, folder):
    for part in range(writers):
        assert not has_checksums(folder)
        write_checksums(folder, part=part, num_parts=writers)
    assert has_checksums(folder)
    file = folder / "a"
    for place in (0, 9, 10, 24):
        data = bytearray(range(25))
        data[place] ^= 1
        file.write_bytes(data)
        told = [damage(folder, part=k, num_parts=readers) for k in range(readers)]
        (damaged,) = filter(None, told)
        assert names(damaged, "a") and not names(damaged, "below/b")
    file.write_bytes(bytes(range(25)))
    assert not any(damage(folder, part=k, num_parts=readers) for k in range(readers))


def test_of_several_writers_what_one_has_noted_is_compared(folder):
    write_checksums(folder, part=1, num_parts=2)
    assert not has_checksums(folder)
    noted = json.loads((folder / "checksums-1-of-2.json").read_text())
    (folder / noted[0][0]).write_bytes(b"short")
    assert names(damage(folder), noted[0][0]) and names(damage(folder), 5)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_file_of_checksums_is_damage(missing, folder):
    for part in {0, 1, 2} - {missing}:
        write_checksums(folder, part=part, num_parts=3)
    assert names(damage(folder), f"checksums-{missing}-of-3.json")
    write_checksums(folder, part=missing, num_parts=3)
    assert damage(folder) is None


def test_a_file_by_another_name_makes_no_set_whole(folder):
    write_checksums(folder, part=0, num_parts=2)
    (folder / "checksums-copy.json").write_text("[]")
    assert not has_checksums(folder)
    assert names(damage(folder), "checksums-1-of-2.json")


@pytest.mark.parametrize("name", ["../outside", "/dev/zero", "below/../../outside"])
def test_checksums_name_files_of_their_own_folder_alone(name, folder):
    (folder.parent / "outside").write_bytes(b"1")
    noted = [[name, 1, 0, 1, zlib.crc32(b"1")]]
    (folder / "checksums.json").write_text(json.dumps(noted))
    assert names(damage(folder), "checksums.json")


def test_a_link_or_a_pipe_in_the_place_of_a_file_is_damage(folder):
    write_checksums(folder)
    (folder / "c").unlink()
    os.mkfifo(folder / "c")
    assert names(damage(folder), "c")
    (folder / "c").unlink()
    (folder / "c").symlink_to("/dev/null")
    assert names(damage(folder), "c")


def test_checksums_of_whole_files_are_read_too(folder, snapshot):
    sums = {"a": [25, zlib.crc32(bytes(range(25)))]}
    (folder / "checksums.json").write_text(json.dumps(sums))
    assert has_checksums(folder) and damage(folder) is None
    (folder / "a").write_bytes(bytes(25))
    assert names(damage(folder), "a") and damage(folder) == snapshot
