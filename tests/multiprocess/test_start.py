"""Real processes that come together where it is not by options, or do not."""

import pytest

from tests.multiprocess.children import ends_of, free_port, start
from tests.refusals import names

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}

# What JAX does once Kubernetes has told it where the pods are.
AS_OF_KUBERNETES = """
import sys
import jax
number, port = map(int, sys.argv[1:])
plain = jax.distributed.initialize

def initialize(initialization_timeout):
    plain(
        f"localhost:{port}", 2, number, cluster_detection_method="deactivate",
        initialization_timeout=initialization_timeout,
    )

jax.distributed.initialize = initialize
import meshpar
with meshpar.distributed.start(emulate=1, timeout_s=40) as processes:
    found = processes.num_processes, processes.gather(number), jax.device_count()
print("found", found, flush=True)
"""


@pytest.mark.slow
def test_pods_that_jax_has_joined_call_the_roll_too():
    port = str(free_port())
    children = [
        start(["-c", AS_OF_KUBERNETES, str(number), port], **POD) for number in (0, 1)
    ]
    for end in ends_of(children, timeout_s=120):
        assert end.status == 0, end.error[-2000:]
        assert "found (2, [0, 1], 2)" in end.output


ALONE = """
import meshpar
try:
    meshpar.distributed.start(timeout_s=2)
except meshpar.InputError as error:
    print("refused:", error.key, error)
"""


def test_a_pod_that_may_not_ask_kubernetes_is_told_both_ways_out():
    (end,) = ends_of([start(["-W", "ignore", "-c", ALONE], **POD)], timeout_s=60)
    refused = next(line for line in end.output.splitlines() if "refused" in line)
    assert names(refused, "processes.kubernetes_unavailable"), refused
    assert names(refused, "'jax[k8s]'")
    assert names(refused, "--process-id $JOB_COMPLETION_INDEX")


TOO_LATE = """
import jax
jax.devices()
import meshpar
by_hand = dict(coordinator="localhost:%d", num_processes=2, process_id=%d)
try:
    meshpar.distributed.start(**by_hand)
except meshpar.InputError as error:
    print("refused:", error.key, error, flush=True)
    meshpar.distributed.leave(2)
"""


@pytest.mark.slow
def test_a_start_after_jax_has_started_is_refused_by_all():
    port = free_port()
    children = [start(["-c", TOO_LATE % (port, number)]) for number in (0, 1)]
    ends = ends_of(children, timeout_s=60)
    assert all(end.status in (0, 2) for end in ends), ends
    key = "processes.jax_already_started"
    assert any(names(end.output, key) for end in ends), ends
