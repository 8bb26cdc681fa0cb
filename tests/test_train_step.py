"""The training step against a single-device program without any layout."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import DATA_PARALLEL, TENSOR, RuleError, make_train_step
from meshpar.model.scope import Scope
from meshpar.model.tracing import forward, loss
from meshpar.models.presets import build
from meshpar.parallel.reduction import random_key
from tests import pipelined
from tests.kept_gradients import KEEPING
from tests.marks import slow
from tests.pipelined import params_of, state_of

BATCH, SEQ = 8, 16
LAYOUTS = ["data=4", "fsdp=2,tensor=2", "data=2,tensor=2,sequence_parallel=true"]
ALL_AXES = "data=2,fsdp=2,tensor=2"
WHOLE = "every option", f"{ALL_AXES},sequence_parallel=true"
"""The model and layout of which `make test` asks the most."""

SIZES = dict(preset="test", vocab=256)
OPTIONS = dict(tied=False, layers=3, qkv_bias=True, qk_norm=True, head_dim=16)
MODELS = {
    "llama": SIZES,
    "untied": dict(SIZES, tied=False, layers=3),
    "qwen2": dict(SIZES, qkv_bias=True),
    "qwen3": dict(SIZES, qk_norm=True, head_dim=16),
    "every option": dict(SIZES, **OPTIONS),
    "one kv head": dict(SIZES, kv_heads=1),
    "gpt2": dict(layers=2, hidden=32, heads=4, vocab=256, max_seq=SEQ),
}
SLOW_CASES = [
    *(slow("llama", line) for line in LAYOUTS),
    *(slow(name, ALL_AXES) for name in ("llama", "untied", "qwen2", "qwen3", "gpt2")),
    slow("gpt2", "fsdp=2,tensor=2,sequence_parallel=true"),
]


@functools.cache
def model_of(name):
    return build(**MODELS[name])


def batch_of(weights=None, dtype=np.int32):
    """Tokens of six bits and targets of eight; all count without other weights."""
    ids = np.random.default_rng(0).integers(0, 64, (BATCH, SEQ + 1))
    tokens, targets = ids[:, :-1].astype(dtype), (ids[:, 1:] + 192).astype(dtype)
    weights = np.ones((BATCH, SEQ), np.float32) if weights is None else weights
    return dict(tokens=tokens, targets=targets, weights=weights)


def no_weights():
    return np.zeros((BATCH, SEQ), np.float32)


def uneven_weights():
    """Some tokens masked, one example and a whole batch shard masked out."""
    weights = np.random.default_rng(1).integers(0, 2, (BATCH, SEQ)).astype(np.float32)
    weights[0] = 0.0
    weights[-BATCH // 4 :] = 0.0
    return weights


def make_step(model, line, **options):
    return pipelined.step_of(model, line, KEEPING, **options)


@functools.cache
def step_of(name, line, **options):
    """The step of a model and layout that several tests ask, compiled once."""
    return make_step(model_of(name), line, **options)


@functools.cache
def updated(name, line, weights=None, dtype=np.int32):
    """Loss, gradients as the optimizer gets them, and norm, by one step."""
    step = step_of(name, line)
    batch = batch_of(None if weights is None else weights(), dtype)
    state, metrics = jax.device_get(step(state_of(step, model_of(name)), batch))
    return metrics["loss"], state.opt_state[0], metrics["grad_norm"]


def gradients_of(model, line, batch):
    """Loss and gradients under a layout, by the program without an optimizer."""
    step = make_step(model, line)
    return jax.device_get(step.loss_and_gradients(state_of(step, model), batch))


@functools.cache
def value_and_grad(model):
    """The program of the model alone, on one device."""
    return jax.jit(jax.value_and_grad(lambda params, batch: loss(model, params, batch)))


@functools.cache
def plain(name, masked):
    """Loss and gradients of the model alone."""
    model = model_of(name)
    batch = batch_of(uneven_weights() if masked else None)
    return jax.device_get(value_and_grad(model)(params_of(model), batch))


@functools.cache
def plain_logits(model):
    """Logits of the model alone."""

    @jax.jit
    def logits(params, batch):
        x = forward(model, params, batch, Scope())
        return model.logits(model.split(params)[0], x, Scope())

    return logits(params_of(model), batch_of())


def assert_close(got, wanted, bound=1e-5):
    for path, value in jax.tree.leaves_with_path(wanted):
        other = functools.reduce(lambda tree, key: tree[key.key], path, got)
        error = np.linalg.norm(other - value) / max(np.linalg.norm(value), 1e-8)
        assert error <= bound, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize(
    ("name", "line"),
    [WHOLE, *SLOW_CASES],
)
def test_loss_and_gradients_equal_those_of_the_model_alone(name, line):
    value, gradients = plain(name, False)
    got_loss, got_gradients, _ = updated(name, line)
    assert got_loss == pytest.approx(float(value), rel=1e-5)
    assert_close(got_gradients, gradients)


@pytest.mark.parametrize(
    ("name", "line"), [WHOLE, *(slow("llama", line) for line in LAYOUTS)]
)
def test_masked_tokens_and_empty_shards_do_not_change_the_loss(name, line):
    value, gradients = plain(name, True)
    got_loss, got_gradients, _ = updated(name, line, uneven_weights)
    assert got_loss == pytest.approx(float(value), rel=1e-5)
    assert_close(got_gradients, gradients)


def test_a_batch_without_any_weight_changes_nothing():
    got_loss, gradients, _ = updated(*WHOLE, no_weights)
    assert got_loss == 0.0
    assert all(not gradient.any() for gradient in jax.tree.leaves(gradients))


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "selective", "dots"])
def test_recomputation_changes_no_number(remat):
    value, gradients = plain("llama", False)
    got_loss, got_gradients, _ = updated("llama", f"fsdp=2,tensor=2,remat={remat}")
    assert got_loss == pytest.approx(float(value), rel=1e-5)
    assert_close(got_gradients, gradients)


@pytest.mark.slow
def test_recomputing_everything_keeps_fewer_bytes_than_nothing():
    model = build("test", layers=6)
    shapes = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in batch_of().items()
    }

    def temp_bytes(remat):
        program = make_step(model, f"fsdp=2,remat={remat}").compile(shapes)
        return program.memory_analysis().temp_size_in_bytes

    assert temp_bytes("full") < temp_bytes("selective") < temp_bytes("none")


@functools.cache
def plain_dropout(model):
    """With dropout, loss and gradients of the model alone, and without, the loss."""
    scope = Scope(
        examples=jnp.arange(BATCH, dtype=jnp.uint32),
        random=random_key(jnp.uint32(3), jnp.int32(0)),
        training=True,
    )

    @jax.jit
    def both(params, batch):
        def dropped(params):
            return loss(model, params, batch, scope)

        return jax.value_and_grad(dropped)(params), loss(model, params, batch)

    return jax.device_get(both(params_of(model), small_ids()))


def small_ids():
    """A batch for a vocabulary of 64."""
    batch = batch_of()
    return {**batch, "targets": batch["targets"] - 192}


DROPOUT = 0.3


@functools.cache
def gpt2():
    return build(**MODELS["gpt2"], dropout=DROPOUT)


def mlp():
    return pipelined.mlp_of(2, DROPOUT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_model", "line"),
    [
        (mlp, LAYOUTS[2]),
        (gpt2, f"{LAYOUTS[2]},remat=selective"),
        (gpt2, "data=4"),
        (gpt2, "fsdp=2,tensor=2"),
    ],
)
def test_dropout_is_a_function_of_seed_step_layer_and_example_only(make_model, line):
    model = make_model()
    (expected, gradients), without = plain_dropout(model)
    step = make_step(model, line)
    state, metrics = jax.device_get(step(state_of(step, model), small_ids()))
    got = metrics["loss"]
    assert got == pytest.approx(float(expected), rel=1e-5)
    assert abs(got - without) > 1e-4
    assert_close(state.opt_state[0], gradients)


LIMIT = 0.01
IN_BF16 = "fsdp=2,tensor=2,precision=bf16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line", "options"),
    [
        ("every option", IN_BF16, dict(max_grad_norm=LIMIT)),
        ("llama", IN_BF16, {}),
        ("llama", "data=2,precision=bf16", {}),
    ],
)
def test_bf16_stays_near_fp32_and_keeps_parameters_in_fp32(name, line, options):
    value, gradients = plain(name, False)
    step = step_of(name, line, **options)
    state, metrics = step(state_of(step, model_of(name)), batch_of())
    # Rounding to 8 bits of mantissa through 2 blocks; the loss is a mean over tokens.
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=2e-3)
    norm = float(optax.tree.norm(gradients))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=2e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {
        jnp.dtype("float32")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line", "bound"),
    [("every option", IN_BF16, 2e-2), slow("llama", "fsdp=2,tensor=2", 1e-5)],
)
def test_gradients_are_scaled_down_to_the_norm_asked_for(name, line, bound):
    step = step_of(name, line, max_grad_norm=LIMIT)
    state = state_of(step, model_of(name))
    before = jax.device_get(state.params)
    after, metrics = step(state, batch_of())
    change = jax.tree.map(np.subtract, before, jax.device_get(after.params))
    assert float(optax.tree.norm(change)) == pytest.approx(LIMIT, rel=1e-3)
    norm = float(optax.tree.norm(plain(name, False)[1]))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=bound)


def test_parameters_are_born_in_their_shards():
    step = step_of(*WHOLE)
    for array in jax.tree.leaves(step.init(0).params):
        whole = array.nbytes
        assert {shard.data.nbytes for shard in array.addressable_shards} <= {
            whole // 4,
            whole // 2,
        }


def test_evaluation_and_logits_equal_those_of_the_model_alone():
    batch = batch_of(uneven_weights())
    name, step = WHOLE[0], step_of(*WHOLE)
    state = state_of(step, model_of(name))
    evaluation = step.evaluate(state, batch)
    loss_sum = evaluation["loss_sum"]
    weight_sum = evaluation["weight_sum"]
    assert float(loss_sum / weight_sum) == pytest.approx(float(plain(name, True)[0]))
    logits = step.logits(state, batch["tokens"])
    np.testing.assert_allclose(
        logits, plain_logits(model_of(name)), rtol=1e-4, atol=1e-5
    )


def test_logits_take_one_sequence_a_device_however_many_microbatches():
    model = pipelined.mlp_of(2)
    step = make_step(model, "data=2,stage=2,tensor=2,microbatches=4")
    logits = step.logits(state_of(step, model), batch_of()["tokens"][:2])
    np.testing.assert_allclose(logits, plain_logits(model)[:2], rtol=1e-4, atol=1e-5)


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
            ("layout.fsdp_gather_without_effect", "fsdp_gather=microbatch", "'fsdp'"),
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
        make_step(model_of("llama"), line)


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
            ("batch.unknown_array", "batch['length']", "tokens"),
        ),
    ],
)
def test_a_batch_that_is_none_is_refused(batch, refusal, refuses):
    step = step_of("llama", "data=2")
    with refuses(*refusal):
        step(step.state_shapes, batch)
    with refuses(*refusal):
        step.compile(batch)


def test_ids_of_few_bits_are_evaluated_as_those_of_many():
    step = step_of(*WHOLE)
    state = state_of(step, model_of(WHOLE[0]))
    loss, again = (
        step.evaluate(state, batch_of(dtype=dtype))["loss_sum"]
        for dtype in (np.int32, np.uint8)
    )
    assert np.isfinite(loss)
    assert float(loss) == float(again)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["data=1", "tensor=2", "stage=2,microbatches=2"])
def test_ids_of_few_bits_are_those_of_many(line):
    loss, _, _ = updated("llama", line)
    again, _, _ = updated("llama", line, dtype=np.uint8)
    assert np.isfinite(loss)
    assert float(loss) == float(again)


def test_a_batch_that_does_not_divide_is_refused_with_both_numbers(refuses):
    step = step_of("llama", "data=2,fsdp=2")
    batch = {name: array[:6] for name, array in batch_of().items()}
    with refuses("batch.indivisible", "batch['tokens']", 6, 4, "data=2,fsdp=2"):
        step(step.state_shapes, batch)


def test_a_batch_that_lies_on_its_devices_is_taken_as_it_is():
    step = step_of("llama", "data=2")
    placed = step.place(batch_of())
    assert all(step.place(placed)[name] is array for name, array in placed.items())
    elsewhere = {name: jax.numpy.asarray(array) for name, array in batch_of().items()}
    for array in step.place(elsewhere).values():
        assert array.sharding == step.batch_sharding


@pytest.mark.parametrize("value", [256, -1])
def test_a_token_that_the_model_does_not_know_is_told_with_its_place(value, refuses):
    step, batch = step_of("llama", "data=2"), dict(batch_of())
    name, tokens = "tokens", np.array(batch["tokens"])
    tokens[3, 5] = value
    batch[name] = tokens
    refusal = ("batch.index_out_of_range", "batch['tokens']", value, (3, 5), 0, 255)
    with refuses(*refusal):
        step.place(batch)
    step.place(batch_of())  # Its shapes have passed now; values are looked at again.
    with refuses(*refusal):
        step.place(batch)
    with refuses(*refusal):
        step.place({**batch, name: jax.numpy.asarray(batch[name])})


@pytest.mark.parametrize(
    ("rules", "refusal"),
    [
        (
            DATA_PARALLEL.with_rules(batch="data"),
            (
                *("rules.wrong_batch_axes", "'batch'"),
                *(("data",), ("data", "fsdp", "expert")),
            ),
        ),
        (
            DATA_PARALLEL.with_rules(embed="fsdp"),
            ("rules.claimed_twice", "'fsdp'", "parameters={'embed': 'fsdp'}"),
        ),
        (
            replace(DATA_PARALLEL, parameters={"layers": "fsdp"}),
            ("rules.split_layers", "'layers'", ("fsdp",)),
        ),
    ],
)
def test_rules_that_use_the_batch_axes_otherwise_are_refused(rules, refusal, refuses):
    with refuses(*refusal, kind=RuleError):
        make_step(model_of("llama"), "data=2", rules=rules)


INDIVISIBLE = replace(TENSOR, replicate_if_indivisible={"kv_heads"})


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        (INDIVISIBLE, "every option"),
        slow(INDIVISIBLE, "one kv head"),
        slow(TENSOR.with_rules(kv_heads=None), "one kv head"),
    ],
)
def test_replicated_kv_heads_serve_the_queries_of_each_device(rules, name):
    model = model_of(name)
    step = make_step(model, "tensor=4", rules=rules)
    expected, gradients = plain(name, False)
    got, got_gradients = step.loss_and_gradients(state_of(step, model), batch_of())
    assert float(got) == pytest.approx(float(expected), rel=1e-5)
    assert_close(jax.device_get(got_gradients), gradients)


@pytest.mark.parametrize("name", ["targets", "weights"])
def test_arrays_that_would_be_broadcast_are_refused(name, refuses):
    step = step_of("llama", "data=2")
    batch = batch_of()
    batch[name] = batch[name][:, :1]
    with refuses("batch.sizes_disagree", f"batch['{name}']", (8, 1), (8, 16)):
        step(step.state_shapes, batch)


def test_a_seed_out_of_range_is_refused(refuses):
    with refuses("value.seed_out_of_range", "seed=-1", 0):
        step_of("llama", "data=2").init(-1)


def test_compiler_options_reach_every_program():
    model, options = pipelined.mlp_of(2), {"no_such_option": 1}
    step = make_step(model, "data=2", compiler_options=options)
    state, batch = state_of(step, model), batch_of()
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
    with refuses("value.not_positive", "max_grad_norm=-1"):
        make_step(model_of("llama"), "data=2", max_grad_norm=-1)


def test_optimizer_state_of_other_dims_is_whole_on_every_device():
    def one_more(params):
        return jax.tree.map(lambda value: jnp.zeros((*value.shape, 3)), params)

    optimizer = optax.GradientTransformation(one_more, lambda g, state, _: (g, state))
    step = make_train_step(model_of("llama"), optimizer, "fsdp=8")
    for sharding in jax.tree.leaves(step.shardings.opt_state):
        assert sharding.is_fully_replicated
