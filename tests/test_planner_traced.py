"""A model of one's own becomes a workload by tracing its blocks."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import pytest

from meshpar import BlockGroup, Parameter
from meshpar.cli.main import main
from meshpar.models.presets import build
from meshpar.parallel.sizes import LOGITS_BYTES
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.cost.memory import fullest_memory
from meshpar.planner.from_model import traced_workload
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import MESHPAR
from meshpar.planner.workload.shapes import SHAPES
from tests.marks import slow


@functools.cache
def traced_preset(name, seq, **options):
    """The workload of a preset."""
    return traced_workload(build(name), seq=seq, **options)


@pytest.mark.parametrize(
    "words",
    [
        ["tiny-vit"],
        ["tiny-t5", "--seq", "32"],
        ["tiny-gemma3", "--seq", "32"],
        slow(["tiny-pair"]),
        slow(["tiny-afno"]),
    ],
    ids=lambda words: words[0],
)
def test_presets_of_every_family_are_planned_by_their_trace(words, capsys):
    layout = ["--layout", "fsdp=2,precision=bf16", "--global-batch", "4"]
    assert main(["estimate", "--preset", *words, *layout, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    # In fp32 with Adam's two moments, each over two devices.
    count = build(words[0]).num_parameters
    assert memory["parameter_bytes"] == pytest.approx(4 * count / 2, rel=0.01)
    assert memory["optimizer_bytes"] == pytest.approx(8 * count / 2, rel=0.01)


def test_the_fullest_block_and_the_batch_are_counted():
    decoder_takes_more = traced_preset("tiny-t5", 32)
    needed = decoder_takes_more.traced.needed
    # Of a decoder's blocks, which keep what the encoder made beside their own stream.
    assert needed.fullest["none"] > needed.mean["none"]
    assert needed.fullest["full"] == pytest.approx(
        4 / 3 * needed.mean["full"], rel=0.01
    )
    run = estimate(
        decoder_takes_more,
        cluster_of("h100-80gb", devices=2),
        "fsdp=2,remat=full,precision=bf16",
        global_batch=8,
        seq=32,
        execution=MESHPAR,
    ).run
    # Source and target tokens, labels and weights, of 4 sequences on a device.
    assert fullest_memory(run).batch_bytes == 4 * 32 * 4 * 4


def test_a_traced_backward_holds_all_that_it_needs_beside_gradients():
    """Bytes of a GELU block: its MLP's hidden values and their gradient, 8 h.

    Of the width of the stream both norms' outputs, queries, keys, values, mixed values
    and attention's output, and gradients of the last two, of the stream and of its sum.
    """
    workload = traced_preset("tiny-gpt2", SEQ, precision="bf16")
    scores = 8 * workload.heads * SEQ  # softmax, and its gradient in fp32 and cast
    values = workload.traced.backward(True, True).bytes - scores
    assert values / (2 * workload.hidden) == pytest.approx(8 + 7 + 4, rel=0.02)
    in_order, last = (workload.traced.backward(one, True) for one in (False, True))
    # Without scores the fullest moment is the MLP's, of which nothing is made yet.
    assert workload.traced.backward(True, False).bytes < last.bytes
    assert in_order.bytes < last.bytes
    assert last.stream_bytes / (2 * workload.hidden) == pytest.approx(5, rel=0.02)


SEQ = 256
"""Of all that ask of a preset in bf16, so that each is traced once."""


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2", slow("test"), "smollm2-135m"])
def test_a_known_model_traces_to_its_own_sizes(name):
    seq = SEQ
    traced, known = traced_preset(name, seq, precision="bf16"), SHAPES[name]
    assert traced.num_parameters == known.num_parameters
    assert traced.model_flops(global_batch=2, seq=seq) == pytest.approx(
        known.model_flops(global_batch=2, seq=seq), rel=1e-6
    )


def test_residuals_shrink_with_remat_down_to_the_input():
    workload = traced_preset("tiny", SEQ, precision="bf16")
    kept = workload.traced.needed.mean
    # The block's input, and constants of a few bytes.
    assert kept["full"] == pytest.approx(2 * workload.hidden, rel=0.01)
    assert kept["full"] < kept["dots"] < kept["selective"] < kept["none"]


def test_attention_in_a_kernel_keeps_no_softmax():
    workload = traced_preset("tiny", SEQ, precision="bf16")
    kept = workload.traced.needed.mean
    in_kernel = workload.traced.kernel_needed().mean
    softmax = 2 * workload.heads * SEQ  # of a token, in bf16
    assert kept["none"] - in_kernel["none"] == pytest.approx(softmax, rel=0.1)
    assert kept["full"] == pytest.approx(in_kernel["full"], rel=1e-3)


def test_estimates_of_a_traced_model_are_near_those_of_its_sizes():
    model, known = build("smollm2-135m"), SHAPES["smollm2-135m"]
    traced = traced_workload(model, seq=2048)
    cluster = cluster_of("h100-80gb", devices=8)
    layout = "fsdp=8,precision=bf16,remat=full"
    ours, theirs = (
        estimate(workload, cluster, layout, global_batch=64, seq=2048)
        for workload in (traced, known)
    )
    assert ours.step_s == pytest.approx(theirs.step_s, rel=0.1)
    assert ours.memory.optimizer_bytes == pytest.approx(theirs.memory.optimizer_bytes)
    assert ours.memory.activation_bytes == pytest.approx(
        theirs.memory.activation_bytes, rel=0.001
    )


def routed_model():
    """Every token through all four experts, weighted: dots with a batch dim."""

    def matrix(*shape, axes):
        return Parameter(
            shape=shape,
            logical_axes=axes,
            dtype=jnp.float32,
            initial=lambda key: 0.02 * jax.random.normal(key, shape),
            num_layers=2,
        )

    def block(params, x, scope):
        gates = jax.nn.softmax(x @ params["router"])
        hidden = jnp.einsum("btd,edf->ebtf", x, params["up"].astype(x.dtype))
        out = jnp.einsum("ebtf,efd->ebtd", jax.nn.relu(hidden), params["down"])
        return x + jnp.einsum("ebtd,bte->btd", out, gates)

    base = build("tiny")
    blocks = {
        "router": matrix(128, 4, axes=("embed", "heads")),
        "up": matrix(4, 128, 64, axes=("experts", "embed", "mlp")),
        "down": matrix(4, 64, 128, axes=("experts", "mlp", "embed")),
    }
    ends, _ = base.split(base.parameters)
    group = BlockGroup(name="blocks", num_layers=2, block=block)
    return dataclasses.replace(
        base, parameters={**ends, "blocks": blocks}, groups=(group,)
    )


def test_dots_with_weights_are_told_from_dots_between_activations():
    workload = traced_workload(routed_model(), seq=32)
    weights = 128 * 4 + 4 * 2 * 128 * 64
    assert workload.traced.parameters == weights
    assert workload.traced.linear_flops == 2 * weights
    assert workload.traced.mixing_flops == 2 * 4 * 128


def test_a_model_without_heads_counts_as_one_with_one():
    model = routed_model()
    blocks = {
        name: dataclasses.replace(
            parameter,
            logical_axes=tuple(
                None if axis == "heads" else axis for axis in parameter.logical_axes
            ),
        )
        for name, parameter in model.parameters["blocks"].items()
    }
    headless = dataclasses.replace(
        model, parameters={**model.parameters, "blocks": blocks}
    )
    found = traced_workload(headless, seq=32)
    assert (found.heads, found.traced.parameters) == (1, 128 * 4 + 4 * 2 * 128 * 64)


def test_a_block_may_read_its_batch_and_a_head_says_how_many_logits_it_makes():
    base = build("test")

    def block(params, x, scope):
        return base.groups[0].block(
            params, x * scope.batch["weights"][..., None].astype(x.dtype), scope
        )

    group = dataclasses.replace(base.groups[0], block=block)
    reading = dataclasses.replace(base, groups=(group,))
    assert traced_workload(reading, seq=32).logits_bytes == LOGITS_BYTES
    few = traced_workload(build("test", logits_bytes=2**16), seq=32)
    assert few.logits_bytes == 2**16
    assert traced_workload(build("test", logits_bytes=0), seq=32).logits_bytes == 0


@pytest.mark.parametrize("remat", ["none", "selective", "dots", "full"])
@pytest.mark.parametrize(
    "name, precision",
    [
        ("tiny", "bf16"),
        ("tiny", "fp32"),
        ("tiny-gpt2", "bf16"),
        ("smollm2-135m", "bf16"),
        slow("tiny-gpt2", "fp32"),
        slow("smollm2-135m", "fp32"),
    ],
)
def test_our_blocks_keep_what_the_planner_says(name, remat, precision):
    """As traced here, without a GPU's fused attention."""
    seq = SEQ
    sized = dataclasses.replace(SHAPES[name], seq=seq)
    traced = traced_preset(name, seq, precision=precision)
    by_size, by_trace = (
        estimate(
            workload,
            cluster_of("h100-80gb", devices=1),
            f"precision={precision},remat={remat}",
            global_batch=1,
            seq=seq,
            execution=dataclasses.replace(MESHPAR, fused_attention=False),
        ).memory.activation_bytes
        for workload in (sized, traced)
    )
    assert by_size == pytest.approx(by_trace, rel=0.02)
