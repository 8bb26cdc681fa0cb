"""Seconds of single kernels and of single collectives, and what hides these.

A `Row` is one collective of a step: its bytes, how often it runs, and what may hide it.
A `Cost` is computing and waiting, by mesh axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from meshpar.hardware import device as matmul_time
from meshpar.hardware.attention_kernels import (
    MATMULS_OF_BACKWARD,
    Kernel,
)
from meshpar.hardware.splash_kernels import splash_backward_in_forwards
from meshpar.planner.cost.run import Run
from meshpar.planner.machine.cluster import Link
from meshpar.planner.machine.collective_cost import collective_s

HOST = "host"
"""Key of `Cost.exposed_s` for waiting on the host's memory."""


@dataclass(frozen=True)
class Cost:
    """Seconds of work on one device.

    Args:
        compute_s: Computing.
        exposed_s: Waiting for collectives, by mesh axis; for the host's memory as
            `HOST`.
        hidden_s: The part of `compute_s` that already runs while collectives do.

    Example:
        >>> (Cost(1.0, {"tensor": 0.5}) * 2 + Cost(1.0)).total_s
        4.0
    """

    compute_s: float = 0.0
    exposed_s: Mapping[str, float] = field(default_factory=dict)
    hidden_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Computing and waiting together."""
        return self.compute_s + sum(self.exposed_s.values())

    def __add__(self, other: Cost) -> Cost:
        exposed_s = dict(self.exposed_s)
        for mesh_axis, seconds in other.exposed_s.items():
            exposed_s[mesh_axis] = exposed_s.get(mesh_axis, 0.0) + seconds
        return Cost(
            self.compute_s + other.compute_s, exposed_s, self.hidden_s + other.hidden_s
        )

    def __mul__(self, times: float) -> Cost:
        return Cost(
            self.compute_s * times,
            {mesh_axis: s * times for mesh_axis, s in self.exposed_s.items()},
            self.hidden_s * times,
        )


HALVES = ("attention", "mlp")
"""Halves of a block. The backward of each has matmuls for `inputs` and `weights`."""

ATTENTION, ATTENTION_AGAIN, LAYER = "attention", "attention again", "layer"
BLOCKS, LAST_BACKWARD, NEXT_FORWARD = "blocks", "last backward", "next forward"
MATMULS, COMPUTING = "matmuls", "computing"
"""Work that can hide collectives, where the execution overlaps them.

