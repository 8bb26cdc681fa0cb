"""`meshpar audit` ends with a status, and its output is for people or for scripts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshpar.audit.collectives import find_collectives
from meshpar.audit.flops import UncountedCall
from meshpar.audit.hazards import Hazard
from meshpar.audit.hlo import parse_program
from meshpar.audit.memory import Buffer, MemoryUse
from meshpar.audit.overlap import Overlap
from meshpar.audit.reasons import Explained
from meshpar.audit.report import AuditReport
from meshpar.audit.targets import TargetError
from meshpar.cli import audit as command
from meshpar.cli.audit import longest_seq
from meshpar.cli.main import main
from meshpar.cli.report.audit_page import audit_page
from tests.test_audit_targets import needs_tpu_compiler
from tests.test_cli import status_of

AUDIT = "meshpar.audit.report"
"""Where the command finds what audits, when it runs."""

STEP = ["audit", "--preset", "test", "--seq", "16"]
KEYS = {
    *("layout", "target", "fits", "memory", "flops"),
    *("collectives", "hazards", "compile_s", "exposed_share", "matmul_s"),
}
MEMORY_KEYS = {
    *("argument_bytes", "output_bytes", "temp_bytes", "peak_bytes"),
    "capacity_bytes",
}
COLLECTIVE_KEYS = {
    *("kind", "mesh_axes", "payload_bytes", "wire_bytes", "executions"),
    *("source", "reason", "surprise"),
}
HAZARD = Hazard(kind="divergent_permute", source="/home/user/f.py:3", message="wrong")


def collectives() -> tuple[Explained, ...]:
    text = Path(__file__).parent / "data" / "programs" / "gpu_kinds.txt"
    rows = find_collectives(parse_program(text.read_text()), {"data": 2, "tensor": 4})
    return tuple(
        Explained(collective=row, reason=f"reason {index}", surprise=False)
        for index, row in enumerate(rows)
    )


CLEAN = AuditReport(
    layout="data=2,tensor=4",
    target="gpu:h100:1x8",
    mesh_shape={"data": 2, "tensor": 4},
    rows=collectives(),
    memory=MemoryUse(
        argument_bytes=1 << 30,
        output_bytes=1 << 30,
        temp_bytes=2 << 30,
        alias_bytes=0,
        peak_bytes=4 << 30,
    ),
    capacity_bytes=80 << 30,
    flops=12_345,
    uncounted=(UncountedCall(name="kernel", source="/home/user/f.py:9", executions=3),),
    buffers=(
        Buffer(
            bytes=4_000_000,
            dtype="f32",
            dims=(1000, 1000),
            opcode="fusion",
            source="/home/user/f.py:7",
            op_path="jit(f)/dot_general",
        ),
    ),
    compile_s=1.5,
)
SURPRISING = replace(CLEAN, rows=(replace(CLEAN.rows[0], surprise=True),))


@pytest.fixture
def audit_gives(monkeypatch):
    """Puts a report, or an error, in place of making a step and compiling it."""
    monkeypatch.setattr(command, "_chosen_step", lambda args, layout: (None, {}))

    def put(report: AuditReport | Exception) -> None:
        def audit(*args: object, **options: object) -> AuditReport:
            if isinstance(report, Exception):
                raise report
            return report

        monkeypatch.setattr(sys.modules[AUDIT], "audit", audit)

    return put


@pytest.mark.parametrize(
    "report, options, status",
    [
        (CLEAN, [], 0),
        (CLEAN, ["--strict"], 0),
        (SURPRISING, [], 0),
        (SURPRISING, ["--strict"], 1),
        (replace(CLEAN, hazards=(HAZARD,)), [], 1),
        (replace(CLEAN, capacity_bytes=3 << 30), [], 1),
        (replace(CLEAN, capacity_bytes=4 << 30), [], 0),
        (replace(CLEAN, capacity_bytes=None), [], 0),
        (
            replace(CLEAN, memory=None, problem="does not fit: 9 of 3", too_large=True),
            [],
            1,
        ),
    ],
)
def test_the_status_is_1_for_hazards_no_fit_and_strictly_for_surprises(
    report, options, status, audit_gives, capsys
):
    audit_gives(report)
    argv = [*STEP, "--layout", "data=2,tensor=2", *options]
    assert status_of(argv) == status
    assert capsys.readouterr().err == ""
    assert status_of([*argv, "--json"]) == status
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert json.loads(captured.out)["fits"] is report.fits


@pytest.mark.parametrize(
    ("hidden_s", "share", "status"),
    [(0.5, "0.4", 1), (0.5, "0.6", 0), (1.0, "0.01", 0)],
)
def test_the_status_is_1_if_more_of_the_step_is_exposed_than_the_limit(
    hidden_s, share, status, audit_gives, capsys
):
    rows = CLEAN.rows[:1]
    line, executions = rows[0].collective.line, rows[0].collective.executions
    overlap = Overlap(line=line, matmul_flops=1, wire_s=1.0, hidden_s=hidden_s)
    report = replace(
        CLEAN, rows=rows, overlaps={line: overlap}, matmul_s=0.5 * executions
    )
    audit_gives(report)
    target = ["--target", "gpu:h100:1x4", "--fail-exposed", share]
    argv = [*STEP, "--layout", "data=2,tensor=2", *target]
    assert status_of(argv) == status
    assert f"exposed: {report.exposed_share:.1%} of the step" in capsys.readouterr().out
    status_of([*argv, "--json"])
    assert json.loads(capsys.readouterr().out)["exposed_share"] == pytest.approx(
        (1 - hidden_s) / (1.5 - hidden_s)
    )


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--fail-exposed", "0.1"], "command.option_without_target"),
        (
            ["--fail-exposed", "10", "--target", "gpu:h100:1x4"],
            "command.bad_share",
        ),
        (
            ["--fail-exposed", "0.1", "--target", "gpu:h100:1x4"],
            "command.unknown_share",
        ),
    ],
)
def test_a_limit_of_exposed_time_that_cannot_be_checked_is_refused(
    options, key, audit_gives, capsys
):
    audit_gives(CLEAN)
    argv = [*STEP, "--layout", "data=2,tensor=2", *options, "--json"]
    assert status_of(argv) == 2
    assert key in capsys.readouterr().out


def test_json_has_the_promised_keys(audit_gives, capsys):
    audit_gives(replace(SURPRISING, hazards=(HAZARD,)))
    status_of([*STEP, "--layout", "data=2,tensor=2", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report.keys() >= KEYS
    assert report["memory"].keys() >= MEMORY_KEYS
    assert report["memory"]["capacity_bytes"] == 80 << 30
    [row] = report["collectives"]
    assert row.keys() >= COLLECTIVE_KEYS
    assert (row["kind"], row["mesh_axes"], row["surprise"]) == (
        *("all-gather", ["tensor"]),
        True,
    )
    [hazard] = report["hazards"]
    assert (hazard["kind"], hazard["source"], hazard["message"]) == (
        *("divergent_permute", "/home/user/f.py:3"),
        "wrong",
    )


def test_tables_show_collectives_totals_arrays_and_memory(audit_gives, capsys):
    audit_gives(replace(SURPRISING, hazards=(HAZARD,)))
    status_of([*STEP, "--layout", "data=2,tensor=2"])
    lines = capsys.readouterr().out.splitlines()
    assert any("1.234e+04 matmul FLOPs" in line for line in lines)

    def words(start: str) -> str:
        return " ".join(next(line for line in lines if line.startswith(start)).split())

    assert words("layout") == (
        "layout data=2,tensor=4 compiled for gpu:h100:1x8 in 1.5 s"
    )
    assert words("all-gather") == (
        "all-gather tensor f32 131,072 98,304 1 reason 0 user/train.py:28"
    )
    assert words("tensor") == "tensor all-gather 1 131,072 98,304"
    assert words("1000") == "1000 1000 f32 4,000,000 fusion user/f.py:7"
    assert "peak 4,294,967,296 bytes" in words("per device")
    assert (
        words("FLOPs") == "FLOPs not counted: kernel, /home/user/f.py:9, runs 3 times"
    )
    assert words("fits") == "fits: peak 4.00 GiB of 80.00 GiB"
    assert words("hazard") == "hazard divergent_permute: /home/user/f.py:3: wrong"
    assert words("surprise") == (
        "surprise: all-gather over tensor, /home/user/train.py:28: reason 0"
    )


def test_a_problem_stands_in_place_of_the_tables(audit_gives, capsys):
    audit_gives(replace(CLEAN, memory=None, rows=(), problem="does not fit: [9] of 3"))
    status_of([*STEP, "--layout", "data=2,tensor=2"])
    out = capsys.readouterr().out
    assert "does not fit: [9] of 3" in out
    assert "per device" not in out


@pytest.mark.parametrize(
    "options, refusal",
    [
        (
            ["--layout", "data=2", "--target", "gpu:h10:1x2"],
            ("audit.unknown_target", "gpu:h10", "gpu:h100"),
        ),
        (
            ["--layout", "data=2", "--target", "gpu:h100"],
            ("audit.target_without_sizes", "'gpu:h100'"),
        ),
        (
            ["--layout", "data=2", "--target", "gpu:h100:1x8"],
            ("layout.wrong_device_count", 2, 8),
        ),
        (["--layout", "dta=2"], ("layout.unknown_key", "'dta'", "'data'")),
        (["--layout", "data=-1"], ("layout.open_size", "data", "--devices")),
        (
            ["--layout", "data=3", "--global-batch", "4"],
            ("batch.indivisible", "tokens", 4, "data=3"),
        ),
        (
            ["--layout", "tensor=2", "--recipe", "nowhere:step"],
            ("command.recipe_and_model", "nowhere:step", "--preset"),
        ),
    ],
)
def test_bad_input_ends_with_2_and_one_line(options, refusal, refuses_command):
    refuses_command([*STEP, *options], *refusal)


def test_a_recipe_gives_the_step_and_its_batch(monkeypatch, capsys):
    audited = []

    def audit(step, batch, *, target, timeout_s, compiler_options, **_):
        audited.append((str(step.layout), sorted(batch), str(target), timeout_s))
        audited.append(compiler_options)
        return CLEAN

    monkeypatch.setattr(sys.modules[AUDIT], "audit", audit)
    argv = [
        "audit",
        "--recipe",
        "meshpar.recipes.pretrain:audited",
        "--layout",
        "fsdp=-1",
    ]
    argv += ["--target", "gpu:h100:2x8", "--timeout", "30"]
    argv += ["--compiler-option", "a=true", "--compiler-option", "b=2"]
    assert status_of(argv) == 0
    names = ["targets", "tokens", "weights"]
    assert audited[0] == ("fsdp=16", names, "gpu:h100:2x8", 30.0)
    assert audited[1] == {"a": True, "b": 2}


def test_a_compiler_that_fails_ends_with_2_and_one_line(audit_gives, capsys):
    audit_gives(TargetError("the compiler for gpu:h100:1x8 failed: abort"))
    assert status_of([*STEP, "--layout", "data=8"]) == 2
    assert capsys.readouterr().err == (
        "meshpar audit: the compiler for gpu:h100:1x8 failed: abort\n"
    )


def test_a_step_compiled_here_is_clean(capsys):
    """Of a model whose size `seq` is given."""
    argv = ["audit", "--model", "layers=1,hidden=32,heads=2,vocab=64,seq=16"]
    assert status_of([*argv, "--layout", "tensor=2", "--strict", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["layout"], report["target"]) == ("tensor=2", "cpu")
    assert report["memory"]["capacity_bytes"] is None
    assert report["fits"] is None
    assert report["collectives"]
    assert all(row["mesh_axes"] == ["tensor"] for row in report["collectives"])
    assert all(row["reason"] for row in report["collectives"])


@needs_tpu_compiler
@pytest.mark.slow
def test_a_step_too_large_for_its_target_ends_with_1(capsys):
    sizes = "layers=1,hidden=2048,heads=16,ffn=2048,vocab=1000000"
    argv = ["audit", "--model", sizes, "--seq", "16", "--layout", "data=-1"]
    assert status_of([*argv, "--target", "tpu:v5e:2x2", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["layout"], report["fits"]) == ("data=4", False)
    assert report["memory"]["capacity_bytes"] == 63 << 28  # 15.75 GiB
    assert report["target"] == "tpu:v5e:2x2"


@pytest.mark.parametrize(
    "preset, model, seq",
    [
        ("tiny-gpt2", None, 256),
        ("tiny-gpt2", "seq=128", 128),
        ("llama3-8b", None, 1024),
        (None, "layers=1,hidden=32,heads=2,vocab=64,seq=16", 16),
        (None, "layers=1,hidden=32,heads=2,vocab=64", 1024),
        (None, None, 1024),
    ],
)
def test_a_model_is_compiled_for_sequences_that_it_takes(preset, model, seq):
    assert longest_seq(preset, model, most=1024) == seq


def test_the_size_seq_of_a_model_is_what_is_compiled(monkeypatch, capsys):
    audited = []

    def audit(step, batch, **options):
        audited.append(batch["tokens"].shape)
        return CLEAN

    monkeypatch.setattr(sys.modules[AUDIT], "audit", audit)
    sizes = "layers=1,hidden=32,heads=2,vocab=64,seq=16"
    assert main(["audit", "--model", sizes, "--layout", "data=1"]) == 0
    assert "compiled for" in capsys.readouterr().out
    assert [seq for _, seq in audited] == [16]


def test_the_page_has_what_a_step_does_otherwise():
    note = "fsdp_prefetch: not where a step runs in ticks"
    report = AuditReport(layout="fsdp=2", target="cpu", mesh_shape={}, notes=(note,))
    assert f"<p>{note}</p>" in audit_page(report)
