"""Collectives of emulated devices: none is paired with another one's."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshpar import Layout, make_mesh, make_train_step, pipeline_value_and_grad
from meshpar.machine import collective_channels
from meshpar.models.presets import build
from meshpar.testing.batches import random_batch
from meshpar.testing.equivalence import quick_compile_options
from tests.collectives_beside_loops import beside_loops, unordered
from tests.marks import slow

T5 = {
    **{"encoder_layers": 3, "decoder_layers": 2, "embed": 32, "heads": 4, "ffn": 64},
    **{"vocab": 64, "logits_bytes": 2000},
}
DIT = {"layers": 3, "embed": 48, "heads": 6, "image": 12}

H1 = "stage=2,microbatches=2,schedule=zero_bubble_h1"
V = "stage=2,microbatches=4,schedule=zero_bubble_v,chunks=2"
STASH = "stage=2,microbatches=4,schedule=pipedream_stash"

LOOP = """
HloModule program, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %at = s32[] get-tuple-element(%state), index=0
  %x = f32[4]{0} get-tuple-element(%state), index=1
  %summed = f32[4]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%add
  ROOT %next = (s32[], f32[4]{0}) tuple(%at, %summed)
}

%goes_on (state.1: (s32[], f32[4])) -> pred[] {
  %state.1 = (s32[], f32[4]{0}) parameter(0)
  ROOT %yes = pred[] constant(false)
}

ENTRY %main (p: f32[4], q: f32[4]) -> (f32[4], f32[4]) {
  %p = f32[4]{0} parameter(0)
  %q = f32[4]{0} parameter(1)
  %zero = s32[] constant(0)
  %first = (s32[], f32[4]{0}) tuple(%zero, %p)
  %loop = (s32[], f32[4]{0}) while(%first), condition=%goes_on, body=%body
  %left = f32[4]{0} get-tuple-element(%loop), index=1
  %beside = f32[4]{0} all-reduce(GIVEN), channel_id=CHANNEL, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%add
  ROOT %both = (f32[4]{0}, f32[4]{0}) tuple(%left, %beside)
}
"""  # noqa: E501


def program(model, layout, examples):
    step = make_train_step(
        *(model, optax.sgd(0.1), layout),
        devices=jax.devices()[: Layout.parse(layout).num_devices],
        compiler_options=quick_compile_options("cpu"),
    )
    return step.compile(random_batch(model, examples, 16, 0)).as_text()


@pytest.mark.parametrize(
    ("given", "channel", "found"),
    [
        ("%q", "1", [("loop", "beside")]),
        ("%left", "1", []),
        ("%q", "2", []),
    ],
)
def test_what_stands_beside_a_loop_is_found(given, channel, found):
    text = LOOP.replace("GIVEN", given).replace("CHANNEL", channel)
    assert beside_loops(text) == found


@pytest.mark.slow
def test_no_collective_shares_its_channel_with_a_loop_beside_it():
    layout = "fsdp=2,context=4,fsdp_prefetch=on,remat=dots"
    text = program(build("tiny", layers=3), layout, 20)
    assert beside_loops(text) == []
    assert beside_loops(re.sub(r"channel_id=\d+", "channel_id=1", text)) != []


@pytest.mark.parametrize(
    ("preset", "sizes", "layout", "examples"),
    [
        ("tiny", {"layers": 4}, f"{H1},data=2,zero=2", 16),
        # A layer, and the same layer computed again.
        slow(
            *("tiny", {"layers": 1}),
            *("context=4,tensor=2,microbatches=5,remat=selective", 20),
        ),
        # The embeddings of a pipeline's phase, and the phase before it.
        slow(
            "tiny-dit",
            DIT,
            "fsdp=2,stage=2,context=2,microbatches=3,schedule=gpipe",
            12,
        ),
        # Stages computed again.
        slow("tiny-dit", DIT, "stage=2,context=2,microbatches=5,remat=stage", 20),
        slow("tiny", {"layers": 4}, "stage=2,tensor=2,fsdp=2,microbatches=4", 16),
        slow("tiny", {"layers": 4}, f"{V},fsdp=2,execution=divergent", 16),
        slow("tiny", {"layers": 4}, f"{H1},fsdp=4,zero=2,remat=full", 16),
        slow("tiny-moe", {}, f"{H1},expert=2", 16),
        slow("tiny-moe", {}, f"{H1},expert=2,execution=divergent", 16),
        slow("tiny", {"layers": 4, "tied": False}, f"{STASH},data=2", 16),
        slow("tiny-t5", T5, f"{H1},data=2", 8),
        slow("tiny", {"layers": 4}, "fsdp=4,microbatches=2,fsdp_prefetch=on", 16),
    ],
)
def test_what_ticks_send_stands_in_one_order(preset, sizes, layout, examples):
    """Without an order, each of two devices can wait for what the other has left."""
    assert unordered(program(build(preset, **sizes), layout, examples)) == []


def test_the_sum_of_weights_stands_before_the_first_tick():
    run = pipeline_value_and_grad(
        lambda w, x: x + jnp.tanh(x @ w),
        lambda scale, x, y: jnp.mean((scale * x - y) ** 2),
        mesh=make_mesh("stage=2", devices=jax.devices()[:2]),
        num_microbatches=2,
        chunks=2,
        schedule="interleaved_1f1b",
        splits=(1, 2, 3, 1),
    )
    x = jnp.ones((8, 8))
    jitted = jax.jit(run, compiler_options=quick_compile_options("cpu"))
    lowered = jitted.lower(jnp.ones((7, 8, 8)), jnp.ones(()), x, x)
    assert unordered(lowered.compile().as_text()) == []


@pytest.mark.parametrize(
    "layout", [slow("data=2,zero=2"), slow("data=4,tensor=2,zero=2")]
)
def test_a_decoders_gradients_share_no_channel_with_the_encoders_backward(layout):
    assert beside_loops(program(build("tiny-t5", **T5), layout, 4)) == []


def shared(function):
    """A function of each device's rows of a (4, 4) array, and such an array's shape."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    spec = PartitionSpec("data")
    x = jax.ShapeDtypeStruct((4, 4), "float32", sharding=NamedSharding(mesh, spec))
    return jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    ), x


