"""The stand-alone pipeline: gradients of a user's own functions, as JAX gives them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meshpar import pipeline_value_and_grad
from tests.marks import slow
from tests.pipelined import QUICK, assert_close

LAYERS, EXAMPLES, SEQ, WIDTH, VOCAB = 7, 24, 8, 16, 32


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: math.prod(sizes.values())])
    return Mesh(
        devices.reshape(tuple(sizes.values())),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
    )


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def block(layer, x):
    hidden = jnp.tanh(x @ layer["up"] + layer["shift"])
    return x + hidden @ layer["down"]


def blocks_of(layers=LAYERS):
    return {
        "up": normal(1, layers, WIDTH, 2 * WIDTH) / 4,
        "shift": normal(2, layers, 2 * WIDTH),
        "down": normal(3, layers, 2 * WIDTH, WIDTH) / 8,
    }


# One array in, one out.


def mean_head(scale, x, targets):
    return jnp.mean((scale * x - targets) ** 2)


SCALE = np.float32(1.5)
X, TARGETS = normal(4, EXAMPLES, WIDTH), normal(5, EXAMPLES, WIDTH)


def plain(block, head, blocks, ends, x, targets, embed=None):
    """The same loss and gradients by `jax.value_and_grad` on one device."""

    def loss(blocks, ends, x):
        x = x if embed is None else embed(ends, x)
        x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, blocks)
        found = head(ends, x, targets)
        return found[0] / found[1] if isinstance(found, tuple) else found

    value_and_grad = jax.value_and_grad(loss, (0, 1, 2), allow_int=True)
    return jax.jit(value_and_grad, compiler_options=QUICK)(blocks, ends, x)


@functools.cache
def plain_mean():
    """Of all blocks and the head of one array."""
    return plain(block, mean_head, blocks_of(), SCALE, X, TARGETS)


def assert_equal(found, wanted):
    (value, gradients), (wanted_value, wanted_gradients) = found, wanted
    assert float(value) == pytest.approx(float(wanted_value), rel=1e-5)
    wanted_gradients = [
        leaf
        for leaf in jax.tree.leaves(wanted_gradients)
        if leaf.dtype != jax.dtypes.float0
    ]
    assert_close(jax.tree.leaves(gradients), wanted_gradients)


V_SHAPED = [
    ["0F0", "0F1", "3F0", "3B0", "3F1", "3B1", "0B0", "0B1"],
    ["1F0", "2F0", "1F1", "2F1", "2B0", "1B0", "2B1", "1B1"],
]
"""Stages 0 and 3 on the first rank, 1 and 2 on the second."""


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        slow(dict(stage=1), dict(num_microbatches=2)),
        (dict(stage=4), dict(num_microbatches=3)),
        slow(dict(data=2, stage=2), dict(num_microbatches=6, remat="full")),
        slow(
            dict(stage=3), dict(num_microbatches=1, splits=(1, 4, 2), schedule="gpipe")
        ),
        slow(
            dict(fsdp=2, stage=2),
            dict(num_microbatches=4, schedule="interleaved_1f1b", chunks=2),
        ),
        slow(dict(stage=2), dict(num_microbatches=2, schedule=V_SHAPED, chunks=2)),
        (
            dict(fsdp=2, stage=2),
            dict(
                num_microbatches=4,
                schedule="interleaved_1f1b",
                chunks=2,
                splits=(1, 3, 2, 1),
                remat="full",
            ),
        ),
    ],
)
def test_gradients_of_blocks_ends_and_input_are_those_of_one_device(sizes, options):
    run = pipeline_value_and_grad(block, mean_head, mesh=mesh_of(**sizes), **options)
    assert_equal(run(blocks_of(), SCALE, X, TARGETS), plain_mean())


@pytest.mark.slow
def test_gspmd_partitions_the_blocks_over_other_mesh_axes():
    mesh = mesh_of(data=2, stage=2, tensor=2)
    specs = {
        "up": PartitionSpec(None, "tensor"),
        "shift": PartitionSpec("tensor"),
        "down": PartitionSpec("tensor", None),
    }
    blocks = jax.tree.map(
        lambda value, spec: jax.device_put(
            value, NamedSharding(mesh, PartitionSpec("stage", *spec))
        ),
        blocks_of(6),
        specs,
    )
    run = pipeline_value_and_grad(
        block, mean_head, mesh=mesh, num_microbatches=3, block_specs=specs
    )
    compiled = jax.jit(run).lower(blocks, SCALE, X, TARGETS).compile()
    wanted = plain(block, mean_head, blocks_of(6), SCALE, X, TARGETS)
    assert_equal(compiled(blocks, SCALE, X, TARGETS), wanted)
    assert "all-reduce" in compiled.as_text()
    assert compiled.output_shardings[1][0]["up"].spec[2] == "tensor"


# Tokens in, a weighted loss out, the two ends tied.


def embed(ends, inputs):
    return ends["table"][inputs["tokens"]] + ends["positions"][inputs["at"]]


def token_head(ends, x, targets):
    logits = x @ ends["table"].T
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(
        logits, targets["ids"][..., None], -1
    ).squeeze(-1)
    return (losses * targets["weights"]).sum(), targets["weights"].sum()


ENDS = {"table": normal(6, VOCAB, WIDTH), "positions": normal(7, SEQ, WIDTH)}
IDS = np.random.default_rng(8).integers(0, VOCAB, (EXAMPLES, SEQ + 1))
INPUTS = {
    "tokens": IDS[:, :-1],
    "at": np.broadcast_to(np.arange(SEQ), (EXAMPLES, SEQ)),
}
WEIGHTED = {"ids": IDS[:, 1:], "weights": (IDS[:, 1:] % 3 > 0).astype(np.float32)}


@pytest.mark.parametrize(
    ("sizes", "num_microbatches", "per_token"),
    [
        (dict(stage=4), 3, False),
        (dict(stage=4), 3, True),
        (dict(data=2, stage=2), 4, False),
        (dict(data=2, stage=2), 4, True),
    ],
)
@pytest.mark.slow
def test_tied_ends_with_a_weighted_loss(sizes, num_microbatches, per_token):
    run = pipeline_value_and_grad(
        block,
        token_head,
        embed=embed,
        mesh=mesh_of(**sizes),
        num_microbatches=num_microbatches,
        per_token=per_token,
    )
    found = run(blocks_of(), ENDS, INPUTS, WEIGHTED)
    assert found[1][2] == {"at": None, "tokens": None}
    wanted = plain(block, token_head, blocks_of(), ENDS, INPUTS, WEIGHTED, embed)
    assert_equal(found, wanted)


def test_tokens_of_one_array_in_a_tree_keep_their_order_where_gspmd_splits_them():
    functions = {
        "block": lambda layer, x: {"x": block(layer, jnp.roll(x["x"], 1, axis=1))},
        "head": lambda ends, x, targets: token_head(ends, x["x"], targets),
        "embed": lambda ends, inputs: {"x": embed(ends, inputs)},
    }
    run = pipeline_value_and_grad(
        **functions,
        mesh=mesh_of(stage=2, tensor=2),
        num_microbatches=2,
        per_token=True,
        x_spec={"x": PartitionSpec(None, "tensor")},
    )
    found = run(blocks_of(2), ENDS, INPUTS, WEIGHTED)
    assert found[1][2] == {"at": None, "tokens": None}
    arrays = dict(blocks=blocks_of(2), ends=ENDS, x=INPUTS, targets=WEIGHTED)
    assert_equal(found, plain(**functions, **arrays))


def float_embed(ends, inputs):
    return inputs["pixels"] @ ends["table"] * inputs["gain"][:, None, None]


@pytest.mark.slow
@pytest.mark.parametrize("per_token", [True, False])
def test_an_embedding_passes_gradients_to_its_float_inputs(per_token):
    inputs = {"gain": normal(10, EXAMPLES), "pixels": normal(9, EXAMPLES, SEQ, VOCAB)}
    run = pipeline_value_and_grad(
        block,
        token_head,
        embed=float_embed,
        mesh=mesh_of(stage=2),
        num_microbatches=3,
        per_token=per_token,
    )
    found = run(blocks_of(), ENDS, inputs, WEIGHTED)
    wanted = plain(block, token_head, blocks_of(), ENDS, inputs, WEIGHTED, float_embed)
    assert_equal(found, wanted)


@pytest.mark.slow
def test_memory_does_not_grow_with_microbatches_of_tokens():
    def temp_bytes(num_microbatches):
        run = pipeline_value_and_grad(
            block,
            token_head,
            embed=embed,
            mesh=mesh_of(stage=2),
            num_microbatches=num_microbatches,
            per_token=True,
        )

        def of_tokens(*shape, dtype=jnp.int32):
            return jax.ShapeDtypeStruct((4 * num_microbatches, *shape), dtype)

        inputs = {"tokens": of_tokens(SEQ), "at": of_tokens(SEQ)}
        targets = {"ids": of_tokens(SEQ), "weights": of_tokens(SEQ, dtype=jnp.float32)}
        program = jax.jit(run).lower(blocks_of(6), ENDS, inputs, targets)
        return program.compile().memory_analysis().temp_size_in_bytes

    assert temp_bytes(64) <= 1.01 * temp_bytes(8)


# Where a block runs.


def test_a_block_may_know_its_layer_microbatch_and_inputs():
    def placed(layer, x, at):
        gain = 1 + at.layer + 0.1 * at.inputs["gain"][:, None]
        return x + jnp.tanh(x @ layer["up"]) @ layer["down"] * gain + at.microbatch

    def first(ends, inputs):
        return inputs["x"]

    inputs = {"x": X, "gain": X[:, 0]}
    run = pipeline_value_and_grad(
        placed, mean_head, embed=first, mesh=mesh_of(stage=3), num_microbatches=2
    )
    value, (of_blocks, _, of_inputs) = run(blocks_of(), SCALE, inputs, TARGETS)

    def loss(blocks, x):
        microbatch = jnp.arange(EXAMPLES)[:, None] // (EXAMPLES // 2)

        def placed_alone(x, at):
            number, layer = at
            gain = 1 + number + 0.1 * X[:, :1]
            hidden = jnp.tanh(x @ layer["up"]) @ layer["down"]
            return x + hidden * gain + microbatch, None

        x, _ = jax.lax.scan(placed_alone, x, (jnp.arange(LAYERS), blocks))
        return mean_head(SCALE, x, TARGETS)

    wanted, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(blocks_of(), X)
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)
    assert_close([of_blocks, of_inputs["x"]], list(gradients))
    assert not np.asarray(of_inputs["gain"]).any()


# Inside other programs.


def runner(**options):
    options = {"mesh": mesh_of(stage=2), "num_microbatches": 3, **options}
    return pipeline_value_and_grad(block, mean_head, **options)


def test_the_loss_can_be_differentiated_inside_another_function():
    splits = (1, 2, 3, 1)
    run = runner(num_microbatches=2, schedule=V_SHAPED, chunks=2, splits=splits)

    def outer(run):
        def loss(blocks, scale, image):
            value = run(blocks, scale, jnp.sin(image), TARGETS)
            return 3 * value**2 + jnp.sum(scale)

        return loss

    def alone(blocks, scale, x, targets):
        x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, blocks)
        return mean_head(scale, x, targets)

    def pipelined(*arguments):
        return run(*arguments)[0]

    arguments = blocks_of(), SCALE, X
    found, wanted = (
        jax.jit(jax.value_and_grad(outer(inner), (0, 1, 2)), compiler_options=QUICK)(
            *arguments
        )
        for inner in (pipelined, alone)
    )
    assert_equal(found, wanted)


def in_bf16(tree):
    return jax.tree.map(lambda value: jnp.asarray(value, jnp.bfloat16), tree)


def test_bf16_parameters_get_bf16_gradients():
    half, x = in_bf16((blocks_of(4), X))
    value, gradients = jax.eval_shape(runner(), half, SCALE, x, TARGETS)
    assert value.dtype == jnp.float32
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(gradients)]
    assert dtypes == [jnp.bfloat16] * 3 + [jnp.float32, jnp.bfloat16]


@pytest.mark.slow
def test_gradients_in_bf16_are_near_those_in_fp32():
    half, x = in_bf16((blocks_of(4), X))
    _, gradients = runner()(half, SCALE, x, TARGETS)
    whole = jax.tree.map(lambda leaf: leaf.astype(np.float32), half)
    wanted = plain(block, mean_head, whole, SCALE, x.astype(np.float32), TARGETS)
    assert_close(jax.tree.map(np.float32, gradients), wanted[1], bound=0.05)


# What is refused.


def test_targets_and_gradients_cannot_be_differentiated(refuses):
    run = runner()

    def of_targets(targets):
        return run(blocks_of(), SCALE, X, targets)[0]

    def of_gradients(x):
        return jnp.sum(run(blocks_of(), SCALE, x, TARGETS)[1][2])

    with refuses("model.gradient_of_targets"):
        jax.eval_shape(jax.grad(of_targets), TARGETS)
    with refuses("model.second_derivative"):
        jax.eval_shape(jax.grad(of_gradients), X)


EXPLICIT = (AxisType.Explicit,)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (dict(mesh=mesh_of(data=2)), ("mesh.no_stage_axis", "'data'", "'stage'")),
        (
            dict(mesh=Mesh(np.array(jax.devices()[:2]), ("stage",), EXPLICIT)),
            ("mesh.axis_not_auto", "'stage'", "Explicit", "Auto"),
        ),
        (dict(schedule="1f2b"), ("schedule.unknown_name", "'1f2b'", "'1f1b'")),
        (dict(chunks=2), ("schedule.unsupported_chunks", "chunks=2", "'1f1b'")),
        (
            dict(remat="some"),
            ("layout.unknown_remat", "'some'", "dots, full, none, stage"),
        ),
        (dict(remat="selective"), ("layout.unknown_remat", "'selective'")),
        (
            dict(x_spec=PartitionSpec(None, "tensor")),
            ("layout.unknown_axis_in_spec", "x_spec", "'tensor'", "no mesh axis"),
        ),
        (
            dict(mesh=mesh_of(stage=2, tensor=2), x_spec=PartitionSpec("stage")),
            ("layout.unknown_axis_in_spec", "'stage'", "'tensor'"),
        ),
        (dict(x_spec="tensor"), ("layout.not_a_partition_spec", "x_spec='tensor'")),
        (
            dict(schedule=[["0F0", "0B0"], ["1F0", "1B0"]]),
            ("schedule.wrong_size", "microbatches=1", "microbatches=3"),
        ),
        (
            dict(schedule=[["0F0", "0B0"]], num_microbatches=1),
            ("schedule.wrong_size", "stages=1", "stages=2"),
        ),
        (
            dict(schedule=[["0F0", "0B0"], ["1B0", "1F0"]], num_microbatches=1),
            ("schedule.deadlock", 1, "1B0", "1F0"),
        ),
        (dict(execution="free"), ("layout.unknown_execution", "'free'", "uniform")),
    ],
)
def test_what_cannot_run_is_refused_when_made(options, refusal, refuses):
    of_jax = isinstance(options.get("x_spec"), PartitionSpec)
    with refuses(*refusal, words=not of_jax):
        runner(**options)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (dict(x=X[:20]), ("batch.different_lengths", (20, 16), (24, 16))),
        (
            dict(x=X[:20], targets=TARGETS[:20]),
            ("batch.indivisible", 20, 1, "num_microbatches=3"),
        ),
        (dict(blocks=blocks_of(1)), ("layout.too_many_stages", "stage=2", 2, 1)),
        (
            dict(blocks={**blocks_of(), "shift": normal(2, 6, 2 * WIDTH)}),
            ("model.wrong_number_of_layers", (6, 32), (7, 16, 32), (7, 32, 16)),
        ),
        (
            dict(x=X.astype(np.int32)),
            ("model.integer_pipeline_input", "int32(8, 16)", "embed"),
        ),
        (dict(scale=np.int32(1)), ("model.integer_parameter", "int32()")),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, refusal, refuses):
    given = {"blocks": blocks_of(), "scale": SCALE, "x": X, "targets": TARGETS}
    with refuses(*refusal):
        runner()(*{**given, **arguments}.values())


SPECS = {name: PartitionSpec() for name in blocks_of(1)}


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (dict(splits=(3.0, 4.0)), ("layout.splits_not_whole", "splits=3.0/4.0")),
        (
            dict(x_spec=PartitionSpec(*(None,) * 4)),
            ("layout.spec_has_more_dims", "x_spec", 4, (8, 16)),
        ),
        (
            dict(block_specs={"up": PartitionSpec()}),
            ("layout.spec_of_other_tree", "block_specs", "'up'", "'down'"),
        ),
        (
            dict(block_specs={**SPECS, "up": "tensor"}),
            ("layout.spec_of_other_tree", "block_specs", "'tensor'"),
        ),
        (
            dict(block_specs={**SPECS, "up": PartitionSpec(None, None, "tensor")}),
            ("layout.spec_has_more_dims", "block_specs['up']", 3, (16, 32)),
        ),
        (
            dict(block_specs={**SPECS, "down": PartitionSpec("tensor")}),
            ("layout.unknown_axis_in_spec", "block_specs['down']", "'tensor'"),
        ),
        (dict(per_token="all"), ("model.per_token_not_booleans", "per_token='all'")),
        (
            dict(per_token=(True, {"ids": True})),
            ("model.per_token_not_booleans", "per_token=(True, {'ids': True})"),
        ),
    ],
)
def test_options_that_do_not_fit_the_arguments_are_refused(options, refusal, refuses):
    # JAX writes its specs, and how trees differ, in words of its version.
    with refuses(*refusal, words="splits" in options):
        runner(**options)(blocks_of(), SCALE, X, TARGETS)


def test_only_arrays_that_are_said_to_have_tokens_are_cut(refuses):
    def head(ends, x, targets):
        loss_sum, weight_sum = token_head(ends, x, targets)
        return loss_sum * jnp.mean(targets["image"]), weight_sum

    image = np.broadcast_to(normal(12, SEQ) + 2, (EXAMPLES, SEQ))  # as wide as SEQ
    targets = {**WEIGHTED, "image": image}
    of_targets = {"ids": True, "weights": True, "image": False}
    options = dict(embed=embed, mesh=mesh_of(stage=2), num_microbatches=3)
    wanted = plain(block, head, blocks_of(), ENDS, INPUTS, targets, embed)
    run = pipeline_value_and_grad(block, head, per_token=(True, of_targets), **options)
    assert_equal(run(blocks_of(), ENDS, INPUTS, targets), wanted)
    run = pipeline_value_and_grad(block, head, per_token=True, **options)
    wide = {**targets, "image": np.ones((EXAMPLES, SEQ + 1), np.float32)}
    with refuses("batch.wrong_shared_size", "targets['image']", (8, 9), 8):
        run(blocks_of(), ENDS, INPUTS, wide)


def test_a_block_that_changes_the_shape_and_a_head_without_a_sum_are_refused(refuses):
    mesh = mesh_of(stage=2)

    def run(block, head):
        value_and_grad = pipeline_value_and_grad(
            block, head, mesh=mesh, num_microbatches=3
        )
        value_and_grad(blocks_of(), SCALE, X, TARGETS)

    with refuses("model.stream_changed", "float32(8, 16)", "float32(8, 15)"):
        run(lambda layer, x: block(layer, x)[:, :-1], mean_head)
    with refuses("model.head_not_scalars", "[(8,)]"):
        run(block, lambda scale, x, targets: jnp.mean((x - targets) ** 2, axis=1))
