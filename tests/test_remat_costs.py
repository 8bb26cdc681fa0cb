"""What remat saves and costs, counted in compiled programs and by formula."""

import dataclasses
import functools

import jax
import optax
import pytest

from meshpar import Layout, batch_shapes, make_train_step, memory_report
from meshpar.audit.hlo import parse_program, shape_arrays
from meshpar.audit.report import audit
from meshpar.audit.targets import Target, compile_for
from meshpar.machine.mesh import absent_mesh
from meshpar.models.presets import build
from meshpar.planner.cost.activations import block_residuals, kept_bytes
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import MESHPAR
from meshpar.planner.workload.workload import Workload
from tests.marks import slow
from tests.test_audit_targets import needs_gpu_compiler

EMBED, HEADS, SEQ, BATCH = 64, 4, 128, 32
SBH = BATCH * SEQ * EMBED
GELU = dict(hidden=EMBED, heads=HEADS, vocab=64, max_seq=SEQ)
SWIGLU = dict(gated=True, hidden=EMBED, heads=HEADS, kv_heads=2, ffn=160, vocab=64)
SHAPE = Workload(layers=1, hidden=EMBED, heads=HEADS, vocab=64)
SHAPES = {
    "gelu": (GELU, SHAPE),
    "dropout": ({**GELU, "dropout": 0.1}, dataclasses.replace(SHAPE, dropout=True)),
    "swiglu": (SWIGLU, dataclasses.replace(SHAPE, kv_heads=2, ffn=160, gated=True)),
}
PAPER = {  # Table 2 less its dropout masks and scores' copy; in sbh, as/h = 8
    ("none", 1, False): 32 + 2 * 8,
    ("none", 2, False): 8 + 24 / 2 + 2 * 8 / 2,
    ("none", 2, True): (32 + 2 * 8) / 2,
    ("selective", 1, False): 32,
    ("selective", 2, False): 8 + 24 / 2,
    ("selective", 2, True): 32 / 2,
    ("full", 1, False): 2,
    ("full", 2, False): 2,
    ("full", 2, True): 2 / 2,
}

QUICK = ("selective", 2, True)
"""The case of the paper that is compiled by every run of the tests."""
assert QUICK in PAPER


def planned(shape, layout, value_bytes, *, fused=False):
    precision = {2: "bf16", 4: "fp32"}[value_bytes]
    return Run(
        workload=shape,
        cluster=cluster_of("h100-80gb", devices=layout.num_devices),
        layout=dataclasses.replace(layout, precision=precision),
        execution=dataclasses.replace(MESHPAR, fused_attention=fused),
        global_batch=BATCH,
        seq=SEQ,
        stage_blocks=(1,),
    )


def formula(shape, layout, value_bytes):
    return kept_bytes(planned(shape, layout, value_bytes), moe=False)


def line_of(remat, tensor, sequence_parallel):
    return str(Layout(tensor=tensor, sequence_parallel=sequence_parallel, remat=remat))


@pytest.mark.parametrize(("case", "in_sbh"), PAPER.items(), ids=str)
def test_the_formula_is_that_of_the_paper(case, in_sbh):
    layout = Layout.parse(line_of(*case))
    assert formula(SHAPE, layout, value_bytes=2) == pytest.approx(in_sbh * SBH)


def test_dropout_keeps_a_mask_of_each_branch():
    shape, layout = SHAPES["dropout"][1], Layout()
    assert formula(shape, layout, 2) == pytest.approx((34 + 2 * 8) * SBH)


def test_a_fused_kernel_keeps_one_number_for_each_query():
    names = "scores", "log_sums"
    found = [
        {
            one.name: one.bytes_per_token
            for one in block_residuals(
                planned(SHAPE, Layout(), 2, fused=fused), moe=False
            )
            if one.name in names
        }
        for fused in (False, True)
    ]
    assert found == [{"scores": HEADS * SEQ * 2}, {"log_sums": HEADS * 4}]


