"""Bytes per device: published ones to the digit, and how they move with the layout."""

import dataclasses

import pytest

from meshpar.layout import Layout
from meshpar.planner.cost.activations import kept_bytes
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.cost.memory import rank_memories
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import MEGATRON_2022, MESHPAR, NANOTRON
from meshpar.planner.published.megatron import published
from meshpar.planner.workload.shapes import SHAPES

GIB = 2**30


def korthikanti(name, remat, execution=MEGATRON_2022):
    row = next(
        row for row in published()["korthikanti_2022"]["rows"] if row["name"] == name
    )
    interleaved = f",schedule=interleaved_1f1b,chunks={row['interleave']}"
    layout = (
        f"stage={row['p']},tensor={row['t']},precision=bf16,{remat},"
        f"microbatches={row['gbs'] // row['mbs']}"
        f"{interleaved if row['interleave'] > 1 else ''}"
    )
    found = estimate(
        SHAPES[name.lower()],
        cluster_of("a100-80gb", devices=row["gpus"]),
        layout,
        global_batch=row["gbs"],
        seq=2048,
        execution=execution,
    )
    return row, found


@pytest.mark.parametrize("name", ["22B", "175B"])
@pytest.mark.parametrize(
    "key, remat",
    [
        ("act_gib_none", "remat=none"),
        ("act_gib_sp_sel", "sequence_parallel=true,remat=selective"),
    ],
)
def test_activations_of_korthikanti_figure_1_to_the_printed_digits(name, key, remat):
    row, found = korthikanti(name, remat)
    # The figure leaves out what arrives between stages.
    kept = found.memory.activation_bytes - found.memory.boundary_bytes
    assert kept / GIB == row[key]


@pytest.mark.parametrize("name", ["22B", "175B"])
def test_parameter_bytes_of_korthikanti_figure_1_to_the_printed_digits(name):
    row, found = korthikanti(name, "remat=none")
    memory, workload = found.memory, SHAPES[name.lower()]
    matrices = workload.layers * workload.block_matrix_parameters(moe=False)
    each = MEGATRON_2022.weight_bytes + MEGATRON_2022.gradient_bytes
    each += MEGATRON_2022.state_bytes
    assert each == 18
    assert matrices / row["gpus"] * each / GIB == row["paramopt_gib"]
    # Ours count the vocabulary, norms and biases besides.
    total = memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes
    assert 1 < total / GIB / row["paramopt_gib"] < 1.04


@pytest.mark.parametrize(
    "remat, terms",
    [
        # Korthikanti et al. 2022, table 2, per s b h: none, with sequence parallelism,
        # selective, both, full.
        ("remat=none", 10 + 24 / 8 + 5 * 64 * 2048 / (6144 * 8)),
        (
            "sequence_parallel=true,remat=none",
            34 / 8 + 5 * 64 * 2048 / (6144 * 8),
        ),
        ("remat=selective", 10 + 24 / 8),
        ("sequence_parallel=true,remat=selective", 34 / 8),
        ("remat=full", 2),
    ],
)
def test_activations_of_a_block_as_in_korthikanti_table_2(remat, terms):
    _, found = korthikanti("22B", remat)
    assert kept_bytes(found.run, moe=False) == pytest.approx(4 * 2048 * 6144 * terms)


def of(layout, *, preset="llama3-8b", global_batch=64, execution=MESHPAR, seq=4096):
    layout = Layout.parse(layout)
    return estimate(
        SHAPES[preset],
        cluster_of("h100-80gb", devices=layout.num_devices),
        layout,
        global_batch=global_batch,
        seq=seq,
        execution=execution,
    ).memory


def test_zero_splits_one_thing_after_another():
    at = [
        of(f"fsdp=8,zero={level},precision=bf16", execution=NANOTRON)
        for level in range(4)
    ]
    whole = at[0]
    assert at[1].optimizer_bytes == whole.optimizer_bytes / 8
    assert at[1].gradient_bytes == whole.gradient_bytes
    assert at[2].gradient_bytes == whole.gradient_bytes / 8
    assert at[2].parameter_bytes == whole.parameter_bytes
    assert at[3].parameter_bytes == whole.parameter_bytes / 8
    assert at[3].gathered_bytes > 0 == at[2].gathered_bytes


def test_what_is_cast_is_whole_for_two_layers_and_the_ends_and_split_for_the_rest():
    ends = 2 * 128_256 * 4096 + 4096
    block = (SHAPES["llama3-8b"].num_parameters - ends) / 32
    in_use = 2 * (ends + 2 * block)
    split = of("fsdp=8,precision=bf16")
    assert split.gathered_bytes == pytest.approx(in_use + 2 * 32 * block / 8)
    # An embedding's gradient comes last: its part of the sums waits for it.
    table = 128_256 * 4096
    assert split.idle_bytes == pytest.approx(2 * ends + 4 * table / 8)
    for layout in ("fsdp=8,precision=bf16,param_dtype=bf16", "data=8,precision=bf16"):
        assert of(layout).gathered_bytes == pytest.approx(in_use)
    assert of("data=8").gathered_bytes == 0
    assert of("fsdp=2,stage=4,microbatches=4,precision=bf16").idle_bytes == 0
    eager = of("fsdp=8,precision=bf16", execution=NANOTRON)
    assert eager.idle_bytes == 0 < eager.gathered_bytes


