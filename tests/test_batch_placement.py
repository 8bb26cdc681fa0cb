"""Of several processes each gives its rows; that they are too many or few is told."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar import BATCH_AXES, Layout, make_mesh
from meshpar.train.batch_placement import BatchPlacement


def unchecked(layout, sharding):
    """Where batches lie, of a model that declares nothing."""
    return BatchPlacement(
        inputs={},
        check_sequences=lambda batch, partly: None,
        layout=layout,
        sharding=sharding,
    )


@pytest.fixture
def placement_of(monkeypatch):
    """A placement as the second of two processes would have it, half of its devices."""

    def placement(line, here=slice(4, 8)):
        layout = Layout.parse(line)
        sharding = NamedSharding(make_mesh(layout), PartitionSpec(BATCH_AXES))
        of_second = list(sharding.mesh.devices.flat)[here]

        def indices(shape):
            places = sharding.devices_indices_map(shape)
            return {device: places[device] for device in of_second}

        seen = SimpleNamespace(
            mesh=sharding.mesh,
            is_fully_addressable=False,
            addressable_devices_indices_map=indices,
        )
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        return unchecked(layout, seen)

    return placement


@pytest.mark.parametrize(
    ("line", "here", "rows"),
    [
        ("data=8", slice(4, 8), [4, 5, 6, 7]),
        ("data=2,fsdp=2,tensor=2", slice(4, 8), [4, 5, 6, 7]),
        ("tensor=8", slice(4, 8), list(range(8))),
        ("stage=2,data=2,tensor=2", slice(0, 4), [0, 1, 2, 3]),
        ("data=4,tensor=2", slice(1, 8, 4), [0, 1, 4, 5]),
    ],
)
def test_a_process_gives_the_rows_of_its_devices(line, here, rows, placement_of):
    assert placement_of(line, here).rows_here(8).tolist() == rows


def test_a_process_alone_gives_all_rows(refuses):
    layout = Layout.parse("data=4,tensor=2")
    sharding = NamedSharding(make_mesh(layout), PartitionSpec(BATCH_AXES))
    placement = unchecked(layout, sharding)
    assert placement.rows_here(8).tolist() == list(range(8))
    with refuses("batch.indivisible", 6, 4, "data=4,fsdp=1"):
        placement.rows_here(6)
    with refuses("batch.wrong_number_of_rows", "batch['x']", 4, 8):
        placement.place({"x": np.zeros((4, 2))}, global_batch=8)


def test_rows_that_do_not_divide_over_its_devices_are_told_with_how_many(
    placement_of, refuses
):
    numbers = ("batch['x']", 3, "1 of 2", "4 of the 8", "multiple of 4", "4/8")
    with refuses("batch.indivisible_rows", *numbers, "data=8,fsdp=1"):
        placement_of("data=8").check({"x": np.zeros((3, 2))})
    placement_of("data=8").check({"x": np.zeros((8, 2))})
    with refuses("batch.indivisible_rows", 8, "data=2,fsdp=1,expert=4"):
        placement_of("data=2,expert=4").check({"x": np.zeros((3, 2))})


def test_a_process_without_a_device_in_the_mesh_is_told(placement_of, refuses):
    with refuses("mesh.process_without_devices", "process 1", "'data=8'"):
        placement_of("data=8", slice(0, 0)).rows_here(8)
