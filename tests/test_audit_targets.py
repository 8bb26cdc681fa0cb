"""Hardware that is not there: names, failures of its compiler, and what it compiles."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import batch_shapes, make_train_step
from meshpar.audit import targets
from meshpar.audit.child import program_text
from meshpar.audit.report import AuditReport, audit
from meshpar.audit.targets import Target, TargetError
from meshpar.models.presets import build
from tests.test_step_collectives import counts, place


def _is_missing(*modules: str) -> bool:
    try:
        return any(importlib.util.find_spec(module) is None for module in modules)
    except ModuleNotFoundError:
        return True


_NO_EXTRA = "the extra 'aot' is not installed"
needs_gpu_compiler = pytest.mark.skipif(
    _is_missing("jax_plugins.xla_cuda13", "flatbuffers"), reason=_NO_EXTRA
)
needs_tpu_compiler = pytest.mark.skipif(
    _is_missing("libtpu", "flatbuffers"), reason=_NO_EXTRA
)


# Names.


@pytest.mark.parametrize(
    "text, num_devices, gibibytes",
    [
        ("tpu:v5p:4x4x4", 64, 96),
        ("tpu:v4:2x2x1", 4, 31),
        ("tpu:v5e:16x16", 256, 16),
        ("tpu:v6e:1x1", 1, 31),
        ("gpu:h100:8x8", 64, 79),
        ("gpu:a100:1x8", 8, 79),
        ("gpu:h200:2x8", 16, 141),
        ("gpu:b200:1x1", 1, 178),
    ],
)
def test_a_target_is_read_and_printed_exactly(text, num_devices, gibibytes):
    target = Target.parse(text)
    assert str(target) == text
    assert target.num_devices == num_devices
    assert round(target.memory_bytes / 2**30) == gibibytes


@pytest.mark.parametrize(
    "text, refusal",
    [
        ("", ("audit.target_without_sizes", "tpu:v5p:4x4x4")),
        ("h100", ("audit.target_without_sizes",)),
        ("gpu:h100", ("audit.target_without_sizes",)),
        ("gpu:h100:8", ("audit.target_dims_mismatch", 1, "gpu:h100", 2)),
        ("gpu:h100:1x8x8", ("audit.target_dims_mismatch", 3, "gpu:h100", 2)),
        ("gpu:h100:0x8", ("audit.target_without_sizes",)),
        ("gpu:h100:-1x8", ("audit.target_without_sizes",)),
        ("gpu:h100:8xx8", ("audit.target_without_sizes",)),
        ("gpu:h100:8x8:2", ("audit.target_without_sizes",)),
        ("gpu:h10:8x8", ("audit.unknown_target", "gpu:h10", "'gpu:h100'")),
        ("cpu:h100:8x8", ("audit.unknown_target", "cpu:h100")),
        ("GPU:H100:8x8", ("audit.unknown_target", "GPU:H100")),
        ("tpu:v5:4x4", ("audit.unknown_target", "tpu:v5", "'tpu:v5e'")),
        ("tpu:v5e:2x2x2", ("audit.target_dims_mismatch", 3, "tpu:v5e", 2)),
        ("tpu:v5p:4x4", ("audit.target_dims_mismatch", 2, "tpu:v5p", 3)),
    ],
)
def test_a_bad_target_is_an_error_that_names_it(refuses, text, refusal):
    with refuses(*refusal, repr(text)):
        Target.parse(text)


# Failures, with a program in place of the compiler.


def absent_mesh(num_devices: int) -> AbstractMesh:
    return AbstractMesh((num_devices,), ("data",), axis_types=(AxisType.Auto,))


def sum_of(num_devices: int, target: str, rows: int = 64, **options) -> AuditReport:
    """The audit of a sum of (rows, 256) values of each device."""
    mesh = absent_mesh(num_devices)
    mapped = jax.shard_map(
        lambda x: lax.psum(x * 2, "data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((rows * num_devices, 256), jnp.float32)
    return audit(mapped, x, mesh=mesh, target=target, **options)


def test_another_number_of_devices_is_an_error_with_both_numbers(refuses):
    with refuses("audit.target_devices_mismatch", 8, 16):
        sum_of(8, "gpu:h100:2x8")


def test_without_the_extra_the_error_says_how_to_install_it(refuses, monkeypatch):
    monkeypatch.setattr(targets, "_is_installed", lambda module: False)
    values = ("libtpu", "flatbuffers", "'.[aot]'")
    with refuses("audit.missing_package", *values, kind=TargetError):
        sum_of(8, "tpu:v5e:2x4")


OFFLOAD = f"{targets.SPARSE_CORE_OFFLOAD}_reduce_scatter"
FATAL = 'print("F0101 00:00 7 partitioner.cc:9] Check failed: groups"); print("trace")'


@pytest.mark.parametrize(
    "program, options, refusal",
    [
        (
            f"import os, sys; {FATAL}; sys.stdout.flush(); os.abort()",
            {},
            ("audit.compiler_failed", "gpu:h100:1x8", "F0101", "groups"),
        ),
        (
            "import os; os.abort()",
            {},
            ("audit.compiler_failed", -6),
        ),
        ("raise SystemExit(3)", {}, ("audit.compiler_failed", 3)),
        (
            "raise ValueError('no such chip')",
            {},
            ("audit.compiler_failed", "ValueError: no such chip"),
        ),
        (
            "raise SystemExit(\"reduce-scatter.34:84:1: error: 'sc_tpu.store' op\")",
            {},
            ("audit.compiler_failed", "'sc_tpu.store'", f"{OFFLOAD}=false"),
        ),
        (
            "import time; time.sleep(60)",
            {"timeout_s": 0.5},
            ("audit.compiler_timeout", "0.5"),
        ),
        (
            "x = bytearray(300_000_000); import time; time.sleep(60)",
            {"memory_bytes": 150_000_000},
            ("audit.compiler_memory_exceeded", "150,000,000"),
        ),
    ],
)
def test_a_compiler_that_fails_gives_one_clear_error(
    refuses, program, options, refusal, monkeypatch
):
    monkeypatch.setattr(targets, "_is_installed", lambda module: True)
    monkeypatch.setattr(
        targets, "_command", lambda folder: [sys.executable, "-c", program]
    )
    monkeypatch.setattr(targets, "_export", lambda target, subject, path: ())
    words = "memory_bytes" not in options  # which says how many were taken
    with refuses(*refusal, kind=TargetError, words=words) as error:
        sum_of(8, "gpu:h100:1x8", **options)
    assert "\n" not in str(error.value)


def test_what_the_compiler_answers_is_what_is_reported(monkeypatch):
    text = (Path(__file__).parent / "data" / "programs" / "gpu_kinds.txt").read_text()
    sizes = dict(argument=5, output=7, temp=11, alias=2, peak=30)
    memory = {f"{name}_bytes": size for name, size in sizes.items()}

    def answer(folder: Path, **limits: float) -> str:
        found = {"problem": "", "memory": memory}
        (folder / "answer.json").write_text(json.dumps(found))
        (folder / "program.txt").write_text(text)
        return ""

    monkeypatch.setattr(targets, "_is_installed", lambda module: True)
    monkeypatch.setattr(targets, "_export", lambda target, subject, path: ())
    monkeypatch.setattr(targets, "_run", answer)
    report = sum_of(8, "gpu:h100:1x8")
    assert len(report.rows) == 5
    assert report.memory.peak_bytes == 30  # No sum of the others.
    assert (report.fits, report.capacity_bytes) == (True, 84_942_979_072)


# The real compilers.

TINY = [
    *("gpu:h100:1x8", "gpu:a100:1x8", "gpu:h200:1x8", "gpu:b200:2x4"),
    *("tpu:v5e:2x4", "tpu:v4:2x2x2", "tpu:v5p:2x2x2", "tpu:v6e:2x4"),
]


def _tiny(text: str) -> pytest.param:
    is_gpu = text.startswith("gpu")
    marks = [needs_gpu_compiler if is_gpu else needs_tpu_compiler]
    if text not in ("gpu:h100:1x8", "tpu:v4:2x2x2"):
        marks.append(pytest.mark.slow)
    return pytest.param(text, marks=marks)


@pytest.mark.parametrize("target", [_tiny(text) for text in TINY])
def test_every_target_compiles_and_counts_the_same_bytes(target):
    report = sum_of(8, target)
    [row] = report.rows
    size = 64 * 256 * 4
    found = row.collective
    assert (found.kind, found.mesh_axes) == ("all-reduce", ("data",))
    assert (found.payload_bytes, found.wire_bytes) == (size, 2 * size * 7 // 8)
    assert found.source.startswith(__file__)
    assert row.reason == "written in the program as psum"
    assert report.memory.argument_bytes == report.memory.output_bytes == size
    assert report.fits
    assert report.target == target


@needs_tpu_compiler
def test_a_program_that_does_not_fit_says_so():
    report = sum_of(4, "tpu:v5e:2x2", rows=32 * 2**20)  # 32 GiB each, of 16.
    assert report.fits is False
    assert report.problem.startswith("does not fit: ")


@needs_gpu_compiler
def test_a_gpu_program_larger_than_its_memory_does_not_fit():
    report = sum_of(1, "gpu:h100:1x1", rows=128 * 2**20)  # 128 GiB, of 79.
    assert report.fits is False
    assert report.to_json()["fits"] is False


@needs_tpu_compiler
def test_a_torus_that_is_none_is_the_compilers_own_error(refuses):
    values = ("audit.compiler_failed", "tpu:v5p:3x3x3", "divisible")
    with refuses(*values, kind=TargetError, words=False):
        sum_of(27, "tpu:v5p:3x3x3")


@needs_gpu_compiler
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_donated_argument_and_shardings_reach_the_compiler(kind):
    mesh = Mesh(jax.devices()[:8], ("data",), axis_types=(kind,))
    split = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=split)
    step = jax.jit(lambda x: x + 1, donate_argnums=0, out_shardings=split)
    memory = audit(step, x, target="gpu:h100:1x8").memory
    size = 64 * 256 * 4 // 8
    assert (memory.argument_bytes, memory.alias_bytes) == (size, size)


# Steps of ours.

LAYERS, BATCH, SEQ, EMBED = 4, 16, 32, 64
SMALL_BYTES = 4096


def step_on(target: str, line: str) -> AuditReport:
    model = build("test", layers=LAYERS, hidden=EMBED, ffn=192)
    step = make_train_step(model, optax.adam(1e-3), line, max_grad_norm=1.0)
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    weights = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.float32)
    batch = dict(tokens=tokens, targets=tokens, weights=weights)
    return audit(step, batch, target=target)


def assert_clean(report: AuditReport) -> None:
    assert report.rows
    assert not report.surprises
    assert all(row.reason for row in report.rows)
    assert all(row.collective.mesh_axes for row in report.rows)
    assert all(row.collective.counted for row in report.rows)
    assert not report.hazards
    assert not report.uncounted
    assert report.fits
    # Of one device: matrices are split over fsdp x tensor, their products over all.
    assert report.flops > 0


WHOLE = "data=2,fsdp=2,tensor=2"
SEQUENCE = f"{WHOLE},sequence_parallel=true"


@needs_gpu_compiler
def test_sequence_parallel_gathers_and_scatters_what_is_split_and_no_more():
    report = step_on("gpu:h100:1x8", SEQUENCE)
    assert_clean(report)
    rows = [row.collective for row in report.rows]
    # Each weight of a block by itself: two matmuls and a norm of attention and of MLP
    # (the combiners' rows in `meshpar.hardware.compiler_options`).
    assert counts(rows, "forward", "fsdp", 0) == {"all-gather": 6}
    assert counts(rows, "backward", "fsdp", 0) == {"all-gather": 6, "reduce-scatter": 6}
    # Of a block: attention's and the MLP's input and output. The backward gathers two
    # gradients, and both inputs once more, which are kept split.
    activation = BATCH // 4 * SEQ * EMBED * 4
    twice = {"all-gather": 2 * activation, "reduce-scatter": 2 * activation}
    assert moved_over_tensor(rows, "forward") == twice
    again = {"all-gather": 4 * activation}
    assert moved_over_tensor(rows, "backward") == twice | again


def moved_over_tensor(rows, where: str) -> dict[str, int]:
    """Payload bytes of one block by kind, less the small sums of the norms."""
    moved: Counter[str] = Counter()
    for row in rows:
        over_tensor = row.mesh_axes == ("tensor",) and place(row) == where
        if over_tensor and row.payload_bytes > SMALL_BYTES:
            moved[row.kind] += row.payload_bytes
    return dict(moved)


@needs_tpu_compiler
@pytest.mark.parametrize("line", [WHOLE, SEQUENCE])
def test_a_step_on_tpus_has_no_surprise_and_a_reason_for_every_row(line):
    report = step_on("tpu:v5p:2x2x2", line)
    assert_clean(report)
    executions = {
        row.collective.executions for row in report.rows if row.collective.in_loop
    }
    # The last block stands outside the loop, which gathers for the next one.
    assert executions == {LAYERS - 1}


@needs_tpu_compiler
@pytest.mark.slow
def test_a_step_of_small_arrays_on_tpus_has_no_surprise():
    """XLA:TPU scatters no 16 values: it all-reduces the output's bias."""
    model = build("dit-b2", layers=2)
    line = "fsdp=8,remat=full,precision=bf16"
    step = make_train_step(model, optax.adamw(1e-3), line)
    report = audit(step, batch_shapes(model, 8), target="tpu:v5p:2x2x2")
    assert_clean(report)


@needs_gpu_compiler
@pytest.mark.slow
def test_a_step_on_gpus_has_no_surprise_and_a_reason_for_every_row():
    assert_clean(step_on("gpu:h100:1x8", WHOLE))


def test_what_jaxlib_cannot_read_is_read_as_the_compiler_printed_it(tmp_path):
    class Unreadable:
        def as_text(self):
            raise jax.errors.JaxRuntimeError("async-update: 1 operand, but sees 3")

    with pytest.raises(jax.errors.JaxRuntimeError, match="async-update"):
        program_text(Unreadable(), tmp_path)
    name = "module_0000.jit_call.cl_1.after_optimizations"
    (tmp_path / f"{name}.txt").write_text("HloModule jit_call")
    (tmp_path / f"{name}-buffer-assignment.txt").write_text("something else")
    assert program_text(Unreadable(), tmp_path) == "HloModule jit_call"
