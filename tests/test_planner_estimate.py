"""`meshpar estimate`: what it prints, what it refuses, how it ends."""

import json

import pytest

from meshpar.cli.main import main
from meshpar.layout import Layout
from meshpar.layout.requirements import layout_errors
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.workload.problems import layout_problems
from meshpar.planner.workload.shapes import SHAPES

GOOD = ["estimate", "--preset", "llama3-8b", "--hardware", "h100-80gb", "--seq", "4096"]
FITS = "fsdp=4,stage=2,tensor=2,microbatches=4,remat=full,precision=bf16"


def report_of(capsys, *more, status=0):
    assert main([*GOOD, *more, "--json"]) == status
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1 and captured.err == ""
    return json.loads(captured.out)


def test_the_keys_that_scripts_rely_on(capsys):
    report = report_of(capsys, "--layout", FITS)
    assert report["layout"] == FITS and report["fits"] is True
    assert {"step_s", "mfu", "memory", "time", "collectives"} <= set(report)
    memory = report["memory"]
    parts = ("parameter", "gradient", "optimizer", "activation", "other")
    total = sum(memory[f"{part}_bytes"] for part in parts)
    assert total == pytest.approx(memory["total_bytes"], abs=len(parts))
    assert {"compute_s", "bubble_s", "exposed"} <= set(report["time"])
    axes = {tuple(row["mesh_axes"]) for row in report["collectives"]}
    assert axes == {("fsdp",), ("stage",), ("tensor",)}
    assert all(row["wire_bytes"] > 0 for row in report["collectives"])


def test_a_smaller_world_ends_with_1_because_it_does_not_fit(capsys):
    report = report_of(capsys, "--layout", "precision=bf16", status=1)
    assert report["fits"] is False
    assert report["memory"]["total_bytes"] > report["memory"]["capacity_bytes"]


def test_people_read_memory_time_and_why(capsys):
    assert main([*GOOD, "--layout", FITS]) == 0
    text = capsys.readouterr().out
    for words in (
        "llama3-8b: 8.03 B parameters on 16 x h100-80gb on 2 hosts",
        "of 84.9 GB: fits",
        "microbatches in flight at stage 0, remat=full",
        "exposed on tensor (host)",
        "sums of the residual stream stand between",
        "fsdp all-gather over the network",
    ):
        assert words in text


@pytest.mark.parametrize(
    "more, refusal",
    [
        (["--layout", "tensor=3"], ("layout.indivisible", "heads=32", "tensor=3")),
        (
            ["--layout", "data=3", "--global-batch", "4"],
            ("batch.indivisible", 4, "data=3"),
        ),
        (
            ["--layout", "expert=2"],
            ("layout.expert_without_experts", "expert=2", "llama3-8b"),
        ),
        (["--layout", "stage=64"], ("layout.too_many_stages", 64, 32)),
        (["--layout", "stage=2,splits=16/17"], ("layout.splits_not_layers", 33, 32)),
        (
            ["--layout", "stage=2,chunks=2"],
            ("schedule.unsupported_chunks", "chunks=2", "1f1b"),
        ),
        (
            ["--layout", "stage=2,schedule=v_third"],
            ("schedule.unknown_name", "'v_third'"),
        ),
        (["--layout", "context=3"], ("layout.indivisible", 4096, "context=3")),
        (
            ["--layout", "data=8", "--devices", "16"],
            ("layout.wrong_device_count", "data=8", 8, 16),
        ),
        (
            ["--layout", "data=2", "--hardware", "h101"],
            ("hardware.unknown_device", "'h101'"),
        ),
        (["--layout", "data=2", "--preset", "llama"], ("model.unknown_name", "llama")),
        (
            ["--layout", "data=2", "--execution", "torch"],
            ("plan.unknown_execution", "'torch'"),
        ),
    ],
)
def test_bad_input_is_one_line_and_ends_with_2(more, refusal, refuses_command):
    refuses_command([*GOOD, *more], *refusal)


