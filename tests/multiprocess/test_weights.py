"""Each of several processes reads the bytes of its own shards, and no others."""

import pytest

from tests.multiprocess.children import ends_of, free_port, start
from tests.transformers_cases import write_model

READ = """
import sys
import jax, numpy as np, optax
import meshpar
from meshpar import make_train_step
from meshpar.models.convert.weights import read_weights

port, number, layout, folder = sys.argv[1:]
with meshpar.distributed.start(
    coordinator=f"localhost:{port}", num_processes=2, process_id=int(number), emulate=1
):
    weights = read_weights(folder)
    step = make_train_step(weights.model, optax.sgd(0.1), layout)
    state = step.init(params=weights.params, model_state=weights.model_state)
    parts = jax.tree.leaves((state.params, state.model_state))
    share = sum(part.addressable_shards[0].data.nbytes for part in parts)
    print("read", weights.source.bytes_read, "of", share, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp=2", "stage=2,microbatches=2", "tensor=2"])
def test_a_process_reads_its_own_bytes(layout, tmp_path):
    pytest.importorskip("safetensors")
    folder = str(write_model(tmp_path / "theirs", "llama"))
    port = str(free_port())
    children = [
        start(["-W", "ignore", "-c", READ, port, number, layout, folder])
        for number in "01"
    ]
    for end in ends_of(children, timeout_s=180):
        assert end.status == 0, end.error[-2000:]
        line = next(one for one in end.output.splitlines() if one.startswith("read"))
        _, read, _, share = line.split()
        assert int(share) <= int(read) <= 1.2 * int(share)
