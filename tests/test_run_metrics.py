"""The metrics of a run: in JSON lines, in TensorBoard's events, in a function."""

import errno
import json
import os
import struct
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

from meshpar.hardware.devices import DEVICES
from meshpar.planner.workload.shapes import SHAPES
from meshpar.recipes import host_times, metrics, pretrain, report
from meshpar.recipes.config import RunConfig
from meshpar.recipes.optimizers import learning_rate_schedule
from meshpar.recipes.pretrain import make_step
from meshpar.recipes.profile import Profile
from meshpar.recipes.rows import cut_rows_after
from meshpar.recipes.run_log import on_console
from tests import run_steps
from tests.conftest import rows
from tests.run_steps import shared_steps as shared_steps

SMALL = RunConfig(**run_steps.SMALL, layout="data=2", steps=4)
KEYS = {
    *("step", "loss", "grad_norm", "tokens_per_s", "step_s", "skipped"),
    *("data_s", "learning_rate", "mfu", "memory_bytes", "host_memory_bytes"),
}


def scalars(folder):
    """Tag -> step -> value of the events in a folder, read as TensorBoard does."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
            data = data[12 + length + 4 :]
    return found


@pytest.fixture(scope="module")
def done(tmp_path_factory, small_text, shared_steps):
    """A short run: its folder, TensorBoard's, and what the function was called with."""
    folder = tmp_path_factory.mktemp("run")
    seen = []
    config = replace(SMALL, out=folder, text=(small_text,), tensorboard=folder / "tb")
    config = replace(config, profile=1)
    pretrain.pretrain(config, on_metrics=seen.append)
    return folder, folder / "tb", seen


def test_every_step_has_a_row_with_all_keys_and_the_function_gets_them_too(done):
    folder, _, seen = done
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == seen
    assert [row["step"] for row in seen] == [0, 1, 2, 3, 3]
    assert all(set(row) >= KEYS for row in seen[:4])
    assert set(seen[4]) == {"step", "validation_loss", "goodput"}
    assert 0 < seen[4]["goodput"] < 1
    rates = rows(folder / "metrics.jsonl", "learning_rate")
    rate_of = learning_rate_schedule(SMALL)
    assert rates == pytest.approx([float(rate_of(step)) for step in range(4)])
    assert rates[0] == 0 and max(rates) == pytest.approx(3e-3)


def test_the_learning_rate_rises_for_a_tenth_and_ends_at_a_tenth():
    rate = learning_rate_schedule(
        RunConfig(steps=60, decay_steps=40, learning_rate=1e-2)
    )
    rates = [float(rate(step)) for step in (0, 2, 4, 22, 40, 60)]
    assert rates == pytest.approx([0, 5e-3, 1e-2, 5.5e-3, 1e-3, 1e-3])


def test_the_trace_names_the_step_that_was_asked_for(done):
    (found,) = (done[0] / "profile").rglob("*.xplane.pb")
    steps = [
        dict(event.stats)["step_num"]
        for plane in jax.profiler.ProfileData.from_file(str(found)).planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    ]
    assert steps == [2]
    assert list((done[0] / "profile").rglob("perfetto_trace.json.gz"))


def test_what_a_cpu_does_not_tell_is_null_and_the_host_memory_is_bytes(done):
    row = done[2][0]
    assert (row["mfu"], row["memory_bytes"]) == (None, None)
    assert 1e8 < row["host_memory_bytes"] < 1e12


def test_tensorboard_has_the_same_numbers(done):
    folder, events, seen = done
    found = scalars(events)
    assert found["loss"] == pytest.approx(
        {row["step"]: row["loss"] for row in seen[:4]}
    )
    assert found["validation_loss"] == pytest.approx({3: seen[4]["validation_loss"]})
    assert "mfu" not in found


