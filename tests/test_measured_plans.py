"""`meshpar plan --measure`: what runs, what is told of it, what efficiency fits."""

import json
import subprocess

import pytest

from meshpar.calibration.fit import LINKS, WORK, fitted_efficiency, times_s
from meshpar.cli import measure as measuring
from meshpar.cli.main import main
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.workload.shapes import SHAPES

CPU = """
name = "mine"
platform = "cpu"
memory_bytes = 3e9
memory_bytes_per_s = 2e9
domain_devices = 8
link_bytes_per_s = 1e9
network_bytes_per_s = 1e9
[peak_flops]
fp32 = 1.5e10
bf16 = 5e9
[efficiency]
matmul = 0.5
attention = 0.5
attention_head_dim = 0
memory = 0.5
link = 0.5
network = 0.5
hop_s = 2e-5
network_hop_s = 2e-5
launch_s = 5e-6
spread = 0
"""
LAYOUTS = ("data=4", "tensor=4", "fsdp=2,tensor=2", "stage=4,microbatches=4")


@pytest.fixture
def words(tmp_path):
    (tmp_path / "mine.toml").write_text(CPU)
    return [
        *("plan", "--preset", "tiny", "--hardware", str(tmp_path / "mine.toml")),
        *("--devices", "4", "--global-batch", "8", "--seq", "64"),
        *("--execution", "meshpar-cpu", "--plans", "2"),
    ]


def plans_of(tmp_path):
    (tmp_path / "mine.toml").write_text(CPU)
    cluster = cluster_of(str(tmp_path / "mine.toml"), devices=4)
    size = {"global_batch": 8, "seq": 64}
    return [estimate(SHAPES["tiny"], cluster, one, **size) for one in LAYOUTS]


@pytest.mark.parametrize("work, links", [(0.25, 0.25), (0.4, 0.1), (0.9, 0.6)])
def test_the_efficiency_that_made_the_times_is_found_again(tmp_path, work, links):
    plans = plans_of(tmp_path)
    truth = {**dict.fromkeys(WORK, work), **dict.fromkeys(LINKS, links)}
    measured_s = times_s(plans, truth)
    found, fitted_s = fitted_efficiency(plans, measured_s)
    assert found == pytest.approx(truth, rel=0.02)
    assert fitted_s == pytest.approx(measured_s, rel=0.01)


def test_one_plan_fits_what_a_device_achieves_alone(tmp_path):
    plan = plans_of(tmp_path)[0]
    found, fitted_s = fitted_efficiency([plan], [2 * plan.step_s])
    assert found["matmul"] < 0.5 and found["link"] == 0.5
    assert fitted_s == pytest.approx([2 * plan.step_s], rel=0.01)


def test_no_efficiency_is_above_the_data_sheet(tmp_path):
    plans = plans_of(tmp_path)
    found, _ = fitted_efficiency(plans, [plan.step_s / 100 for plan in plans])
    assert max(found.values()) <= 1


def test_predicted_stands_beside_measured_in_text_json_and_page(
    words, tmp_path, capsys, monkeypatch
):
    asked = []

    def child(question):
        asked.append(question)
        return {"seconds": 0.5} if len(asked) % 2 else {"problem": "no room"}

    monkeypatch.setattr(measuring, "_child", child)
    page = tmp_path / "plan.html"
    assert main([*words, "--measure", "2", "--json", "--html", str(page)]) == 0
    report = json.loads(capsys.readouterr().out)
    first, second = report["measured"]
    assert first["layout"] == report["plans"][0]["layout"] == asked[0]["layout"]
    assert first["predicted_s"] == report["plans"][0]["step_s"]
    assert first["measured_s"] == 0.5
    assert first["fitted_s"] == pytest.approx(0.5, rel=0.01)
    assert second["problem"] == "no room" and second["fitted_s"] is None
    assert set(report["fitted_efficiency"]) == {*WORK, *LINKS}
    assert "Predicted against measured" in page.read_text()
    assert asked[0]["emulate"] and asked[0]["devices"] == 4
    assert main([*words, "--measure", "1"]) == 0
    text = capsys.readouterr().out
    assert "median of 5 steps" in text and "[efficiency]\nmatmul = " in text


def test_devices_that_are_not_here_are_told_before_the_search(
    refuses_command, monkeypatch
):
    here = {"platform": "cpu", "kind": "cpu", "count": 1}
    monkeypatch.setattr(measuring, "_child", lambda question: here)
    line = "plan --preset tiny --devices 4 --global-batch 8 --measure 1"
    values = ("1 x cpu", "4 x h100-80gb")
    refuses_command(line.split(), "hardware.other_devices", *values)


def test_a_child_that_dies_says_its_last_words(monkeypatch, refuses):
    monkeypatch.setattr(measuring.sys, "executable", "false")
    assert "ended with status 1" in measuring._child({"ask": "devices"})["problem"]
    with refuses("hardware.no_devices", "--measure", "status 1"):
        measuring.check_measurable(cluster_of("h100-80gb"))


def test_a_child_that_does_not_end_is_a_problem(monkeypatch):
    def never(command, *, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(measuring.subprocess, "run", never)
    monkeypatch.setattr(measuring, "_TIMEOUT_S", 7)
    assert measuring._child({"ask": "step"}) == {"problem": "did not end within 7 s"}


@pytest.mark.slow
def test_plans_run_on_virtual_devices_in_fresh_processes(words, capsys):
    assert main([*words, "--measure", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [one["problem"] for one in report["measured"]] == ["", ""]
    assert all(one["measured_s"] > 0 for one in report["measured"])