Further names are a half's `attention outputs` (in the forward), `attention inputs` and
`mlp weights`.
"""

SECONDS, BYTES = "seconds", "bytes"
"""Values of `Row.only`."""


class Row(NamedTuple):
    """One collective.

    Args:
        mesh_axes: Mesh axes whose devices take part together.
        kind: XLA's name of the collective.
        payload_bytes: Bytes of the whole array: output of a gather, input of a scatter;
            of a permute, bytes sent.
        reason: Purpose, in words.
        passes: Part of the step that runs it: `forward`, `backward`, `weight_grad` (of
            a split backward), `head`, `up` and `down` (hops), `once`.
        times: Times that it runs in each of them.
        hidden_by: Work that can hide it; empty for none.
        share: Largest fraction of its time that can be hidden there.
        waits_on: Mesh axis that waiting for it counts for; its first when empty.
        members: Devices that take part; 0 for all of the mesh axes.
        part: `inner` for devices next to each other, `outer` for one of each such
            group; empty for all of the mesh axes.
        only: `SECONDS` or `BYTES` if only that sum counts the row.
        again: Number of `recomputation.Again` that `times` is multiplied by.
    """

    mesh_axes: tuple[str, ...]
    kind: str
    payload_bytes: float
    reason: str
    passes: str
    times: int = 1
    hidden_by: str = ""
    waits_on: str = ""
    members: int = 0
    part: str = ""
    only: str = ""
    share: float = 1.0
    again: str = ""


Rows = tuple[Row, ...]


def rows_in(rows: Rows, passes: str) -> Rows:
    """Return the rows that run in this part of the step."""
    return tuple(row for row in rows if row.passes == passes)


_NOTHING: Mapping[str, float] = {}


def row_s(run: Run, row: Row) -> float:
    """Return the seconds of a row in one pass; 0 where only bytes count."""
    if row.only == BYTES:
        return 0.0
    once = row.passes == "once"
    key = row.mesh_axes, row.kind, row.payload_bytes, row.members, row.part, once
    if key not in run.known:
        link, num_devices, count = row_link(run, row), members(run, row), 1
        if once and run.execution.bucket_bytes:
            count = math.ceil(row.payload_bytes / run.execution.bucket_bytes)
        payload_bytes = row.payload_bytes / count
        each_s = collective_s(row.kind, payload_bytes, num_devices, link)
        run.known[key] = count * each_s
    return row.times * run.known[key]


def row_link(run: Run, row: Row) -> Link:
    """Return the link that a row runs on."""
    if not row.part:
        return run.link(*row.mesh_axes)
    [mesh_axis] = row.mesh_axes
    size = getattr(run.layout, mesh_axis)
    inner = row.members if row.part == "inner" else size // row.members
    return run.link_within(mesh_axis, inner, row.part)


def members(run: Run, row: Row) -> int:
    """Return the number of devices that take part."""
    return row.members or math.prod(getattr(run.layout, axis) for axis in row.mesh_axes)


def exposed(
    run: Run, rows: Iterable[Row], hiding_s: Mapping[str, float] = _NOTHING
) -> Cost:
    """Return the cost of waiting for rows one after another.

    Args:
        run: The run.
        rows: Its rows of one pass.
        hiding_s: Seconds of work that hides collectives, by its `Row.hidden_by`;
            rows with the same name share them.
    """
    left = dict(hiding_s)
    exposed_s: dict[str, float] = {}
    total_hidden_s = 0.0
    for row in rows:
        seconds = row_s(run, row)
        if row.hidden_by in left:
            hidden_s = min(seconds * row.share, left[row.hidden_by])
            left[row.hidden_by] -= hidden_s
            seconds -= hidden_s
            total_hidden_s += hidden_s
        mesh_axis = row.waits_on or row.mesh_axes[0]
        exposed_s[mesh_axis] = exposed_s.get(mesh_axis, 0.0) + seconds
    slowed_s = total_hidden_s * run.cluster.device.efficiency.collective_cores
    return Cost(slowed_s, exposed_s, total_hidden_s)


def matmul_s(
    run: Run,
    rows: float,
    inner: float,
    columns: float,
    *,
    count: float = 1,
    sum_bytes: float = 0,
    unscaled: bool = False,
) -> float:
    """Return the seconds of `count` matmuls (rows, inner) x (inner, columns).

    Args:
        run: Gives device and precision.
        rows: Rows of the first operand.
        inner: Columns of the first operand, rows of the second.
        columns: Columns of the second operand.
        count: Number of matmuls.
        sum_bytes: Bytes of each value of a sum that the matmul adds its result to, and
            reads and writes instead of a result.
        unscaled: True if it is not in fp8 where the blocks are (`Run.unscaled`).
    """
    precision = run.unscaled if unscaled else run.layout.precision
    operand_bytes = run.dtype_bytes if unscaled else run.gathered_bytes
    flops = 2 * rows * inner * columns
    num_bytes = (rows * inner + inner * columns) * operand_bytes
    num_bytes += rows * columns * (2 * sum_bytes or run.dtype_bytes)
    return count * matmul_time.matmul_s(
        run.cluster.device,
        precision,
        flops,
        num_bytes,
        fraction=run.matmul_fraction,
    )


def cast_s(run: Run, values: float) -> float:
    """Return the seconds to cast operands of matmuls to fp8; 0 where none are.

    For a matmul, and transposed or scaled along their other dim for one of the backward
    (`Execution.cast_bytes`, `mxfp8_cast_bytes`).
    """
    if not run.layout.scales_matmuls:
        return 0.0
    to_mxfp8 = run.layout.precision == "mxfp8"
    execution = run.execution
    each = execution.mxfp8_cast_bytes if to_mxfp8 else execution.cast_bytes
    return memory_s(run, values * each)


def memory_s(run: Run, num_bytes: float) -> float:
    """Return the seconds to read or write so many bytes of memory."""
    return matmul_time.memory_s(run.cluster.device, num_bytes)


def host_s(run: Run, num_bytes: float) -> float:
    """Return the seconds to move bytes to the host's memory."""
    device = run.cluster.device
    return num_bytes / (device.efficiency.host * device.host_bytes_per_s)


