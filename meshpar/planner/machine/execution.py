"""How a training program runs a layout: what it fuses, overlaps, shares and keeps.

A property of the software, the same for all its runs: ours, and those whose published
runs the planner is held against.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshpar.errors import InputError
from meshpar.layout import nearest


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One training program.

    Args:
        name: What `--execution` calls it.
        fused_attention: Whether one kernel does attention without storing the scores,
            and skips what a causal mask hides (FlashAttention), where there is one:
            `Run.fused_attention`.
        fused_activation: Whether one kernel does the MLP's bias, activation and gate.
        dropout: Whether blocks drop values, whose masks are kept.
        lock_step: Whether all pipeline ranks move together, tick by tick, those without
            work too (`meshpar.parallel.pipeline`); otherwise each waits for its inputs.
        shared_ends: Whether all pipeline ranks share embedding and head; otherwise the
            first has the embedding and the last the head.
        tensor_overlap: Whether the backward's collectives over `tensor` run beside the
            matmuls for the weight gradients.
        reduction_overlap: Whether gradients are reduced beside the last backward.
        gather_overlap: Whether weights split over `fsdp` are gathered one layer ahead.
        hop_overlap: Whether activations hop between stages beside computation.
        hop_split: Whether a hop is split over `tensor` and gathered behind it.
        fused_accumulation: Whether a weight gradient is added to its sum by the matmul
            that makes it.
        keeps_gathered: Whether what sequence parallelism gathers is kept for the
            backward; otherwise it is gathered again.
        weight_bytes: Of each parameter as it is stored for use.
        gradient_bytes: Of each parameter's gradient sum.
        reduction_bytes: Of each parameter in the reduction over `data`.
        state_bytes: Of each parameter's optimizer state, and its master if it has one.
        logit_bytes: Of each logit at the loss, all its copies together: fp32 logits and
            their gradient (8); in Megatron-LM and nanotron 16-bit logits, the fp32
            copy, its softmax, and a 16-bit gradient (12).
        host_s: Work of the host between steps that no device work hides.
        hop_wait_s: Of each hop between stages, besides its bytes: what the host takes to
            wait for it and to start the device again.
        bucket_bytes: Of the gradients that one collective over data-parallel devices
            sums, and of the parameters that one gathers behind an update; 0 for all.
        eager: Whether operations run one by one, as written; otherwise a compiler
            fuses them, casts parameters for use, and leaves out what no result needs.
    """

    name: str
    fused_attention: bool
    fused_activation: bool
    dropout: bool
    lock_step: bool
    shared_ends: bool
    tensor_overlap: bool
    reduction_overlap: bool
    gather_overlap: bool
    hop_overlap: bool
    hop_split: bool
    fused_accumulation: bool
    keeps_gathered: bool
    weight_bytes: int
    gradient_bytes: int
    reduction_bytes: int
    state_bytes: int
    logit_bytes: float
    host_s: float
    eager: bool
    hop_wait_s: float = 0.0
    bucket_bytes: float = 0.0

    @property
    def update_bytes(self) -> int:
        """Of each parameter, what the update reads and writes.

        The sum's norm reads it, Adam reads it and reads and writes its state. Compiled,
        the parameter is read and written. Operation by operation, clipping reads and
        writes the sum, the master is read to write the parameter, and the sum is set to
        zero; one of 16 bits is first copied to fp32.
        """
        adam = 2 * 4 + 2 * self.state_bytes
        if not self.eager:
            return adam + 2 * self.weight_bytes
        copied = 2 + 4 if self.gradient_bytes == 2 else 0
        return adam + 2 * 4 + 4 + self.weight_bytes + self.gradient_bytes + copied


# Megatron-LM waits for the whole device after a hop. Calibrated: Qi et al. 2024 profile
# 0.60 ms for hops of 28 MB inside a host, whose bytes take 0.12 ms, and 0.38 ms for
# those of 10 MB, one in eight of them between hosts, whose bytes take 0.09.
_MEGATRON_HOP_S = 0.35e-3

