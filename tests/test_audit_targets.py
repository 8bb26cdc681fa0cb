"""Hardware that is not there: names, failures of its compiler, and what it compiles."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import export, lax
from jax.experimental import pallas
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import batch_shapes, make_train_step
from meshpar.audit import child, targets
from meshpar.audit.child import program_text
from meshpar.audit.memory import MemoryUse
from meshpar.audit.report import AuditReport, audit
from meshpar.audit.targets import Target, TargetError
from meshpar.hardware import platforms
from meshpar.hardware.platforms import compiler_options_for
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
        ("tpu:v7x:2x2x2", 16, 95),
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
    monkeypatch.setattr(platforms, "_is_importable", lambda module: False)
    values = ("libtpu", "flatbuffers", "'meshpar[aot]'")
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
    monkeypatch.setattr(platforms, "_is_importable", lambda module: True)
    monkeypatch.setattr(
        targets, "_child_command", lambda folder: [sys.executable, "-c", program]
    )
    monkeypatch.setattr(targets, "_export", lambda target, subject, path: ())
    words = "memory_bytes" not in options  # which says how many were taken
    with refuses(*refusal, kind=TargetError, words=words) as error:
        sum_of(8, "gpu:h100:1x8", **options)
    assert "\n" not in str(error.value)


MEMORY = MemoryUse(
    argument_bytes=5, output_bytes=7, temp_bytes=11, alias_bytes=2, peak_bytes=30
)


def answered(monkeypatch, **answer) -> AuditReport:
    """The report of what a compiler is made to answer."""
    text = (Path(__file__).parent / "data" / "programs" / "gpu_kinds.txt").read_text()

    def run(folder: Path, **limits: float) -> str:
        (folder / "answer.json").write_text(json.dumps(answer))
        (folder / "program.txt").write_text(text)
        return ""

    monkeypatch.setattr(platforms, "_is_importable", lambda module: True)
    monkeypatch.setattr(targets, "_export", lambda target, subject, path: ())
    monkeypatch.setattr(targets, "_run", run)
    return sum_of(8, "gpu:h100:1x8")


def test_what_the_compiler_answers_is_what_is_reported(monkeypatch):
    report = answered(monkeypatch, problem="", memory=asdict(MEMORY))
    assert len(report.rows) == 5
    assert report.memory.peak_bytes == 30  # No sum of the others.
    assert (report.fits, report.capacity_bytes) == (True, 84_942_979_072)


def test_what_the_compiler_finds_too_large_does_not_fit(monkeypatch):
    refused = answered(monkeypatch, problem="does not fit: 9 of 3", memory=None)
    assert (refused.fits, refused.problem) == (False, "does not fit: 9 of 3")
    large = {**asdict(MEMORY), "peak_bytes": 84_942_979_073}
    report = answered(monkeypatch, problem="", memory=large)
    assert report.fits is False and report.to_json()["fits"] is False


def test_memory_that_a_compiler_lacks_is_its_answer(monkeypatch, tmp_path):
    exported = export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct((8,), jnp.float32))
    (tmp_path / "program.bin").write_bytes(exported.serialize())
    request = {"target": "cpu:virtual:8", "mesh_shape": {"data": 8}, "donated": []}
    request |= {"is_layout": True, "axis_types": [], "compiler_options": {}}
    (tmp_path / "request.json").write_text(json.dumps(request))

    def compiled(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 32 GiB\nof 16")

    monkeypatch.setattr(child, "_compile", compiled)
    child.main(tmp_path)
    problem = "does not fit: RESOURCE_EXHAUSTED: 32 GiB of 16"
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer == {"problem": problem, "memory": None}


# The real compilers. `make test` compiles one program for a GPU and one for a TPU, with
# what a small program can have; steps of ours are left to `make test-full`.

TINY = [
    *("gpu:h100:1x8", "gpu:a100:1x8", "gpu:h200:1x8", "gpu:b200:2x4"),
    *("tpu:v5e:2x4", "tpu:v4:2x2x2", "tpu:v5p:2x2x2", "tpu:v6e:2x4"),
    "tpu:v7x:2x2x1",
]


def _tiny(text: str) -> pytest.param:
    is_gpu = text.startswith("gpu")
    marks = [needs_gpu_compiler if is_gpu else needs_tpu_compiler]
    if text not in ("gpu:h100:1x8", "tpu:v5e:2x4"):
        marks.append(pytest.mark.slow)
    return pytest.param(text, marks=marks)


ROWS, COLUMNS, TIMES = 64, 256, 5


def one_of_each(x, platform: str):
    """A device's: a sum in a loop, a ragged exchange, and on TPUs two kernels."""

    def body(x, _):
        return x - lax.psum(x * x, "data") / 8, None

    x, _ = lax.scan(body, x, length=TIMES)
    part = ROWS // 8
    sizes = jnp.full(8, part, jnp.int32)
    starts = part * jnp.arange(8, dtype=jnp.int32)
    there = jnp.full(8, part * lax.axis_index("data"), jnp.int32)
    places = starts, sizes, there, sizes
    x = lax.ragged_all_to_all(x, jnp.zeros_like(x), *places, axis_name="data")
    if platform == "tpu":
        x = doubled(x, flops=ROWS * COLUMNS, name="estimated")
        x = doubled(x, flops=None, name="plain")
    return x


