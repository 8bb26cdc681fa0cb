"""Training programs: ours, and those whose published runs the planner is held against.

`--execution` takes one by name, or a TOML file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshpar.errors import InputError, nearest
from meshpar.hardware.attention_kernels import OWN_KERNEL
from meshpar.planner.machine.execution_fields import Execution
from meshpar.planner.machine.toml_file import check_fields, toml_values

# Calibrated with the A100's matmuls: one layer of Korthikanti et al. 2022, table 4.
_MEGATRON_LAUNCH_S = 8e-6

# Megatron-LM waits for the whole device after a hop. Calibrated: Qi et al. 2024 profile
# 0.60 ms for hops of 28 MB inside a host, whose bytes take 0.12 ms, and 0.38 ms for
# those of 10 MB, one in eight of them between hosts, whose bytes take 0.09.
_MEGATRON_HOP_S = 0.35e-3

MESHPAR = Execution(
    name="meshpar",
    fused_attention=True,  # for half precision: cuDNN on GPUs, splash on TPUs
    attention_kernel=OWN_KERNEL,
    fused_activation=True,  # XLA fuses elementwise chains
    dropout=False,
    lock_step=True,
    shared_ends=True,
    tensor_overlap=False,
    reduction_overlap=False,  # one reduction after the loop
    gather_overlap=False,
    measured_overlap=True,  # what XLA hides is read from what it compiles
    hop_overlap=False,
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
    MESHPAR, name="meshpar-cpu", fused_attention=False, measured_overlap=False
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
    launch_s=_MEGATRON_LAUNCH_S,
)
"""Megatron-LM of Narayanan et al. 2021 (section 4: fused kernels, scatter/gather)."""

MEGATRON_2022 = replace(
    MEGATRON_2021,
    name="megatron-2022",
    tensor_overlap=True,
    fused_accumulation=True,
    gradient_bytes=4,
    reduction_bytes=4,
)
"""Megatron-LM of Korthikanti et al. 2022 (section 4.2.2: collectives overlapped with
weight gradients; 18 bytes a parameter)."""

MEGATRON_2023 = replace(
    MEGATRON_2022,
    name="megatron-2023",
    gradient_bytes=2,
    reduction_bytes=2,
    reserve=0.055,  # calibrated: `published.others.CALIBRATES_RESERVE`
)
"""Megatron-LM in fp16, whose gradients are fp16 too, as Qi et al. 2024 ran it."""

MEGATRON_2024 = replace(
    MEGATRON_2023,
    name="megatron-2024",
    fused_attention=True,
    attention_kernel="flash-attention-2",
    dropout=False,
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
    attention_kernel="flash-attention-2",
    bucket_copy_bytes=2,  # DistributedDataParallel's, beside the sums in fp32
    bucket_bytes=25 * 2**20,  # DistributedDataParallel's default
    host_s=0.07,  # calibrated: `published.others.CALIBRATES_HOST`
    eager=True,
)
"""nanotron of the "Ultra-Scale Playbook" (Tazi et al. 2025): eager PyTorch with
FlashAttention-2, DistributedDataParallel and fp32 gradient accumulation."""

MEGATRON_CORE = replace(
    MEGATRON_2022,
    name="megatron-core",
    fused_attention=True,
    attention_kernel="cudnn",
    dropout=False,
    tensor_ring=True,
    reduction_overlap=True,
    update_overlap=True,
    hop_overlap=True,
    hop_split=False,
    bucket_bytes=160e6,
    hop_wait_s=0.0,
    reserve=MEGATRON_2023.reserve,
    host_s=0.08,  # calibrated: `published.megatron.CALIBRATES_HOST`
)
"""Megatron-Core on Hopper: data, tensor and pipeline parallel overlapped, attention of
Transformer Engine. The distributed optimizer is `zero=1` of a layout.

Reference: Megatron Core's user guide, "Communication Overlap" (read 2025): reductions
and gathers in buckets of 40 million parameters beside the backward and the forward
(`DistributedDataParallelConfig`), tensor parallel collectives in chunks beside the
matmuls that they feed, sends of interleaved stages beside computation.
"""

MEGATRON_BRIDGE = replace(
    MEGATRON_CORE, name="megatron-bridge", gradient_bytes=2, reduction_bytes=2
)
"""Megatron Bridge's recipes for performance: Megatron-Core with gradients kept and
summed in 16 bits (`grad_reduce_in_fp32=False`), tokens sent to their experts by an
all-to-all that no work hides (`moe_a2a_overlap=False`)."""

DEEPSPEED_ZERO3 = replace(
    MEGATRON_2021,
    name="deepspeed-zero3",
    gradient_bytes=2,
    reduction_bytes=2,
    reduction_overlap=True,
    gather_overlap=True,
    gathers_again=True,
    rails=1,  # calibrated: `published.others.CALIBRATES_RAILS`
)
"""DeepSpeed ZeRO-3 as Narayanan et al. 2021 ran it (section 5.2), with Megatron-LM's
kernels: 16-bit parameters gathered for every use, a layer ahead (Rajbhandari et al.
2021, "ZeRO-Infinity", section 6.2), for what is recomputed and for its backward too."""

MAXTEXT = replace(
    MESHPAR,
    name="maxtext",
    attention_kernel="splash",
    tensor_overlap=True,
    tensor_ring=True,
    gather_overlap=True,
    measured_overlap=False,
)
"""MaxText on TPUs: splash attention, and XLA's asynchronous collective fusion and
collective matmul, whose options its recipes set."""

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
        MEGATRON_CORE,
        MEGATRON_BRIDGE,
        DEEPSPEED_ZERO3,
        MAXTEXT,
    )
}
"""What `--execution` knows by name."""


def execution_of(name: str) -> Execution:
    """The execution of a name, or of a TOML file (`load_execution`).

    Raises:
        InputError: There is none, or the file does not describe one.
    """
    if name.endswith(".toml"):
        return load_execution(name)
    if name not in EXECUTIONS:
        raise InputError(
            f"no execution {name!r}; {nearest(name, EXECUTIONS)}; or name a .toml file",
            key="plan.unknown_execution",
        )
    return EXECUTIONS[name]


def load_execution(path: str | Path) -> Execution:
    """A program of one's own from a TOML file.

    The file has fields of `Execution`, and may start from a known one with `like`:

        like = "megatron-core"
        tensor_ring = false
        gradient_bytes = 2

    Its name is the file's, unless it gives one.

    Raises:
        InputError: The file cannot be read, has a field that is none or a value that
            cannot be, or lacks one without starting from a known execution.
    """
    values = toml_values(path, room="plan")
    like = values.pop("like", None)
    if like is not None and like not in EXECUTIONS:
        raise InputError(
            f"{str(path)!r}: no execution {like!r}; {nearest(str(like), EXECUTIONS)}",
            key="plan.unknown_execution",
        )
    base = {} if like is None else vars(EXECUTIONS[like])
    merged = {**base, "name": Path(path).stem, **values}
    start = 'execution with like = "megatron-core"'
    check_fields(Execution, merged, f"{str(path)!r}:", start, room="plan")
    try:
        return Execution(**merged)
    except InputError as error:
        raise InputError(f"{str(path)!r}: {error}", key=error.key) from error
