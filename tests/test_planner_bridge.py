"""Programs that train experts as Megatron Bridge does: what each option changes."""

import dataclasses

import pytest

from meshpar.planner.cost.activations import kept_bytes
from meshpar.planner.cost.block_time import block_time
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.cost.expert_time import (
    host_work_s,
    routed_bytes,
    routed_linears,
)
from meshpar.planner.cost.recomputation import recomputation
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.seconds import rows_in
from meshpar.planner.cost.step_time import stage_times
from meshpar.planner.cost.traffic import block_rows
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import EXECUTIONS, load_execution
from meshpar.planner.published.megatron import published
from meshpar.planner.workload.shapes import SHAPES

BRIDGE = EXECUTIONS["megatron-bridge"]
_TOKENS = 4096


def _run(
    model="qwen3-30b-a3b",
    layout="expert=8,zero=1",
    precision="bf16",
    batch=16,
    **changes,
) -> Run:
    """Run on 16 H100 of two hosts, of one sequence a device."""
    hardware = cluster_of("h100", devices=16)
    words = f"data=-1,{layout},precision={precision}"
    program = dataclasses.replace(BRIDGE, **changes)
    return estimate(
        SHAPES[model],
        hardware,
        words,
        global_batch=batch,
        seq=_TOKENS,
        execution=program,
    ).run


def _kept(*, moe=True, **changes):
    return kept_bytes(_run(**changes), moe=moe) / _TOKENS


def test_what_matmuls_take_in_8_bits_is_kept_so():
    workload = SHAPES["qwen3-30b-a3b"]
    whole, eighth = (_kept(precision="fp8", keeps_fp8=keeps) for keeps in (False, True))
    hidden, mixed = workload.hidden, workload.heads * workload.value_dim
    routed = workload.top_k * (workload.hidden + workload.expert_ffn)
    # Attention takes its output in 16 bits besides, the router its input.
    assert whole - eighth == hidden + routed - mixed
    assert _kept(keeps_fp8=True) == _kept(keeps_fp8=False)


def test_weights_before_the_last_matmul_keep_no_outputs():
    workload = SHAPES["qwen3-30b-a3b"]
    behind, before = (_kept(keeps_expert_outputs=keeps) for keeps in (True, False))
    assert behind - before == workload.top_k * workload.hidden * 2


def test_a_fused_loss_has_each_logit_once_and_moves_less():
    plain, fused = (
        estimate(
            SHAPES["llama3-8b"],
            cluster_of("h100", devices=8),
            "fsdp=8,zero=1,precision=bf16",
            global_batch=8,
            execution=dataclasses.replace(BRIDGE, fused_loss=one),
        )
        for one in (False, True)
    )
    logits = fused.run.tokens * fused.run.workload.vocab
    assert fused.memory.logit_bytes == 2 * logits
    assert plain.memory.logit_bytes == BRIDGE.logit_bytes * logits
    [before], [after] = stage_times(plain.run), stage_times(fused.run)
    assert after.forward.total_s < before.forward.total_s
    assert after.backward.total_s < before.backward.total_s


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3"])
def test_whole_experts_are_as_much_work_on_fewer_matmuls(model):
    layout = "expert=8,tensor=2,sequence_parallel=true,zero=1"
    shared, whole = (_run(model, layout, whole_experts=one) for one in (False, True))
    flops = [
        sum(rows * inner * columns * count for rows, inner, columns, count in half)
        for run in (shared, whole)
        for half in routed_linears(dataclasses.replace(run, execution=_lazy(run)))
    ]
    assert flops[:2] == pytest.approx(flops[2:])
    counts = [routed_linears(run)[0][0][3] for run in (shared, whole)]
    assert counts[0] == 2 * counts[1]
    rows = [block_rows(run, moe=True) for run in (shared, whole)]
    axes = [{row.mesh_axes for row in each if "expert" in row.reason} for each in rows]
    assert axes == [{("expert",)}, {("expert", "tensor")}]
    gathers = [
        sum(row.times for row in each if row.kind == "all-gather") for each in rows
    ]
    # Experts that all tokens go to are shared over `tensor` all the same.
    assert (gathers[1] < gathers[0]) == (not whole.workload.shared_experts)
    assert block_rows(shared, moe=False) == block_rows(whole, moe=False)
    # Each device puts its part of the tokens in order.
    ordered = [routed_bytes(run, moe=True) for run in (shared, whole)]
    assert ordered[0] == 2 * ordered[1]


def _lazy(run):
    """Execution without half empty tiles."""
    return dataclasses.replace(run.execution, eager=False)


def test_experts_that_do_not_divide_are_shared_over_tensor():
    workload = dataclasses.replace(SHAPES["qwen3-30b-a3b"], experts=8)
    layout = "expert=8,tensor=2,zero=1"
    run = dataclasses.replace(_run(layout=layout), workload=workload)
    assert routed_linears(run)[0][0][3] == 1


@pytest.mark.parametrize(
    "module, model, values",
    [
        # Values of one token: both norms' outputs; the experts' hidden ones; those of
        # queries, keys and values, all heads; a dense MLP's.
        ("layernorm", "qwen3-30b-a3b", 2 * 2048),
        ("moe_act", "qwen3-30b-a3b", 8 * 768),
        ("mla_up_proj", "deepseek-v3", 128 * (2 * 192 + 128)),
        ("mla_up_proj", "qwen3-30b-a3b", 0),
        ("mlp", "deepseek-v3", 0),
    ],
)
def test_a_recomputed_module_keeps_nothing_and_takes_time(module, model, values):
    kept, dropped = (_kept(model=model, recomputes=one) for one in ("", module))
    assert kept - dropped == 2 * values
    times = [
        block_time(
            _run(model, recomputes=one, kernel_host_s=0.0), moe=True
        ).backward.total_s
        for one in ("", module)
    ]
    assert (times[1] > times[0]) == (values > 0)


