"""A host reads what its devices need of an array, each chunk once."""

import math
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

from meshpar import Layout, make_mesh
from meshpar.train.checkpoint import stored_arrays
from meshpar.train.checkpoint.stored_arrays import cut_box, handler, read, save_args

SHAPE = (6, 8, 12)
VALUES = np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(Layout.parse("data=2,fsdp=2,tensor=2"))


def args_of_orbax(tree):
    args = ocp.SaveArgs(chunk_byte_size=256)
    return ocp.args.PyTreeSave(tree, jax.tree.map(lambda _: args, tree))


@pytest.fixture(scope="module", params=[save_args, args_of_orbax])
def folder(request, tmp_path_factory, mesh):
    """An array that was split over two dims, in chunks of 64 values, ours or Orbax's.

    Checkpoints have had Orbax's chunks.
    """
    path = tmp_path_factory.mktemp("stored") / "state"
    sharding = jax.NamedSharding(mesh, jax.P("data", None, "tensor"))
    tree = {"a": jax.device_put(VALUES, sharding), "n": np.float32(7)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_arrays, "_CHUNK_BYTES", (64, 256))
        tree["n"] = jax.device_put(tree["n"], jax.NamedSharding(mesh, jax.P()))
        with ocp.Checkpointer(handler()) as writer:
            writer.save(path, args=request.param(tree))
    return path


def structs(mesh, shape=SHAPE, *spec):
    return {
        "a": jax.ShapeDtypeStruct(
            shape, np.float32, sharding=jax.NamedSharding(mesh, jax.P(*spec))
        ),
        "n": jax.ShapeDtypeStruct(
            (), np.float32, sharding=jax.NamedSharding(mesh, jax.P())
        ),
    }


@pytest.fixture
def values_read(monkeypatch):
    """How many values each read asks for; blocks are of at most 64."""
    monkeypatch.setattr(stored_arrays, "_BLOCK_BYTES", (256, 256))
    sizes, plain = [], tensorstore.open

    class Counted:
        def __init__(self, source):
            self.shape, self._source = source.shape, source

        def __getitem__(self, index):
            part = self._source[index]
            sizes.append(math.prod(part.shape))
            return part

    class Opened:
        def __init__(self, future):
            self._future = future

        def result(self):
            return Counted(self._future.result())

    counted = SimpleNamespace(open=lambda *a, **k: Opened(plain(*a, **k)))
    monkeypatch.setattr(stored_arrays, "tensorstore", counted)
    return sizes


@pytest.mark.parametrize(
    "spec",
    [(), ("data", None, "tensor"), (None, ("data", "fsdp", "tensor")), ("tensor",)],
)
def test_values_come_back_in_any_sharding_each_read_once(
    spec, mesh, folder, values_read
):
    wanted = structs(mesh, SHAPE, *spec)
    found = read(folder, wanted, {"a": None, "n": None})
    np.testing.assert_array_equal(found["a"], VALUES)
    assert found["n"] == 7 and found["a"].sharding == wanted["a"].sharding
    assert sum(values_read) == VALUES.size + 1
    assert max(values_read) <= 64


@pytest.mark.parametrize("spec", [("data",), (None, "fsdp", "tensor")])
def test_layers_come_to_their_places_and_empty_places_are_zeros(
    spec, mesh, folder, values_read
):
    places = (0, 3, -1, 1, 2, -1, 5, 4)
    wanted = structs(mesh, (8, *SHAPE[1:]), *spec)
    found = np.asarray(read(folder, wanted, {"a": places, "n": None})["a"])
    for place, layer in enumerate(places):
        np.testing.assert_array_equal(found[place], VALUES[layer] if layer >= 0 else 0)
    assert sum(values_read) == VALUES.size + 1


def test_an_array_more_or_less_is_named(mesh, folder, snapshot):
    wanted = structs(mesh)
    with pytest.raises(ValueError, match=r"\ba \(1\b") as more:
        read(folder, {"n": wanted["n"]}, {"n": None})
    with pytest.raises(ValueError, match=r"\bb \(1\b") as less:
        read(folder, {**wanted, "b": wanted["n"]}, dict.fromkeys("abn"))
    assert [str(more.value), str(less.value)] == snapshot


@pytest.mark.parametrize("most", [1, 7, 40, 1000])
def test_blocks_cover_a_box_once_and_are_cut_between_chunks(most):
    box, chunk = ((1, 7), (0, 5), (2, 12)), (2, 5, 4)
    seen = np.zeros((8, 8, 16), int)
    for block in cut_box(box, chunk, most):
        seen[tuple(slice(*bounds) for bounds in block)] += 1
        size = math.prod(stop - start for start, stop in block)
        assert size <= max(most, math.prod(chunk))
        for (start, stop), (first, last), step in zip(block, box, chunk, strict=True):
            assert start in (first, *range(0, 16, step))
            assert stop in (last, *range(0, 16, step))
    inside = seen[tuple(slice(*bounds) for bounds in box)]
    assert inside.min() == inside.max() == 1 and seen.sum() == inside.size


def test_a_chunk_that_is_missing_is_no_zeros(mesh, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "state")
    base = {"driver": "ocdbt", "base": copy.as_uri()}
    store = tensorstore.KvStore.open(base).result()
    chunk = next(k for k in store.list().result() if k.startswith(b"a/0"))
    store.delete_range(tensorstore.KvStore.KeyRange(chunk, chunk + b"\0")).result()
    with pytest.raises(Exception, match="(?i)missing"):
        stored_arrays.opened(copy, "a").read().result()
    assert stored_arrays.opened(folder, "a").read().result().size == VALUES.size