def compiled(function):
    function, x = shared(function)
    return jax.jit(function).lower(x).compile()


def of_each_kind(x):
    whole = lax.all_gather(x, "data")
    parts = lax.all_to_all(whole, "data", 0, 0).sum(0)
    summed = lax.psum_scatter(whole, "data") + lax.pmax(x, "data")
    return parts + summed + lax.psum(x, "data") + lax.ppermute(x, "data", [(0, 1)])


def three_sums(x):
    return lax.scan(lambda x, _: (lax.psum(jnp.sin(x), "data"), None), x, length=3)[0]


def one_body_in_two_loops(x):
    def body(x, _):
        return lax.psum(jnp.sin(x), "data"), None

    return sum(lax.scan(body, n * x, length=3)[0] for n in (1, 2))


def one_function_of_another_called_twice(x):
    inner = jax.jit(three_sums)
    outer = jax.jit(lambda x: inner(x) + inner(2 * x))
    return outer(x) + outer(3 * x)


def a_function_of_a_composite_called_twice(x):
    summed = lax.composite(lambda x: lax.psum(jnp.sin(x), "data"), "one.sum")

    def function(x):
        return lax.scan(lambda x, _: (summed(x), None), x, length=3)[0]

    function = jax.jit(function)
    return function(x) + function(2 * x)


def computed_again_twice(x):
    function = jax.checkpoint(lambda x: jnp.sin(three_sums(x)))
    return jax.grad(lambda x: (function(x) + function(2 * x)).sum())(x)


@pytest.mark.parametrize(
    ("function", "loops"),
    [
        (one_body_in_two_loops, 2),
        (one_function_of_another_called_twice, 4),
        (a_function_of_a_composite_called_twice, 2),
        (computed_again_twice, 4),
    ],
)
def test_loops_that_are_written_down_once_share_no_channel(function, loops):
    text = compiled(function).as_text()
    found = re.findall(r" all-reduce\(.*channel_id=(\d+)", text)
    assert len(set(found)) == len(found) >= loops
    assert beside_loops(text) == []


def test_an_exported_function_that_is_called_twice_shares_no_channel():
    function, x = shared(three_sums)
    exported = jax.export.export(jax.jit(function), platforms=["cpu"])(x)
    twice = jax.jit(lambda x: exported.call(x) + exported.call(2 * x))
    assert beside_loops(twice.lower(x).compile().as_text()) == []


def test_functions_that_are_copied_give_what_they_gave():
    function = compiled(one_function_of_another_called_twice)
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    _, shape = shared(three_sums)

    def sums(x):
        for _ in range(3):
            x = np.tile(np.sin(x).reshape(2, 2, 4).sum(0), (2, 1))
        return x

    expected = sum(sums(n * x) for n in (1, 2, 3, 6))
    found = function(jax.device_put(x, shape.sharding))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_each_kind_has_a_channel_of_its_own():
    found = re.findall(r"channel_id=(\d+)", compiled(of_each_kind).as_text())
    assert len(set(found)) == len(found) == 6


def gathered_twice(x):
    return jnp.sin(lax.all_gather(x, "data"))[0] + lax.all_gather(x, "data")[1]


def moved_twice(x):
    def moved(x):
        return lax.ppermute(x, "data", [(0, 1), (1, 0)])

    return jnp.sin(moved(x)) + moved(x)


@pytest.mark.parametrize("function", [gathered_twice, moved_twice])
def test_equal_collectives_are_still_made_one(function):
    assert len(re.findall(r"channel_id=", compiled(function).as_text())) == 1


@pytest.mark.parametrize("platforms", [("tpu",), ("cpu", "tpu")])
def test_programs_of_other_platforms_stay_as_they_are(platforms):
    function, x = shared(of_each_kind)
    text = jax.jit(function).trace(x).lower(lowering_platforms=platforms).as_text()
    assert set(re.findall(r"channel_handle<handle = (\d+)", text)) == {"1"}


def test_a_jax_that_lowers_otherwise_is_told(monkeypatch):
    monkeypatch.setattr(collective_channels, "_LOWER", "lower_in_another_way")
    with pytest.warns(UserWarning, match="meshpar.* JAX"):
        collective_channels.give_own_channels.__wrapped__()
