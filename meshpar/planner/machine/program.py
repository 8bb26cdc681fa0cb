"""A training program: what it fuses, keeps, overlaps and does on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from meshpar.errors import InputError, nearest
from meshpar.hardware.attention_kernels import (
    KERNELS,
    OWN_KERNEL,
    PLATFORM_KERNEL,
    is_number,
)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One training program.

    Args:
        name: Its name for `--execution`.
        fused_attention: True if one kernel does attention without storing the scores,
            and skips what a causal mask hides (FlashAttention), where the device has
            one: `Run.attention`.
        attention_kernel: Name in `meshpar.hardware.attention_kernels` of that kernel;
            `platform` for splash attention on TPUs and cuDNN's on GPUs; or `own` for
            the one that this library takes on the device.
        fused_activation: True if one kernel does the MLP's bias, activation and gate.
        fused_norms: True if one kernel does a norm, and one the rotary positions; else
            those of gated models run as Llama's reference code writes them, operation
            by operation and in fp32, which also repeats shared keys and values.
        dropout: True if blocks drop values, whose masks are kept.
        lock_step: True if all pipeline ranks move together, tick by tick, idle ones too
            (`meshpar.parallel.pipeline`); else each waits for its inputs.
        uneven_shares: True if slow devices may have fewer blocks or microbatches than
            others (`data_splits`, mixed hardware).
        shared_ends: True if all pipeline ranks share embedding and head; else the first
            has the embedding and the last the head.
        tensor_overlap: True if the backward's collectives over `tensor` run beside the
            matmuls for the weight gradients.
        tensor_ring: True if they, and the forward's, run in chunks around a ring, each
            beside the matmul of another chunk.
        reduction_overlap: True if gradients are reduced beside the last backward.
        expert_overlap: True if that holds for the gradients of experts too, and what
            follows for their parameters.
        update_overlap: True if updated parameters are gathered beside the next forward.
        gather_overlap: True if weights split over `fsdp` are gathered one layer ahead.
        scans_blocks: True if a compiled loop over single blocks gathers and casts the
            weights of one, and scatters their gradients, in each turn; ours gathers the
            next one's too, and takes the MLP of long batches in chunks.
        gathers_again: True if they are gathered once more for what a block recomputes.
        waits_for_scatters: Kind of device, such as `tpu`, on which no work hides the
            scattering of their gradients, though it hides the gathers; empty for none.
        scatters_whole: True if it all-reduces where XLA:TPU would by default instead of
            reduce-scattering (`Link.scatters_whole`).
        repacks: True if what is gathered is copied out of one buffer for the layer's
            matrices, and their gradients into one, in fp32, of which the device keeps
            its shard's sum; else gradients are added to a sum of the whole layer.
        recomputes: Parts of a block that are computed again besides what `remat` says,
            separated by "/": some of `MODULES`.
        stops_early: True if a block recomputes no more than its backward reads, so not
            the last matmul, under `remat=full` too.
        selects_matmuls: True if `remat=selective` keeps attention's output and that of
            every second matmul of a block, and recomputes the others.
        expert_capacity: Rows that an expert computes for each that is evenly its own: 1
            where none is dropped, above where it has room for so many and drops others.
        tunes_matmuls: True if its compiler times several kernels for each matmul and
            takes the fastest (`Efficiency.tuned_matmul`).
        splits_stored: True if ZeRO-1 and 2 split parameters between steps too, and
            gather them in the forward, not after the update.
        measured_overlap: True if the hidden share of a step's collectives is measured
            in compiled programs (`hidden_share`), not a yes or no of the options above.
        rails: Network ports of a host that one collective uses at once; 0 for all.
        hop_overlap: True if activations hop between stages beside computation, where
            ranks have several stages.
        hop_split: True if a hop is split over `tensor` and gathered after it.
        fused_accumulation: True if the matmul that makes a weight gradient adds it to
            its sum.
        keeps_gathered: True if what sequence parallelism gathers is kept for the
            backward; else it is gathered again.
        weight_bytes: Bytes of a parameter as it is stored for use.
        gradient_bytes: Bytes of a parameter's gradient sum.
        bucket_copy_bytes: Bytes per parameter of copies of its gradient in the buckets
            that collectives sum.
        reduction_bytes: Bytes per parameter in the reduction over `data`.
        state_bytes: Bytes per parameter of optimizer state, its master included.
        logit_bytes: Bytes per logit at the loss, all its copies together: fp32 logits
            and their gradient (8); in Megatron-LM and nanotron 16-bit logits, the fp32
            copy, its softmax, and a 16-bit gradient (12).
        loss_bytes: Bytes that the loss reads and writes for each logit, both ways: 36
            if its gradient is made at once; 52 if softmax's is read and written with
            it, and made from a mask of zeros.
        launch_s: Time that launching a kernel of a forward takes from Python besides
            the device's (`Efficiency.launch_s`).
        host_s: Time of the host between steps that no device work hides.
        kernel_host_s: Time that the host takes for each kernel of a block, Python,
            autograd and checks included: a device that is faster waits for it.
        graphs: True if attention, norms, router and shared experts are launched as CUDA
            graphs, for which the host takes no time.
        adds_biases_apart: True if biases of experts' outputs are added one expert after
            another, in fp32.
        biased_grad_flops: FLOP/s of experts' weight gradients that sum a bias's
            gradient too, where those are slower than other matmuls; 0 where not.
        exchange_overlap: True if tokens travel to and from experts beside matmuls of
            another microbatch.
        hop_wait_s: Time of each hop between stages besides its bytes: the host waits
            for it and starts the device again.
        bucket_bytes: Bytes of the gradients that one collective over data-parallel
            devices sums, and of the parameters that one gathers after an update; 0 for
            all.
        reserve: Bytes that the allocator holds besides what is counted, as a fraction
            of that: rounding, fragments, temporaries of library calls.
        eager: True if operations run one by one, as written; else a compiler fuses
            them, casts parameters for use, and drops what no result needs.
        fp8: True if it can train with `precision=fp8`: the matmuls of blocks with
            operands of 8 bits, gathered weights too; the rest as in bf16.
        cast_bytes: Bytes that casting a value to 8 bits reads and writes: 4 for one
            kernel that reads 16 bits and writes two copies (Transformer Engine 2.x,
            `Float8Quantizer`).
        mxfp8_cast_bytes: The same to MXFP8, whose blocks of 32 values have a scale
            each, along both dims; 0 if it does not train with `precision=mxfp8`.
        keeps_fp8: True if what its matmuls take in 8 bits is kept so for the backward;
            else in 16 bits, and cast again.
        keeps_expert_outputs: True if experts' outputs are kept, to weight them behind;
            else the router's weights scale what the experts' last matmul takes.
        whole_experts: True if devices of `tensor` have whole experts each, where their
            number allows it, and tokens go to those of `expert` and `tensor` together
            (Megatron's `expert_tensor_parallel_size=1`); else they share each expert.
        sends_once: True if a token goes once to each host with experts of its own, and
            is copied to their devices there (DeepEP, HybridEP); else once for each.
        fused_loss: True if one kernel turns the logits into their gradient, in 16 bits
            and in place; `logit_bytes` and `loss_bytes` are not used then.
        trains_mtp: True if it trains a model's `mtp_layers`.
        learned_positions: Name of the execution of models with learned positions, where
            another program trains them; empty for this one.

    Raises:
        InputError: A value of another type, or outside of what it can be.
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
    uneven_shares: bool = False
    fp8: bool = False
    keeps_fp8: bool = False
    keeps_expert_outputs: bool = True
    whole_experts: bool = False
    sends_once: bool = False
    fused_loss: bool = False
    trains_mtp: bool = False
    cast_bytes: float = 4.0
    mxfp8_cast_bytes: float = 0.0
    launch_s: float = 0.0
    kernel_host_s: float = 0.0
    graphs: bool = False
    adds_biases_apart: bool = False
    biased_grad_flops: float = 0.0
    exchange_overlap: bool = False
    attention_kernel: str = "cudnn"
    tensor_ring: bool = False
    update_overlap: bool = False
    expert_overlap: bool = True
    scans_blocks: bool = False
    gathers_again: bool = False
    waits_for_scatters: str = ""
    scatters_whole: bool = True
    repacks: bool = False
    recomputes: str = ""
    stops_early: bool = False
    selects_matmuls: bool = False
    fused_norms: bool = True
    loss_bytes: float = 36.0
    tunes_matmuls: bool = False
    expert_capacity: float = 1.0
    splits_stored: bool = False
    measured_overlap: bool = False
    rails: int = 0
    hop_wait_s: float = 0.0
    bucket_bytes: float = 0.0
    bucket_copy_bytes: int = 0
    reserve: float = 0.0
    learned_positions: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(self.name, field.name, str(field.type), getattr(self, field.name))
        if self.recomputes and not self.eager:
            raise InputError(
                f"execution {self.name!r}: recomputes={self.recomputes!r} is of eager "
                "programs, and this one is compiled; leave it out, and name what is "
                "kept in the layout (remat=save:...)",
                key="plan.recomputes_compiled",
            )

    @property
    def modules(self) -> frozenset[str]:
        """Names in `recomputes`."""
        return frozenset(filter(None, self.recomputes.split("/")))

    @property
    def update_bytes(self) -> int:
        """Bytes that the update reads and writes for each parameter.

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


MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act")
"""Megatron-Core's `recompute_modules`: attention's scores and mixing, both norms, the
matrices that expand latent queries, keys and values, a dense MLP, and the activation of
routed experts."""

# Least and most of each number.
_RANGES = {
    "weight_bytes": (1, 8),
    "gradient_bytes": (0, 8),
    "bucket_copy_bytes": (0, 8),
    "reduction_bytes": (0, 8),
    "state_bytes": (0, 32),
    "logit_bytes": (0, 64),
    "loss_bytes": (0, 256),
    "cast_bytes": (0, 64),
    "mxfp8_cast_bytes": (0, 64),
    "host_s": (0, 3600),
    "launch_s": (0, 1),
    "kernel_host_s": (0, 1),
    "biased_grad_flops": (0, math.inf),
    "hop_wait_s": (0, 1),
    "bucket_bytes": (0, math.inf),
    "reserve": (0, 1),
    "rails": (0, 72),
    "expert_capacity": (1, 1000),
}
_KINDS = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "text, in quotes"),
    "int": (
        lambda value: is_number(value) and float(value).is_integer(),
        "a whole number",
    ),
    "float": (is_number, "a number"),
}


def _check(name: object, field: str, kind: str, value: object) -> None:
    is_kind, words = _KINDS[kind]
    if not is_kind(value):
        raise InputError(
            f"execution {name!r}: {field}={value!r} must be {words}",
            key="plan.wrong_field_type",
        )
    kernels = (*KERNELS, PLATFORM_KERNEL, OWN_KERNEL)
    if field == "attention_kernel" and value not in kernels:
        raise InputError(
            f"execution {name!r}: no attention_kernel {value!r}; "
            f"{nearest(str(value), kernels)}",
            key="plan.unknown_attention_kernel",
        )
    if field == "recomputes":
        wrong = {*str(value).split("/")} - {"", *MODULES}
        if wrong:
            raise InputError(
                f"execution {name!r}: recomputes={value!r}: no {sorted(wrong)[0]!r}; "
                f"{nearest(sorted(wrong)[0], MODULES)}",
                key="plan.unknown_module",
            )
    if field in _RANGES:
        least, most = _RANGES[field]
        if not least <= value <= most:  # type: ignore[operator]
            raise InputError(
                f"execution {name!r}: {field}={value!r} must be at least {least} and "
                f"at most {most}",
                key="plan.field_out_of_range",
            )