def test_a_blocks_gradients_wait_beside_the_next_unless_nothing_is_prefetched():
    shape = SHAPES["llama3.2-1b"]  # its one table's gradient waits too
    block = (shape.num_parameters - shape.vocab * shape.hidden - shape.hidden) / 16
    on, off = (
        of(f"fsdp=8,precision=bf16,remat=full{more}", preset="llama3.2-1b")
        for more in ("", ",fsdp_prefetch=off")
    )
    assert on.workspace_bytes - off.workspace_bytes == pytest.approx(2 * block)
    own = of("fsdp=8,precision=bf16"), of("fsdp=8,precision=bf16,fsdp_prefetch=off")
    assert own[0].workspace_bytes == own[1].workspace_bytes


@pytest.mark.parametrize(
    "layout, tables",
    [
        ("fsdp=8", {"llama3.2-1b": 3, "llama3-8b": 2}),
        ("data=8,zero=1", {"llama3.2-1b": 3, "llama3-8b": 2}),
        # Others are in the sums.
        ("data=8,zero=1,fsdp_prefetch=off", {"llama3.2-1b": 2, "llama3-8b": 0}),
        ("fsdp=2,stage=4,microbatches=4", {"llama3.2-1b": 0, "llama3-8b": 0}),
    ],
)
def test_at_the_end_the_gradients_of_the_ends_are_whole_and_a_tied_ones_sum(
    layout, tables
):
    for preset, count in tables.items():
        shape = SHAPES[preset]
        memory = of(f"{layout},precision=bf16", preset=preset)
        assert memory.ends_bytes == count * 4 * shape.vocab * shape.hidden
        assert memory.temporary_bytes >= memory.gradient_bytes + memory.ends_bytes


def test_remat_keeps_less_and_less():
    kept = [
        of(f"fsdp=8,precision=bf16,remat={remat}").activation_bytes
        for remat in ("none", "selective", "dots", "full")
    ]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == 4


def test_activations_do_not_grow_with_microbatches_but_with_what_is_in_flight():
    few = of("stage=4,microbatches=16,precision=bf16", global_batch=16)
    many = of("stage=4,microbatches=64,precision=bf16", global_batch=64)
    assert few.activation_bytes == many.activation_bytes
    # In lock step rank r holds 2 (S - r) - 1 microbatches; otherwise S - r.
    assert (few.stage, few.in_flight) == (0, 7)
    apart = of(
        "stage=4,microbatches=16,precision=bf16", global_batch=16, execution=NANOTRON
    )
    assert apart.in_flight == 4
    whole = of("stage=4,microbatches=16,schedule=gpipe,precision=bf16", global_batch=16)
    assert whole.in_flight == 16


def test_gpipe_holds_every_microbatch_however_many():
    more = of("stage=4,microbatches=64,schedule=gpipe,precision=bf16", global_batch=64)
    assert more.in_flight == 64


def test_the_ends_lie_on_the_first_and_last_rank_unless_shared():
    layout = Layout.parse("stage=4,microbatches=8,precision=bf16")
    shared, apart = (
        rank_memories(
            estimate(
                SHAPES["llama3-8b"],
                cluster_of("h100-80gb", devices=4),
                layout,
                global_batch=8,
                seq=4096,
                execution=execution,
            ).run
        )
        for execution in (MESHPAR, NANOTRON)
    )
    assert [memory.logit_bytes > 0 for memory in apart] == [False, False, False, True]
    assert len({memory.logit_bytes for memory in shared}) == 1
    assert len({memory.optimizer_bytes for memory in shared}) == 1
    table = 128_256 * 4096
    assert apart[0].optimizer_bytes - apart[1].optimizer_bytes == 12 * table


def test_experts_are_split_over_their_axis_and_with_zero_0_nothing_else_is():
    one = of("precision=bf16", preset="mixtral-8x7b", global_batch=8)
    line = "expert=8,precision=bf16,zero=0"
    eight = of(line, preset="mixtral-8x7b", global_batch=8)
    workload = SHAPES["mixtral-8x7b"]
    experts = workload.layers * workload.expert_parameters(moe=True)
    saved = one.optimizer_bytes - eight.optimizer_bytes
    assert saved == 8 * experts * 7 / 8


@pytest.mark.parametrize("zero", ["zero=3", "zero=1", "zero=1,zero_axes=expert"])
def test_what_is_no_expert_is_shared_out_over_the_experts_axis(zero):
    line = f"expert=8,precision=bf16,{zero}"
    alone = of(line, preset="mixtral-8x7b", global_batch=8)
    workload = SHAPES["mixtral-8x7b"]
    experts = workload.layers * workload.expert_parameters(moe=True)
    dense = workload.num_parameters - experts
    # Adam's two moments; an expert's lie with it already.
    assert alone.optimizer_bytes == pytest.approx(8 * (dense + experts) / 8)


def test_masks_of_dropout_are_kept():
    gpt2 = SHAPES["gpt2-xl"]
    kept = [
        kept_bytes(
            estimate(
                dataclasses.replace(gpt2, dropout=dropout),
                cluster_of("h100-80gb", devices=1),
                "precision=bf16",
                global_batch=1,
            ).run,
            moe=False,
        )
        for dropout in (False, True)
    ]
    assert kept[1] - kept[0] == 2 * gpt2.seq * gpt2.hidden
