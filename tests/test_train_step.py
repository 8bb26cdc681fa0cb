"""The training step against a single-device program without any layout."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import (
    DATA_PARALLEL,
    TENSOR,
    Layout,
    RuleError,
    TrainState,
    make_train_step,
)
from meshpar.model.scope import Scope
from meshpar.model.single import loss
from meshpar.models.presets import build
from meshpar.parallel.mean_loss import random_key

BATCH, SEQ = 8, 16
LAYOUTS = ["data=4", "fsdp=2,tensor=2", "data=2,tensor=2,sequence_parallel=true"]
MODELS = {
    "llama": dict(preset="test"),
    "untied": dict(preset="test", tied=False, layers=3),
    "qwen2": dict(preset="test", qkv_bias=True),
    "qwen3": dict(preset="test", qk_norm=True, head_dim=16),
    "gpt2": dict(layers=2, hidden=32, heads=4, vocab=64, max_seq=SEQ),
}


@functools.cache
def model_of(name):
    return build(**MODELS[name])


def batch_of(weights=None):
    tokens = np.random.default_rng(0).integers(0, 64, (BATCH, SEQ + 1), np.int32)
    weights = np.ones((BATCH, SEQ), np.float32) if weights is None else weights
    return dict(tokens=tokens[:, :-1], targets=tokens[:, 1:], weights=weights)


def uneven_weights():
    """Some tokens masked, one example and a whole batch shard masked out."""
    weights = np.random.default_rng(1).integers(0, 2, (BATCH, SEQ)).astype(np.float32)
    weights[0] = 0.0
    weights[-BATCH // 4 :] = 0.0
    return weights


def sgd_step(model, line, **options):
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    return make_train_step(model, optax.sgd(1.0), layout, devices=devices, **options)


@functools.cache
def params_of(model):
    """Initial values, made once: compiling them takes longer than a step."""
    return jax.device_get(jax.jit(model.init)(3))


def state_of(step):
    """The first state of a step, of the shared initial values."""
    params = params_of(step.model)
    state = TrainState(
        step=jnp.int32(0),
        seed=jnp.uint32(3),
        skipped=jnp.int32(0),
        params=params,
        opt_state=optax.sgd(1.0).init(params),
    )
    return jax.device_put(state, step.shardings)


def gradients_of(model, line, batch):
    """Loss and gradients under a layout."""
    step = sgd_step(model, line)
    return jax.device_get(step.loss_and_gradients(state_of(step), batch))


@functools.cache
def plain(name, masked):
    """Loss and gradients of the model alone, on one device."""
    model = model_of(name)
    batch = batch_of(uneven_weights() if masked else None)
    params = params_of(model)
    value_and_grad = jax.jit(jax.value_and_grad(lambda p: loss(model, p, batch)))
    return jax.device_get(value_and_grad(params))


def assert_close(got, wanted, bound=1e-5):
    for path, value in jax.tree.leaves_with_path(wanted):
        other = functools.reduce(lambda tree, key: tree[key.key], path, got)
        error = np.linalg.norm(other - value) / max(np.linalg.norm(value), 1e-8)
        assert error <= bound, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *(("llama", line) for line in LAYOUTS),
        *((name, "data=2,fsdp=2,tensor=2") for name in MODELS),
        ("gpt2", "fsdp=2,tensor=2,sequence_parallel=true"),
    ],
)
def test_loss_and_gradients_equal_those_of_the_model_alone(name, line):
    value, gradients = plain(name, False)
    got_loss, got_gradients = gradients_of(model_of(name), line, batch_of())
    assert got_loss == pytest.approx(float(value), rel=1e-5)
    assert_close(got_gradients, gradients)


@pytest.mark.parametrize("line", LAYOUTS)
def test_masked_tokens_and_empty_shards_do_not_change_the_loss(line):
    value, gradients = plain("llama", True)
    batch = batch_of(uneven_weights())
    got_loss, got_gradients = gradients_of(model_of("llama"), line, batch)
    assert got_loss == pytest.approx(float(value), rel=1e-5)
    assert_close(got_gradients, gradients)


def test_a_batch_without_any_weight_changes_nothing():
    batch = batch_of(np.zeros((BATCH, SEQ), np.float32))
    got_loss, gradients = gradients_of(model_of("llama"), "fsdp=4", batch)
    assert got_loss == 0.0
    assert all(not gradient.any() for gradient in jax.tree.leaves(gradients))


@pytest.mark.parametrize("remat", ["full", "selective", "dots"])
def test_recomputation_changes_no_number(remat):
    value, gradients = plain("llama", False)
    line = f"fsdp=2,tensor=2,remat={remat}"
    got_loss, got_gradients = gradients_of(model_of("llama"), line, batch_of())
    assert got_loss == pytest.approx(float(value), rel=1e-5)
    assert_close(got_gradients, gradients)


def test_recomputing_everything_keeps_fewer_bytes_than_nothing():
    model = build("test", layers=6)
    shapes = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in batch_of().items()
    }

    def temp_bytes(remat):
        program = sgd_step(model, f"fsdp=2,remat={remat}").compile(shapes)
        return program.memory_analysis().temp_size_in_bytes

    assert temp_bytes("full") < temp_bytes("selective") < temp_bytes("none")


@pytest.mark.parametrize("line", ["data=4", "fsdp=2,tensor=2"])
def test_dropout_is_a_function_of_seed_step_layer_and_example_only(line):
    model = build(layers=2, hidden=32, heads=4, vocab=64, max_seq=SEQ, dropout=0.3)
    batch = batch_of()
    scope = Scope(
        examples=jnp.arange(BATCH, dtype=jnp.uint32),
        random=random_key(jnp.uint32(3), jnp.int32(0)),
        training=True,
    )
    expected = float(loss(model, params_of(model), batch, scope))
    got, _ = gradients_of(model, line, batch)
    without = float(loss(model, params_of(model), batch))
    assert got == pytest.approx(expected, rel=1e-5)
    assert abs(got - without) > 1e-4


@pytest.mark.parametrize("line", ["data=2", "fsdp=2,tensor=2"])
def test_bf16_stays_near_fp32_and_keeps_parameters_in_fp32(line):
    value, gradients = plain("llama", False)
    step = sgd_step(model_of("llama"), f"{line},precision=bf16")
    state, metrics = step(state_of(step), batch_of())
    # Rounding to 8 bits of mantissa through 2 blocks; the loss is a mean over tokens.
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=2e-3)
    norm = float(optax.tree.norm(gradients))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=2e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {
        jnp.dtype("float32")
    }


@pytest.mark.parametrize("line", LAYOUTS)
def test_the_global_norm_counts_every_parameter_once(line):
    step = sgd_step(model_of("untied"), line)
    _, metrics = step(state_of(step), batch_of())
    norm = float(optax.tree.norm(plain("untied", False)[1]))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)


def test_gradients_are_scaled_down_to_the_norm_asked_for():
    free, clipped = (
        sgd_step(model_of("llama"), "fsdp=2,tensor=2", max_grad_norm=limit)
        for limit in (None, 0.01)
    )
    before = jax.device_get(state_of(clipped).params)
    after, metrics = clipped(state_of(clipped), batch_of())
    change = jax.tree.map(np.subtract, before, jax.device_get(after.params))
    assert float(optax.tree.norm(change)) == pytest.approx(0.01, rel=1e-3)
    unscaled = free(state_of(free), batch_of())[1]
    assert float(metrics["grad_norm"]) == pytest.approx(float(unscaled["grad_norm"]))


def test_parameters_are_born_in_their_shards():
    step = sgd_step(model_of("llama"), "fsdp=4,tensor=2")
    for array in jax.tree.leaves(step.init(0).params):
        whole = array.nbytes
        assert {shard.data.nbytes for shard in array.addressable_shards} <= {
            whole // 8,
            whole // 4,
        }


def test_evaluation_and_logits_equal_those_of_the_model_alone():
    model, batch = model_of("llama"), batch_of(uneven_weights())
    step = sgd_step(model, "data=2,fsdp=2,tensor=2")
    state = state_of(step)
    loss_sum, weight_sum = step.evaluate(state, batch)
    assert float(loss_sum / weight_sum) == pytest.approx(float(plain("llama", True)[0]))
    logits = step.logits(state, batch["tokens"])
    params = params_of(model)
    ends = model.split(params)[0]
    x = model.embed(ends, batch, Scope())
    for layer in range(2):
        one = jax.tree.map(lambda value, at=layer: value[at], params["blocks"])
        x = model.groups[0].block(one, x, Scope())
    expected = model.logits(ends, x, Scope())
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_logits_take_one_sequence_a_device_however_many_microbatches():
    model, batch = model_of("llama"), batch_of(uneven_weights())
    step = sgd_step(model, "data=2,stage=2,tensor=2,microbatches=4")
    plain_step = sgd_step(model, "data=2")
    tokens = batch["tokens"][:2]
    np.testing.assert_allclose(
        step.logits(state_of(step), tokens),
        plain_step.logits(state_of(plain_step), tokens),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("expert=2", ("layout.expert_without_experts", "expert=2", "'experts'")),
        (
            "zero=1,tensor=2",
            ("layout.zero_without_effect", "zero=1", "data=1", "fsdp=1"),
        ),
        (
            "zero_axes=data,fsdp=2,zero=1",
            ("layout.zero_axes_without_effect", "zero_axes=data", "data=1"),
        ),
        (
            "fsdp_gather=microbatch,fsdp=2",
            ("layout.fsdp_gather_without_effect", "fsdp_gather=microbatch", "zero=3"),
        ),
        (
            "data=2,microbatches=2,fsdp_gather=microbatch",
            ("rules.dead", "fsdp_gather=microbatch", "'fsdp'"),
        ),
        (
            "param_dtype=bf16,data=2",
            ("layout.param_dtype_rounds", "param_dtype=bf16", "precision=fp32"),
        ),
        ("data=2,chunks=2", ("layout.option_without_axis", "chunks", "stage=1")),
        (
            "data=2,schedule=gpipe",
            ("layout.option_without_axis", "schedule", "stage=1"),
        ),
        (
            "data=2,attention=ulysses",
            ("layout.option_without_axis", "attention", "context=1"),
        ),
    ],
)
def test_a_layout_that_is_not_built_is_refused(line, refusal, refuses):
    with refuses(*refusal):
        sgd_step(model_of("llama"), line)


@pytest.mark.parametrize(
    ("batch", "refusal"),
    [
        ({}, ("batch.not_a_dict", "empty")),
        (
            dict(batch_of(), weights=None),
            ("batch.not_an_array", "batch['weights']", "NoneType"),
        ),
        (
            dict(batch_of(), tokens=np.zeros(8, np.int32)),
            ("batch.wrong_shape", "batch['tokens']", (8,), ("batch", "seq")),
        ),
        (
            dict(batch_of(), targets=np.zeros((8, 16))),
            ("batch.wrong_dtype", "batch['targets']", "float64", "'int'"),
        ),
        (
            dict(batch_of(), length=np.int32(3)),
            ("batch.no_example_dim", "batch['length']", ()),
        ),
    ],
)
def test_a_batch_that_is_none_is_refused(batch, refusal, refuses):
    step = sgd_step(model_of("llama"), "data=2")
    with refuses(*refusal):
        step(step.state_shapes, batch)
    with refuses(*refusal):
        step.compile(batch)


@pytest.mark.parametrize("line", ["data=1", "tensor=2", "stage=2,microbatches=2"])
def test_ids_of_few_bits_are_those_of_many(line):
    step = sgd_step(build("test", vocab=256), line)
    batch = batch_of()
    batch["targets"] = batch["targets"] + 192
    narrow = {name: batch[name].astype(np.uint8) for name in ("tokens", "targets")}
    loss, _ = step.loss_and_gradients(state_of(step), batch)
    again, _ = step.loss_and_gradients(state_of(step), {**batch, **narrow})
    assert np.isfinite(loss)
    assert float(loss) == float(again)


def test_a_batch_that_does_not_divide_is_refused_with_both_numbers(refuses):
    step = sgd_step(model_of("llama"), "data=2,fsdp=2")
    batch = {name: array[:6] for name, array in batch_of().items()}
    with refuses("batch.indivisible", "batch['tokens']", 6, 4, "data=2,fsdp=2"):
        step(step.state_shapes, batch)


def test_a_batch_that_lies_on_its_devices_is_taken_as_it_is():
    step = sgd_step(model_of("llama"), "data=2")
    placed = step.place(batch_of())
    assert all(step.place(placed)[name] is array for name, array in placed.items())
    elsewhere = {name: jax.numpy.asarray(array) for name, array in batch_of().items()}
    for array in step.place(elsewhere).values():
        assert array.sharding == step.batch_sharding


@pytest.mark.parametrize("value", [64, -1])
def test_a_token_that_the_model_does_not_know_is_told_with_its_place(value, refuses):
    step, batch = sgd_step(model_of("llama"), "data=2"), dict(batch_of())
    name, tokens = "tokens", np.array(batch["tokens"])
    tokens[3, 5] = value
    batch[name] = tokens
    refusal = ("batch.index_out_of_range", "batch['tokens']", value, (3, 5), 0, 63)
    with refuses(*refusal):
        step.place(batch)
    step.place(batch_of())  # Its shapes have passed now; values are looked at again.
    with refuses(*refusal):
        step.place(batch)
    # A target is free: a weight of 0 leaves it out.
    step.place({**batch_of(), "targets": tokens})
    # To look at what is on a device already, each step would have to wait for it.
    step.place({**batch, name: jax.numpy.asarray(batch[name])})


@pytest.mark.parametrize(
    ("rules", "refusal"),
    [
        (
            DATA_PARALLEL.with_rules(batch="data"),
            ("rules.unknown", "'batch'", ("data",), ("data", "fsdp", "expert")),
        ),
        (
            DATA_PARALLEL.with_rules(embed="fsdp"),
            ("rules.claimed_twice", "'fsdp'", "parameters={'embed': 'fsdp'}"),
        ),
        (
            replace(DATA_PARALLEL, parameters={"layers": "fsdp"}),
            ("rules.claimed_twice", "'layers'", ("fsdp",)),
        ),
    ],
)
def test_rules_that_use_the_batch_axes_otherwise_are_refused(rules, refusal, refuses):
    with refuses(*refusal, kind=RuleError):
        sgd_step(model_of("llama"), "data=2", rules=rules)


@pytest.mark.parametrize(
    "rules",
    [
        TENSOR.with_rules(kv_heads=None),
        replace(TENSOR, replicate_if_indivisible={"kv_heads"}),
    ],
)
def test_replicated_kv_heads_serve_the_queries_of_each_device(rules):
    model = build("test", kv_heads=1)
    step = sgd_step(model, "tensor=4", rules=rules)
    expected, gradients = jax.value_and_grad(lambda p: loss(model, p, batch_of()))(
        params_of(model)
    )
    got, got_gradients = step.loss_and_gradients(state_of(step), batch_of())
    assert float(got) == pytest.approx(float(expected), rel=1e-5)
    assert_close(jax.device_get(got_gradients), gradients)


@pytest.mark.parametrize("name", ["targets", "weights"])
def test_arrays_that_would_be_broadcast_are_refused(name, refuses):
    step = sgd_step(model_of("llama"), "data=2")
    batch = batch_of()
    batch[name] = batch[name][:, :1]
    with refuses("batch.sizes_disagree", f"batch['{name}']", (8, 1), (8, 16)):
        step(step.state_shapes, batch)


def test_a_seed_out_of_range_is_refused(refuses):
    with refuses("value.seed_out_of_range", "seed=-1", 0):
        sgd_step(model_of("llama"), "data=2").init(-1)


def test_compiler_options_reach_every_program():
    options = {"no_such_option": 1}
    step = sgd_step(model_of("llama"), "data=2", compiler_options=options)
    state, batch = state_of(step), batch_of()
    for program in (
        lambda: step.init(0),
        lambda: step(state, batch),
        lambda: step.loss_and_gradients(state, batch),
        lambda: step.evaluate(state, batch),
        lambda: step.logits(state, batch["tokens"]),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
            program()


def test_a_limit_of_the_norm_that_is_not_positive_is_refused(refuses):
    with refuses("step.grad_norm_not_positive", "max_grad_norm=-1"):
        sgd_step(model_of("llama"), "data=2", max_grad_norm=-1)


def test_optimizer_state_of_another_shape_is_refused(refuses):
    def one_more(params):
        return jax.tree.map(lambda value: jnp.zeros((*value.shape, 3)), params)

    optimizer = optax.GradientTransformation(one_more, lambda g, state, _: (g, state))
    shapes = (2, 4, 8, 32, 3), (2, 4, 8, 32)
    with refuses("optimizer.state_has_other_dims", *shapes):
        make_train_step(model_of("llama"), optimizer, "data=8")
