"""A step on volumes as a workload of the planner: traced, and its arrays counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax

from meshpar.audit.needs import exchanges
from meshpar.audit.subject import FlatFunction, Subject
from meshpar.planner.workload.volume import SpaceWorkload
from meshpar.trace.live_bytes import most_room
from meshpar.trace.operations import operations


class _Traced(Protocol):
    def audit_subject(self, *arguments: Any) -> Subject: ...


def traced_space(step: _Traced, batch: Mapping[str, Any]) -> SpaceWorkload:
    """What a step holds and sends, by tracing it on its batch and on one of twice that.

    Nothing is compiled. What grows with the batch is of volumes, what does not is not.
    A step for TPUs has its arrays as XLA lays them out there.

    Args:
        step: From `make_train_step`; on an `absent_mesh` too.
        batch: Arrays or their shapes, the example first.
    """
    subject, once = _flat(step, batch, 1)
    _, twice = _flat(step, batch, 2)
    traced = operations(once.jaxpr, once.in_shardings, once.weights)
    least, most = (most_room(one.jaxpr, subject.platform) for one in (once, twice))
    return SpaceWorkload.from_peaks(least, most, exchanges(traced, subject.mesh_shape))


def _flat(
    step: _Traced, batch: Mapping[str, Any], times: int
) -> tuple[Subject, FlatFunction]:
    shapes = {
        name: jax.ShapeDtypeStruct(
            (times * array.shape[0], *array.shape[1:]), array.dtype
        )
        for name, array in batch.items()
    }
    subject = step.audit_subject(shapes)
    return subject, subject.flat()
