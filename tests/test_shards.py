"""The shards that arithmetic gives each device are those that JAX gives it."""

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar import Layout, lint, make_mesh
from meshpar.lint.findings import parameter_shards
from meshpar.models.presets import build

LAYOUTS = [
    "data=8",
    "data=2,fsdp=2,tensor=2",
    "fsdp=4,tensor=2",
    "data=2,stage=2,tensor=2,microbatches=4",
    "fsdp=2,stage=2,tensor=2,microbatches=4,schedule=interleaved_1f1b,chunks=2",
    "data=4,fsdp=2,zero_axes=data/fsdp",
]


@pytest.mark.parametrize("line", LAYOUTS)
def test_every_device_holds_the_slices_that_jax_gives_it(line):
    layout = Layout.parse(line)
    mesh = make_mesh(layout)
    for shards in parameter_shards(build("tiny"), layout):
        row = shards.row
        sharding = NamedSharding(mesh, PartitionSpec(*row.mesh_axes))
        found = sharding.devices_indices_map(row.shape)
        for number, device in enumerate(jax.devices()):
            whole = [slice(0, size) for size in row.shape]
            expected = [
                one if mine == slice(None) else mine
                for one, mine in zip(whole, found[device], strict=True)
            ]
            assert [*shards.slices(shards.of_device[number])] == expected
        assert shards.number * shards.copies == 8


@pytest.mark.parametrize("line", LAYOUTS)
def test_rows_are_those_of_the_lint(line):
    model = build("tiny")
    rows = tuple(shards.row for shards in parameter_shards(model, Layout.parse(line)))
    assert rows == lint(model, line).parameters


def test_zero_1_splits_states_and_parameters_between_steps():
    for shards in parameter_shards(build("tiny"), Layout(data=8, zero=1)):
        assert shards.number == 8
        assert "data" in shards.state_mesh_axes


def test_layers_of_chunks_are_named_by_their_place():
    line = "stage=2,microbatches=4,schedule=interleaved_1f1b,chunks=2"
    first = parameter_shards(build("tiny"), Layout.parse(line))[0]
    part = first.slices(first.of_device[0])[0]
    assert first.places[part] == (0, 2)


def test_a_large_model_takes_no_memory_and_no_devices():
    shards = parameter_shards(build("llama3-70b"), Layout(fsdp=8, tensor=8))
    assert {len(one.of_device) for one in shards} == {64}
    assert sum(one.row.bytes for one in shards) > 4e9
