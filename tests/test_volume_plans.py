"""Plans of models of volumes: halos, memory and time by closed forms written here."""

import dataclasses
import functools
import json
import math

import optax
import pytest

from meshpar import absent_mesh, default_rules, make_train_step
from meshpar.cli.main import main
from meshpar.model.inputs import input_shapes
from meshpar.models.presets import OTHER_PRESETS, build
from meshpar.planner.curve import BEND, curve_in_words, scaling_curve
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.search.space import Constraints
from meshpar.planner.volume_traces import traced_space, traced_volume
from meshpar.planner.volumes import VolumeRequest, exposed, halo_bytes
from meshpar.planner.workload.shapes import OTHER_SHAPES, TRACED
from meshpar.planner.workload.volumes import Kernel, SpaceWorkload, VolumeWorkload
from meshpar.train.memory_report import estimated_bytes
from tests.marks import slow

PLANE = 64 * 64
WINDOW = Kernel(
    flops=2e12, num_bytes=4e9, sizes=(64, 64, 64), reach=(2, 2, 2), place_bytes=32
)
MADE = VolumeWorkload(
    name="made",
    precision="bf16",
    num_parameters=1_000_000,
    kernels=(WINDOW, WINDOW, Kernel(flops=1e9, num_bytes=1e6)),
    summed_bytes=1e9,
    num_sums=5,
    at_once=SpaceWorkload(volume_bytes=4 * 10**9, other_bytes=10**6),
    on_tpus=SpaceWorkload(volume_bytes=64 * 10**9, other_bytes=16 * 10**6),
    batch_bytes=10**6,
    least_sizes=(8, 8, 8),
)


def request(devices, workload=MADE, global_batch=1, **kept):
    return VolumeRequest(
        workload=workload,
        cluster=cluster_of("h100-80gb", devices=devices),
        global_batch=global_batch,
        constraints=Constraints(kept=kept),
    )


@functools.cache
def tiny(levels, blocks=1, remat="none"):
    model = build("tiny-unet3d", levels=levels, blocks=blocks)
    return traced_volume(model, "tiny-unet3d", precision="fp32", remat=remat)


def step_of(layout, levels, **rules):
    model = build("tiny-unet3d", levels=levels)
    step = make_train_step(
        model,
        optax.adamw(1e-3),
        layout,
        rules=default_rules(layout).with_rules(**rules),
        mesh=absent_mesh(layout),
    )
    return step, input_shapes(model.inputs, {"batch": 1})


# Halos and memory.


def test_halo_seconds_are_bytes_over_a_port_and_a_hop_for_each_convolution():
    plan, _ = request(4, context=4).kept_plan()
    device = plan.run.cluster.device
    halo = 2 * PLANE * 32
    one_s = halo / (device.link_bytes_per_s * device.efficiency.link)
    halos_s = 2 * (one_s + device.efficiency.hop_s)
    alone = dataclasses.replace(MADE, kernels=MADE.kernels[2:])
    others, _ = request(4, alone, context=4).kept_plan()
    found = exposed(plan.run)["context"] - exposed(others.run)["context"]
    assert found == pytest.approx(halos_s)
    assert halo_bytes(plan.run) == 2 * halo


def test_a_second_split_dim_sends_the_halo_of_the_first_too():
    plan, _ = request(8, context=4, tensor=2).kept_plan()
    along_depth = 2 * 32 * 64 * 32
    along_height = 2 * (64 / 4 + 2) * 64 * 32
    assert halo_bytes(plan.run) == 2 * (along_depth + along_height)
    assert plan.run.rules == "depth=context,height=tensor"
    assert 'with_rules(depth="context", height="tensor")' in plan.run.python_call


BY_HAND = 4 * 2 * 8 * 8 * 16 * 4
"""Of the coarse level's four gradients: two places of each device are less than a
window, so that their halos are sent by hand and are none of the trace's."""


BEAMS = {"depth": "context", "height": "tensor"}