def doubled(x, *, flops: int | None, name: str):
    def kernel(x, result):
        result[...] = 2 * x[...]

    estimate = flops and pallas.CostEstimate(
        flops=flops, bytes_accessed=2 * x.nbytes, transcendentals=0
    )
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(kernel, shape, cost_estimate=estimate, name=name)(x)


@pytest.mark.parametrize("target", [_tiny(text) for text in TINY])
def test_every_target_compiles_and_counts_the_same_bytes(target):
    platform = Target.parse(target).platform
    mesh = absent_mesh(8)
    mapped = jax.shard_map(
        lambda x: one_of_each(x, platform),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    # The compiler knows each option that a step may be compiled with.
    options = compiler_options_for(platform, prefetching=True, sequence_parallel=True)
    report = audit(
        jax.jit(mapped, donate_argnums=0),
        jax.ShapeDtypeStruct((8 * ROWS, COLUMNS), jnp.float32),
        mesh=mesh,
        target=target,
        compiler_options=options,
    )
    size = ROWS * COLUMNS * 4
    rows = {row.collective.kind: row for row in report.rows}
    assert len(rows) == len(report.rows)
    moved = {
        "all-reduce": (2 * size * 7 // 8, TIMES, "psum"),
        "ragged-all-to-all": (size * 7 // 8, 1, "ragged_all_to_all"),
    }
    assert rows.keys() == moved.keys()
    for kind, (wire_bytes, executions, written) in moved.items():
        found = rows[kind].collective
        assert found.mesh_axes == ("data",)
        assert (found.payload_bytes, found.wire_bytes) == (size, wire_bytes)
        assert (found.executions, found.in_loop) == (executions, executions > 1)
        assert found.source.startswith(__file__)
        assert rows[kind].reason == f"written in the program as {written}"
        assert not rows[kind].surprise
    memory = report.memory
    assert memory.argument_bytes == memory.output_bytes == memory.alias_bytes == size
    assert size + memory.temp_bytes <= memory.peak_bytes < report.capacity_bytes
    assert report.fits and not report.hazards
    assert report.target == target
    on_tpu = platform == "tpu"
    assert report.flops == (ROWS * COLUMNS if on_tpu else 0)
    assert [call.name for call in report.uncounted] == ["plain"] * on_tpu
    assert all(call.source == line_of_kernels() for call in report.uncounted)


def line_of_kernels() -> str:
    """Where `doubled` calls its kernel."""
    lines, first = inspect.getsourcelines(doubled)
    [at] = [at for at, line in enumerate(lines) if "pallas_call" in line]
    return f"{__file__}:{first + at}"


@needs_tpu_compiler
@pytest.mark.slow
def test_a_program_that_does_not_fit_says_so():
    report = sum_of(4, "tpu:v5e:2x2", rows=32 * 2**20)  # 32 GiB each, of 16.
    assert report.fits is False
    assert report.problem.startswith("does not fit: ")


@needs_gpu_compiler
@pytest.mark.slow
def test_a_gpu_program_larger_than_its_memory_does_not_fit():
    report = sum_of(1, "gpu:h100:1x1", rows=128 * 2**20)  # 128 GiB, of 79.
    assert report.fits is False
    assert report.to_json()["fits"] is False


@needs_tpu_compiler
@pytest.mark.slow
def test_a_torus_that_is_none_is_the_compilers_own_error(refuses):
    values = ("audit.compiler_failed", "tpu:v5p:3x3x3", "divisible")
    with refuses(*values, kind=TargetError, words=False):
        sum_of(27, "tpu:v5p:3x3x3")


@needs_gpu_compiler
@pytest.mark.slow
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
@pytest.mark.slow
def test_sequence_parallel_gathers_and_scatters_what_is_split_and_no_more():
    report = step_on("gpu:h100:1x8", SEQUENCE)
    assert_clean(report)
    rows = [row.collective for row in report.rows]
    # A block's weights together, and its gradients (`meshpar.hardware.platforms`).
    assert counts(rows, "forward", "fsdp", 0) == {"all-gather": 1}
    assert counts(rows, "backward", "fsdp", 0) == {"all-gather": 1, "reduce-scatter": 1}
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
@pytest.mark.slow
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