@functools.cache
def temporaries(name, line, layers):
    model = build(layers=layers, **SHAPES[name][0])
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    step = make_train_step(model, optax.sgd(0.1), layout, devices=devices)
    sizes = [
        parameter.struct.size // layers
        for path, parameter in model.flat_parameters().items()
        if path.startswith("blocks.")
    ]
    report = audit(step, batch_shapes(BATCH, SEQ))
    return report.memory.temp_bytes - layers * 4 * sum(sizes) // layout.tensor


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *(
            ("gelu", line_of(*case)) if case == QUICK else slow("gelu", line_of(*case))
            for case in PAPER
        ),
        slow("gelu", "remat=dots"),
        slow("gelu", "remat=save:attention_mixed/mlp_up"),
        slow("dropout", "remat=none"),
        slow("swiglu", "remat=none"),
        slow("swiglu", "tensor=2,remat=selective"),
    ],
)
def test_a_compiled_step_grows_by_the_formula_with_every_block(name, line):
    # On a CPU, so in fp32: XLA:CPU keeps what a loop stacks in bf16 as fp32.
    grown = (temporaries(name, line, 5) - temporaries(name, line, 2)) / 3
    expected = formula(SHAPES[name][1], Layout.parse(line), value_bytes=4)
    assert grown == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize(
    ("tensor", "remat"),
    [
        ("tensor=2,sequence_parallel=true", "none"),
        ("tensor=2", "none"),
        ("tensor=2", "selective"),
    ],
)
def test_a_gpus_loop_over_blocks_carries_what_the_formula_counts_in_bf16(remat, tensor):
    layers = 7
    layout = Layout.parse(f"{tensor},remat={remat},precision=bf16")
    model = build(layers=layers, **GELU)
    step = make_train_step(model, optax.sgd(0.1), layout, mesh=absent_mesh(layout))
    compiled = compile_for(
        Target.parse("gpu:h100:1x2"),
        step.audit_subject(batch_shapes(BATCH, SEQ), platform="gpu"),
        timeout_s=300,
        memory_bytes=4 << 30,
    )
    program = parse_program(compiled.text)
    carried = [
        sum(
            array.bytes
            for array in shape_arrays(instruction.shape)
            if array.dims[:1] == (layers,) and array.bytes >= layers * BATCH * SEQ * 8
        )
        for computation in program.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "while"
    ]
    kept = max(carried) / layers
    assert kept == pytest.approx(formula(SHAPE, layout, value_bytes=2), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    ["data=2", "fsdp=2", "tensor=2", "stage=2,microbatches=3"],
)
def test_full_remat_needs_less_memory_and_one_forward_more(line):
    # All matmuls but the head's, which a vocabulary of 8 makes small, are in blocks:
    # forward, and twice as many backward.
    model = build(layers=4, hidden=64, heads=4, vocab=8, max_seq=64)

    def report_of(remat):
        layout = Layout.parse(f"{line},remat={remat}")
        devices = jax.devices()[: layout.num_devices]
        step = make_train_step(model, optax.sgd(0.1), layout, devices=devices)
        return audit(step, batch_shapes(12, 64))

    none, full = report_of("none"), report_of("full")
    assert full.memory.temp_bytes < 0.6 * none.memory.temp_bytes
    forward = none.flops / 3
    # The last matmul of a block need not run again: nothing in it needs its result.
    last = 4 * 64 * 64 / (12 * 64 * 64 + 2 * 64 * 64)
    assert full.flops - none.flops == pytest.approx(forward * (1 - last), rel=0.03)
    assert full.flops - none.flops <= forward


@pytest.mark.slow
@needs_gpu_compiler
def test_a_model_of_1_3b_trains_in_24_gb_of_an_h100():
    model = build(layers=24, hidden=2048, heads=16, vocab=50304, max_seq=4096)
    assert model.num_parameters == pytest.approx(1.3e9, rel=0.02)
    layout = Layout.parse("remat=full,precision=bf16")
    step = make_train_step(model, optax.adamw(1e-3), layout, mesh=absent_mesh(layout))
    found = memory_report(step, batch_shapes(1, 4096), target="gpu:h100:1x1")
    assert max(found.peak_bytes, found.formula_bytes) < 24e9
    assert abs(found.difference) < 0.05
    report = audit(step, batch_shapes(1, 4096), target="gpu:h100:1x1")
    all_logits = 4096 * 50304 * 4
    assert not [one for one in report.buffers if one.dims[-2:] == (4096, 50304)]
    assert report.memory.temp_bytes - 4 * model.num_parameters < 4 * all_logits