def fused_attention_s(run: Run, flops: float, head_dim: float) -> float:
    """Return the seconds of the forward of the execution's fused attention kernel.

    Softmax costs as much as matmuls of the kernel's own `head_dim`, whatever the
    head's size (`meshpar.hardware.attention_kernels`).
    """
    kernel = _kernel(run)
    fraction = kernel.whole * head_dim / (head_dim + kernel.head_dim)
    return flops / (run.peak_flops * fraction)


def _kernel(run: Run) -> Kernel:
    """Return the speed of the fused kernel on the device."""
    device = run.cluster.device
    achieved = device.efficiency
    measured = Kernel(achieved.attention, achieved.attention_head_dim)
    return device.attention_kernels.get(run.attention.kernel, measured)


_FP32_BYTES = 4


def attention_forward_s(run: Run) -> float:
    """Return the seconds of attention of one microbatch: scores to mixed values."""
    if run.fused_attention:
        return _fused_s(run)
    scores_s = memory_s(run, _scores(run) * _forward_score_bytes(run))
    return _computed_share(run) * (_matmuls_s(run) + scores_s)


def attention_backward_s(run: Run) -> float:
    """Return the seconds of the gradients of queries, keys and values."""
    if run.fused_attention:
        if run.attention.kernel != "splash":
            return _fused_s(run) * _kernel(run).backward_in_forwards
        return _fused_s(run) * splash_backward_in_forwards(fused=run.fuses_backward)
    scores_s = memory_s(run, _scores(run) * _backward_score_bytes(run))
    if run.tiled_attention:  # the scores are made again
        return _computed_share(run) * (MATMULS_OF_BACKWARD * _matmuls_s(run) + scores_s)
    return 2 * _matmuls_s(run) + scores_s


def _computed_share(run: Run) -> float:
    """Fraction of all scores that is computed: tiles skip what a causal mask hides."""
    return 0.5 if run.tiled_attention and run.workload.causal else 1.0


def _forward_score_bytes(run: Run) -> float:
    """Bytes that the forward reads and writes for each stored score."""
    if not run.execution.eager:
        # `causal_attention`: in fp32 written, read for the maximum, the sum and the
        # quotient; that in the compute dtype written, and read.
        return 4 * _FP32_BYTES + 2 * run.dtype_bytes
    masked = 1 if run.execution.dropout else 0
    # Written, read and written by the softmax, read; and by dropout, with its mask.
    return (4 + 2 * masked) * run.dtype_bytes + masked


def _backward_score_bytes(run: Run) -> float:
    if not run.execution.eager:
        # The softmax's gradient in fp32 written, read for its mean and to be combined;
        # the softmax read by both and by a matmul; the scores' gradient written, and
        # read by two.
        return 3 * _FP32_BYTES + 6 * run.dtype_bytes
    masked = 1 if run.execution.dropout else 0
    # Read by three matmuls, written by one, three times by the softmax's derivative,
    # twice by dropout's, with its mask.
    return (7 + 2 * masked) * run.dtype_bytes + masked


def _flops(run: Run) -> float:
    """FLOPs of one forward on one device, masked scores included."""
    whole = run.tokens * run.workload.attention_flops(run.seq)
    return whole / run.layout.tensor


def _scores(run: Run) -> float:
    return run.tokens * run.seq * run.workload.heads / run.layout.tensor


def _matmuls_s(run: Run) -> float:
    return _flops(run) / (run.peak_flops * run.matmul_fraction)


def _fused_s(run: Run) -> float:
    """Seconds of the fused kernel, which skips the half that a causal mask hides."""
    hidden = 2 if run.workload.causal else 1
    head_dim = (run.workload.query_dim + run.workload.value_dim) / 2
    return fused_attention_s(run, _flops(run) / hidden, head_dim)
