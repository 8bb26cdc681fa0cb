"""The compiled pipeline: flat memory, two hops a tick, one reduction, no extra work."""

import functools
from collections import Counter

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P

from meshpar import (
    Layout,
    audit,
    batch_shapes,
    default_rules,
    make_mesh,
    make_train_step,
)
from meshpar.audit.flops import program_flops
from meshpar.audit.flow import may_end_early, places, trip_count
from meshpar.audit.hlo import parse_program, shape_arrays
from meshpar.machine.mesh import absent_mesh
from meshpar.models.presets import build
from meshpar.parallel.pipeline.crossing import Shares, stream_specs
from meshpar.schedules import make_schedule, tick_table
from meshpar.trace.walk import equations
from tests.marks import slow
from tests.pipelined import mlp_of
from tests.test_audit_targets import needs_gpu_compiler, needs_tpu_compiler

SEQ, EXAMPLES = 16, 2  # of one microbatch on one device
LAYERS = 4


def llama_of(layers):
    return build("test", layers=layers, kv_heads=4, tied=False)


@functools.cache
def step_of(line, layers=LAYERS, model_of=mlp_of):
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    return make_train_step(model_of(layers), optax.sgd(1.0), layout, devices=devices)


def examples_of(line):
    layout = Layout.parse(line)
    return layout.batch_shards * layout.microbatches * EXAMPLES


def compiled(line, layers=LAYERS, model_of=mlp_of, examples=None):
    """A compiled step, for the batch of its layout or of so many examples."""
    return compiled_step(line, layers, model_of, examples or examples_of(line))


@functools.cache
def compiled_step(line, layers, model_of, examples):
    return step_of(line, layers, model_of).compile(batch_shapes(examples, SEQ))


@functools.cache
def program_of(step):
    return parse_program(step.as_text())


def flops_in(step):
    return program_flops(program_of(step)).total


def temp_bytes_in(step):
    return step.memory_analysis().temp_size_in_bytes


@functools.cache
def audit_and_program(line, model_of=mlp_of):
    """The audit of a step, and what it compiled; every collective has a reason."""
    step, programs = step_of(line, model_of=model_of), []
    compile_ = jax.stages.Lowered.compile

    def compiled(*given):
        programs.append(compile_(*given))
        return programs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compiled)
        report = audit(step, batch_shapes(examples_of(line), SEQ))
    assert not report.problem
    assert list(report.complaints()) == []
    assert all(row.reason for row in report.rows)
    *_, program = programs  # After what a check before it compiles.
    return report, program


def audited(line, model_of=mlp_of):
    return audit_and_program(line, model_of)[0]


def executions(report, mesh_axes, min_bytes):
    """Kind -> how often collectives over some mesh axes run, small ones left out."""
    found = Counter()
    for row in report.rows:
        one = row.collective
        if one.mesh_axes == mesh_axes and one.payload_bytes >= min_bytes:
            found[one.kind] += one.executions
    return dict(found)


def table_of(line):
    layout = Layout.parse(line)
    sizes = layout.stage, layout.microbatches, layout.chunks
    return tick_table(make_schedule(layout.schedule, *sizes))


@pytest.mark.parametrize(
    ("model_of", "remat"),
    [
        (mlp_of, "none"),
        *(slow(llama_of, remat) for remat in ("none", "full", "stage", "stage_full")),
    ],
)
def test_memory_does_not_grow_with_microbatches(model_of, remat):
    few, many = (
        temp_bytes_in(
            compiled(f"stage=2,microbatches={num},remat={remat}", model_of=model_of)
        )
        for num in (8, 128)
    )
    assert many <= 1.01 * few


ALL_TOGETHER = "stage=2,tensor=2,sequence_parallel=true,precision=bf16,remat=stage"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "line"),
    [
        pytest.param("tpu:v5e:2x2", "stage=4", marks=needs_tpu_compiler),
        pytest.param("gpu:h100:1x4", "stage=4,remat=stage", marks=needs_gpu_compiler),
        pytest.param("tpu:v5e:2x2", ALL_TOGETHER, marks=needs_tpu_compiler),
    ],
)
def test_memory_does_not_grow_on_an_absent_accelerator(target, line):
    model = build(layers=4, hidden=512, heads=2, vocab=512, max_seq=128)

    def used(num_microbatches):
        layout = Layout.parse(f"{line},microbatches={num_microbatches}")
        step = make_train_step(model, optax.sgd(1.0), layout, mesh=absent_mesh(layout))
        batch = batch_shapes(num_microbatches * EXAMPLES, 128)
        return audit(step, batch, target=target).compiled_memory

    few, many = used(8), used(128)
    # Token ids do grow, and copies of them; a stream is 170 times as large.
    more_ids = many.argument_bytes - few.argument_bytes
    assert more_ids < 120 * EXAMPLES * 128 * 512 * 4 / 100
    assert many.temp_bytes - few.temp_bytes <= 4 * more_ids


