"""Who reads a part of an array reads little else from the disk."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

from meshpar import Layout, make_mesh
from meshpar.train.checkpoint import stored_arrays
from meshpar.train.checkpoint.contents import StoredArray
from meshpar.train.checkpoint.stored_arrays import _asking, chunk_bytes, chunk_shape

SHAPE = (4, 512, 512)
VALUES = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)


def bytes_read():
    found = tensorstore.experimental_collect_matching_metrics(
        "/tensorstore/kvstore/file/bytes_read"
    )
    return sum(value["value"] for metric in found for value in metric["values"])


def saved(folder, array, args):
    with ocp.Checkpointer(stored_arrays.handler()) as writer:
        writer.save(folder, args=args({"w": array}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An array that was saved split over its last dim."""
    mesh = make_mesh(Layout.parse("data=2,tensor=4"))
    array = jax.device_put(VALUES, jax.NamedSharding(mesh, jax.P(None, None, "tensor")))
    path = tmp_path_factory.mktemp("stored") / "state"
    return saved(path, array, stored_arrays.save_args)


@pytest.mark.parametrize(
    "part",
    [
        np.s_[:2],
        np.s_[1:2],
        np.s_[:, 256:],
        np.s_[:, 128:256],
        np.s_[:, :, :256],
        np.s_[2:, :256, 256:],
    ],
)
def test_a_host_reads_its_share_whatever_dims_are_split(part, folder):
    stored = StoredArray(folder, ("w",), SHAPE)
    stored[0:1, 0:1]  # Opened, so that what it says of itself is not counted.
    before = bytes_read()
    np.testing.assert_array_equal(stored[part], VALUES[part])
    share = VALUES[part].nbytes  # Compressed to nine tenths.
    assert 0.8 * share < bytes_read() - before < 1.1 * share


def test_layers_that_share_chunks_are_read_once(tmp_path):
    def of_orbax(tree):
        args = ocp.SaveArgs(chunk_byte_size=1 << 20)
        return ocp.args.PyTreeSave(tree, jax.tree.map(lambda _: args, tree))

    saved(tmp_path / "state", jnp.asarray(VALUES), of_orbax)
    cache = stored_arrays.chunk_cache()
    stored = StoredArray(tmp_path / "state", ("w",), SHAPE, cache=cache)
    before = bytes_read()
    for layer in range(len(VALUES)):
        part = slice(layer, layer + 1)
        np.testing.assert_array_equal(stored[part], VALUES[part])
    assert 0.8 * VALUES.nbytes < bytes_read() - before < 1.1 * VALUES.nbytes


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((), ()),
        ((7,), (7,)),
        ((0, 4), (0, 4)),
        ((16, 768), (8, 768)),
        ((50257, 768), (50257, 96)),
        ((65537, 64), (65537, 64)),
        ((32, 4096, 11008), (8, 512, 11008)),
        ((80, 8192, 8, 10, 128), (20, 8192, 2, 10, 128)),
        ((3, 3, 3, 48, 96), (3, 3, 3, 48, 48)),
    ],
)
def test_chunks_divide_what_a_device_writes_and_are_of_a_good_size(
    shape, part, itemsize
):
    chunk = chunk_shape(shape, part, itemsize)
    assert all(
        size >= 1 and whole % size == 0 for size, whole in zip(chunk, part, strict=True)
    )
    num_bytes, whole_bytes = (math.prod(one) * itemsize for one in (chunk, part))
    assert num_bytes >= min(1 << 16, whole_bytes)
    assert num_bytes <= 1 << 20 or 65537 in chunk


def test_orbax_may_take_other_arguments_beside_ours():
    def theirs(global_shape, write_shape, dtype, target_byte_size, *new, **options):
        return new, options

    choose = _asking(theirs)
    given = {"dtype": np.dtype(np.float32), "target_byte_size": chunk_bytes()}
    wanted = chunk_shape(SHAPE, SHAPE, 4)
    assert choose(SHAPE, write_shape=SHAPE, axes=(1,), **given) == wanted
    assert choose(SHAPE, SHAPE, None, 1 << 20, 5, axes=(1,)) == ((5,), {"axes": (1,)})


def test_an_orbax_of_other_arguments_chooses_by_itself():
    def theirs(shape, dtype):
        return shape

    with pytest.warns(UserWarning, match=r"\bshape, dtype\b"):
        assert _asking(theirs) is theirs


@pytest.mark.parametrize("part", [(32, 4096, 16384), (32, 4096, 2048), (4, 512, 16384)])
def test_dims_are_cut_alike_whichever_the_layout_splits(part):
    assert chunk_shape((32, 4096, 16384), part, 4) == (1, 256, 1024)
