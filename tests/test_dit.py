"""A Diffusion Transformer equals the plain one, and its planner knows its sizes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import Layout, Scope, lint, make_train_step
from meshpar.model.tracing import forward, loss
from meshpar.models.layers.patches import to_images, to_patches
from meshpar.models.presets import build, configure
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.from_model import traced_workload
from meshpar.planner.inference import estimate_inference
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import MESHPAR
from meshpar.planner.workload.problems import layout_problems
from meshpar.planner.workload.shapes import OTHER_SHAPES
from tests import test_zoo
from tests.marks import slow
from tests.states import normal_values
from tests.zoo import diffusion
from tests.zoo.diffusion import CLASSES, DIT, DIT_V, batch, config

model = functools.cache(diffusion.model)


def params_of(made):
    return jax.device_put(normal_values(jax.eval_shape(made.init, 0), scale=0.2))


@pytest.mark.parametrize(
    "layout",
    [
        slow("context=2,attention=ring"),
        slow("context=8,attention=ring"),
        slow("context=4,attention=allgather"),
        slow("data=2,context=4,attention=ulysses"),
        slow("context=4,attention=ulysses:2+ring:2"),
        slow("fsdp=2,context=2,tensor=2,attention=ring"),
        slow("context=2,tensor=2,sequence_parallel=true"),
        slow("stage=2,context=2,microbatches=4"),
        slow("data=2,stage=2,microbatches=4,schedule=1f1b,remat=full"),
        slow("fsdp=4,tensor=2,remat=selective"),
    ],
)
def test_devices_that_share_an_image_train_as_plain_flax_does(layout):
    test_zoo.check("dit", layout, 4)


@pytest.mark.parametrize("layout", [slow("fsdp=2,tensor=2,stage=2,microbatches=4")])
def test_v_prediction_trains_as_plain_flax_does(layout, monkeypatch):
    monkeypatch.setitem(test_zoo.ZOO, "dit_v", DIT_V)
    test_zoo.check("dit_v", layout, 4)


@pytest.mark.slow
def test_v_prediction_has_the_plain_loss():
    params = jax.jit(model(2, "v").init)(3)
    scope = Scope(
        examples=jnp.arange(8),
        random=jax.random.fold_in(
            jax.random.fold_in(jax.random.key(3), np.uint32(0xD0)), 0
        ),
        training=True,
    )
    found = jax.jit(lambda params: loss(model(2, "v"), params, batch(), scope))(params)
    whole = test_zoo.train(DIT_V.ends, DIT_V.groups(2), batch(), DIT_V.loss)
    assert float(found) == pytest.approx(whole.losses[0], rel=1e-5)


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({"layers": 0}, ("value.below_one", "layers=0", 1)),
        ({"image": 9}, ("model.patch_indivisible", "image=9", "patch=2")),
        ({"heads": 3}, ("model.heads_indivisible", "embed=128", "heads=3")),
        (
            {"embed": 18, "heads": 3},
            ("model.embed_indivisible_by_four", "embed=18", 4),
        ),
        (
            {"prediction": "noise"},
            ("model.unknown_prediction", "prediction='noise'", "flow", "v"),
        ),
        ({"label_dropout": 1.0}, ("model.dropout_out_of_range", "dropout=1.0", 0, 1)),
        (
            {"patches": 4},
            ("model.unknown_size", "DiTConfig", "'patches'", "'patch'"),
        ),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(changes, refusal, refuses):
    with refuses(*refusal):
        configure("tiny-dit", **changes)


# Peebles and Xie 2023, table 4, with twice the output channels and a frozen table of
# positions.
@pytest.mark.parametrize(
    "preset, published",
    [("dit-s2", 33e6), ("dit-b2", 130e6), ("dit-l2", 458e6), ("dit-xl2", 675e6)],
)
def test_a_preset_has_about_the_published_number_of_parameters(preset, published):
    assert build(preset).num_parameters == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize("preset", ["tiny-dit", "dit-xl2"])
def test_a_preset_is_clean_under_the_rules_of_a_layout(preset):
    layout = Layout.parse("fsdp=2,tensor=2,sequence_parallel=true")
    assert lint(build(preset), layout).findings == ()


def test_patches_are_cut_row_by_row_and_put_back():
    images = jax.random.normal(jax.random.key(0), (2, 6, 6, 3))
    patches = to_patches(images, 2)
    assert patches.shape == (2, 9, 12)
    np.testing.assert_array_equal(patches[1, 5].reshape(2, 2, 3), images[1, 2:4, 4:6])
    np.testing.assert_array_equal(to_images(patches, 2), images)


def test_labels_are_dropped_in_training_alone_and_as_often_as_said():
    made = model(1)
    params, given = params_of(made), batch()
    given["times"] = np.linspace(0, 1, 8, dtype=np.float32)
    known = dict(examples=jnp.arange(8), random=jax.random.key(1))

    @jax.jit
    def condition(labels, training):
        def run(scope):
            return forward(made, params, {**given, "labels": labels}, scope)

        streams = [run(Scope(**known, training=one)) for one in (True, False)]
        return jnp.where(training, *(stream["condition"] for stream in streams))

    none = np.full(8, CLASSES)
    labelled, dropped = (condition(given["labels"], one) for one in (False, True))
    np.testing.assert_array_equal(labelled, condition(given["labels"], False))
    differs = np.any(labelled != dropped, axis=-1)
    assert 0 < differs.sum() < 8
    without = condition(none, False)
    np.testing.assert_array_equal(dropped[differs], without[differs])


def test_an_image_of_weight_0_does_not_count():
    made = model(1)
    params, given = params_of(made), batch()
    given |= {"times": np.full(8, 0.5, np.float32), "targets": given["patches"] / 2}
    mean = jax.jit(lambda batch: loss(made, params, batch))
    changed = {**given, "patches": given["patches"].copy()}
    changed["patches"][7] += 1  # its weight is 0
    assert float(mean(changed)) == float(mean(given))


@pytest.mark.parametrize(
    "name, key",
    [
        ("times", "batch.times_without_targets"),
        ("targets", "batch.targets_without_times"),
    ],
)
def test_times_or_targets_alone_have_no_loss(name, key, refuses):
    given = batch()
    both = {"times": np.zeros(8, np.float32), "targets": given["patches"]}
    scope = Scope(examples=jnp.arange(8), random=jax.random.key(0))
    alone = {**given, name: both[name]}
    params = jax.eval_shape(model(1).init, 0)
    with refuses(key, "'times'", "'targets'"):
        jax.eval_shape(lambda params: loss(model(1), params, alone, scope), params)


def test_images_of_another_size_are_refused_by_name(refuses):
    step = make_train_step(
        model(1), optax.sgd(0.1), "data=1", devices=jax.devices()[:1]
    )
    given = {**batch(), "patches": np.zeros((8, 9, 8), np.float32)}
    with refuses("batch.wrong_shape", "batch['patches']", (8, 9, 8)):
        step.compile(given)


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_the_planner_counts_the_parameters_of_a_preset(name):
    made, known = build(name), OTHER_SHAPES[name]
    assert known.num_parameters == made.num_parameters
    assert known.seq == configure(name).tokens


@functools.cache
def traced_small(seq):
    return traced_workload(build("dit-s2"), seq=seq)


@pytest.mark.parametrize("remat", ["none", "selective", "dots", "full"])
def test_a_block_does_and_keeps_what_the_planner_says(remat):
    """As traced here, without a GPU's fused attention; the condition is left out."""
    known = OTHER_SHAPES["dit-s2"]
    traced = traced_small(known.seq)
    assert traced.model_flops(global_batch=1, seq=256) == pytest.approx(
        known.model_flops(global_batch=1, seq=256), rel=0.01
    )
    by_size, by_trace = (
        estimate(
            workload,
            cluster_of("h100-80gb", devices=1),
            f"precision=bf16,remat={remat}",
            global_batch=1,
            execution=dataclasses.replace(MESHPAR, fused_attention=False),
        ).memory.activation_bytes
        for workload in (known, traced)
    )
    assert by_size == pytest.approx(by_trace, rel=0.03)


