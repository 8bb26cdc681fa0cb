"""PyTorch's FSDP, as TorchTitan and LLM Foundry run it: what each option costs.

Closed forms of a Llama 3 8B on 8 H100: 4,096 values wide, 32 heads of 128 with 8 keys
and values, an MLP of 14,336.
"""

import dataclasses

import pytest

from meshpar.planner.cost.activations import kept_bytes
from meshpar.planner.cost.block_time import accumulated_s, block_time
from meshpar.planner.cost.elementwise import backward_bytes, forward_bytes
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.cost.recomputation import recomputation
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.seconds import cast_s, matmul_s, memory_s
from meshpar.planner.cost.step_time import stage_times
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import (
    TORCH_FSDP2,
    TORCH_FSDP2_COMPILE,
    load_execution,
)
from meshpar.planner.search.search import Request
from meshpar.planner.workload.shapes import SHAPES, workload_of

GPT = workload_of(
    "layers=4,hidden=1024,heads=16,vocab=50432,learned_positions=true,tied=true"
)
TOKENS = 8192


def planned_run(layout: str, **options) -> Run:
    planned = estimate(
        SHAPES["llama3-8b"],
        cluster_of("h100-80gb", devices=8),
        f"fsdp=8,precision=bf16,{layout}",
        global_batch=8,
        seq=TOKENS,
        execution=dataclasses.replace(TORCH_FSDP2, **options),
    )
    return planned.run


def test_recomputation_that_stops_early_makes_no_mlp_output_again():
    early, whole = (
        planned_run("remat=full", stops_early=stops) for stops in (True, False)
    )
    saved_s = block_time(whole, moe=False).backward.compute_s
    saved_s -= block_time(early, moe=False).backward.compute_s
    launches_s = early.cluster.device.efficiency.launch_s + early.execution.launch_s
    down_s = matmul_s(early, TOKENS, 14_336, 4096)
    assert saved_s == pytest.approx(down_s + launches_s, rel=1e-6)


def test_a_selected_block_makes_keys_attention_output_and_half_the_gate_again():
    run = planned_run("remat=selective")
    again = recomputation(run, moe=False)
    widths = {"qkv": (32 + 2 * 8) * 128, "out": 4096, "up": 2 * 14_336}
    made = {name: getattr(again, name) * width for name, width in widths.items()}
    assert made == {"qkv": 8 * 128, "out": 4096, "up": 14_336}
    assert (again.attention, again.down, again.elementwise) == (0, 0, 1)


def test_a_selected_block_keeps_what_it_does_not_make_again():
    """Input, queries, values, attention's output, gate, last output, in 16 bits."""
    kept = kept_bytes(planned_run("remat=selective"), moe=False)
    values = 4096 + 4096 + 1024 + 4096 + 14_336 + 4096
    assert kept == TOKENS * (2 * values + 4 * 32)
    everything = kept_bytes(planned_run("remat=none"), moe=False)
    assert kept_bytes(planned_run("remat=full"), moe=False) < kept < 0.6 * everything


def test_shards_are_copied_to_their_matrices_and_gradients_back():
    run, parameters = planned_run("remat=full"), 1e9
    assert accumulated_s(run, parameters) == memory_s(run, 14 * parameters)
    sums = planned_run("remat=full", repacks=False)
    assert accumulated_s(sums, parameters) == memory_s(run, 10 * parameters)


def test_reference_norms_and_positions_move_fp32_besides_what_kernels_do():
    reference, fused = (
        planned_run("remat=none", fused_norms=one) for one in (False, True)
    )
    heads = 16 * (4096 + 1024) + 2 * 2 * 4096
    for found, norm in ((forward_bytes, 2 * 32), (backward_bytes, 2 * 74)):
        more = found(reference, moe=False) - found(fused, moe=False)
        assert more == pytest.approx(TOKENS * (norm * 4096 + heads))


def test_the_loss_takes_as_long_as_the_bytes_of_its_logits():
    def ends_s(loss_bytes):
        run = planned_run("remat=full", loss_bytes=loss_bytes)
        [stage] = stage_times(run)
        return run, stage.forward.total_s + stage.backward.total_s

    (run, eager_s), (_, fused_s) = ends_s(52), ends_s(36)
    more_s = memory_s(run, 16 * TOKENS * 128_256)
    assert eager_s - fused_s == pytest.approx(more_s)


def test_dynamic_scales_read_a_value_before_they_cast_it():
    """torchao: largest value (read 2), cast (2, 1), transposed (1, 1)."""
    run = planned_run("remat=full")
    layout = dataclasses.replace(run.layout, precision="fp8")
    scaled = dataclasses.replace(run, layout=layout)
    assert cast_s(run, 1e9) == 0
    assert cast_s(scaled, 1e9) == memory_s(run, 7e9)


def test_a_compiled_block_is_faster_and_keeps_as_much():
    eager, compiled = (
        estimate(
            SHAPES["llama3-8b"],
            cluster_of("h100-96gb", devices=8),
            "fsdp=8,remat=selective,precision=bf16",
            global_batch=16,
            seq=TOKENS,
            execution=execution,
        )
        for execution in (TORCH_FSDP2, TORCH_FSDP2_COMPILE)
    )
    # TorchTitan's report: 5,762 and 6,667 tokens a second.
    assert 1.05 < eager.step_s / compiled.step_s < 1.25
    assert eager.memory.total_bytes == compiled.memory.total_bytes


def test_models_with_learned_positions_run_in_the_program_that_trained_them(tmp_path):
    cluster, layout = cluster_of("a100-80gb", devices=8), "fsdp=8,precision=bf16"

    def planned(workload, execution):
        options = {"global_batch": 8, "seq": 2048, "execution": execution}
        return estimate(workload, cluster, layout, **options).run

    foundry = planned(GPT, TORCH_FSDP2)
    assert foundry.execution.name == "llm-foundry"
    assert foundry.attention.kernel == "flash-attention-1"
    llama = planned(SHAPES["llama3-8b"], TORCH_FSDP2)
    assert llama.execution is TORCH_FSDP2
    request = Request(
        workload=GPT, cluster=cluster, global_batch=8, execution=TORCH_FSDP2
    )
    assert request.run.execution == foundry.execution
    # A program of one's own trains both.
    path = tmp_path / "mine.toml"
    path.write_text('like = "torch-fsdp2"\nhost_s = 0.5\n')
    own = load_execution(path)
    assert planned(GPT, own).execution == own