def test_tensorboard_that_is_not_installed_is_told_with_its_extra(
    monkeypatch, tmp_path, small_text, refuses_recipe
):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setattr(pretrain, "train", lambda run, state, log, stop: state)
    words = ["--layout", "data=2", "--out", str(tmp_path), "--text", str(small_text)]
    words += ["--tensorboard", str(tmp_path / "tb")]
    needed = "--tensorboard", "tensorboardX", "'meshpar[tensorboard]'"
    refuses_recipe(lambda: pretrain.main(words), "run.missing_package", *needed)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_mfu_is_of_the_data_sheets_peak_at_the_layouts_precision(
    precision, monkeypatch
):
    h100 = DEVICES["h100-80gb"]
    monkeypatch.setattr(metrics, "device_from_kind", lambda kind: h100)
    layout = f"data=2,precision={precision}"
    step = make_step(RunConfig(layout=layout, preset="tiny"))
    use = metrics.Utilization(step, global_batch=8, seq=64)
    flops = SHAPES["tiny"].model_flops(global_batch=8, seq=64)
    peak = h100.peak_flops[precision]
    assert use.row(0.5)["mfu"] == pytest.approx(flops / (0.5 * 2 * peak), rel=1e-6)


def test_memory_is_of_the_fullest_device():
    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    devices = [Device({"peak_bytes_in_use": bytes_}) for bytes_ in (5, 9, 7)]
    assert metrics._device_bytes([*devices, Device(None)]) == 9
    assert metrics._device_bytes([Device(None)]) is None


def test_a_full_disk_under_the_times_of_processes_does_not_end_the_run(
    monkeypatch, tmp_path, caplog
):
    path = tmp_path / host_times.NAME
    before = '{"step": 1, "process": 0}\n'
    path.write_text(before)

    def write(self, **row):
        with path.open("a") as file:
            file.write('{"step": ')
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(host_times.JsonLines, "write", write)
    monkeypatch.setattr(host_times, "probe_s", lambda devices: [0.1])
    run = SimpleNamespace(
        config=replace(SMALL, out=tmp_path),
        step=SimpleNamespace(mesh=SimpleNamespace(devices=np.array(jax.devices()))),
        processes=SimpleNamespace(
            num_processes=2,
            process_id=0,
            is_first=True,
            hosts=["[a]", "[b]"],
            gather=lambda value: [value, value],
        ),
    )
    caplog.set_level("INFO")
    times = host_times.HostTimes(run)
    times.note(1.0, [0.0, 0.0])
    times.look(4)
    assert f"[Errno {errno.ENOSPC}]" in caplog.text
    assert path.read_text() == before


def test_what_ends_a_run_is_not_lost_behind_a_trace_that_fails(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *args, **options: None)

    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    config = replace(SMALL, profile=2, out=tmp_path)
    with (
        pytest.raises(ZeroDivisionError),
        Profile(config, first=0) as profile,
        profile.step(2),
    ):
        raise ZeroDivisionError
    assert f"[Errno {errno.ENOSPC}]" in caplog.text


def test_processes_write_traces_into_folders_of_their_own(monkeypatch, tmp_path):
    folders = []
    monkeypatch.setattr(
        jax.profiler, "start_trace", lambda folder, **options: folders.append(folder)
    )
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config = replace(SMALL, profile=1, out=tmp_path)
    for process in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda number=process: number)
        with Profile(config, first=0) as profile, profile.step(2):
            pass
    assert folders == [f"{tmp_path}/profile/process{n}" for n in (0, 1)]


def test_a_resumed_run_cuts_the_times_of_processes_as_its_other_rows(tmp_path):
    for path in (tmp_path / host_times.NAME, tmp_path / "metrics.jsonl"):
        path.write_text("".join(f'{{"step": {step}}}\n' for step in range(6)))
    run = SimpleNamespace(
        config=replace(SMALL, out=tmp_path, steps=9),
        processes=SimpleNamespace(is_first=True),
        goodput=SimpleNamespace(lose=lambda rows, done, every: list(rows)),
    )
    cut_rows_after(run, 4)
    for name in (host_times.NAME, "metrics.jsonl"):
        assert rows(tmp_path / name, "step") == [0, 1, 2, 3]


def test_a_line_that_names_a_file_is_printed_as_it_is(capsys):
    with on_console(Console(width=20)):
        report.log_line("tokenized [b].txt and [/b].txt in 2 s")
    assert capsys.readouterr().out == "tokenized [b].txt and [/b].txt in 2 s\n"
