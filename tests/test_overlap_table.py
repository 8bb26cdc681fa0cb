"""The table of shares is made from the audit's reports, and is the one that stands."""

import json

import pytest

from meshpar.layout import Layout
from meshpar.planner.machine import collective_cost as planned
from recipes.bench import overlap


def collective(axes, kind, wire_bytes, matmul_flops, executions=1):
    return {
        "mesh_axes": axes,
        "kind": kind,
        "wire_bytes": wire_bytes,
        "matmul_flops": matmul_flops,
        "executions": executions,
    }


def report(*collectives):
    return {
        "target": "gpu:h100:8x8",
        "layout": "fsdp=64,precision=bf16",
        "collectives": list(collectives),
    }


def test_a_share_is_of_the_bytes_that_have_a_matmul_beside_them():
    found = overlap.table_rows(
        report(
            collective(["fsdp"], "all-gather", 1e9, 1, executions=3),
            collective(["fsdp"], "all-gather", 1e9, 0),
            collective(["fsdp"], "reduce-scatter", 2e9, 0),
            collective(["fsdp"], "all-reduce", 8, 1),
            collective(["data", "stage"], "all-reduce", 1e9, 1),
            collective(None, "collective-permute", 1e9, 1),
        ),
        ["audit", "--layout", "fsdp=64,precision=bf16"],
    )
    assert [(row["kind"], row["share"], row["wire_bytes"]) for row in found] == [
        ("all-gather", 0.75, 4_000_000_000),
        ("reduce-scatter", 0.0, 2_000_000_000),
    ]
    assert {row["command"] for row in found} == {
        "meshpar audit --layout fsdp=64,precision=bf16"
    }


def test_collectives_of_a_part_of_an_axis_are_rows_apart():
    inside, across = (
        {**collective([], "all-to-all", 1e9, flops), "part": ["expert", stride]}
        for stride, flops in ((1, 1), (8, 0))
    )
    found = overlap.table_rows(report(inside, across), [])
    assert [(row["mesh_axis"], row["part"], row["share"]) for row in found] == [
        ("expert", "inner", 1.0),
        ("expert", "outer", 0.0),
    ]


def test_the_table_that_stands_is_of_the_cases_that_are_compiled():
    rows = json.loads(overlap.FILE.read_text())["rows"]
    commands = {
        " ".join(["meshpar", *overlap.audit_command(case, target)])
        for target, case in overlap.targeted_cases()
    }
    assert {row["command"] for row in rows} == commands
    assert len(rows) == len(planned.hidden_shares())


def test_rows_of_other_targets_stay(refuses, tmp_path, monkeypatch):
    out = tmp_path / "overlap.json"
    out.write_text(overlap.FILE.read_text())
    gather = report(collective(["fsdp"], "all-gather", 1e9, 1))
    monkeypatch.setattr(
        overlap,
        "_audited",
        lambda case, target: (gather, overlap.audit_command(case, target)),
    )
    assert overlap.main(["--target", "gpu", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    before = json.loads(overlap.FILE.read_text())["rows"]
    tpu = [row for row in before if row["platform"] == "tpu"]
    assert [row for row in rows if row["platform"] == "tpu"] == tpu
    measured = [case for target, case in overlap.targeted_cases() if "gpu" in target]
    assert sum(row["platform"] == "gpu" for row in rows) == len(measured)
    with refuses("command.unknown_target", "'cpu'", "gpu:h100:8x8"):
        overlap.main(["--target", "cpu"])


@pytest.fixture
def no_shares_kept():
    """Shares are those of the table that the test gives, and no later test's."""
    planned._shares.cache_clear()
    yield
    planned._shares.cache_clear()


def row(kind, share, wire_bytes, mesh_axis="tensor", layout="data=8,tensor=8"):
    return planned.HiddenShare(
        platform="tpu",
        mesh_axis=mesh_axis,
        kind=kind,
        share=share,
        wire_bytes=wire_bytes,
        target="tpu:v5p:4x4x4",
        layout=layout,
        command="",
    )


def test_a_share_is_of_programs_whose_collectives_take_the_same_turns(
    monkeypatch, no_shares_kept
):
    table = (
        row("all-gather", 0.9, 10, "fsdp", "fsdp=64"),
        row("all-gather", 0.5, 30, "fsdp", "data=2,fsdp=32"),
        row("all-gather", 0.2, 10, "fsdp", "fsdp=8,tensor=8"),
    )
    monkeypatch.setattr(planned, "hidden_shares", lambda: table)
    for layout, share in (
        ("data=2,fsdp=2", 0.6),
        ("fsdp=2,tensor=2", 0.2),
        ("fsdp=2,expert=2", 0.6),  # not measured: without experts
        ("fsdp=2,stage=2,microbatches=2", 0.2),  # not measured: the least
    ):
        condition = planned.overlap_condition(Layout.of(layout), in_parts=False)
        found = planned.hidden_share(condition, "tpu", ("fsdp",), "all-gather")
        assert found == pytest.approx(share)


def test_chunks_around_tensor_count_as_its_gathers_and_scatters(
    monkeypatch, no_shares_kept
):
    table = (
        row("all-gather", 0.0, 10),
        row("collective-permute", 1.0, 30),
        row("all-reduce", 0.5, 10),
    )
    monkeypatch.setattr(planned, "hidden_shares", lambda: table)
    alone = planned.overlap_condition(Layout(), in_parts=False)
    for kind, share in (
        ("all-gather", 0.75),
        ("reduce-scatter", 0.75),
        ("all-reduce", 0.5),
        ("all-to-all", 0.0),
    ):
        assert planned.hidden_share(alone, "tpu", ("tensor",), kind) == share
    for platform, axes in (("gpu", ("tensor",)), ("tpu", ("tensor", "data"))):
        assert planned.hidden_share(alone, platform, axes, "all-gather") == 0.0
