"""What is read layer by layer is read from the disk once."""

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from meshpar.train import stored_arrays
from meshpar.train.checkpoint_arrays import StoredArray


def bytes_read():
    found = tensorstore.experimental_collect_matching_metrics(
        "/tensorstore/kvstore/file/bytes_read"
    )
    return sum(value["value"] for metric in found for value in metric["values"])


def test_layers_that_share_chunks_are_read_once(tmp_path):
    rng = np.random.default_rng(0)
    array = rng.standard_normal((8, 512, 512)).astype(np.float32)
    saved = stored_arrays.save_args({"w": jnp.asarray(array)})
    ocp.Checkpointer(stored_arrays.handler()).save(tmp_path / "state", args=saved)
    cache = stored_arrays.chunk_cache()
    stored = StoredArray(tmp_path / "state", ("w",), array.shape, cache=cache)
    before = bytes_read()
    for layer in range(8):
        part = slice(layer, layer + 1)
        np.testing.assert_array_equal(stored[part], array[part])
    assert 0.5 * array.nbytes < bytes_read() - before < 1.2 * array.nbytes
