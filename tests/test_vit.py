"""A ViT refuses sizes that do not fit, and pools and weighs as it says."""

import jax
import numpy as np
import optax
import pytest

from meshpar import Layout, Scope, lint, make_train_step
from meshpar.model.tracing import forward, loss
from meshpar.models.presets import build, configure
from tests.states import normal_values

SMALL = dict(image=8, patch=4, channels=1, embed=16, heads=4, layers=2)


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({"layers": 0}, ("value.below_one", "layers=0", 1)),
        ({"image": 30}, ("model.patch_indivisible", "image=30", "patch=8")),
        ({"heads": 3}, ("model.heads_indivisible", "embed=128", "heads=3")),
        (
            {"pooling": "max"},
            ("model.unknown_pooling", "pooling='max'", "class_token", "mean"),
        ),
        ({"dropout": 1.0}, ("model.dropout_out_of_range", "dropout=1.0", 0, 1)),
        ({"ffn": -1}, ("value.negative", "ffn=-1", 0)),
        ({"patch": 2.0}, ("value.not_whole_number", "patch=2.0")),
        ({"pathc": 4}, ("model.unknown_size", "ViTConfig", "'pathc'", "'patch'")),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(changes, refusal, refuses):
    with refuses(*refusal):
        configure("tiny-vit", **changes)


# Dosovitskiy et al. 2021, table 1, with the head of 1,000 classes of their checkpoints.
@pytest.mark.parametrize(
    "preset, published", [("vit-b16", 86_567_656), ("vit-l16", 304_326_632)]
)
def test_a_preset_has_the_published_number_of_parameters(preset, published):
    assert build(preset).num_parameters == published


@pytest.mark.parametrize("preset", ["tiny-vit", "vit-b16"])
def test_a_preset_is_clean_under_the_rules_of_a_layout(preset):
    assert lint(build(preset), Layout.parse("fsdp=2,tensor=2")).findings == ()


def images_of(num_examples):
    rng = np.random.default_rng(0)
    pixels = rng.normal(size=(num_examples, 8, 8, 1)).astype(np.float32)
    return {"images": pixels, "labels": rng.integers(0, 10, num_examples)}


@pytest.mark.parametrize("pooling, tokens", [("class_token", 5), ("mean", 4)])
def test_a_class_token_is_one_token_more(pooling, tokens):
    model = build("tiny-vit", **SMALL, pooling=pooling)
    stream = jax.eval_shape(
        lambda: forward(model, model.init(0), images_of(3), Scope())
    )
    assert stream.shape == (3, tokens, 16)


def test_an_image_of_weight_0_does_not_count():
    model = build("tiny-vit", **SMALL)
    shapes, batch = jax.eval_shape(model.init, 0), images_of(4)
    params = jax.device_put(normal_values(shapes))
    mean = jax.jit(lambda batch: loss(model, params, batch))
    alone = mean({name: array[:3] for name, array in batch.items()})
    weighted = mean({**batch, "weights": np.float32([1, 1, 1, 0])})
    assert float(weighted) == pytest.approx(float(alone), rel=1e-6)


def test_images_of_another_size_are_refused_by_name(refuses):
    devices = jax.devices()[:1]
    model = build("tiny-vit", **SMALL)
    step = make_train_step(model, optax.sgd(0.1), "data=1", devices=devices)
    batch = {"images": np.zeros((2, 6, 8, 1)), "labels": np.zeros(2, np.int32)}
    with refuses("batch.wrong_shape", "batch['images']", (2, 6, 8, 1)):
        step.compile(batch)