def test_a_patch_is_not_split_and_all_patches_see_each_other():
    known = OTHER_SHAPES["dit-12b"]
    layout = Layout.parse("tensor=36,precision=bf16")  # 36 heads, 16 numbers a patch
    assert layout_problems(known, layout, global_batch=1, seq=known.seq) == []
    causal = dataclasses.replace(known, causal=True)
    one, two = (
        estimate(
            workload,
            cluster_of("h100-80gb", devices=8),
            "fsdp=8,remat=full,precision=bf16",
            global_batch=8,
        ).time.compute_s
        for workload in (causal, known)
    )
    assert two > 1.2 * one


def test_an_image_has_the_patches_that_it_has_and_no_next_token(refuses):
    known, cluster = OTHER_SHAPES["dit-xl2"], cluster_of("h100-80gb", devices=1)
    with refuses("plan.seq_not_patches", 512, "dit-xl2", 256):
        estimate(known, cluster, "data=1", global_batch=1, seq=512)
    with refuses("generation.not_causal", "dit-xl2"):
        estimate_inference(known, cluster, "data=1", slots=1, seq=256)


def test_noise_is_of_the_tokens_at_hand():
    known = dict(random=jax.random.key(0), examples=jnp.arange(2))
    whole = Scope(**known).normal((2, 6, 3), "noise")
    places = jnp.array([4, 1])
    share = Scope(**known, token_positions=places, full_seq=6)
    np.testing.assert_array_equal(share.normal((2, 2, 3), "noise"), whole[:, places])
    assert share.uniform("time").tolist() == Scope(**known).uniform("time").tolist()
    assert not np.array_equal(whole, Scope(**known).normal((2, 6, 3), "other"))


@pytest.mark.parametrize("shape", [(3, 6), (2,)])
def test_noise_of_other_examples_is_refused(shape, refuses):
    scope = Scope(random=jax.random.key(0), examples=jnp.arange(2))
    with refuses("model.normal_wrong_examples", "'noise'", shape, "2 examples"):
        scope.normal(shape, "noise")


def test_a_config_of_the_zoo_is_that_of_its_model():
    assert DIT.model(4).num_layers == config(4).layers
