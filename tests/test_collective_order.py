"""No collective stands behind a loop that XLA:CPU would let it run beside."""

import jax
import optax
import pytest

from meshpar import Layout, make_train_step
from meshpar.models.presets import build
from meshpar.testing.batches import random_batch
from meshpar.testing.quick_compile import quick_compile_options
from tests.collectives_behind_loops import behind_loops

SIZES = {"encoder_layers": 3, "decoder_layers": 2, "embed": 32, "heads": 4, "ffn": 64}

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


def program(model, layout, examples=4):
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
    "layout", ["data=2,zero=2", "fsdp=2", "data=4,tensor=2,zero=2"]
)
def test_a_decoders_gradients_wait_for_the_encoders_loop(layout):
    model = build("tiny-t5", **SIZES, vocab=64, logits_bytes=2000)
    assert behind_loops(program(model, layout)) == []


def test_an_embedding_waits_for_the_phase_of_a_pipeline_before_it():
    model = build("tiny-dit", layers=3, embed=48, heads=6, image=12)
    layout = "fsdp=2,stage=2,context=2,microbatches=3,schedule=gpipe,zero=1"
    assert behind_loops(program(model, layout, examples=12)) == []
