"""Time of a collective over one link, and the share that compiled programs hide.

References: Chan et al. 2007, "Collective communication"; Thakur et al. 2005.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from meshpar.collective_kinds import KINDS
from meshpar.layout import Layout
from meshpar.planner.machine.cluster import Link


def all_gather_s(output_bytes: float, num_devices: int, link: Link) -> float:
    """Time of an all-gather over a ring.

    Each device receives the `n - 1` shards that it lacks, one a step:

        time = output_bytes * (n - 1) / n / link + latency of n - 1 steps

    On a torus dim by dim, so that the steps are those of each dim's ring together.
    Between racks the faster of that ring and of two levels: every device gathers from
    its like in the other racks, and then all in a rack gather what those have.

    Example:
        >>> link = Link(name="host", bytes_per_s=100e9, hop_s=0.0)
        >>> all_gather_s(8e9, 4, link)
        0.06
    """
    if num_devices == 1:
        return 0.0
    moved = wire_bytes("all-gather", output_bytes, num_devices)
    ring_s = moved / link.bytes_per_s + _ring_latency_s(num_devices, link)
    if link.rack is None:
        return ring_s
    each = link.rack_members
    levels_s = all_gather_s(output_bytes / each, link.racks, link.between_racks)
    return min(ring_s, levels_s + all_gather_s(output_bytes, each, link.rack))


def reduce_scatter_s(input_bytes: float, num_devices: int, link: Link) -> float:
    """Time of a reduce-scatter: an all-gather's, or an all-reduce's where it is one.

    Example:
        >>> link = Link(name="host", bytes_per_s=100e9, hop_s=0.0)
        >>> reduce_scatter_s(8e9, 4, link)
        0.06
    """
    if link.scatters_whole:
        return all_reduce_s(input_bytes, num_devices, link)
    return all_gather_s(input_bytes, num_devices, link)


def all_reduce_s(payload_bytes: float, num_devices: int, link: Link) -> float:
    """Time of an all-reduce: the faster of a ring and a double binary tree.

        ring = 2 bytes (n - 1) / n / link + latency of 2 (n - 1) steps
        tree = 2 bytes / (link share) + latency of 2 log2(n) steps

    with the share of the bandwidth that a tree of so many bytes achieves there.

    Reference: Sanders et al. 2009 (double trees), as in NCCL 2.4; NCCL's own model of
    them (`src/graph/tuning.cc`, `treeCorrectionFactor`).

    Example:
        >>> link = Link(name="host", bytes_per_s=100e9, hop_s=0.0)
        >>> all_reduce_s(8e9, 4, link)
        0.12
    """
    if num_devices == 1:
        return 0.0
    ring_s = 2 * all_gather_s(payload_bytes, num_devices, link)
    if link.spans:
        return ring_s
    if link.rack is not None:
        # Scattered in each rack, summed between racks, and gathered there.
        each = link.rack_members
        sums_s = all_reduce_s(payload_bytes / each, link.racks, link.between_racks)
        ring_s = min(ring_s, 2 * all_gather_s(payload_bytes, each, link.rack) + sums_s)
    outer = max(1, num_devices // link.inner)
    tree_hops_s = math.log2(outer) * link.hop_s if link.inner > 1 or outer > 1 else 0.0
    tree_hops_s += (link.inner - 1) * link.inner_hop_s
    tree_hops_s += math.log2(link.racks) * _longer_hop_s(link)
    share = 1.0
    if link.name == "network":
        size = math.log2(max(payload_bytes, 1.0) / _TREE_FROM_BYTES)
        share = _TREE_SHARES[min(max(0, math.floor(size)), len(_TREE_SHARES) - 1)]
    moved_s = 2 * payload_bytes / (link.bytes_per_s * share)
    return min(ring_s, moved_s + 2 * tree_hops_s)


# Share of a ring's bandwidth that NCCL's trees are taken to achieve between hosts,
# NCCL's for its simple protocol: 0.92, and for each power of two from 512 KiB to
# 128 MiB this correction: of so many bytes, up to twice as many. (Of 8 MiB NCCL has 0.8
# and of 16 MiB 0.7; here more bytes never achieve less.) Fewer than 512 KiB achieve the
# first here, where NCCL takes other protocols; more than 128 MiB the last.
_TREE_FROM_BYTES = 2**19
_TREE_SHARES = tuple(
    0.92 * share for share in (0.5, 0.5, 0.6, 0.7, 0.7, 0.7, 0.7, 0.8, 0.9)
)


def all_to_all_s(payload_bytes: float, num_devices: int, link: Link) -> float:
    """Time of an all-to-all of `payload_bytes` on every device.

    Each device keeps `1 / n` and sends the rest directly; between hosts what leaves
    the host goes through the device's own port. Along a dim of k devices of a torus
    every value travels `k / 4` links on average, of each device's two (half as many and
    one where the ends are not joined: the middle link carries `k / 4` payloads); the
    dims work beside one another.
    """
    if num_devices == 1:
        return 0.0
    if link.spans:
        slowest = max(span.size / 4 / span.links for span in link.spans)
        latency_s = sum(span.size // 2 for span in link.spans) * link.hop_s
        return payload_bytes * slowest / link.port_bytes_per_s + latency_s
    if link.name == "network":
        away = payload_bytes * (1 - link.inner / num_devices)
        sent_s = away / link.port_bytes_per_s
        if link.rack is None:
            return sent_s + link.hop_s
        out_s = payload_bytes * (1 - 1 / link.racks) / link.rack_bytes_per_s
        return max(sent_s, out_s) + link.rack_hop_s
    away = payload_bytes * (num_devices - 1) / num_devices
    return away / link.bytes_per_s + link.hop_s


def send_s(payload_bytes: float, link: Link) -> float:
    """Time from a rank to the next: one port or link, one step.

    Of the ranks in a rack one sends out of it, and has what leads out for all of them.
    """
    if link.name == "none":
        return 0.0
    port = min(link.port_bytes_per_s, link.rack_bytes_per_s * link.rack_members)
    return payload_bytes / port + max(link.hop_s, link.rack_hop_s)


def collective_s(
    kind: str, payload_bytes: float, num_devices: int, link: Link
) -> float:
    """Time of a collective by its kind.

    Args:
        kind: One of `meshpar.collective_kinds.KINDS`; a ragged all-to-all takes at most
            an all-to-all's, a broadcast a send's.
        payload_bytes: Bytes of the whole array: output of a gather, input of a scatter.
        num_devices: Members of a group.
        link: Their link.
    """
    seconds = _SECONDS.get(KINDS[kind].takes_as or kind)
    if seconds is None:
        return send_s(payload_bytes, link)
    return seconds(payload_bytes, num_devices, link)


_SECONDS = {
    "all-gather": all_gather_s,
    "all-reduce": all_reduce_s,
    "all-to-all": all_to_all_s,
    "reduce-scatter": reduce_scatter_s,
}


def wire_bytes(kind: str, payload_bytes: float, num_devices: int) -> float:
    """Bytes that one device sends, as `meshpar.audit` counts them.

    Args:
        kind: One of `meshpar.collective_kinds.KINDS`.
        payload_bytes: Bytes of the whole array: output of a gather, input of a scatter.
        num_devices: Members of a group.

    Reference: nccl-tests, `doc/PERFORMANCE.md` (bus bandwidth over algorithm's).
    """
    share, of = KINDS[kind].sent(num_devices)
    return payload_bytes * (share / of if num_devices > 1 else 0.0)


def _ring_latency_s(num_devices: int, link: Link) -> float:
    if link.spans:
        # Dim by dim, of rings that have the whole of it ready at once.
        return sum(span.size - 1 for span in link.spans) * link.hop_s
    far_s = (link.racks - 1) * _longer_hop_s(link)
    outer = num_devices // link.inner
    if link.inner == 1:
        return (num_devices - 1) * link.hop_s + far_s
    # Most steps of a ring through every host stay inside one.
    return outer * link.hop_s + (num_devices - outer) * link.inner_hop_s + far_s


def _longer_hop_s(link: Link) -> float:
    """Time that a step to another rack takes above one in a rack."""
    return max(0.0, link.rack_hop_s - link.hop_s)


@dataclass(frozen=True, kw_only=True)
class HiddenShare:
    """Share of one kind of collective that matmuls hide in one program.

    Args:
        platform: `gpu` or `tpu`.
        mesh_axis: Mesh axis of the devices that take part.
        kind: XLA's name of the collective.
        share: Share of the bytes sent with a matmul between start and done, 0 to 1.
        wire_bytes: Bytes that one device sends with it in a step.
        target: Machine that the program was compiled for.
        layout: Layout of the model.
        num_parts: Parts in which blocks took the batch (`Platform.num_batch_parts`).
        command: Command that measures the row.
        part: As of `Row.part`, of a collective among some of the axis's devices.
    """

    platform: str
    mesh_axis: str
    kind: str
    share: float
    wire_bytes: int
    target: str
    layout: str
    command: str
    num_parts: int = 1
    part: str = ""


@cache
def hidden_shares() -> tuple[HiddenShare, ...]:
    """Return the rows of `overlap.json`, read from compiled programs.

    `recipes.bench.overlap` writes them: a collective is hidden if a matmul stands
    between its start and its done.
    """
    text = Path(__file__).parents[1].joinpath("overlap.json").read_text()
    return tuple(HiddenShare(**row) for row in json.loads(text)["rows"])


Condition = frozenset[str]
"""Mesh axes that a collective takes turns with, `microbatches` and `parts`."""

_TAKE_TURNS = ("stage", "tensor", "expert")
"""Mesh axes whose collectives stand in the way of others' between the same matmuls."""

_MICROBATCHES, _PARTS = "microbatches", "parts"


@cache
def hidden_share(
    condition: Condition,
    platform: str,
    mesh_axes: tuple[str, ...],
    kind: str,
    part: str = "",
) -> float:
    """Return the share of a collective that compiled programs hide.

    The mean, by bytes, of the measured programs in the same condition. If there is
    none, of those without experts, or without microbatches; else the least of the
    programs in ticks, or of those that are not, as the layout's is; else the least of
    all. The least of several mesh axes; 0 of what was not measured. Permutes over
    `tensor` are its gathers and scatters in chunks, so the three count together, as all
    collectives do that are a sum of gradients.

    Args:
        condition: An `overlap_condition`.
        platform: `gpu` or `tpu`.
        mesh_axes: Mesh axes of the collective.
        kind: XLA's name of the collective.
        part: As of `Row.part`.

    Example:
        >>> alone = overlap_condition(Layout(), in_parts=False)
        >>> round(hidden_share(alone, "gpu", ("data",), "all-reduce"), 2)
        0.64
    """
    shares = [_shares().get((platform, axis, part, kind), {}) for axis in mesh_axes]
    return min(_nearest(each, condition) for each in shares)


def overlap_condition(layout: Layout, *, in_parts: bool) -> Condition:
    """Return all that the hidden share of a layout's collectives depends on.

    Which of `tensor`, `stage` and `expert` have several devices, whose collectives take
    turns with one another; whether there are microbatches without stages; and whether
    blocks take the batch in parts.
    """
    sizes = layout.mesh_shape
    words = [axis for axis in _TAKE_TURNS if sizes[axis] > 1]
    words += [_MICROBATCHES] if layout.runs_in_ticks and layout.stage == 1 else []
    return frozenset([*words, _PARTS] if in_parts else words)


def _nearest(shares: dict[Condition, float], condition: Condition) -> float:
    """Return the share of a condition, or of those most like it; 0 if there is none."""
    for without in ((), ("expert",), (_MICROBATCHES,), ("expert", _MICROBATCHES)):
        if condition.difference(without) in shares:
            return shares[condition.difference(without)]
    ticks = {"stage", _MICROBATCHES}
    in_ticks = condition.isdisjoint(ticks)
    alike = [shares[each] for each in shares if each.isdisjoint(ticks) == in_ticks]
    return min(alike or shares.values(), default=0.0)


@cache
def _shares() -> dict[tuple[str, str, str, str], dict[Condition, float]]:
    """Return platform, mesh axis, part of it and kind -> condition -> share."""
    sums: dict[tuple[str, str, str, str], dict[Condition, list[float]]] = {}
    for row in hidden_shares():
        layout = Layout.of(row.layout)
        condition = overlap_condition(layout, in_parts=row.num_parts > 1)
        for kind in _kinds(row, layout):
            key = row.platform, row.mesh_axis, row.part, kind
            by_condition = sums.setdefault(key, {})
            total = by_condition.setdefault(condition, [0, 0])
            total[0] += row.share * row.wire_bytes
            total[1] += row.wire_bytes
    return {
        key: {
            condition: hidden / sent
            for condition, (hidden, sent) in by_condition.items()
        }
        for key, by_condition in sums.items()
    }


def _kinds(row: HiddenShare, layout: Layout) -> tuple[str, ...]:
    """Return the kinds of a plan's collectives that a row measures."""
    if row.mesh_axis == "tensor" and row.kind in _AROUND_TENSOR:
        return _AROUND_TENSOR
    shards = math.prod(layout.mesh_shape[axis] for axis in layout.split_axes)
    if row.mesh_axis == "data" and shards == 1:
        # Sums of gradients in two halves (`parallel.zero`): nothing else is sent.
        return ("all-reduce",)
    return (row.kind,)


_AROUND_TENSOR = ("all-gather", "reduce-scatter", "collective-permute")