def test_a_dense_mlp_is_recomputed_in_dense_blocks():
    workload = SHAPES["deepseek-v3"]
    kept, dropped = (
        _kept(model="deepseek-v3", moe=False, recomputes=one) for one in ("", "mlp")
    )
    assert kept - dropped == 2 * 3 * workload.ffn
    again = recomputation(_run("deepseek-v3", recomputes="mlp"), moe=False)
    assert (again.up, again.qkv) == (1, 0)


def test_attention_is_recomputed_if_its_module_or_remat_says_so():
    for recomputes, remat, times in (("core_attn", "selective", 1), ("", "none", 0)):
        run = _run(layout=f"expert=8,zero=1,remat={remat}", recomputes=recomputes)
        again = recomputation(run, moe=True)
        assert (again.attention, again.trades) == (times, times)


def test_expanding_latent_heads_again_is_their_share_of_the_matmuls():
    workload = SHAPES["deepseek-v3"]
    again = recomputation(_run("deepseek-v3", recomputes="mla_up_proj"), moe=True)
    query, latent = workload.q_lora_rank, workload.kv_lora_rank
    expanded = 128 * (query * 192 + latent * 256)
    narrow = workload.hidden * (query + latent + workload.qk_rope_head_dim)
    assert again.qkv == pytest.approx(expanded / (expanded + narrow))


def test_an_unknown_module_is_refused(tmp_path, refuses):
    file = tmp_path / "mine.toml"
    file.write_text('like = "megatron-bridge"\nrecomputes = "layernorms/mlp"\n')
    with refuses("plan.unknown_module", "'layernorms'", "'layernorm'"):
        load_execution(file)
    file.write_text('like = "meshpar"\nrecomputes = "mlp"\n')
    with refuses("plan.recomputes_compiled", "'mlp'"):
        load_execution(file)


def test_norms_are_recomputed_of_the_tokens_that_a_device_norms():
    parts = [
        recomputation(
            _run("llama3-8b", f"tensor=8,{more}zero=1", recomputes="layernorm"),
            moe=False,
        ).moved_bytes
        for more in ("", "sequence_parallel=true,")
    ]
    assert parts[0] == 8 * parts[1] > 0


def test_a_token_goes_once_to_each_host_that_has_its_experts():
    sent = {}
    for once in (False, True):
        for layout in ("expert=16,zero=1", "expert=8,zero=1"):
            rows = block_rows(_run(layout=layout, sends_once=once), moe=True)
            payloads = {
                row.payload_bytes for row in rows_in(rows, "forward") if row.times
            }
            [sent[once, layout]] = payloads
    assert sent[True, "expert=8,zero=1"] == sent[False, "expert=8,zero=1"]
    once, plain = (
        routed_bytes(_run(sends_once=one), moe=True) for one in (True, False)
    )
    assert plain == 2 * once  # without rows in order by device
    # Of two hosts one has none of 8 experts with a probability of 1/256.
    two, every = sent[True, "expert=16,zero=1"], sent[False, "expert=16,zero=1"]
    assert two / every == pytest.approx(2 * (1 - 0.5**8) / 8)


def test_graphs_leave_the_host_what_routing_makes_of_changing_size():
    for moe in (False, True):
        plain, graphs = (host_work_s(_run(graphs=one), moe, 0) for one in (False, True))
        assert graphs < plain / 4
        assert (graphs > 0) == moe


def test_a_matmul_of_an_expert_costs_the_host_little_more():
    few, many = (
        host_work_s(_run(layout=f"expert={size},zero=1"), True, 0) for size in (16, 8)
    )
    assert many - few == pytest.approx(6 * 8 * BRIDGE.launch_s)


def test_the_host_of_overlapped_exchanges_launches_more():
    beside = EXECUTIONS["megatron-bridge-overlap"]
    assert beside.kernel_host_s > BRIDGE.kernel_host_s
    assert dataclasses.replace(
        beside, name=BRIDGE.name, exchange_overlap=False, kernel_host_s=0.0
    ) == dataclasses.replace(BRIDGE, kernel_host_s=0.0)


def test_all_computing_hides_the_exchanges_of_another_microbatch():
    free = {"kernel_host_s": 0.0, "layout": "expert=16,zero=1"}
    plain, beside = (
        block_time(_run(exchange_overlap=one, **free), moe=True)
        for one in (False, True)
    )
    for name in ("forward", "backward"):
        alone, hidden = getattr(plain, name), getattr(beside, name)
        saved_s = alone.exposed_s["expert"] - hidden.exposed_s["expert"]
        assert hidden.hidden_s == pytest.approx(saved_s)
        # All but the gaps between kernels.
        assert 0.6 * alone.compute_s < saved_s < alone.compute_s


def test_a_hop_is_hidden_where_ranks_have_several_stages():
    words = "expert=2,stage=4,microbatches=8,zero=1"
    chunks = f"{words},schedule=interleaved_1f1b,chunks=2"
    single, several = (
        stage_times(_run(layout=layout, batch=32))[1] for layout in (words, chunks)
    )
    assert single.forward.exposed_s["stage"] > 0
    assert "stage" not in several.forward.exposed_s


def test_rows_change_their_program_as_a_file_would():
    rows = published()["public_tables"]["rows"]
    changed = [row["program"] for row in rows if "program" in row]
    fields = {field.name for field in dataclasses.fields(BRIDGE)}
    assert changed and all(program.keys() <= fields for program in changed)
