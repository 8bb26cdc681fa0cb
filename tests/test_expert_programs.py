"""Compiled programs of experts: what they multiply, and what they send."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from meshpar import Layout, Scope, default_rules, make_train_step
from meshpar.audit.collectives import find_collectives
from meshpar.audit.flops import instruction_flops
from meshpar.audit.flow import places
from meshpar.audit.hlo import parse_program
from meshpar.audit.overlap import find_overlaps
from meshpar.audit.report import audit
from meshpar.audit.subject import make_subject
from meshpar.audit.target import Target
from meshpar.audit.targets import compile_for
from meshpar.cli.main import main
from meshpar.hardware.platforms import compiler_options_for
from meshpar.layout import BATCH_AXES
from meshpar.machine.mesh import absent_mesh
from meshpar.model.tracing import traced_batch
from meshpar.models.presets import build
from meshpar.parallel.expert import tiles
from meshpar.parallel.expert.experts import counted_mlp
from meshpar.parallel.sizes import SPARE, host_room
from tests.marks import slow
from tests.test_audit_targets import needs_gpu_compiler, needs_tpu_compiler

# FLOPs of experts at balanced load.

EMBED, HIDDEN, EXPERTS, TOP_K, TOKENS = 512, 1024, 8, 2, 4096


@functools.cache
def compiled_program(line, target, dtype, shared=False, hosts=1):
    """The compiled experts and their gradients, `TOKENS` tokens on each device.

    With `shared` there is an expert that all tokens go to, of one matmul.
    """
    layout = Layout.parse(line)
    mesh = absent_mesh(layout)
    axes = tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)
    chosen = Target.parse(target)
    scope = Scope(
        rules=default_rules(layout),
        batch_axes=axes,
        platform=chosen.platform,
        expert_hosts=hosts,
    )

    def run(x, experts, weights, gate_up, down):
        beside = (x @ down[0, :EMBED],) if shared else ()
        y, _, beside = counted_mlp(
            (x, experts, weights),
            (gate_up, down),
            scope,
            num_experts=EXPERTS,
            beside=beside,
        )
        return sum(beside, y)

    def local(x, experts, weights, gate_up, down, dy):
        y, vjp = jax.vjp(
            lambda *of: run(of[0], experts, *of[1:]), *(x, weights, gate_up, down)
        )
        return y, *vjp(dy)

    examples, split = P(BATCH_AXES), P("expert")
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(examples, examples, examples, split, split, examples),
        out_specs=(examples, examples, examples, split, split),
        axis_names=set(BATCH_AXES),
        check_vma=False,
    )
    batch = layout.num_devices
    array = jax.ShapeDtypeStruct
    arguments = (
        array((batch, TOKENS, EMBED), dtype),
        array((batch, TOKENS, TOP_K), jnp.int32),
        array((batch, TOKENS, TOP_K), jnp.float32),
        array((EXPERTS, EMBED, 2, HIDDEN), dtype),
        array((EXPERTS, HIDDEN, EMBED), dtype),
        array((batch, TOKENS, EMBED), dtype),
    )
    subject = make_subject(mapped, arguments, mesh=mesh, platform=chosen.platform)
    options = compiler_options_for(chosen.platform, prefetching=True, by_host=hosts > 1)
    subject = subject.with_options(options)
    found = compile_for(chosen, subject, timeout_s=580, memory_bytes=16 << 30)
    return parse_program(found.text)


def first_round_flops(program):
    """Of the loops over tiles that are counted, as if each ran as often as it can."""
    total = 0
    for name, at in places(program).items():
        computation = program.computations[name]
        times = sum(one.executions for one in at if one.in_loop and one.counted)
        for instruction in computation.instructions:
            total += times * (instruction_flops(program, computation, instruction) or 0)
    return total


@pytest.mark.parametrize(
    "line, target, dtype",
    [
        slow("expert=8", "cpu:virtual:8", jnp.float32),
        slow("data=8", "cpu:virtual:8", jnp.float32),
        pytest.param(
            *("fsdp=8,expert=8", "gpu:h100:8x8", jnp.bfloat16),
            marks=[pytest.mark.slow, needs_gpu_compiler],
        ),
        pytest.param(
            *("fsdp=8,expert=8", "tpu:v5p:4x4x4", jnp.bfloat16),
            marks=[pytest.mark.slow, needs_tpu_compiler],
        ),
    ],
)
def test_at_balanced_load_a_ninth_of_the_flops_or_less_is_in_vain(line, target, dtype):
    program = compiled_program(line, target, dtype)
    degree = Layout.parse(line).expert
    own, rows = EXPERTS // degree, TOKENS * TOP_K
    room = rows if degree == 1 else math.ceil(SPARE * rows / degree) * degree
    tile = tiles.tile_size(room, own)
    counts = jnp.full((own,), rows // own, jnp.int32)
    balanced = tiles.cut(counts, jnp.cumsum(counts) - counts, room, tile)
    most = balanced.expert.shape[0]
    executed = first_round_flops(program) / most * int(balanced.number)
    ideal = 3 * 2 * rows * 3 * EMBED * HIDDEN
    assert 1 <= executed / ideal <= 1.15


@pytest.mark.slow
@needs_gpu_compiler
def test_rows_of_a_part_are_sent_beside_the_matmuls_of_another():
    line = "fsdp=8,expert=8"
    program = compiled_program(line, "gpu:h100:8x8", jnp.bfloat16)
    shape = absent_mesh(Layout.parse(line)).shape
    rows = find_collectives(program, shape)
    overlaps = find_overlaps(program, rows, shape, None)
    parts = [
        overlaps[row.line].is_hidden
        for row in rows
        if "asked-expert_dispatch)" in row.op_path
        and row.executions
        and row.payload_bytes > 1e6
    ]
    assert len(parts) == 4 and sum(parts) == 3  # Nothing precedes the first.


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("shared", [False, True])
def test_shared_experts_are_computed_while_the_first_rows_go_to_other_hosts(shared):
    line = "fsdp=8,expert=8"
    program = compiled_program(line, "gpu:h100:8x8", jnp.bfloat16, shared, hosts=2)
    shape = absent_mesh(Layout.parse(line)).shape
    rows = find_collectives(program, shape)
    overlaps = find_overlaps(program, rows, shape, None)
    [to_host] = [row for row in rows if "asked-expert_dispatch_host)" in row.op_path]
    assert overlaps[to_host.line].is_hidden is shared


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.filterwarnings("ignore:the model of blocks:UserWarning")
def test_a_step_hides_most_of_what_its_experts_send_and_of_the_reduction(capsys):
    line = "expert=8,remat=full,precision=bf16"
    command = f"--preset mixtral-8x7b --model layers=3 --layout {line}"
    target = "--target gpu:h100:1x8 --global-batch 16 --seq 2048 --timeout 580"
    main(["audit", *command.split(), *target.split(), "--json"])
    report = json.loads(capsys.readouterr().out)
    in_loop = [one for one in report["collectives"] if one["in_loop"]]
    for kind in ("all-to-all", "reduce-scatter"):
        rows = [one for one in in_loop if one["kind"] == kind]
        wire_s, hidden_s = (
            sum(one["executions"] * one[key] for one in rows)
            for key in ("wire_s", "hidden_s")
        )
        assert hidden_s >= 0.8 * wire_s > 0, kind


# What a training step sends.

LAYERS, BATCH, SEQ, WIDTH = 3, 8, 32, 16
SIZES = dict(embed=WIDTH, heads=2, kv_heads=2, vocab=64, expert_ffn=24)


@functools.cache
def audited(line, preset, devices_per_host=None):
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    model = build(preset, layers=LAYERS, **SIZES)
    step = make_train_step(
        model,
        optax.sgd(1.0),
        layout,
        devices=devices,
        devices_per_host=devices_per_host,
    )
    return audit(step, traced_batch(model, BATCH, SEQ))


def room_of(line, preset):
    """Rows that a device sends each other of those that share the experts."""
    layout = Layout.parse(line)
    examples = BATCH // layout.batch_shards
    if preset == "tiny-moe-capacity":
        return examples * math.ceil(1.25 * SEQ * 2 / 8) * 8 // layout.expert
    fair = SPARE * examples * SEQ * 2 / layout.expert
    return math.ceil(fair / 8) * 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, preset",
    [
        ("data=2,expert=4", "tiny-moe"),
        ("data=2,expert=4", "tiny-moe-capacity"),
        ("fsdp=2,expert=2,tensor=2", "tiny-moe"),
        ("expert=8", "tiny-moe-capacity"),
    ],
)
def test_a_block_sends_the_bytes_of_its_rounds_and_nothing_is_unasked(line, preset):
    """Of n devices each sends n - 1 others `room` rows: of embed values there and back.

    And of a row its expert and weight there, the weight's gradient back.
    """
    report = audited(line, preset)
    assert report.complaints() == []
    sizes = Layout.parse(line)
    sent = {}
    for row in report.rows:
        one = row.collective
        if one.kind == "all-to-all" and one.counted:
            assert one.mesh_axes == ("expert",)
            bytes_of = sent.setdefault(row.reason, 0)
            sent[row.reason] = bytes_of + one.wire_bytes * one.executions
    rows = LAYERS * (sizes.expert - 1) * room_of(line, preset)
    assert sent == {
        "tokens to their experts": rows * (WIDTH + 2) * 4,
        "experts' results back to the tokens": rows * WIDTH * 4,
        "gradients of results, to the experts": rows * WIDTH * 4,
        "gradients of tokens, from the experts": rows * (WIDTH + 1) * 4,
    }


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny-moe", "tiny-moe-capacity"])
def test_a_token_is_sent_once_to_each_host_and_its_results_come_back_as_one(preset):
    """On 2 hosts of 4 devices a row travels inside its host once in each direction."""
    line, hosts, per_host = "expert=8", 2, 4
    report = audited(line, preset, per_host)
    assert report.complaints() == []
    room = room_of(line, preset)
    is_most = preset == "tiny-moe-capacity"
    tokens = host_room(SEQ, 2, hosts, per_host * room, is_most=is_most)
    assert 0 < tokens < per_host * room
    sent = {}
    for row in report.rows:
        one = row.collective
        if "xpert" in row.reason and one.kind != "all-reduce" and one.counted:
            assert one.along == ("expert",)
            bytes_of = sent.setdefault((one.kind, one.part), [])
            bytes_of += [one.payload_bytes] * one.executions
    # There and back, forward and backward.
    assert sent["collective-permute", None] == [tokens * WIDTH * 4] * 4 * LAYERS
    rows = hosts * per_host * room
    assert sent["all-to-all", ("expert", 1)] == [rows * WIDTH * 4] * 4 * LAYERS
    assert sent["all-to-all", ("expert", per_host)] == [hosts * tokens * 2 * 4] * LAYERS
    assert sum(sent["all-to-all", None]) == rows * (8 + 4) * LAYERS


@pytest.mark.slow
def test_gradients_of_experts_are_not_reduced_over_their_own_mesh_axis():
    reduced = {}
    for row in audited("data=2,expert=4", "tiny-moe").rows:
        if row.reason == "gradient reduction over the batch axes":
            axes = row.collective.mesh_axes
            reduced[axes] = reduced.get(axes, 0) + row.collective.payload_bytes
    model = build("tiny-moe", layers=LAYERS, **SIZES)
    values = {True: 0, False: 0}
    for one in model.flat_parameters().values():
        size = math.prod(one.stacked_shape)
        values["experts" in one.logical_axes] += size
    experts, others = values[True] // 4, values[False]
    assert reduced == {("data",): experts * 4, ("data", "expert"): others * 4}
