"""Generation by the roofline: weights and cache are read once for each token.

    decode = max(bytes / memory bandwidth, FLOPs / peak) + communication
    prefill = hypot of the same two (`meshpar.hardware.device`) + communication

Windows are not modelled: a layer that has one is counted as if it kept and read all
tokens, so memory and time are upper bounds then.

Reference: Pope et al. 2022, "Efficiently scaling transformer inference", section 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshpar.errors import InputError, whole_number
from meshpar.hardware import device as matmul_time
from meshpar.layout import Layout
from meshpar.layout.requirements import check_precision
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.collective_cost import all_gather_s, all_reduce_s, send_s
from meshpar.planner.machine.mixed import check_one_kind
from meshpar.planner.workload.workload import Workload

_BYTES = {"fp32": 4, "bf16": 2, "bf16_stochastic": 2}
_LOGIT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class InferenceEstimate:
    """Estimated memory and time of generation on one cluster.

    Args:
        workload, cluster, layout: Model, machine and layout.
        slots: Requests that run at once.
        seq: Most tokens of a request.
        prompt: Tokens of a prompt.
    """

    workload: Workload
    cluster: Cluster
    layout: Layout
    slots: int
    seq: int
    prompt: int

    def __post_init__(self) -> None:
        for name in ("slots", "seq", "prompt"):
            whole_number(name, getattr(self, name))
        if self.prompt > self.seq:
            raise InputError(
                f"prompt={self.prompt} tokens are more than seq={self.seq}; raise seq",
                key="generation.prompt_too_long",
            )
        shards = self.layout.batch_shards
        if self.slots % shards:
            raise InputError(
                f"slots={self.slots} do not divide over the {shards} devices that "
                f"share the batch of layout {str(self.layout)!r}; give a multiple",
                key="generation.indivisible_slots",
            )

    @property
    def rows(self) -> int:
        """Number of requests of a device."""
        return self.slots // self.layout.batch_shards

    @property
    def parameter_bytes(self) -> float:
        """Bytes of parameters at rest on a device."""
        split = self.layout.fsdp if self.layout.zero == 3 else 1
        return self._computed_parameters * _BYTES[self.layout.param_dtype] / split

    @property
    def cache_bytes(self) -> float:
        """Bytes of the cache of all slots, full, on a device.

        Two arrays of kv heads, or one latent, for each token and layer:
        rows x seq x layers x values x bytes; heads that do not divide over `tensor`
        are copied (`meshpar.model.token_cache.kept_heads`).
        """
        return self._cache_bytes(self.seq) * self.rows

    @property
    def other_bytes(self) -> float:
        """Bytes of logits, of the larger program's stream, and of gathered weights."""
        tokens = max(self.rows, min(self.prompt, 128))
        stream = tokens * self.workload.hidden * self._compute_bytes * 8
        logits = self.rows * self.workload.vocab / self.layout.tensor * _LOGIT_BYTES
        layer = self._layer_parameters * self._compute_bytes
        return stream + logits + (2 * layer if self.layout.fsdp > 1 else 0)

    @property
    def total_bytes(self) -> float:
        """Bytes of a device in all."""
        return self.parameter_bytes + self.cache_bytes + self.other_bytes

    @property
    def fits(self) -> bool:
        """True if a device has enough memory."""
        return self.total_bytes <= self.cluster.device.usable_bytes

    @property
    def decode_s(self) -> float:
        """Seconds of one token of every slot, all of them full."""
        return self._step_s(1, self.seq, self.rows)

    @property
    def prefill_s(self) -> float:
        """Seconds of one prompt on each device that shares the batch."""
        return self._step_s(self.prompt, self.prompt / 2, 1)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all slots together."""
        return self.slots / self.decode_s

    @property
    def bound(self) -> str:
        """Part of a decode step that takes most time."""
        parts = self._parts(1, self.seq, self.rows)
        return max(parts, key=parts.__getitem__)

    def with_slots(self, slots: int) -> InferenceEstimate:
        """Return the same estimate with another number of slots."""
        return replace(self, slots=slots)

    def table(self) -> list[InferenceEstimate]:
        """Return estimates of one slot a device, two, four ... as long as they fit."""
        estimates, slots = [], self.layout.batch_shards
        while (each := self.with_slots(slots)).fits and slots <= 1 << 20:
            estimates.append(each)
            slots *= 2
        return estimates

    def as_json(self) -> dict[str, Any]:
        """Return what `meshpar estimate --slots --json` prints; bytes of a device."""
        return {
            "layout": str(self.layout),
            "slots": self.slots,
            "seq": self.seq,
            "prompt": self.prompt,
            "fits": self.fits,
            "memory": {
                "parameter_bytes": round(self.parameter_bytes),
                "cache_bytes": round(self.cache_bytes),
                "other_bytes": round(self.other_bytes),
                "total_bytes": round(self.total_bytes),
            },
            "decode_s": self.decode_s,
            "prefill_s": self.prefill_s,
            "tokens_per_s": self.tokens_per_s,
            "bound": self.bound,
            "roofline": self._parts(1, self.seq, self.rows),
            "by_slots": [
                {
                    "slots": one.slots,
                    "decode_s": one.decode_s,
                    "tokens_per_s": one.tokens_per_s,
                }
                for one in self.table()
            ],
        }

    @property
    def _compute_bytes(self) -> int:
        return _BYTES[self.layout.precision]

    @property
    def _layers(self) -> int:
        return -(-self.workload.layers // self.layout.stage)

    @property
    def _layer_parameters(self) -> float:
        """Mean parameters of a layer on a device that has it whole over `fsdp`."""
        workload, layout = self.workload, self.layout
        total = 0.0
        for moe, count in workload.block_kinds:
            experts = workload.expert_parameters(moe=moe)
            others = workload.block_parameters(moe=moe) - experts - self._whole
            split = (others + experts / layout.expert) / layout.tensor
            total += count * (split + self._whole)
        return total / workload.layers

    @property
    def _heads_divide(self) -> bool:
        """True if each device has an equal part of the query heads."""
        return self.workload.heads % self.layout.tensor == 0

    @property
    def _whole(self) -> int:
        """Parameters of a layer's attention that each device of `tensor` has whole.

        All if heads do not divide, those before attention if key heads do not.
        """
        workload = self.workload
        if workload.traced:
            return 0
        if not self._heads_divide:
            return workload.attention_matrix_parameters
        if workload.kv_lora_rank or workload.kv_heads % self.layout.tensor == 0:
            return 0
        heads = workload.heads + 2 * workload.kv_heads
        return workload.hidden * heads * workload.head_dim

    @property
    def _computed_parameters(self) -> float:
        ends = self.workload.embedding_parameters + self.workload.head_parameters
        return self._layers * self._layer_parameters + ends / self.layout.tensor

    def _cache_bytes(self, tokens: float) -> float:
        """Bytes of the cache of one request on a device."""
        workload, layout = self.workload, self.layout
        if workload.kv_lora_rank:
            values = float(workload.kv_lora_rank + workload.qk_rope_head_dim)
        else:
            # As `meshpar.model.token_cache` copies heads, without importing jax.
            kept_heads = workload.kv_heads
            if kept_heads > 1 and self._heads_divide:
                kept_heads = math.lcm(kept_heads, layout.tensor) // layout.tensor
            values = kept_heads * (workload.query_dim + workload.value_dim)
        per_token = self._layers * values * self._compute_bytes
        return tokens / layout.context * per_token

    def _microbatches(self, rows: int) -> int:
        """Number of microbatches of a step: only stages cut it."""
        return min(self.layout.microbatches, rows) if self.layout.stage > 1 else 1

    def _parts(self, new: int, seen: float, rows: int) -> dict[str, float]:
        """Seconds of reading memory, of arithmetic, and of each mesh axis."""
        workload, layout, device = self.workload, self.layout, self.cluster.device
        read = self._computed_parameters * self._compute_bytes
        read *= self._microbatches(rows)
        read += self._cache_bytes(seen) * rows
        tokens = rows * new
        whole = workload.layers * self._whole
        met = (workload.active_parameters - whole) / layout.tensor + whole
        shares = layout.tensor if self._heads_divide else 1
        scores = workload.layers * workload.attention_flops(round(seen)) / shares
        flops = (2 * met + scores) * tokens / layout.stage
        peak = device.peak_flops[layout.precision] * device.efficiency.matmul
        return {
            "memory": matmul_time.memory_s(device, read),
            "compute": flops / peak,
            **self._communication_s(tokens, self._microbatches(rows)),
        }

    def _communication_s(self, tokens: int, microbatches: int) -> dict[str, float]:
        layout = self.layout
        stream = tokens * self.workload.hidden * self._compute_bytes
        seconds = {}
        if layout.tensor > 1:
            link = self.cluster.link(layout, "tensor")
            one = all_reduce_s(stream, layout.tensor, link)
            seconds["tensor"] = 2 * self._layers * one
        if layout.fsdp > 1 and layout.zero == 3:
            link = self.cluster.link(layout, "fsdp")
            whole = self._computed_parameters * self._compute_bytes
            seconds["fsdp"] = all_gather_s(whole, layout.fsdp, link)
        if layout.context > 1:
            link = self.cluster.link(layout, "context")
            wide = 4 * tokens * self.workload.heads * (self.workload.value_dim + 1)
            one = all_reduce_s(wide / layout.tensor, layout.context, link)
            seconds["context"] = self._layers * one
        if layout.stage > 1:
            link = self.cluster.link(layout, "stage")
            hops = microbatches + layout.stage - 1
            seconds["stage"] = hops * send_s(stream / microbatches, link)
        return seconds

    def _step_s(self, new: int, seen: float, rows: int) -> float:
        parts = self._parts(new, seen, rows)
        memory, compute = parts.pop("memory"), parts.pop("compute")
        of_stage = max(memory, compute) if new == 1 else (memory**2 + compute**2) ** 0.5
        microbatches = self._microbatches(rows)
        ticks = (microbatches + self.layout.stage - 1) / microbatches
        return of_stage * ticks + sum(parts.values())


def estimate_inference(
    workload: Workload,
    cluster: Cluster,
    layout: Layout | str,
    *,
    slots: int,
    seq: int,
    prompt: int = 0,
) -> InferenceEstimate:
    """Estimate memory and time of generation.

    Args:
        workload: The model's shape.
        cluster: The devices.
        layout: The layout of the model.
        slots: Requests that run at once.
        seq: Most tokens of a request.
        prompt: Tokens of a prompt; half of `seq` when 0.

    Raises:
        InputError: Sizes do not fit together, or the model is not causal.
    """
    if not workload.causal:
        raise InputError(
            f"{workload.name} is not causal: its tokens attend to later ones, so there "
            "is no generation to estimate",
            key="generation.not_causal",
        )
    check_one_kind(cluster, "generation is estimated on")
    layout = Layout.of(layout).resolve(cluster.num_devices)
    check_precision(layout)
    return InferenceEstimate(
        workload=workload,
        cluster=cluster,
        layout=layout,
        slots=slots,
        seq=seq,
        prompt=prompt or max(1, seq // 2),
    )


def inference_lines(shown: InferenceEstimate) -> Sequence[str]:
    """Return lines of text: memory, decode, prefill, and a table of slots."""
    device = shown.cluster.device
    gigabytes = [
        f"{name} {value / 1e9:.2f} GB"
        for name, value in (
            ("parameters", shown.parameter_bytes),
            ("cache", shown.cache_bytes),
            ("other", shown.other_bytes),
        )
    ]
    rows = [
        f"  {one.slots:>7} slots {1e3 * one.decode_s:9.2f} ms a token "
        f"{one.tokens_per_s:12,.0f} tokens/s"
        for one in shown.table()
    ]
    return [
        f"{shown.workload.name} on {shown.cluster.text}, layout {shown.layout}: "
        f"{shown.slots} slots of {shown.seq} tokens",
        f"memory {shown.total_bytes / 1e9:.2f} of {device.memory_bytes / 1e9:.2f} GB: "
        f"{'fits' if shown.fits else 'does not fit'}",
        f"  {', '.join(gigabytes)}",
        f"decode {1e3 * shown.decode_s:.2f} ms a token, bound by {shown.bound}; "
        f"{shown.tokens_per_s:,.0f} tokens/s",
        f"prefill {1e3 * shown.prefill_s:.1f} ms for {shown.prompt} tokens",
        "against the number of slots, all of them full:",
        *rows,
    ]
