"""Collectives of emulated devices: none is paired with another one's."""

import re

import jax
import optax
import pytest
from jax import lax
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from meshpar import Layout, make_train_step
from meshpar.collective_channels import give_own_channels
from meshpar.models.presets import build
from meshpar.testing.batches import random_batch
from meshpar.testing.quick_compile import quick_compile_options
from tests.collectives_behind_loops import behind_loops

T5 = {
    **{"encoder_layers": 3, "decoder_layers": 2, "embed": 32, "heads": 4, "ffn": 64},
    **{"vocab": 64, "logits_bytes": 2000},
}
DIT = {"layers": 3, "embed": 48, "heads": 6, "image": 12}

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
  %beside = f32[4]{0} all-reduce(GIVEN), channel_id=1, replica_groups=GROUPS, use_global_device_ids=true, to_apply=%add
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
    ("given", "groups", "found"),
    [
        ("%q", "{{0,1}}", [("beside", "loop")]),
        ("%left", "{{0,1}}", []),
        ("%q", "{{0,2}}", []),  # other devices meet there
    ],
)
def test_what_stands_behind_a_loop_is_found(given, groups, found):
    text = LOOP.replace("GIVEN", given).replace("GROUPS", groups)
    assert behind_loops(text) == found


@pytest.mark.parametrize(
    ("preset", "sizes", "layout", "examples"),
    [
        # A decoder's gradients, and the encoder's backward.
        ("tiny-t5", T5, "data=2,zero=2", 4),
        ("tiny-t5", T5, "data=4,tensor=2,zero=2", 4),
        # A layer, and the same layer computed again.
        (
            "tiny",
            {"layers": 1},
            "context=4,tensor=2,microbatches=5,remat=selective",
            20,
        ),
        ("tiny", {"layers": 3}, "fsdp=2,context=4,fsdp_prefetch=on,remat=dots", 20),
        # The embeddings of a pipeline's phase, and the phase before it.
        ("tiny-dit", DIT, "fsdp=2,stage=2,context=2,microbatches=3,schedule=gpipe", 12),
        # Stages computed again.
        ("tiny-dit", DIT, "stage=2,context=2,microbatches=5,remat=stage", 20),
    ],
)
def test_no_collective_is_paired_with_one_of_another_loop(
    preset, sizes, layout, examples
):
    text = program(build(preset, **sizes), layout, examples)
    assert re.search(r"channel_id=\d", text)
    assert behind_loops(text) == []


def whole_sums(x):
    return lax.psum(x, "data") + lax.psum(x * lax.pmax(x, "data"), "data")


def channels(platform):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    spec = PartitionSpec("data")
    summed = jax.shard_map(whole_sums, mesh=mesh, in_specs=spec, out_specs=spec)
    x = jax.ShapeDtypeStruct((4,), "float32", sharding=NamedSharding(mesh, spec))
    text = jax.jit(summed).trace(x).lower(lowering_platforms=(platform,)).as_text()
    return re.findall(r"channel_handle<handle = (\d+)", text)


def test_each_collective_of_emulated_devices_has_a_channel_of_its_own():
    assert len(set(channels("cpu"))) == 3
    assert channels("tpu") == ["1", "1", "1"]  # as JAX gives them


def test_a_jax_that_lowers_collectives_otherwise_is_told(monkeypatch):
    monkeypatch.delattr(mlir, "_lowerings")
    with pytest.warns(UserWarning, match="may be paired wrongly.*version of JAX"):
        give_own_channels.__wrapped__()