def test_a_stage_recomputed_keeps_less():
    none, stage_full = (
        compiled(f"stage=2,microbatches=8,remat={remat}")
        for remat in ("none", "stage_full")
    )
    assert temp_bytes_in(none) > temp_bytes_in(stage_full)
    assert flops_in(none) < flops_in(stage_full)


@pytest.mark.slow
def test_less_is_kept_the_more_is_recomputed():
    """4 layers a stage, 7 microbatches in flight on the first rank."""

    def measured(remat):
        step = compiled(f"stage=4,microbatches=8,remat={remat}", 16, llama_of)
        return temp_bytes_in(step), flops_in(step)

    none, full, stage, stage_full = map(
        measured, ("none", "full", "stage", "stage_full")
    )
    assert none[0] > stage[0]
    assert none[0] > full[0] > stage_full[0]
    # Once more each: a stage with the last matmul of its blocks, a block without.
    assert none[1] < full[1] < stage[1] < stage_full[1]
    assert stage_full[1] - stage[1] == full[1] - none[1]


def test_1f1b_hops_twice_a_tick_and_shares_its_ends_once():
    num_microbatches = 5
    line = f"data=2,stage=4,microbatches={num_microbatches}"
    table = table_of(line)
    forward, backward = table.num_forward_ticks, table.num_backward_ticks
    assert forward == backward == num_microbatches + 3
    with_head = num_microbatches  # none of the ticks that fill the pipeline
    report = audited(line)
    assert executions(report, ("stage",), min_bytes=8) == {
        "collective-permute": forward + backward,
        # Embedding, and the loss's gradient; head, and embedding's gradient.
        "all-gather": forward + with_head,
        "reduce-scatter": with_head + backward,
    }
    assert executions(report, ("data",), min_bytes=8) == {"all-reduce": 1}
    # Losses and the ends' gradients.
    assert executions(report, ("data", "stage"), min_bytes=8) == {"all-reduce": 1}
    reductions = [
        row.collective
        for row in report.rows
        if row.collective.kind == "all-reduce" and row.collective.payload_bytes > 64
    ]
    assert {row.executions for row in reductions} == {1}
    model = step_of(line).model
    per_device = sum(
        parameter.struct.size // (4 if parameter.num_layers else 1)
        for parameter in model.flat_parameters().values()
    )
    sent = sum(row.payload_bytes for row in reductions)
    assert sent - 4 * per_device in range(64)  # the losses


TOGETHER = "fsdp=2,stage=2,tensor=2,microbatches=3,sequence_parallel=true"
"""Ranks that GSPMD partitions blocks of, beside parameters split over `fsdp`."""


@pytest.mark.slow
def test_split_parameters_are_gathered_once_a_step_or_once_a_microbatch():
    def over_fsdp(report):
        return {
            (row.collective.kind, row.collective.in_loop)
            for row in report.rows
            if row.collective.mesh_axes == ("fsdp",)
            and row.collective.payload_bytes > 64
        }

    once = over_fsdp(audited(TOGETHER, llama_of))
    assert once == {("all-gather", False), ("reduce-scatter", False)}
    line = "fsdp=2,stage=2,microbatches=3,fsdp_gather=microbatch"
    layerwise = over_fsdp(audited(line))
    assert layerwise == once | {("all-gather", True), ("reduce-scatter", True)}


@pytest.mark.parametrize(
    "line",
    [
        "data=2,stage=2,tensor=2,microbatches=3",
        slow(TOGETHER),
        slow("stage=2,schedule=interleaved_1f1b,chunks=2,microbatches=4,remat=full"),
    ],
)
def test_every_collective_of_a_pipeline_has_a_reason(line):
    assert audited(line, llama_of).rows


def loops_that_ranks_leave(step):
    """Trip counts of the loops of a step that ranks may leave before the others do."""
    program = program_of(step)
    return [
        trip_count(program, computation, one)
        for computation in program.computations.values()
        for one in computation.instructions
        if one.opcode == "while" and may_end_early(program, one)
    ]


def test_layers_of_forward_and_backward_are_left_out_by_idle_ranks():
    # Of ticks that only fill, that do both and that only drain the pipeline.
    trips = loops_that_ranks_leave(compiled("stage=2,microbatches=8,remat=none"))
    assert trips == [2] * 4


@pytest.mark.slow
def test_ranks_stay_together_where_gspmd_may_permute():
    assert loops_that_ranks_leave(audit_and_program(TOGETHER, llama_of)[1]) == []


