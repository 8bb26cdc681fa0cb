"""An axis on a slow link is named, and no order of the axes is faster than the best."""

import itertools
import json
import random

import pytest

from meshpar.cli.main import main
from meshpar.errors import InputError
from meshpar.layout import MESH_AXES, Layout
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.cost.mesh_order import LEAST_GAIN
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.workload.shapes import SHAPES

RACKS = """
name = "in-racks"
like = "h100-80gb"
rack_devices = 16
oversubscription = 4
"""
MACHINES = {
    "hosts": ("h100", 64),
    "racks": ("in-racks.toml", 64),
    "domains of NVLink": ("gb200", 144),
    "a torus": ("v5p:4x4x8", 128),
    "a torus without rings": ("v5e:8x8", 64),
    "two devices a chip": ("v7x:2x4x4", 64),
    "slices": ("v6e:4x4", 32),
}
"""Name -> hardware and devices."""


@pytest.fixture(autouse=True)
def racks_file(tmp_path, monkeypatch):
    (tmp_path / "in-racks.toml").write_text(RACKS)
    monkeypatch.chdir(tmp_path)


def planned(layout, machine, model="llama3-70b", order=None):
    hardware, devices = MACHINES[machine]
    hosts = 2 if machine == "slices" else None
    return estimate(
        SHAPES[model],
        cluster_of(hardware, devices=devices, hosts=hosts),
        layout,
        global_batch=4 * devices,
        seq=8192,
        order=order,
    )


def drawn(machine, number):
    """Yield plans of layouts drawn over the mesh axes."""
    draw, devices = random.Random(machine), MACHINES[machine][1]
    while number:
        model = draw.choice(("llama3-70b", "mixtral-8x7b"))
        axes = [axis for axis in MESH_AXES if axis != "expert" or "mixtral" in model]
        sizes, rest = dict.fromkeys(MESH_AXES, 1), devices
        for factor in (2, 3):
            while rest % factor == 0:
                sizes[draw.choice(axes)] *= factor
                rest //= factor
        layout = Layout(**sizes, remat="full", precision="bf16")
        try:
            yield planned(layout, machine, model)
        except InputError:
            continue
        number -= 1


@pytest.mark.parametrize("machine", MACHINES)
def test_no_permutation_of_the_axes_is_faster_than_the_order_of_a_plan(machine):
    """The plan's own, or the one that it names instead."""
    named = 0
    for plan in drawn(machine, 12):
        run, sizes = plan.run, plan.run.layout.mesh_shape
        large = [axis for axis in MESH_AXES if sizes[axis] > 1]
        found_s = {
            order: planned(run.layout, machine, run.workload.name, order).step_s
            for order in itertools.permutations(large)
        }
        assert found_s[tuple(large)] == plan.step_s
        orders = plan.mesh_orders
        chosen_s = found_s[orders.fastest.order] if orders else plan.step_s
        assert chosen_s * (1 - LEAST_GAIN) <= min(found_s.values())
        if orders:
            listed = {one.order: one.step_s for one in orders.times}
            assert all(found_s[order] == step_s for order, step_s in listed.items())
            assert min(listed.values()) == min(found_s.values())
            named += bool(orders.lines)
    assert named or machine == "a torus"


@pytest.mark.parametrize(
    ("machine", "layout", "order", "words"),
    [
        (
            "hosts",
            "fsdp=16,tensor=4",
            "tensor,fsdp",
            "'tensor' lies between hosts at 45 GB/s, not inside a host at 360 GB/s",
        ),
        (
            "racks",
            "data=4,fsdp=16",
            "fsdp,data",
            "'fsdp' lies between racks at 45 GB/s, not between hosts at 360 GB/s",
        ),
        (
            "a torus",
            "fsdp=16,tensor=8",
            "tensor,fsdp",
            "'tensor' lies on a ring of the torus at 180 GB/s, not on a ring and a "
            "line of the torus at 270 GB/s",
        ),
        (
            "two devices a chip",
            "fsdp=32,tensor=2",
            "tensor,fsdp",
            "'tensor' lies on a line of the torus at 44.5 GB/s, not inside a chip at "
            "534 GB/s",
        ),
        (
            "slices",
            "stage=2,fsdp=16,microbatches=4",
            "fsdp,stage",
            "'fsdp' lies between slices at 80 GB/s, not on 2 lines of the torus at "
            "118 GB/s",
        ),
    ],
)
def test_an_axis_on_a_slow_level_is_named_with_both_times(
    machine, layout, order, words
):
    layout = f"{layout},remat=full,precision=bf16"
    best = ",".join(reversed(order.split(",")))
    good, bad = (planned(layout, machine, order=one) for one in (best, order))
    assert good.step_s < 0.99 * bad.step_s and not good.mesh_orders.lines
    [line] = bad.mesh_orders.lines
    assert line.startswith(f"mesh order {order}: ") and words in line
    assert f"in the order {best} " in line
    assert line in "\n".join(bad.lines) and line in "\n".join(bad.answer)
    found = bad.as_json()["mesh_orders"]
    assert found["present"] == order.split(",") != found["fastest"]
    assert {one["step_s"] for one in found["orders"]} == {good.step_s, bad.step_s}


def test_one_axis_and_one_host_have_no_order():
    for layout, devices in (("fsdp=64", 64), ("fsdp=4,tensor=2", 8)):
        plan = estimate(
            SHAPES["llama3-8b"],
            cluster_of("h100", devices=devices),
            f"{layout},precision=bf16",
            global_batch=64,
        )
        assert plan.mesh_orders is None and "mesh_orders" not in plan.as_json()


def test_the_command_that_runs_a_plan_has_its_order(capsys):
    words = ["--preset", "llama3-8b", "--hardware", "h100", "--devices", "16"]
    words += ["--seq", "4096", "--global-batch", "16"]
    assert main(["plan", *words, "--keep", "fsdp=8", "--keep", "stage=2"]) == 0
    printed = capsys.readouterr().out
    assert "mesh order fsdp,stage: 'fsdp' lies between hosts at 180 GB/s" in printed
    assert printed.rstrip().endswith(" --mesh-order stage,fsdp")
    layout = "fsdp=8,stage=2,microbatches=2,remat=full,precision=bf16"
    given = ["estimate", *words, "--layout", layout, "--json", "--mesh-order"]
    main([*given, "stage,fsdp"])
    found = json.loads(capsys.readouterr().out)["mesh_orders"]
    assert found["present"] == found["fastest"] == ["stage", "fsdp"]
    assert found["slow"] == []