@pytest.mark.parametrize(
    "layout, rules, levels, by_hand",
    [
        ("context=2,tensor=2", BEAMS, 1, 0),
        slow("context=2,tensor=2", BEAMS, 2, 0),
        slow("context=4", {}, 2, BY_HAND),
    ],
)
def test_halos_and_memory_are_those_of_the_traced_step(layout, rules, levels, by_hand):
    step, batch = step_of(layout, levels, **rules)
    plan, _ = request(4, tiny(levels), **step.layout.mesh_shape).kept_plan()
    assert halo_bytes(plan.run) == traced_space(step, batch).halo_bytes + by_hand
    states, at_once = estimated_bytes(step, batch)
    assert plan.memory.total_bytes == pytest.approx(states + at_once, rel=1e-3)


def test_devices_that_share_a_volume_hold_their_part_of_it():
    one, eight = (request(n, context=n).kept_plan()[0] for n in (1, 8))
    assert eight.memory.activation_bytes == one.memory.activation_bytes / 8
    assert one.memory.halo_bytes == 0
    assert eight.memory.halo_bytes == 2 * PLANE * 32
    assert eight.memory.state_bytes == one.memory.state_bytes == 12e6


@pytest.mark.slow
def test_blocks_that_are_scanned_count_as_often_as_they_run():
    one, two = (tiny(levels=1, blocks=num) for num in (1, 2))
    kernels = 2 * 3**3 * 8 * 8  # of one more block
    voxels = math.prod(one.least_sizes)
    # Two for a multiply and add, forward and of both gradients.
    assert two.flops - one.flops == 2 * 3 * voxels * kernels
    norms = 2 * voxels * 8 * 4
    assert two.num_sums > one.num_sums
    assert two.summed_bytes >= one.summed_bytes + norms


@pytest.mark.slow
def test_what_is_computed_again_is_no_work_of_the_model():
    full = tiny(levels=1, blocks=1, remat="full")
    assert full.recomputed_flops > 0
    assert full.flops == tiny(levels=1, blocks=1).flops


# Plans and curves.


def test_plans_for_tpus_count_channels_along_their_lanes_and_say_so():
    asked = dataclasses.replace(request(8), cluster=cluster_of("tpu-v5p", devices=8))
    plan, fits = asked.kept_plan()
    assert fits and "fits" in "\n".join(plan.lines)
    curve = scaling_curve(asked)
    assert curve_in_words(curve)[-1] == curve.note == plan.run.notes[0]
    assert "128 lanes" in plan.as_json()["note"]
    gpu, _ = request(8).kept_plan()
    assert gpu.as_json()["note"] is None
    apart = 16 * gpu.memory.activation_bytes, 16 * gpu.memory.other_bytes
    assert (plan.memory.activation_bytes, plan.memory.other_bytes) == apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "compiled_bytes"),
    [
        ({}, 72_811_375_200),
        ({"depth": 384}, 56_630_536_800),
        ({"depth": 640}, 90_938_092_128),
        ({"base": 16}, 74_015_180_384),
        ({"depth": 256, "height": 256, "width": 256}, 9_429_267_552),
    ],
)
def test_memory_on_tpus_is_what_their_compiler_said(sizes, compiled_bytes):
    """Totals of libtpu of jax 0.10.2 for tpu:v5p:2x2x2, which take a minute each."""
    work = traced_volume(build("unet3d-512", **sizes), "u")
    cluster = cluster_of("tpu-v5p", devices=8)
    asked = dataclasses.replace(request(8, work, context=8), cluster=cluster)
    plan, _ = asked.kept_plan()
    assert plan.memory.total_bytes == pytest.approx(compiled_bytes, rel=0.03)


def test_beams_whose_parts_a_convolution_refuses_are_no_plans(refuses):
    window = dataclasses.replace(WINDOW, sizes=(8, 8, 8), window=(3, 3, 3))
    coarse = dataclasses.replace(MADE, kernels=(window,))
    asked = {"global_batch": 2, "context": 8, "tensor": 2}
    with refuses("grid.short_part_beside_examples", "'depth'", 8, 3, 1):
        request(32, coarse, data=2, **asked).kept_plan()
    request(16, coarse, data=1, **asked).kept_plan()
    request(128, coarse, **{**asked, "data": 2, "tensor": 8}).kept_plan()