@pytest.mark.slow
def test_a_single_rank_is_never_idle():
    assert loops_that_ranks_leave(compiled("microbatches=3", layers=1)) == []


@pytest.mark.parametrize(
    ("line", "num_forward_ticks"),
    [
        ("stage=2,microbatches=8,remat=none", 9),
        slow("stage=2,schedule=interleaved_1f1b,chunks=2,microbatches=8", 17),
        slow("stage=2,schedule=interleaved_1f1b,chunks=2,microbatches=4", 9),
        slow("stage=4,microbatches=4", 7),
        slow("data=2,stage=2,microbatches=3", 4),
        slow("stage=2,schedule=gpipe,microbatches=4", 5),
    ],
)
def test_work_is_that_of_one_device_shared_and_of_the_bubble(line, num_forward_ticks):
    layout = Layout.parse(line)
    table = table_of(line)
    assert table.num_forward_ticks == table.num_backward_ticks == num_forward_ticks
    alone, examples = f"data={layout.data}", examples_of(line)
    whole = flops_in(compiled(alone, examples=examples))
    # Of a microbatch a rank runs 1/(S v) of the blocks a tick, and 1/S of the ends, but
    # none of the head in a phase in which no microbatch ends.
    ends = flops_in(compiled(alone, layers=1, examples=examples))
    blocks = (whole - ends) * LAYERS / (LAYERS - 1)
    at_last = table.forward_stage == layout.stage * layout.chunks - 1
    with_head = sum(
        phase.stop - phase.start
        for phase in table.phases
        if at_last[phase.start : phase.stop].any()
    )
    expected = (
        num_forward_ticks * blocks / (layout.stage * layout.chunks)
        + with_head * (whole - blocks) / layout.stage
    ) / layout.microbatches
    found = flops_in(compiled(line))
    assert 0.999 <= found / expected <= 1.001
    if layout.chunks == 1:
        bubble = (layout.microbatches + layout.stage - 1) / layout.microbatches
        assert found <= 1.02 * bubble * whole / layout.stage


@pytest.mark.parametrize(
    "line",
    [
        "stage=2,schedule=interleaved_1f1b,chunks=2,microbatches=8",
        slow("stage=2,schedule=interleaved_1f1b,chunks=2,microbatches=4"),
        slow("stage=4,microbatches=8"),
        slow("data=2,stage=2,tensor=2,microbatches=4,remat=full"),
        slow("stage=2,schedule=gpipe,microbatches=4"),
    ],
)
def test_no_buffer_of_the_pipeline_is_copied_in_the_loop(line):
    table = table_of(line)
    lengths = {
        max(slots)
        for slots in (table.saved_slots, table.input_slots, table.gradient_slots)
    } - {1, 2}
    assert lengths
    written = {dims for dims in dims_of(line, "dynamic-update-slice")}
    buffers = {dims for dims in written if dims[:1] and dims[0] in lengths}
    assert buffers
    assert not buffers & dims_of(line, "copy")


def dims_of(line, opcode):
    """Shapes of what an opcode makes inside loops."""
    program = program_of(compiled(line))
    return {
        array.dims
        for name, at in places(program).items()
        if any(place.in_loop for place in at)
        for instruction in program.computations[name].instructions
        if instruction.opcode == opcode
        for array in shape_arrays(instruction.shape)
    }


@pytest.mark.parametrize("spec, constraints", [(P(), 0), (P(None, None), 1)])
def test_a_stream_of_which_nothing_is_said_lies_at_the_ends_as_gspmd_has_it(
    spec, constraints
):
    """One that is declared is held to its axes, so that a gather of it is asked for."""
    shares = Shares(num_ranks=2, rank=1, dim=0, size=4, specs=spec)
    scattered = jax.shard_map(
        lambda x: shares.scatter(x, "head_scatter"),
        mesh=make_mesh(Layout(stage=2, tensor=2), devices=jax.devices()[:4]),
        in_specs=P(),
        out_specs=P("stage"),
        axis_names={"stage"},
        check_vma=False,
    )
    program = jax.jit(scattered).trace(jax.ShapeDtypeStruct((4, 8), "float32")).jaxpr
    names = [one.primitive.name for one in equations(program.jaxpr)]
    assert names.count("sharding_constraint") == constraints
    assert names.count("reduce_scatter") == 1


def test_what_a_stream_is_declared_as_says_every_dim_and_nothing_without():
    x = jax.ShapeDtypeStruct((4, 8), "float32")
    rules = default_rules(Layout())
    assert stream_specs(("batch", None), x, rules) == P(None, None)
    assert len(stream_specs(None, x, rules)) == 0
