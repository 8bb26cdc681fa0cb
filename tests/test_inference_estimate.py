"""What the planner says of generation: bytes by formula, time by the roofline."""

import json
import math

import jax
import pytest

from meshpar import Layout
from meshpar.cli.main import main
from meshpar.generation.programs import Programs, stored_shape
from meshpar.model.parameter import is_parameter
from meshpar.models.presets import build
from meshpar.planner.inference import estimate_inference
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.workload.shapes import workload_of

BF16 = "precision=bf16,param_dtype=bf16"


def estimated(model="llama3-70b", layout=f"tensor=8,{BF16}", **sizes):
    sizes = {"slots": 32, "seq": 8192, **sizes}
    layout = Layout.parse(layout)
    cluster = cluster_of("h100-80gb", devices=layout.num_devices)
    return estimate_inference(workload_of(model), cluster, layout, **sizes)


def test_a_decode_step_takes_as_long_as_its_bytes():
    found = estimated()
    device = found.cluster.device
    # 80 layers x 2 x 1 head of 128 x 2 bytes x 8192 tokens x 32 requests.
    assert found.cache_bytes == 80 * 2 * 128 * 2 * 8192 * 32
    assert found.parameter_bytes == pytest.approx(2 * 70.55e9 / 8, rel=1e-3)
    read = found.parameter_bytes + found.cache_bytes
    memory_s = read / (device.memory_bytes_per_s * device.efficiency.memory)
    parts = found.as_json()["roofline"]
    assert parts["memory"] == pytest.approx(memory_s, rel=1e-6)
    assert parts["compute"] < memory_s
    assert found.bound == "memory"
    assert found.decode_s == pytest.approx(memory_s + parts["tensor"])


def test_more_slots_give_more_tokens_until_they_do_not_fit():
    table = estimated().table()
    rates = [one.tokens_per_s for one in table]
    assert rates == sorted(rates)
    assert table[-1].fits
    assert not table[-1].with_slots(2 * table[-1].slots).fits


@pytest.mark.parametrize(
    ("layout", "heads", "kv_heads"),
    [
        ("tensor=2", 8, 4),
        ("data=2", 8, 4),
        ("context=2", 8, 4),
        ("tensor=4", 8, 2),
        ("tensor=4", 12, 6),
        ("tensor=4", 6, 3),
        ("tensor=4", 4, 1),
    ],
)
def test_the_cache_and_the_weights_are_the_program_s(layout, heads, kv_heads):
    layout = Layout.parse(layout)
    cluster = cluster_of("h100-80gb", devices=layout.num_devices)
    words = f"layers=4,hidden=128,heads={heads},kv_heads={kv_heads},head_dim=16,ffn=384"
    workload = workload_of(f"{words},vocab=256,gated=true")
    found = estimate_inference(workload, cluster, layout, slots=4, seq=64)
    model = build("tiny", heads=heads, kv_heads=kv_heads, head_dim=16)
    devices = jax.devices()[: layout.num_devices]
    programs = Programs.from_model(model, layout, slots=4, max_seq=64, devices=devices)
    assert found.cache_bytes == programs.plan.bytes_per_device()
    stacked = jax.tree.map(
        lambda one: stored_shape(one, layout.param_dtype),
        model.parameters,
        is_leaf=is_parameter,
    )
    arrays, shardings = (
        jax.tree.leaves(tree) for tree in (stacked, programs.stacked_shardings)
    )
    held = sum(
        4 * math.prod(sharding.shard_shape(array.shape))
        for array, sharding in zip(arrays, shardings, strict=True)
    )
    # Norms are whole on each device; the estimate splits all but attention.
    assert found.parameter_bytes == pytest.approx(held, rel=0.01)


def test_a_hop_between_hosts_leaves_by_one_port():
    found = estimated(layout=f"stage=4,tensor=4,microbatches=4,{BF16}")
    link = found.cluster.link(found.layout, "stage")
    assert link.port_bytes_per_s < link.bytes_per_s
    of_one_s = 32 / 4 * 8192 * 2 / link.port_bytes_per_s  # requests, values, bf16
    hops = 4 + 3
    seconds = found.as_json()["roofline"]["stage"]
    assert seconds == pytest.approx(hops * (of_one_s + link.hop_s))


def test_microbatches_are_of_stages_alone():
    plain, cut = (
        estimated(layout=f"tensor=8,{more}{BF16}").as_json()["roofline"]
        for more in ("", "microbatches=4,")
    )
    assert cut == plain
    few, many = (
        estimated(layout=f"stage=8,microbatches={number},{BF16}", slots=4)
        for number in (4, 64)
    )
    # 4 requests make no more than 4 microbatches.
    assert many.decode_s == few.decode_s
    assert many.prefill_s == few.prefill_s
    one = estimated(layout=f"stage=8,{BF16}", slots=4)
    read = few.as_json()["roofline"]["memory"] - one.as_json()["roofline"]["memory"]
    device = one.cluster.device
    speed = device.memory_bytes_per_s * device.efficiency.memory
    assert read == pytest.approx(3 * one.parameter_bytes / speed)


def test_sizes_that_do_not_fit_together_are_refused(refuses):
    with refuses("generation.indivisible_slots", "slots=3", 2):
        estimated(layout=f"data=2,{BF16}", slots=3)
    with refuses("generation.prompt_too_long", "prompt=99", "seq=8"):
        estimated(seq=8, prompt=99)


def test_the_command_answers_for_generation(capsys, refuses_command):
    words = ["estimate", "--preset", "llama3-70b", "--seq", "8192", "--slots", "32"]
    assert main([*words, "--layout", f"tensor=8,{BF16}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["total_bytes"] == round(estimated().total_bytes)
    assert found["by_slots"][0]["slots"] == 1
    assert main([*words, "--layout", "tensor=2"]) == 1
    assert "does not fit" in capsys.readouterr().out
    words = ["estimate", "--preset", "llama3-8b", "--layout", "data=1", "--prompt", "3"]
    refuses_command(words, "command.prompt_without_slots", "--prompt", "--slots")
