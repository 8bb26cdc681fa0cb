"""Collectives of the compiled step: those that the layout asks for, and no others."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from meshpar import Layout, make_train_step
from models.presets import build
from tests.hlo import Collective, collectives, counts

LAYERS, BATCH, SEQ = 3, 16, 16
MODEL = build("test", layers=LAYERS)
# A weight here has at least 1,024 values, an activation 2,048, and a
# norm's scale 32.
SMALL_BYTES = 1024


@functools.cache
def compiled(line: str) -> tuple[jax.stages.Compiled, list[Collective]]:
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    step = make_train_step(MODEL, optax.adam(1e-3), layout, devices=devices)
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    weights = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.float32)
    program = step.compile(dict(tokens=tokens, targets=tokens, weights=weights))
    return program, collectives(program.as_text(), layout.mesh_shape)


@pytest.mark.parametrize("line", ["tensor=2", "data=2,fsdp=2,tensor=2"])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_block_all_reduces_twice_over_tensor_in_each_pass(line, place):
    rows = compiled(line)[1]
    assert counts(rows, place, "tensor", SMALL_BYTES) == {"all-reduce": 2}
    activation = BATCH // Layout.parse(line).batch_shards * SEQ * 32 * 4
    over_tensor = [
        row for row in rows if row.place == place and row.mesh_axes == ("tensor",)
    ]
    assert [row.bytes for row in over_tensor] == [activation, activation]


@pytest.mark.parametrize("line", ["fsdp=8", "data=2,fsdp=2,tensor=2"])
def test_each_weight_is_gathered_once_per_pass_and_its_gradient_scattered_once(line):
    rows = compiled(line)[1]
    weights_of_a_block = 6
    gathers = {"all-gather": weights_of_a_block}
    scatters = {"reduce-scatter": weights_of_a_block}
    assert counts(rows, "forward", "fsdp", 0) == gathers
    assert counts(rows, "backward", "fsdp", 0) == gathers | scatters
    weights_outside = 2
    a_norm_scale = 32 * 4 // 8
    assert counts(rows, "outside", "fsdp", a_norm_scale) == {
        "all-gather": weights_outside,
        "reduce-scatter": weights_outside,
    }


def test_gathered_bytes_are_those_of_the_weights_and_nothing_larger_moves():
    rows = compiled("fsdp=8")[1]
    block_bytes = sum(
        parameter.struct.size // LAYERS * 4
        for path, parameter in MODEL.flat_parameters().items()
        if path.startswith("blocks.")
    )
    gathered = [row for row in rows if row.kind == "all-gather"]
    for place in ("forward", "backward"):
        assert sum(row.bytes for row in gathered if row.place == place) == block_bytes
    scattered = [row for row in rows if row.kind == "reduce-scatter"]
    in_backward = [row.bytes for row in scattered if row.place == "backward"]
    assert sum(in_backward) == block_bytes // 8


def test_pure_data_parallel_reduces_gradients_once_and_nothing_else():
    rows = compiled("data=8")[1]
    assert all(row.place == "outside" and row.kind == "all-reduce" for row in rows)
    large = [row for row in rows if row.bytes > SMALL_BYTES]
    assert [row.bytes for row in large] == [4 * MODEL.num_parameters]


@pytest.mark.parametrize("line", ["data=8", "fsdp=8", "data=2,fsdp=2,tensor=2"])
def test_nothing_else_of_the_size_of_an_activation_or_a_weight_moves(line):
    rows = compiled(line)[1]
    asked_for = {
        ("forward", "all-reduce", ("tensor",)): 2,
        ("backward", "all-reduce", ("tensor",)): 2,
        ("outside", "all-reduce", ("tensor",)): 2 + 3,  # ends, and loss of each token
        ("outside", "all-reduce", ("data",)): 1,
        ("forward", "all-gather", ("fsdp",)): 4,  # a block's matrices
        ("backward", "all-gather", ("fsdp",)): 4,
        ("backward", "reduce-scatter", ("fsdp",)): 4,
        ("outside", "all-gather", ("fsdp",)): 1,  # the embedding table
        ("outside", "reduce-scatter", ("fsdp",)): 1,
    }
    for row in rows:
        if max(row.sizes) < SMALL_BYTES:
            continue
        key = (row.place, row.kind, row.mesh_axes)
        assert asked_for.get(key, 0) > 0, row
        asked_for[key] -= 1


def test_state_under_fsdp_8_takes_an_eighth_of_the_whole_per_device():
    whole = 3 * 4 * MODEL.num_parameters
    per_device = compiled("fsdp=8")[0].memory_analysis().argument_size_in_bytes
    batch_bytes = BATCH * SEQ * 3 * 4 // 8 + BATCH * 4 // 8
    assert per_device - batch_bytes == pytest.approx(whole / 8, rel=0.01)


def test_a_train_state_is_updated_in_place():
    analysis = compiled("fsdp=8")[0].memory_analysis()
    assert analysis.alias_size_in_bytes >= 3 * 4 * MODEL.num_parameters / 8
