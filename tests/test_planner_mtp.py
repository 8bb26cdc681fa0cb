"""Plans of models that predict later tokens too (multi-token prediction)."""

import dataclasses

import pytest

from meshpar.planner.cost.block_time import block_time
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.cost.memory import rank_memories
from meshpar.planner.cost.run import end_parameters, rank_parameters
from meshpar.planner.cost.seconds import matmul_s
from meshpar.planner.cost.step_time import stage_times
from meshpar.planner.cost.step_traffic import step_rows
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import EXECUTIONS
from meshpar.planner.search.search import Request, search
from meshpar.planner.workload.shapes import SHAPES, workload_of

_SIZES = (
    "layers=8,hidden=1024,heads=8,vocab=32000,gated=true,experts=8,top_k=2,"
    "expert_ffn=512,dense_layers=1"
)


def _planned(mtp_layers, layout="expert=2,stage=4,microbatches=8,zero=1"):
    return estimate(
        workload_of(f"{_SIZES},mtp_layers={mtp_layers}"),
        cluster_of("h100", devices=8),
        f"{layout},precision=bf16",
        global_batch=16,
        execution=EXECUTIONS["megatron-bridge"],
    )


def test_deepseek_v3_has_14_billion_parameters_more_with_its_later_token():
    # DeepSeek-AI's README (2024): 671B and 14B, which hold a copy of both tables;
    # 684.5B in its files on Hugging Face.
    more = workload_of("deepseek-v3", words="mtp_layers=1")
    copies = 2 * more.vocab * more.hidden
    assert round((more.num_parameters + copies) / 1e9, 1) == 684.5
    added = more.num_parameters + copies - SHAPES["deepseek-v3"].num_parameters
    assert 13 < added / 1e9 < 14


def test_a_later_token_takes_the_published_flops():
    # NVIDIA, performance summary of container 25.11: model TFLOP/s over tokens/s of
    # DeepSeek-V3 on GB300 without, on B200 with it; half of attention is counted.
    published = 557e12 / 2139 - 961e12 / 3848
    flops = [
        workload_of("deepseek-v3", words=f"mtp_layers={count}").model_flops(
            global_batch=1, seq=4096
        )
        for count in (0, 1)
    ]
    masked = 3 * SHAPES["deepseek-v3"].attention_flops(4096) / 2
    assert (flops[1] - flops[0]) / 4096 - masked == pytest.approx(published, rel=0.1)


def test_the_last_stage_has_a_block_a_matrix_and_the_head_once_more():
    without, run = _planned(0).run, _planned(1).run
    assert without.stage_blocks == (2, 2, 2, 2) and run.stage_blocks == (2, 2, 2, 3)
    before, after = stage_times(without), stage_times(run)
    assert after[:3] == before[:3]
    block, hidden = block_time(run, moe=True), run.workload.hidden
    forward_s = after[3].forward.total_s - before[3].forward.total_s
    head_s = matmul_s(run, run.tokens, hidden, run.workload.vocab)
    least_s = block.forward.total_s + head_s
    least_s += matmul_s(run, run.tokens, 2 * hidden, hidden)
    assert least_s < forward_s < 2 * least_s  # the loss and norms
    more = rank_parameters(run, 3) - rank_parameters(without, 3)
    assert more > run.workload.vocab * hidden  # its own table of tokens
    assert rank_parameters(run, 0) == rank_parameters(without, 0)


def test_both_tables_of_tokens_are_summed_once_a_step():
    reasons = [
        [row.reason for row in step_rows(_planned(count).run, ranks=range(4))]
        for count in (0, 1)
    ]
    assert [each.count("gradients of tables") for each in reasons] == [0, 1]


def test_one_stage_has_one_table_of_tokens():
    layout = "expert=8,microbatches=2,zero=1"
    runs = [_planned(count, layout).run for count in (0, 1)]
    more = end_parameters(runs[1], 0) - end_parameters(runs[0], 0)
    assert more == runs[1].workload.mtp_parameters


def test_logits_of_both_heads_are_kept_at_once():
    without, both = (rank_memories(_planned(count).run)[-1] for count in (0, 1))
    assert both.logit_bytes == 2 * without.logit_bytes


def test_a_search_counts_the_later_token():
    with_it = workload_of(_SIZES.replace("layers=8", "layers=3") + ",mtp_layers=1")
    seconds = [
        search(
            Request(
                workload=workload,
                cluster=cluster_of("h100", devices=2),
                global_batch=2,
                execution=EXECUTIONS["megatron-bridge"],
            ),
            plans_only=True,
        )
        .plans[0]
        .step_s
        for workload in (dataclasses.replace(with_it, mtp_layers=0), with_it)
    ]
    assert seconds[0] < seconds[1]


def test_our_program_and_others_refuse_what_they_do_not_train(refuses):
    workload = workload_of(f"{_SIZES},mtp_layers=1")
    cluster = cluster_of("h100", devices=8)
    with refuses("plan.mtp_not_trained", "mtp_layers=1", "'meshpar'"):
        estimate(workload, cluster, "fsdp=8", global_batch=8)
    with refuses("plan.mtp_not_trained", "mtp_layers=1", "'nanotron'"):
        Request(
            workload=workload,
            cluster=cluster,
            global_batch=8,
            execution=EXECUTIONS["nanotron"],
        )