MESHPAR = Execution(
    name="meshpar",
    fused_attention=True,  # cuDNN's, for half precision on a GPU
    fused_activation=True,  # XLA fuses elementwise chains
    dropout=False,
    lock_step=True,
    shared_ends=True,
    tensor_overlap=False,
    reduction_overlap=False,  # one reduction after the loop
    gather_overlap=True,  # XLA's latency-hiding scheduler moves gathers ahead
    hop_overlap=False,  # the next tick reads it
    hop_split=False,
    fused_accumulation=True,
    keeps_gathered=False,
    weight_bytes=4,  # parameters are stored in fp32 and cast for use
    gradient_bytes=4,
    reduction_bytes=4,
    state_bytes=8,  # Adam's two moments; the parameters are their own masters
    logit_bytes=8,  # fp32 logits and their gradient
    host_s=0.0,
    eager=False,
)
"""`make_train_step` of this library, with Adam."""

MESHPAR_CPU = replace(
    MESHPAR, name="meshpar-cpu", fused_attention=False, gather_overlap=False
)
"""The same on emulated devices: XLA:CPU has no fused attention, and does one thing
after another (`meshpar.emulate`)."""

MEGATRON_2021 = Execution(
    name="megatron-2021",
    fused_attention=False,
    fused_activation=True,
    dropout=True,
    lock_step=False,
    shared_ends=False,
    tensor_overlap=False,
    reduction_overlap=False,
    gather_overlap=False,
    hop_overlap=False,
    hop_split=True,
    fused_accumulation=False,
    keeps_gathered=False,
    weight_bytes=2,
    gradient_bytes=2,
    reduction_bytes=2,
    state_bytes=12,
    logit_bytes=12,
    host_s=0.0,
    eager=True,
    hop_wait_s=_MEGATRON_HOP_S,
)
"""Megatron-LM of Narayanan et al. 2021 (section 4: fused kernels, scatter/gather)."""

MEGATRON_2022 = Execution(
    name="megatron-2022",
    fused_attention=False,
    fused_activation=True,
    dropout=True,
    lock_step=False,
    shared_ends=False,
    tensor_overlap=True,
    reduction_overlap=False,
    gather_overlap=False,
    hop_overlap=False,
    hop_split=True,
    fused_accumulation=True,
    keeps_gathered=False,
    weight_bytes=2,
    gradient_bytes=4,
    reduction_bytes=4,
    state_bytes=12,
    logit_bytes=12,
    host_s=0.0,
    eager=True,
    hop_wait_s=_MEGATRON_HOP_S,
)
"""Megatron-LM of Korthikanti et al. 2022 (section 4.2.2: collectives overlapped with
weight gradients; 18 bytes a parameter)."""

MEGATRON_2023 = replace(
    MEGATRON_2022, name="megatron-2023", gradient_bytes=2, reduction_bytes=2
)
"""Megatron-LM in fp16, whose gradients are fp16 too, as Qi et al. 2024 ran it."""

MEGATRON_2024 = replace(
    MEGATRON_2023, name="megatron-2024", fused_attention=True, dropout=False
)
"""The same with FlashAttention-2 and no dropout, as Yeung et al. 2024 ran it."""

NANOTRON = Execution(
    name="nanotron",
    fused_attention=True,
    fused_activation=False,
    dropout=False,
    lock_step=False,
    shared_ends=False,
    tensor_overlap=True,
    reduction_overlap=True,
    gather_overlap=False,
    hop_overlap=False,
    hop_split=False,
    fused_accumulation=False,
    keeps_gathered=True,
    weight_bytes=2,
    gradient_bytes=4,
    reduction_bytes=4,
    state_bytes=12,
    logit_bytes=12,
    bucket_bytes=25 * 2**20,  # DistributedDataParallel's default
    host_s=0.08,  # calibrated: `published_others.CALIBRATES_HOST`
    eager=True,
)
"""nanotron of the "Ultra-Scale Playbook" (Tazi et al. 2025): eager PyTorch with
FlashAttention-2, DistributedDataParallel and fp32 gradient accumulation."""

EXECUTIONS = {
    execution.name: execution
    for execution in (
        MESHPAR,
        MESHPAR_CPU,
        MEGATRON_2021,
        MEGATRON_2022,
        MEGATRON_2023,
        MEGATRON_2024,
        NANOTRON,
    )
}
"""What `--execution` knows by name."""


def execution_of(name: str) -> Execution:
    """The execution of a name.

    Raises:
        InputError: There is none.
    """
    if name not in EXECUTIONS:
        raise InputError(f"no execution {name!r}; {nearest(name, EXECUTIONS)}")
    return EXECUTIONS[name]