def test_plans_divide_the_batch_and_the_coarsest_level(refuses):
    layouts = {
        str(plan.run.layout)
        for plan in request(16, global_batch=2).search(num_plans=99).plans
    }
    assert "data=2,context=8,precision=bf16" in layouts
    assert "context=8,tensor=2,precision=bf16" in layouts
    assert not any("data=4" in one or "context=16" in one for one in layouts)
    with refuses("plan.no_dividing_layout", 3):
        request(3).search()


def test_what_does_not_fit_is_no_plan():
    asked = request(8)
    small = dataclasses.replace(asked, constraints=Constraints(max_memory_bytes=0.6e9))
    assert {plan.run.sharing for plan in small.search().plans} == {8}
    tiny_room = Constraints(max_memory_bytes=0.5e9)
    assert not dataclasses.replace(asked, constraints=tiny_room).search().plans


@pytest.mark.parametrize("batch", ["strong", "weak"])
def test_a_curve_of_volumes_adds_up_and_names_its_examples(batch):
    curve = scaling_curve(request(16, global_batch=16), batch)
    assert [point.num_devices for point in curve.points] == [1, 2, 4, 8, 16]
    for point in curve.points:
        assert sum(point.lost.values()) == pytest.approx(1 - point.efficiency)
    assert "volumes/s" in curve_in_words(curve)[0]


def test_one_volume_over_many_hosts_bends_for_its_halos():
    asked = request(64, dataclasses.replace(MADE, least_sizes=(64, 64, 64)))
    curve = scaling_curve(asked)
    bend = curve.bend
    assert bend.num_devices <= 16 and bend.efficiency < BEND
    assert bend.most_lost == "exposed on context"
    assert "halos of convolutions" in bend.why
    efficiencies = [point.efficiency for point in curve.points]
    assert efficiencies == sorted(efficiencies, reverse=True)


@pytest.mark.parametrize(
    "axis, fault",
    [
        ("stage", "unsplit_axis_kept"),
        ("fsdp", "unsplit_axis_kept"),
        ("microbatches", "unknown_kept_key"),
    ],
)
def test_what_volumes_are_not_planned_over_is_refused(axis, fault, refuses):
    with refuses(f"plan.{fault}", f"{axis}=2"):
        request(8, **{axis: 2})


# The commands.


def test_every_preset_has_a_workload_or_is_traced():
    assert OTHER_PRESETS.keys() - OTHER_SHAPES.keys() == TRACED


@pytest.mark.slow
def test_the_command_plans_a_volume_and_draws_its_curve(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    words = ["plan", "--preset", "tiny-unet3d", "--model", "levels=1"]
    words += ["--devices", "4", "--global-batch", "4"]
    assert main([*words, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    assert best["memory"].keys() >= {"activation_bytes", "halo_bytes", "total_bytes"}
    picture = tmp_path / "volume.png"
    assert main([*words, "--curve", "--plot", str(picture)]) == 0
    head, *rows, _ = capsys.readouterr().out.splitlines()
    assert "volumes/s" in head and "sequences" not in head
    assert [row.split()[0] for row in rows] == ["1", "2", "4"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_estimate_of_a_layout_speaks_of_volumes(capsys):
    words = ["estimate", "--preset", "tiny-unet3d", "--model", "levels=1"]
    assert main([*words, "--layout", "context=2,tensor=2"]) == 0
    printed = capsys.readouterr().out
    assert "1 volume on 4 devices together" in printed and "halos" in printed
    assert "token" not in printed and "sequence" not in printed


@pytest.mark.parametrize(
    "words, refusal",
    [
        (
            ["--preset", "tiny-unet3d", "--seq", "8"],
            ("command.option_of_transformers", "--seq", "tiny-unet3d"),
        ),
        (
            ["--preset", "tiny-unet3d", "--confirm", "1"],
            ("command.option_of_transformers", "--confirm", "tiny-unet3d"),
        ),
        (
            ["--preset", "tiny", "--tables", "9"],
            ("command.tables_of_transformer", "--tables"),
        ),
        (
            ["--preset", "tiny-unet3d", "--execution", "nanotron"],
            ("command.execution_of_transformers", "nanotron", "tiny-unet3d"),
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(words, refusal, refuses_command):
    argv = ["plan", "--devices", "4", "--global-batch", "4", *words]
    refuses_command(argv, *refusal)