def test_no_model_is_refused(refuses_command):
    refuses_command(["estimate", "--layout", "data=2"], "command.no_model", "--preset")


def test_sizes_and_a_torus_and_another_vocabulary(capsys):
    sizes = "layers=8,hidden=1024,heads=8,vocab=1000,gated=true"
    argv = ["estimate", "--model", sizes, "--vocab", "32000", "--layout", "data=-1"]
    argv += ["--hardware", "tpu-v5e:4x4", "--seq", "1024", "--json"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layout"] == "data=16"
    assert {row["link"] for row in report["collectives"]} == {"torus"}


def test_every_reason_is_there_as_data(refuses):
    layout = Layout.parse("data=3,expert=2,tensor=3,stage=64")
    problems = layout_problems(SHAPES["llama3-8b"], layout, global_batch=4, seq=4096)
    assert {problem.option for problem in problems} >= {
        "microbatches", "tensor", "expert", "stage",
    }  # fmt: skip
    with refuses("batch.indivisible", 4, "data=3", "expert=2"):
        estimate(
            SHAPES["llama3-8b"],
            cluster_of("h100-80gb", devices=layout.num_devices),
            layout,
            global_batch=4,
        )


@pytest.mark.parametrize(
    "layout, refusal",
    [
        ("fsdp=8,remat=stage", ("layout.stage_remat_without_stages", "stage=1")),
        ("fsdp=8,schedule=gpipe", ("layout.option_without_axis", "stage=1")),
        (
            "fsdp=8,zero=0,zero_axes=fsdp",
            ("layout.zero_axes_without_effect", "zero_axes=fsdp", "zero=0"),
        ),
        (
            "fsdp=8,fsdp_gather=microbatch",
            ("layout.fsdp_gather_without_effect", "fsdp_gather=microbatch", "zero=3"),
        ),
        ("zero=1", ("layout.zero_without_effect", "zero=1", "data=1", "fsdp=1")),
        (
            "fsdp=8,param_dtype=bf16",
            ("layout.param_dtype_rounds", "param_dtype=bf16", "precision=fp32"),
        ),
        (
            "microbatches=2,remat=offload:mlp_hidden",
            ("layout.offload_in_ticks", "remat=offload", "microbatches=1"),
        ),
        ("fsdp=8,remat=save:nonsense", ("layout.unknown_residual", "'nonsense'")),
        ("fsdp=8,remat=save:mlp_up", ("layout.unknown_residual", "'mlp_up'")),
    ],
)
def test_what_the_step_refuses_is_not_estimated(layout, refusal, refuses_command):
    refused = layout_errors(Layout.parse(layout))
    assert bool(refused) != ("save:" in layout)
    arguments = ["estimate", "--preset", "llama3-8b", "--layout", layout]
    refuses_command(arguments, *refusal)
    # Other programs have other limits.
    if "save:" in layout:
        assert main([*arguments, "--execution", "nanotron"]) in (0, 1)


def test_sizes_beyond_any_run_are_refused(refuses):
    one = cluster_of("h100-80gb", devices=1)
    with refuses("plan.size_too_large", 10**28, 10**9):
        estimate(SHAPES["tiny"], one, "data=1", global_batch=1, seq=10**28)


@pytest.mark.parametrize(
    "more, why",
    [
        ("", "take longer than the layer's work beside them"),
        (",zero=1", "gradients are reduced once"),
        (",microbatches=2", "gradients are reduced once"),
    ],
)
def test_why_fsdp_is_exposed_depends_on_what_it_splits_and_when(more, why):
    found = estimate(
        SHAPES["llama3-8b"],
        cluster_of("h100-80gb", devices=16),
        f"fsdp=16,precision=bf16{more}",
        global_batch=32,
    )
    [line] = [line for line in found.lines if "exposed on fsdp" in line]
    assert why in line
