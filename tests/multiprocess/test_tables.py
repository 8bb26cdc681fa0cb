"""Embedding tables over several processes train as one, and go on from their states."""

import numpy as np
import pytest

from tests.multiprocess.children import ends_of, free_port, start
from tests.test_tables import batches, dense_run, step_of

TRAIN = """
import sys
import meshpar
from tests.test_tables import EXAMPLES, MIXED, batches, step_of

def losses(step, state, numbers):
    here = step.rows_here(EXAMPLES)
    for number in numbers:
        batch = {name: array[here] for name, array in batches()[number].items()}
        state, metrics = step(state, batch)
        print("loss", float(metrics["loss"]), flush=True)
    return state

port, number, folder = sys.argv[1:]
with meshpar.distributed.start(
    coordinator=f"localhost:{port}",
    num_processes=2,
    process_id=int(number),
    emulate=4,
    timeout_s=200,
    heartbeat_s=200,
) as processes:
    first = step_of(
        "data=2,stage=2,tensor=2,microbatches=4", "RowwiseAdagrad", MIXED, top_layers=2
    )
    state = losses(first, first.init(3), [0, 1])
    with first.checkpoints(folder, processes=processes) as checkpoints:
        checkpoints.save(first.portable(state), {})
        then = step_of("fsdp=4,tensor=2", "RowwiseAdagrad", "row_wise", top_layers=2)
        losses(then, then.restored(checkpoints), [2])
"""


@pytest.mark.slow
def test_two_processes_train_tables_and_others_go_on_from_their_checkpoint(tmp_path):
    port = str(free_port())
    words = ["-W", "ignore", "-c", TRAIN, port]
    children = [start([*words, number, str(tmp_path)]) for number in "01"]
    wanted = dense_run("RowwiseAdagrad", 2)[0][:3]
    for end in ends_of(children, timeout_s=500):
        assert end.status == 0, end.error[-3000:]
        lines = [line.split() for line in end.output.splitlines()]
        found = [float(line[1]) for line in lines if line[0] == "loss"]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    step = step_of("data=1", "RowwiseAdagrad", "replicated", top_layers=2)
    with step.checkpoints(tmp_path) as checkpoints:
        _, metrics = step(step.restored(checkpoints), batches()[2])
    np.testing.assert_allclose(float(metrics["loss"]), wanted[2], rtol=1e-5)
