"""A run: one training step on a cluster, and the parameters that each device has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from meshpar.hardware.attention_kernels import (
    KERNELS,
    OWN_KERNEL,
    PLATFORM_KERNEL,
    AttentionChoice,
    AttentionRequest,
    attention_choice,
)
from meshpar.hardware.platforms import Platform, platform_named
from meshpar.hardware.splash_kernels import fuses_backward
from meshpar.layout import MESH_AXES, ZERO_AXES, Layout
from meshpar.parallel.sizes import pairs_ticks
from meshpar.planner.cost.pipeline_time import Ticks, layout_ticks
from meshpar.planner.known_errors import LONG_SEQ
from meshpar.planner.machine.cluster import Cluster, Link
from meshpar.planner.machine.execution import Execution
from meshpar.planner.machine.mixed import crossing_first
from meshpar.planner.workload.workload import Workload
from meshpar.schedules import SCHEDULES

SUM_AXES = tuple(axis for axis in ZERO_AXES if axis != "expert")
"""The mesh axes whose devices have the same parameters and other tokens, so that the
gradients of all parameters are summed over them.

Devices of `expert` have other tokens too, but share the routed experts out (GShard,
Lepikhin et al. 2020): the gradients of the other parameters are summed over it.
"""

_ONCE = "gradients are reduced once, behind the last backward"
_WHY_EXPOSED = {
    "tensor": "sums of the residual stream stand between a block's matmuls",
    "fsdp": "weights and gradients take longer than the layer's work beside them",
    "data": _ONCE,
    "stage": "a stage waits for its input and, where shared, for embedding and head",
    "context": "keys and values take longer than the attention beside them",
    "expert": "tokens must reach their experts before these can start",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A workload on a cluster under a layout.

    Args:
        workload, cluster, layout, execution: Model, machine, layout and program.
        global_batch: Sequences in a step.
        seq: Tokens of a sequence.
        stage_blocks: Blocks of every stage, chunk by chunk in order of the stages.
        ticks: Ticks of its pipeline; None to take them from the layout's schedule.
        why_execution: Why its layout's execution was chosen; empty if it was not.
        whole: The cluster of several kinds of devices whose part `cluster` is; None if
            it is none (`meshpar.planner.cost.parts`).
        order: All mesh axes, outermost first, along which devices are numbered
            (`make_mesh(order=)`).
    """

    workload: Workload
    cluster: Cluster
    layout: Layout
    execution: Execution
    global_batch: int
    seq: int
    stage_blocks: tuple[int, ...]
    ticks: Ticks | None = None
    why_execution: str = ""
    whole: Cluster | None = None
    order: tuple[str, ...] = MESH_AXES

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Size of each mesh axis, outermost first."""
        sizes = self.layout.mesh_shape
        if self.order == MESH_AXES:
            return sizes
        return {axis: sizes[axis] for axis in self.order}

    @property
    def replicas(self) -> int:
        """Devices that share a step's examples."""
        layout = self.layout
        return layout.data * layout.fsdp * layout.expert

    @property
    def microbatch(self) -> int:
        """Sequences of one microbatch on one device."""
        return self.global_batch // (self.replicas * self.layout.microbatches)

    @cached_property
    def tokens(self) -> int:
        """Tokens of one microbatch on one device."""
        return self.microbatch * self.seq // self.layout.context

    @property
    def num_parts(self) -> int:
        """Number of parts in which a block of our models takes a microbatch."""
        if not self.layout.sequence_parallel or self.layout.tensor == 1:
            return 1
        if self.workload.experts and self.layout.expert > 1:
            return 1  # a block that sends tokens over a batch axis is taken whole
        return self.platform.num_batch_parts(self.microbatch, self.tokens)

    @cached_property
    def state_shards(self) -> int:
        """Number of devices that ZeRO splits the states of dense parameters over."""
        layout = self.layout
        return math.prod(getattr(layout, axis) for axis in layout.split_axes)

    @property
    def routed_axes(self) -> tuple[str, ...]:
        """Mesh axes of ZeRO that split the states of experts too."""
        return tuple(axis for axis in self.layout.split_axes if axis != "expert")

    @cached_property
    def routed_shards(self) -> int:
        """Number of devices along `routed_axes`."""
        return math.prod(getattr(self.layout, axis) for axis in self.routed_axes)

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Mesh axes that all gradients are summed over whole, after ZeRO's.

        Without `data` under local steps, whose replicas average their parameters.
        """
        split = self.layout.split_axes if self.state_shards > 1 else ()
        averaged = ("data",) if self.layout.sync_every > 1 else ()
        return tuple(axis for axis in SUM_AXES if axis not in (*split, *averaged))

    @property
    def gathers_once(self) -> bool:
        """True if split parameters are gathered once for the whole step."""
        layout = self.layout
        if layout.zero < 3:
            return self.execution.splits_stored
        once = layout.runs_in_ticks and layout.fsdp_gather == "step"
        return self.execution.lock_step and once

    @property
    def splits_backward(self) -> bool:
        """True if the pipeline runs a backward in two: for input and for weights."""
        splits = SCHEDULES[self.layout.schedule].splits_backward
        return splits and self.layout.stage > 1

    @property
    def loops_over_ticks(self) -> bool:
        """True if XLA keeps the loop over ticks: of two, the last stands by itself."""
        return self.layout.stage > 1 or self.layout.microbatches > 2

    @property
    def prefetches(self) -> bool:
        """True if what a block sends over batch axes stands beside another block."""
        choice = self.layout.fsdp_prefetch
        if self.layout.runs_in_ticks or choice == "off":
            return False
        return self.execution.measured_overlap or choice == "on"

    @property
    def reduces_in_last_microbatch(self) -> bool:
        """True if gradients are reduced beside the last microbatch's backward.

        Pipelines that are asked to (`fsdp_prefetch=on`) hide little, and count as
        hiding nothing.
        """
        layout = self.layout
        if not self.execution.measured_overlap or layout.fsdp_prefetch == "off":
            return False
        in_ticks = layout.runs_in_ticks and layout.stage == 1
        in_ticks = in_ticks and not layout.data_splits
        return in_ticks and self.platform.overlaps_last_microbatch

    @property
    def split_from(self) -> dict[str, int]:
        """Least ZeRO stage that splits optimizer states, gradients and parameters."""
        return {
            "state": 1,
            "gradient": 1 if self.prefetches else 2,
            "weight": 1 if self.execution.splits_stored else 3,
        }

    @property
    def splits_parameters(self) -> bool:
        """True if a device has a part of each parameter between steps."""
        return self.state_shards > 1 and self.layout.zero >= self.split_from["weight"]

    @property
    def casts_parameters(self) -> bool:
        """True if parameters are stored wider than compiled matmuls take them."""
        wide = stored_bytes(self)[0] > self.dtype_bytes
        return wide and not self.execution.eager and self.layout.precision == "bf16"

    @property
    def scans_blocks(self) -> bool:
        """True if a loop gathers and casts one block's weights in each turn."""
        return self.execution.scans_blocks and not self.layout.runs_in_ticks

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one value in the blocks."""
        return 4 if self.layout.precision == "fp32" else 2

    @property
    def taken_bytes(self) -> int:
        """Bytes of a value that only matmuls of blocks take, as the backward has it."""
        scaled = self.execution.keeps_fp8 and self.layout.scales_matmuls
        return 1 if scaled else self.dtype_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes of one value of a weight that is gathered for use."""
        return 1 if self.layout.scales_matmuls else self.dtype_bytes

    @property
    def residual_bytes(self) -> float:
        """Bytes of the residual stream of one microbatch, over all of `tensor`."""
        return self.tokens * self.workload.hidden * self.dtype_bytes

    @property
    def residual_share(self) -> float:
        """Fraction of the residual stream that one device of `tensor` holds."""
        return 1 / self.layout.tensor if self.layout.sequence_parallel else 1.0

    @cached_property
    def platform(self) -> Platform:
        """The kind of device."""
        return platform_named(self.cluster.device.platform)

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of one device, in the precision of all but the blocks' matmuls.

        Attention, head and router of a program that trains in fp8 are in bf16.
        """
        return self.cluster.device.peak_flops[self.unscaled]

    @property
    def unscaled(self) -> str:
        """Precision of what is never in fp8: attention, head, router."""
        return "bf16" if self.layout.scales_matmuls else self.layout.precision

    @property
    def matmul_fraction(self) -> float:
        """Fraction of that peak that a matmul of infinite size achieves."""
        achieved = self.cluster.device.efficiency
        tuned = self.execution.tunes_matmuls and achieved.tuned_matmul
        return tuned or achieved.matmul

    @cached_property
    def attention(self) -> AttentionChoice:
        """The fused attention kernel that stores no scores, or why there is none.

        Our program chooses it with `attention_choice`, as the models do; other programs
        have their own, on its platform.
        """
        platform, kernel = self.cluster.device.platform, self.execution.attention_kernel
        split = self.layout.context > 1
        how, method = (
            self.layout.attention_method,
            self.layout.attention if split else "",
        )
        if not self.execution.fused_attention:
            return AttentionChoice()
        others = self.cluster.device.fused_attention
        if kernel == OWN_KERNEL and others:
            wanted = self.platform.fused_attention
            return AttentionChoice(wanted=wanted, obstacle="vendor")
        if kernel == OWN_KERNEL:
            return attention_choice(
                AttentionRequest(
                    platform=platform,
                    half=self.layout.precision == "bf16",
                    queries=self.seq,
                    keys=self.seq,
                    head_dim=self.workload.query_dim,
                    method=method,
                    capability=self.cluster.device.compute_capability,
                    # Zigzag order (`meshpar.parallel.sequence`).
                    chunks=2 * how.groups if split and how.heads == 1 else 1,
                )
            )
        if kernel == PLATFORM_KERNEL:
            kernel = self.platform.fused_attention
        kernel = others or kernel
        half = self.layout.precision != "fp32"
        taken = half and KERNELS.get(kernel) == platform
        return AttentionChoice(kernel=kernel if taken else "")

    @property
    def fused_attention(self) -> bool:
        """True if one kernel does attention and stores no scores."""
        return bool(self.attention.kernel)

    @property
    def fuses_backward(self) -> bool:
        """True if splash attention's backward is one kernel, not two."""
        workload, tensor = self.workload, self.layout.tensor
        how, causal = self.layout.attention_method, workload.causal
        # Of a ring's kernels all but the first meet chunks that see each other whole.
        hops = self.layout.context > 1 and how.groups > 1
        tokens = self.seq // (2 * how.groups if hops and causal else how.groups)
        heads, kv_heads = workload.heads / tensor, workload.kv_heads / tensor
        return fuses_backward(
            tokens,
            tokens,
            group=max(1, round(heads / max(1, kv_heads))),
            head_dim=workload.query_dim,
            masked=causal and not hops,
        )

    @property
    def keeps_log_sums(self) -> bool:
        """True if the log of each softmax's sum is kept with attention's output.

        By name (`layout.ATTENTION_MIXED`), so that the backward attends no second time;
        a kernel of cuDNN gives no such name.
        """
        return self.tiled_attention or self.attention.kernel == "splash"

    @property
    def tiled_attention(self) -> bool:
        """True if our own loop over tiles does attention (`parallel.context.tiles`)."""
        longest = self.platform.longest_scores
        needed = self.layout.context > 1 or self.seq > longest
        return needed and not self.execution.eager and not self.fused_attention

    @property
    def stores_softmax(self) -> bool:
        """True if the forward stores the softmax, not the log of its sums."""
        return not (self.fused_attention or self.tiled_attention)

    @property
    def drops(self) -> bool:
        """True if branches drop values, by the model or by the program."""
        return self.workload.dropout or self.execution.dropout

    @cached_property
    def known(self) -> dict[tuple, Any]:
        """Values computed of this run, by their name and further arguments."""
        return {}

    def link(self, *mesh_axes: str) -> Link:
        """Return the link that a collective over these mesh axes runs on."""
        if mesh_axes not in self.known:
            link = self._mesh_link(self.mesh_shape, mesh_axes)
            ours = self.execution.measured_overlap and len(self.cluster.torus) == 3
            if ours or not self.execution.scatters_whole:
                # Ours by the options of `hardware.platforms`: a step of `fsdp=64` on
                # v5p:4x4x4 scatters all of its gradients (`recipes.bench.overlap`).
                link = replace(link, scatters_whole=False)
            self.known[mesh_axes] = _over_rails(link, self.execution.rails)
        return self.known[mesh_axes]

    def link_within(self, mesh_axis: str, inner: int, part: str) -> Link:
        """Return the link of groups along a mesh axis, or of one device of each.

        Args:
            mesh_axis: The mesh axis.
            inner: Devices of a group, next to each other.
            part: `inner` for the devices of a group, `outer` for one of each group.
        """
        key = "within", mesh_axis, part, inner
        if key not in self.known:
            shape: dict[str, int] = {}
            for axis, size in self.mesh_shape.items():
                if axis == mesh_axis:
                    shape |= {"outer": size // inner, "inner": inner}
                else:
                    shape[axis] = size
            link = self._mesh_link(shape, (part,))
            self.known[key] = _over_rails(link, self.execution.rails)
        return self.known[key]

    def _mesh_link(
        self, mesh_shape: Mapping[str, int], mesh_axes: Sequence[str]
    ) -> Link:
        """Return the link of a collective; between kinds of devices the slowest."""
        whole = self.whole or self.cluster
        if not whole.parts:
            return self.cluster.mesh_link(mesh_shape, mesh_axes)
        crossing, mesh_shape = crossing_first(whole, mesh_shape)
        cluster = whole if crossing in mesh_axes else self.cluster
        return cluster.mesh_link(mesh_shape, mesh_axes)

    def rank_blocks(self, rank: int) -> tuple[range, ...]:
        """Return the layers of each chunk of one rank."""
        ends, each = list(accumulate(self.stage_blocks)), self.stage_blocks
        return tuple(
            range(ends[stage] - each[stage], ends[stage])
            for stage in self.rank_stages(rank)
        )

    def rank_stages(self, rank: int) -> Sequence[int]:
        """Return the stages that the schedule places on a rank, its chunk 0 first."""
        ranks = self.layout.stage
        chunks = self.num_stages // ranks
        return SCHEDULES[self.layout.schedule].stages_of(rank, ranks, chunks)

    @property
    def pipeline_ticks(self) -> Ticks:
        """Ticks of the pipeline, in lock step or where ranks diverge."""
        ticks = self.ticks or layout_ticks(self.layout)
        if not self.pairs_ticks:
            return ticks
        most = self.layout.microbatches * self.num_stages // self.layout.stage
        held = tuple(min(count + 1, most) for count in ticks.in_flight)
        return replace(ticks, in_flight=held)

    @property
    def pairs_ticks(self) -> bool:
        """True if a tick's forward and backward of experts run side by side."""
        return self.execution.measured_overlap and pairs_ticks(
            self.layout, self.platform, self.expert_hosts
        )

    @property
    def expert_hosts(self) -> int:
        """Number of hosts of the devices that share experts."""
        link = self.link("expert")
        return self.layout.expert // link.inner if link.name == "network" else 1

    @property
    def num_stages(self) -> int:
        """Number of stages: chunks of all ranks."""
        return len(self.stage_blocks)

    # Its description, for `meshpar.planner.plan.Plan`.

    @property
    def heading(self) -> str:
        """The model and the machine, in a line."""
        number = self.workload.num_parameters
        size = f"{number / 1e9:.3g} B" if number >= 1e8 else f"{number / 1e6:.3g} M"
        return (
            f"{self.workload.name}: {size} parameters on {self.cluster.text}, run as "
            f"{self.execution.name}"
        )

    @property
    def layout_text(self) -> str:
        """The layout as text."""
        return str(self.layout)

    @property
    def share(self) -> str:
        """Part of the batch on a device, in words."""
        count = self.layout.microbatches
        counts = "/".join(map(str, self.layout.data_splits or (count,)))
        return (
            f"{self.global_batch} sequences of {self.seq} tokens, {counts} "
            f"microbatch{'es' if count > 1 else ''} of {self.microbatch} on a device"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Words about its attention, and how its ranks run."""
        return tuple(filter(None, (self.attention.words, self.why_execution)))

    @property
    def examples(self) -> tuple[int, str]:
        """Number of tokens of a step."""
        return self.global_batch * self.seq, "tokens"

    @property
    def kind(self) -> str:
        """Kind of the model, and of its sequences where attention is most of a step."""
        if self.workload.experts:
            return "models with experts"
        if self.seq >= LONG_SEQ:
            return f"sequences of {LONG_SEQ:,} tokens or more"
        return "dense models"

    @property
    def model_flops(self) -> int:
        """FLOPs of one step, without recomputation."""
        return self.workload.model_flops(global_batch=self.global_batch, seq=self.seq)

    @property
    def python_call(self) -> str:
        """Call that makes the training step."""
        return f"meshpar.make_train_step(model, optimizer, {str(self.layout)!r})"

    def why_exposed(self, mesh_axis: str) -> str:
        """Return the reason why the step waits for a mesh axis."""
        layer_by_layer = self.layout.zero == 3 and not self.gathers_once
        if mesh_axis == "fsdp" and not layer_by_layer:
            return _ONCE
        return _WHY_EXPOSED[mesh_axis]

    def as_json(self) -> dict[str, Any]:
        """Return entries of a plan's JSON that only transformers have."""
        return {"attention": self.attention.words, "why_execution": self.why_execution}


def _over_rails(link: Link, rails: int) -> Link:
    """Return the link of a collective that uses `rails` ports of a host; 0 for all."""
    if not rails or link.name != "network":
        return link
    return replace(
        link, bytes_per_s=min(link.bytes_per_s, rails * link.port_bytes_per_s)
    )


def block_parameters(run: Run, *, moe: bool) -> float:
    """Return the number of parameters of a block that one device computes with."""
    workload, layout = run.workload, run.layout
    experts = workload.expert_parameters(moe=moe)
    matrices = workload.block_matrix_parameters(moe=moe) - experts
    vectors = workload.block_vector_parameters(moe=moe)
    return (matrices + experts / layout.expert) / layout.tensor + vectors


def rank_parameters(run: Run, rank: int) -> float:
    """Return a rank's parameters on one device, without ZeRO's split."""
    key = "parameters", rank
    if key not in run.known:
        blocks = sum(
            count * block_parameters(run, moe=moe)
            for moe, count in blocks_by_kind(run, rank)
        )
        run.known[key] = blocks + end_parameters(run, rank)
    return run.known[key]


def blocks_by_kind(run: Run, rank: int) -> tuple[tuple[bool, int], ...]:
    """Return pairs of True for routed experts, and the count of such blocks."""
    key = "kinds", rank
    if key not in run.known:
        chunks = run.rank_blocks(rank)
        total = sum(map(len, chunks))
        moe = sum(map(run.workload.count_moe_layers, chunks))
        pairs = (False, total - moe), (True, moe)
        run.known[key] = tuple(pair for pair in pairs if pair[1])
    return run.known[key]


def routed_parameters(run: Run, rank: int) -> float:
    """Return a rank's parameters on one device that belong to its routed experts."""
    workload, layout = run.workload, run.layout
    routed = sum(
        count * workload.expert_parameters(moe=moe)
        for moe, count in blocks_by_kind(run, rank)
    )
    return routed / layout.expert / layout.tensor


def shared_out(run: Run, rank: int) -> float:
    """Return one device's share of a rank's parameters, as ZeRO splits them.

    Those of experts lie over `expert` already.
    """
    routed = routed_parameters(run, rank)
    others = rank_parameters(run, rank) - routed
    return others / run.state_shards + routed / run.routed_shards


def end_parameters(run: Run, rank: int) -> float:
    """Return the parameters of embedding and head that a rank's device has."""
    workload, tensor = run.workload, run.layout.tensor
    first, last = has_ends(run, rank)
    total = 0.0
    if first:
        total += workload.embedding_parameters / tensor
    if last:
        total += workload.head_parameters / tensor + workload.final_norm_parameters
        total += workload.mtp_parameters / tensor
    if last and not first and has_both_tables(workload):
        total += table_parameters(run)  # its own copy
    return total


def has_both_tables(workload: Workload) -> bool:
    """Return True if the last stage takes the table of tokens, as the first does.

    For its tied head, or for the embeddings that `mtp_layers` join.
    """
    return workload.tied or workload.mtp_layers > 0


def table_parameters(run: Run) -> float:
    """Return one device's parameters of the table of tokens, or of the head's."""
    return run.workload.vocab * run.workload.hidden / run.layout.tensor


def has_ends(run: Run, rank: int) -> tuple[bool, bool]:
    """Return True for the embedding, and for the head, if a rank has it."""
    if run.execution.shared_ends:
        return True, True
    stages = run.rank_stages(rank)
    return 0 in stages, run.num_stages - 1 in stages


def stored_bytes(run: Run) -> tuple[int, int]:
    """Return the bytes of a parameter at rest, and of its optimizer state.

    Our parameters of 16 bits have an fp32 master among their state, unless they are
    rounded at random.
    """
    execution, kind = run.execution, run.layout.param_dtype
    if execution.eager or kind == "fp32":
        return execution.weight_bytes, execution.state_bytes
    master = 4 if kind == "bf16" else 0
    return 2, execution.state_bytes + master


def outer_bytes(run: Run) -> int:
    """Return the bytes a parameter that local steps keep: the common one, a momentum.

    In fp32, laid out as the optimizer's state.
    """
    return 8 if run.layout.sync_every > 1 else 0


def update_bytes(run: Run) -> int:
    """Return the bytes a parameter that the update reads and writes, as it is stored.

    A master is among the state, and its parameter only written; one that is rounded at
    random is read too.
    """
    execution = run.execution
    weight_bytes, state_bytes = stored_bytes(run)
    more = 2 * (state_bytes - execution.state_bytes)
    if execution.eager or run.layout.param_dtype == "fp32":
        return execution.update_bytes
    ways = 1 if state_bytes > execution.state_bytes else 2
    return execution.update_bytes + more + ways * weight_bytes - 8
