"""Parameters go from any layout to any other, bit by bit, sending what devices lack."""

import jax
import numpy as np
import pytest

import meshpar
from meshpar import Layout
from meshpar.model.parameter import is_parameter
from meshpar.models.presets import build
from meshpar.parallel.pipeline.stages import in_layer_order
from meshpar.parallel.resharding import (
    ParameterPlacement,
    moved,
    reshard_bytes,
    reshard_memory,
)
from meshpar.testing.layout_cases import Choices, draw_cases
from tests.marks import slow

MODEL = build("tiny-8")
FAST = [
    ("tensor=2", "tensor=8"),
    ("stage=3,microbatches=3", "fsdp=4,tensor=2"),
    ("stage=2,microbatches=2,schedule=interleaved_1f1b,chunks=2", "stage=4"),
]
SLOW = [
    ("stage=4,microbatches=4", "tensor=8"),
    ("fsdp=8", "tensor=8"),
    ("data=2,fsdp=2,tensor=2", "stage=2,tensor=4"),
    ("context=2,tensor=2", "fsdp=2,stage=3"),
]


def devices_of(layout):
    return jax.devices()[: Layout.of(layout).num_devices]


def params_of(model, layout):
    """Random parameters as they lie in a layout, and how they lie."""
    source = ParameterPlacement.from_layout(model, layout, devices=devices_of(layout))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x, sharding: jax.device_put(
            rng.standard_normal(x.stacked_shape).astype(np.float32), sharding
        ),
        source.model.parameters,
        source.shardings,
        is_leaf=is_parameter,
    )
    return params, source


def check(model, one, other, devices=None):
    params, source = params_of(model, one)
    wanted = in_layer_order(source.model, jax.device_get(params))
    found = meshpar.reshard(
        params, one, other, model=model, devices=devices or devices_of(other)
    )
    assert all(array.is_deleted() for array in jax.tree.leaves(params))
    target = ParameterPlacement.from_layout(
        model, other, devices=devices or devices_of(other)
    )
    lying = jax.tree.map(lambda array: array.sharding, found)
    assert lying == target.shardings
    jax.tree.map(
        np.testing.assert_array_equal, in_layer_order(target.model, found), wanted
    )


@pytest.mark.parametrize(("one", "other"), [*FAST, *(slow(*pair) for pair in SLOW)])
def test_every_value_arrives(one, other):
    check(MODEL, one, other)


def drawn(num, model, seed):
    """Pairs of random layouts of up to 8 devices."""
    choices = Choices(models=("",), build=lambda _: model)
    found = [one.layout for one in draw_cases(2 * num, seed, choices, jax.devices())]
    return list(zip(found[::2], found[1::2], strict=True))


def check_moved(model, one, other):
    """Every bit arrives, and no device holds more than was promised."""
    rng = np.random.default_rng(0)
    values = jax.tree.map(
        lambda x: rng.standard_normal(x.stacked_shape).astype(np.float32),
        model.parameters,
        is_leaf=is_parameter,
    )
    source = ParameterPlacement.from_layout(model, one, devices=devices_of(one))
    target = ParameterPlacement.from_layout(model, other, devices=devices_of(other))
    params = moved(values, ParameterPlacement(model=model), source)
    memory = reshard_memory(params, source, target)
    assert memory.peak <= memory.limit, (str(one), str(other), memory)
    found = moved(params, source, target, donate=True)
    assert all(array.is_deleted() for array in jax.tree.leaves(params))
    lying = jax.tree.map(lambda array: array.sharding, found)
    assert lying == target.shardings
    jax.tree.map(
        np.testing.assert_array_equal, in_layer_order(target.model, found), values
    )
    return memory


def test_no_device_holds_more_than_one_layer_above_the_larger_layout():
    memory = check_moved(MODEL, "fsdp=2", "tensor=2")
    assert memory.before < memory.after < 1.1 * memory.before
    assert memory.by_host > memory.after / 2, "these are as large as they were"
    assert memory.layer < memory.after / 4


@pytest.mark.slow
def test_twenty_random_pairs_arrive_within_that_room():
    named = [
        (MODEL, "tensor=2", "tensor=8"),
        (MODEL, "stage=4,microbatches=4", "tensor=8"),
        (build("tiny-moe"), "expert=4", "expert=2"),
        (build("tiny-moe"), "expert=2,tensor=2", "expert=8"),
    ]
    random = [(MODEL, *pair) for pair in drawn(16, MODEL, seed=5)]
    for case in (*named, *random):
        check_moved(*case)


def test_every_value_arrives_on_other_devices():
    check(MODEL, "tensor=4", "fsdp=2,tensor=2", devices=jax.devices()[4:])


@pytest.mark.slow
def test_experts_arrive():
    check(build("tiny-moe"), "expert=4", "expert=2,tensor=2")


def bytes_of(one, other):
    params, source = params_of(MODEL, one)
    target = ParameterPlacement.from_layout(MODEL, other, devices=devices_of(other))
    return reshard_bytes(params, source, target)


def test_what_devices_lack_is_counted():
    split = 4 * sum(
        np.prod(parameter.stacked_shape)
        for path, parameter in MODEL.flat_parameters().items()
        if "norm" not in path
    )
    whole = 4 * MODEL.num_parameters
    assert bytes_of("data=2", "data=4").total == 2 * whole, "two devices have nothing"
    assert bytes_of("data=8", "tensor=8").total == 0
    # Each of 4 devices has a quarter of what is split, and lacks the rest.
    gathered = bytes_of("tensor=4", "data=4")
    assert gathered.by_axis == {"tensor": 3 * split}
    assert gathered.by_link == {"host": 3 * split}
    # The halves of tensor=2 that each device has hold what it is to have in 4 of 8.
    assert bytes_of("data=4,tensor=2", "tensor=8").total == split // 2


def test_parameters_of_another_layout_are_refused(refuses):
    params, _ = params_of(MODEL, "stage=3,microbatches=3")
    devices = jax.devices()[:2]
    shapes = ("blocks.attention.out", (6, 8, 16, 128), (4, 8, 16, 128))
    with refuses("layout.parameter_of_other_layout", *shapes):
        meshpar.reshard(params, "data=2", "tensor=2", model=MODEL, devices=devices)


INTERLEAVED = "stage=2,chunks=2,schedule=interleaved_1f1b,microbatches=2"


@pytest.mark.parametrize(
    ("lies", "said", "stages"),
    [
        (INTERLEAVED, "data=1", ("2 stages", 1)),
        (INTERLEAVED, "stage=4,microbatches=4", ("2 stages", 4)),
        ("data=1", INTERLEAVED, ("1 stages", 2)),
    ],
)
def test_parameters_of_another_number_of_stages_are_refused(
    lies, said, stages, refuses
):
    model = build("test", layers=4)
    params, _ = params_of(model, lies)
    with refuses("layout.parameter_of_other_stages", *stages, "from_layout="):
        meshpar.reshard(params, said, "data=1", model=model, devices=jax.devices()[:1])
