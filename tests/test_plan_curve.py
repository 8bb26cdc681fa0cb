"""A scaling curve says how much is lost, where, and to what."""

import dataclasses
import json

import pytest

from meshpar.cli.main import main
from meshpar.planner.curve import BEND, curve_in_words, scaling_curve
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.search.search import Request
from meshpar.planner.search.space import Constraints
from meshpar.planner.workload.shapes import workload_of

WORDS = ["plan", "--preset", "dit-b2", "--devices", "16", "--global-batch", "256"]


def request(model="dit-b2", devices=16, global_batch=256, **more):
    """Of few layouts: replicas and split states alone."""
    forbidden = frozenset({"tensor", "stage", "context"})
    return Request(
        workload=workload_of(model),
        cluster=cluster_of("h100-80gb", devices=devices),
        global_batch=global_batch,
        constraints=Constraints(forbidden=forbidden, kept={"precision": "bf16"}),
        **more,
    )


def counts(curve):
    return [point.num_devices for point in curve.points]


@pytest.mark.parametrize("batch", ["strong", "weak"])
def test_what_is_lost_adds_up_to_the_efficiency(batch):
    curve = scaling_curve(request(), batch)
    assert counts(curve) == [1, 2, 4, 8, 16]
    rates = [
        point.global_batch / point.plan.step_s / point.num_devices
        for point in curve.points
    ]
    for point, rate in zip(curve.points, rates, strict=True):
        assert sum(point.lost.values()) == pytest.approx(1 - point.efficiency)
        assert point.efficiency == pytest.approx(rate / max(rates))
    assert curve.best.efficiency == 1 and not any(curve.best.lost.values())


def test_weak_scaling_keeps_the_sequences_of_a_device_and_loses_less():
    strong, weak = (scaling_curve(request(), one) for one in ("strong", "weak"))
    assert [point.global_batch for point in weak.points] == [16, 32, 64, 128, 256]
    assert {point.global_batch for point in strong.points} == {256}
    assert weak.points[-1].efficiency > strong.points[-1].efficiency


def test_a_slow_network_bends_the_curve_where_hosts_begin_and_says_so():
    asked = request(devices=32, global_batch=1024)
    device = asked.cluster.device
    slow = dataclasses.replace(
        device, network_bytes_per_s=device.network_bytes_per_s / 100
    )
    cluster = dataclasses.replace(asked.cluster, device=slow)
    bend = scaling_curve(dataclasses.replace(asked, cluster=cluster), "weak").bend
    assert bend.num_devices == 16 and bend.efficiency < BEND
    assert bend.most_lost in ("exposed on data", "exposed on fsdp")
    assert bend.why.startswith("over the network, gradients are reduced once")


def test_devices_that_are_too_few_are_a_row_and_compared_with_none():
    curve = scaling_curve(request("llama3-8b", devices=16, global_batch=16))
    one, *others = curve.points
    assert one.plan is None and "nothing fits in" in one.problem
    assert one not in curve.fitting and curve.best in others
    table = curve_in_words(curve)
    assert "nothing fits in" in table[1] and str(curve.best.num_devices) in table[-1]


def test_a_constraint_that_few_devices_cannot_meet_is_a_row_and_no_end():
    kept = Constraints(kept={"data": 4, "precision": "bf16"})
    asked = dataclasses.replace(request(devices=4), constraints=kept)
    one, two, four = scaling_curve(asked).points
    assert one.plan is None and "data=4" in one.problem and two.plan is None
    assert four.efficiency == 1


@pytest.mark.parametrize(("device", "each"), [("tpu v5p", 1), ("v7x", 2)])
def test_a_torus_is_halved_along_its_longest_side(device, each):
    asked = dataclasses.replace(
        request(), cluster=cluster_of(f"{device}:2x2x4"), global_batch=64
    )
    curve = scaling_curve(asked)
    devices = [point.cluster.num_devices for point in curve.points]
    assert devices == [each * chips for chips in (1, 2, 4, 8, 16)]
    assert [point.cluster.torus for point in curve.points] == [
        (1, 1, 1),
        (1, 1, 2),
        (1, 2, 2),
        (2, 2, 2),
        (2, 2, 4),
    ]


FEW = ["plan", "--preset", "dit-b2", "--devices", "16", "--global-batch", "32"]
"""Images, 2 on each of 16 devices: the curve bends."""


def test_the_command_prints_a_table_and_where_it_bends(capsys):
    assert main([*FEW, "--curve", "--forbid", "stage"]) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["devices", "batch", "sequences/s", "efficiency"]
    assert [row.split()[0] for row in rows] == ["1", "2", "4", "8", "16"]
    assert last.startswith("bends at 4 devices: each does ")
    assert float(rows[1].split()[3].rstrip("%")) >= 100 * BEND
    assert float(rows[2].split()[3].rstrip("%")) < 100 * BEND


def test_json_has_points_and_the_bend(capsys):
    words = ["--curve", "weak", "--forbid", "stage", "--keep", "zero=0", "--json"]
    assert main([*FEW, *words]) == 0
    curve = json.loads(capsys.readouterr().out)["curve"]
    assert curve["batch"] == "weak" and len(curve["points"]) == 5
    assert curve["points"][0].keys() == {
        *("devices", "global_batch", "fits", "layout", "step_s", "sequences_per_s"),
        "examples_per_s",
        *("mfu", "total_bytes", "efficiency", "lost"),
    }
    assert curve["examples"] == "sequences"
    bend = curve["bend"]
    assert bend.keys() == {"devices", "efficiency", "most_lost", "lost", "why"}
    assert bend["devices"] == 8 and bend["efficiency"] < BEND


def test_what_fits_nowhere_ends_with_1(capsys):
    words = ["plan", "--model", "llama3-405b", "--devices", "2", "--global-batch", "2"]
    assert main([*words, "--curve"]) == 1
    printed = capsys.readouterr()
    assert "nothing fits on any of these" in printed.out
    assert "nothing fits on any of these; give more --devices" in printed.err


@pytest.mark.parametrize(
    "words, refusal",
    [
        (["--curve", "--tokens", "1e9"], ("command.option_with_curve", "--tokens")),
        (
            ["--curve", "--checkpoint-s", "9"],
            ("command.option_with_curve", "--checkpoint-s"),
        ),
        (["--curve", "--plans", "3"], ("command.option_with_curve", "--plans")),
        (["--plot", "{folder}/x.png"], ("command.plot_without_curve", "--plot")),
        (
            ["--curve", "--plot", "{folder}/x.pdf"],
            ("command.unknown_suffix", "--plot", "x.pdf", ".png"),
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    words, refusal, tmp_path, refuses_command
):
    given = [word.format(folder=tmp_path) for word in words]
    refuses_command([*WORDS, *given], *refusal)


def test_an_unknown_kind_of_batch_is_refused(refuses):
    with refuses("plan.unknown_batch_kind", "batch='big'", "strong, weak"):
        scaling_curve(request(), "big")


def test_a_picture_and_a_page_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    files = [tmp_path / "curve.png", tmp_path / "curve.html"]
    words = ["--curve", "--plot", str(files[0]), "--html", str(files[1])]
    assert main([*WORDS, *words, "--forbid", "stage"]) == 0
    assert files[0].read_bytes().startswith(b"\x89PNG")
    assert "more exposed on" in files[1].read_text()
