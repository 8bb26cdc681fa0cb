"""A few steps on real data teach models more than the shares of its classes."""

import functools
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from meshpar import Layout, make_train_step
from meshpar.models.presets import build

PLAYS = Path(__file__).parents[1] / "recipes" / "data" / "shakespeare"
BATCH = 64


def trained(model, layout, batches, rate):
    """The step and the state after one step on each batch."""
    layout = Layout.parse(layout)
    devices = jax.devices()[: layout.num_devices]
    step = make_train_step(
        model, optax.adamw(rate), layout, devices=devices, max_grad_norm=1.0
    )
    state = step.init(seed=0)
    for batch in batches:
        state, _ = step(state, batch)
        jax.block_until_ready(state.step)
    return step, state


def entropy(values):
    """The loss of knowing nothing but how frequent each value is, in nats."""
    _, counts = np.unique(values, return_counts=True)
    shares = counts / counts.sum()
    return -np.sum(shares * np.log(shares))


@functools.cache
def digits():
    """Images (examples, 8, 8, 1) of values up to 1, and their labels."""
    datasets = pytest.importorskip(
        "sklearn.datasets", reason="pip install 'meshpar[test]' brings the digits"
    )
    found = datasets.load_digits()
    return found.images[..., None].astype(np.float32) / 16, found.target


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ("data=2,tensor=2", 2),
        ("data=2,stage=2,tensor=2,microbatches=4,schedule=1f1b", 4),
    ],
)
def test_a_vision_transformer_learns_to_read_digits(layout, layers):
    images, labels = digits()
    held_out = len(images) - 4 * BATCH
    rng = np.random.default_rng(0)

    def batches():
        for _ in range(50):
            chosen = rng.integers(0, held_out, BATCH)
            yield {"images": images[chosen], "labels": labels[chosen]}

    sizes = dict(image=8, patch=4, channels=1, layers=layers, embed=32, heads=4)
    model = build("tiny-vit", **sizes, init_std=0.2)
    step, state = trained(model, layout, batches(), rate=5e-3)
    rest = {"images": images[held_out:], "labels": labels[held_out:]}
    evaluation = step.evaluate(state, rest)
    loss_sum = evaluation["loss_sum"]
    weight_sum = evaluation["weight_sum"]
    assert loss_sum / weight_sum < entropy(labels) / 2
    logits = np.asarray(step.logits(state, rest))
    accuracy = np.mean(np.argmax(logits, axis=-1) == rest["labels"])
    most_frequent = np.max(np.bincount(rest["labels"])) / len(rest["labels"])
    assert accuracy > 3 * most_frequent


@pytest.mark.slow
def test_an_encoder_decoder_learns_to_mend_text_on_split_states():
    text = np.frombuffer((PLAYS / "macbeth.txt").read_bytes(), np.uint8)
    rng = np.random.default_rng(0)
    seq, hidden = 16, 0

    def batch():
        """Characters of which some are hidden, and the characters themselves."""
        starts = rng.integers(0, len(text) - seq, BATCH)
        clean = text[starts[:, None] + np.arange(seq)].astype(np.int32)
        return {
            "source_tokens": np.where(rng.random(clean.shape) < 0.15, hidden, clean),
            "target_tokens": np.pad(clean, ((0, 0), (1, 0)))[:, :-1],
            "labels": clean,
            "weights": np.ones(clean.shape, np.float32),
        }

    sizes = dict(embed=32, heads=4, ffn=64, vocab=128, max_seq=seq)
    model = build("tiny-t5", **sizes, init_std=0.1)
    layout = "fsdp=2,stage=2,microbatches=2"
    batches = [batch() for _ in range(60)]
    step, state = trained(model, layout, batches, rate=1e-2)
    evaluation = step.evaluate(state, batch())
    loss_sum = evaluation["loss_sum"]
    weight_sum = evaluation["weight_sum"]
    assert loss_sum / weight_sum < entropy(text) - 0.3
