"""Everything that a layout must meet, one row each.

A row has the key of its error, the option of the layout that it is about, when it is
broken, and the words of the error. Lint, step, planner, fuzzer and command line read
these rows, so that one fault has one key and one wording. Each gives the facts that it
knows; rows whose facts are missing refuse nothing. What depends on a model's rules is
in `meshpar.train.refusals`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshpar.errors import InputError, RuleError
from meshpar.hardware.platforms import platform_named
from meshpar.layout.layout import (
    SCALING_EXECUTIONS,
    STAGE_REMATS,
    Layout,
    ResidualNames,
)

PLAIN = Layout()
"""The layout with every option at its default."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A layout, and what is known of the run that it is for.

    Args:
        layout: The layout, every mesh axis with its size.
        platform: `cpu`, `gpu` or `tpu`; None if not known, as for all that follows.
        examples: Examples of the batch.
        array: Name of the array that has them; empty for a whole batch.
        seq: Tokens of an example.
        model: Name of the model in messages.
        num_experts: Experts of a block; 0 if the model has none.
        input_gradient: Name of an input that has a gradient; empty if none has.
        sizes: Name -> a size that `tensor` splits.
        kv_heads: Heads of keys and values, several of which may share a device.
        heads: Heads of attention, of all devices of `tensor`.
        heads_in: Name of the parameter that has the heads.
        head_shards: Devices that share the heads, but for those of `context`.
        stored: Name -> a size that the mesh axes of ZeRO split.
    """

    layout: Layout
    platform: str | None = None
    examples: int | None = None
    array: str = ""
    seq: int | None = None
    model: str = "the model"
    num_experts: int | None = None
    input_gradient: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    kv_heads: int | None = None
    heads: int | None = None
    heads_in: str = "the model"
    head_shards: int = 1
    stored: Mapping[str, int] = field(default_factory=dict)


class Requirement(NamedTuple):
    """One rule that a layout must meet.

    Args:
        key: Key of the error, which stays.
        option: Option of the layout that the error is about.
        is_broken: (layout, facts) -> True if they break the rule.
        words: (layout, facts) -> what is wrong, with both numbers, and a way out.
        kind: Lint's word for the error, if it is a `RuleError`.
    """

    key: str
    option: str
    is_broken: Callable[[Layout, Facts], bool]
    words: Callable[[Layout, Facts], str]
    kind: str = ""


class Problem(NamedTuple):
    """A requirement that a layout does not meet.

    Args:
        option, key, kind: As of the requirement; the option's value must change.
        message: What was asked, what was found, and a way out.
    """

    option: str
    message: str
    key: str
    kind: str = ""

    def error(self, layout: Layout | None = None) -> InputError:
        """Return the error to raise; its message names the layout if one is given."""
        named = "" if layout is None else f"layout {str(layout)!r}: "
        if self.kind:
            return RuleError(self.kind, named + self.message, key=self.key)
        return InputError(named + self.message, key=self.key)


def _zero_shards(layout: Layout) -> int:
    """Return the devices that may share out stored parameters."""
    axes = {"data", "fsdp", *layout.split_axes}
    return math.prod(layout.mesh_shape[axis] for axis in axes)


def _zero_axes_idle(layout: Layout) -> str:
    """Return why `zero_axes` changes nothing, such as `data=1`; empty if it does."""
    if not layout.zero_axes or layout.zero == 0:
        return "zero=0" if layout.zero_axes else ""
    idle = [axis for axis in layout.zero_axes if layout.mesh_shape[axis] == 1]
    return f"{idle[0]}=1" if idle else ""


def _residuals(layout: Layout) -> ResidualNames:
    """Return the residuals that `remat` names, none if it is one word."""
    return layout.residual_names or ResidualNames()


def _without_axis(option: str, mesh_axis: str) -> Requirement:
    """Return the row of an option that means something on one mesh axis only."""
    return Requirement(
        "layout.option_without_axis",
        option,
        lambda layout, at: (
            getattr(layout, option) != getattr(PLAIN, option)
            and getattr(layout, mesh_axis) == 1
        ),
        lambda layout, at: (
            f"{option} changes nothing while {mesh_axis}=1; leave it out, or give "
            f"{mesh_axis!r} a size"
        ),
    )


def own_collective(layout: Layout) -> str | None:
    """Return a mesh axis over which blocks may communicate; None if there is none.

    Without one, ranks may diverge whatever the model is.
    """
    axes = ("context", "expert", "tensor")
    return next((axis for axis in axes if getattr(layout, axis) > 1), None)


LOCAL_STEPS = (
    Requirement(
        "layout.sync_of_one_replica",
        "sync_every",
        lambda layout, at: layout.sync_every > 1 and layout.data == 1,
        lambda layout, at: (
            f"sync_every={layout.sync_every} averages replicas over 'data', but "
            "data=1 has only one; leave it out, or give 'data' a size"
        ),
    ),
    Requirement(
        "layout.sync_with_shared_states",
        "sync_every",
        lambda layout, at: (
            layout.sync_every > 1 and layout.zero > 0 and "data" in layout.split_axes
        ),
        lambda layout, at: (
            f"sync_every={layout.sync_every} gives each part of 'data' a replica "
            f"with optimizer state of its own, but zero={layout.zero} shares states "
            "out over 'data'; share them over 'fsdp' (zero_axes=fsdp), or set "
            "sync_every=1"
        ),
    ),
    Requirement(
        "layout.sync_with_host_memory",
        "sync_every",
        lambda layout, at: layout.sync_every > 1 and layout.optimizer_memory == "host",
        lambda layout, at: (
            f"sync_every={layout.sync_every} is not supported with "
            "optimizer_memory=host; leave one of them out"
        ),
    ),
)
"""Requirements of local steps."""


def _with_stash(
    option: str, is_broken: Callable[[Layout], bool], why: str
) -> Requirement:
    """Return the row of an option that a layout with stashed weights cannot have."""
    return Requirement(
        "layout.needs_one_update",
        option,
        lambda layout, at: layout.updates_each_microbatch and is_broken(layout),
        lambda layout, at: (
            f"schedule={layout.schedule} updates each stage by itself after every "
            f"microbatch, but {option}={getattr(layout, option)} {why}; leave it out, "
            "or take schedule=1f1b"
        ),
    )


STASHED_WEIGHTS = (
    Requirement(
        "layout.stash_in_lock_step",
        "execution",
        lambda layout, at: (
            layout.updates_each_microbatch and layout.execution == "uniform"
        ),
        lambda layout, at: (
            f"schedule={layout.schedule} runs one forward or one backward of each "
            f"stage at a time, but execution={layout.execution} moves all ranks in "
            "lock step, in which a gradient is late by twice as many updates; leave "
            "execution out"
        ),
    ),
    _with_stash(
        "fsdp",
        lambda layout: layout.fsdp > 1,
        "shares out parameters that are gathered once a batch",
    ),
    _with_stash(
        "zero",
        lambda layout: layout.fsdp == 1 and _state_shards(layout) > 1,
        "shares out states that are updated once a batch",
    ),
    _with_stash(
        "tensor",
        lambda layout: layout.tensor > 1,
        "permutes, which would wait for ranks that do work of their own",
    ),
    _with_stash(
        "context",
        lambda layout: layout.context > 1,
        "sums gradients of a sequence once a batch",
    ),
    _with_stash(
        "expert",
        lambda layout: layout.expert > 1,
        "sums gradients of experts once a batch",
    ),
    _with_stash(
        "optimizer_memory",
        lambda layout: layout.optimizer_memory != "device",
        "moves the optimizer's state once a batch",
    ),
    _with_stash(
        "param_dtype",
        lambda layout: layout.param_dtype != "fp32",
        "rounds parameters once a batch",
    ),
    _with_stash(
        "sync_every",
        lambda layout: layout.sync_every > 1,
        "averages replicas that take one step a batch",
    ),
    _with_stash(
        "fsdp_prefetch",
        lambda layout: layout.fsdp_prefetch == "on",
        "sums gradients beside the last microbatch of a batch",
    ),
)
"""Requirements of stages that update their weights by themselves."""


def _with_uneven_shards(
    option: str, is_broken: Callable[[Layout], bool], why: str
) -> Requirement:
    """Return the row of an option that a layout with `data_splits` cannot have."""
    return Requirement(
        "layout.needs_even_shards",
        option,
        lambda layout, at: bool(layout.data_splits) and is_broken(layout),
        lambda layout, at: (
            f"data_splits={'/'.join(map(str, layout.data_splits))} runs another number "
            f"of microbatches on each part of 'data', but "
            f"{option}={getattr(layout, option)} {why}; leave one of them out"
        ),
    )


UNEVEN_SHARDS = (
    _without_axis("data_splits", "data"),
    Requirement(
        "layout.wrong_data_splits",
        "data_splits",
        lambda layout, at: (
            bool(layout.data_splits)
            and (
                layout.data % len(layout.data_splits) > 0
                or sum(layout.data_splits)
                != layout.microbatches * len(layout.data_splits)
            )
        ),
        lambda layout, at: (
            f"data_splits={'/'.join(map(str, layout.data_splits))} has "
            f"{len(layout.data_splits)} parts of {sum(layout.data_splits)} "
            f"microbatches together: their number must divide data={layout.data}, and "
            f"their mean be microbatches={layout.microbatches}"
        ),
    ),
    _with_uneven_shards(
        "stage", lambda layout: layout.stage > 1, "moves activations in every tick"
    ),
    *(
        _with_uneven_shards(
            axis,
            lambda layout, axis=axis: getattr(layout, axis) > 1,  # type: ignore[misc]
            "may permute in the blocks, where XLA waits for all devices",
        )
        for axis in ("context", "expert")
    ),
    _with_uneven_shards(
        "zero",
        lambda layout: layout.zero > 1 and "data" in layout.split_axes,
        "sums the gradients of every microbatch over 'data'",
    ),
    _with_uneven_shards(
        "fsdp_prefetch",
        lambda layout: layout.fsdp_prefetch == "on",
        "sums gradients beside the last microbatch of all devices",
    ),
    _with_uneven_shards(
        "sync_every",
        lambda layout: layout.sync_every > 1,
        "averages parts of 'data' that have trained on as much",
    ),
)
"""Requirements of parts of `data` with different numbers of microbatches."""


def _named(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


PRECISION = (
    Requirement(
        "layout.precision_of_others",
        "precision",
        lambda layout, at: layout.scales_matmuls,
        lambda layout, at: (
            f"precision={layout.precision} is not among this program's; write "
            f"precision=bf16, or estimate a program that trains in {layout.precision} "
            f"(--execution {_named(SCALING_EXECUTIONS[layout.precision])})"
        ),
    ),
)
"""The requirement of programs without fp8, as ours are."""

OPTIONS = (
    _without_axis("schedule", "stage"),
    _without_axis("execution", "stage"),
    _without_axis("max_pending_w", "stage"),
    Requirement(
        "layout.divergent_permute",
        "execution",
        lambda layout, at: (
            layout.execution == "divergent" and layout.attention_method.permutes
        ),
        lambda layout, at: (
            "execution=divergent: ranks do work of their own, and a permute over "
            "'context' would wait for all; set execution=uniform"
        ),
    ),
    _without_axis("chunks", "stage"),
    _without_axis("splits", "stage"),
    _without_axis("attention", "context"),
    Requirement(
        "layout.stage_remat_without_stages",
        "remat",
        lambda layout, at: layout.remat in STAGE_REMATS and layout.stage == 1,
        lambda layout, at: (
            f"remat={layout.remat} keeps the input of each pipeline stage, but "
            "stage=1; take remat=full, or give 'stage' a size"
        ),
    ),
    Requirement(
        "layout.offload_in_ticks",
        "remat",
        lambda layout, at: bool(_residuals(layout).offload) and layout.runs_in_ticks,
        lambda layout, at: (
            "remat=offload is not supported where microbatches wait in slots on the "
            "device; write remat=save:..., or set stage=1 and microbatches=1"
        ),
    ),
    Requirement(
        "layout.zero_without_effect",
        "zero",
        lambda layout, at: (
            layout.zero in (1, 2)
            and not layout.zero_axes
            and _state_shards(layout) == 1
        ),
        lambda layout, at: (
            f"zero={layout.zero} shares nothing out while data=1 and fsdp=1; leave "
            "it out, or give one of them a size"
        ),
    ),
    Requirement(
        "layout.zero_axes_without_effect",
        "zero_axes",
        lambda layout, at: bool(_zero_axes_idle(layout)),
        lambda layout, at: (
            f"zero_axes={'/'.join(layout.zero_axes)} changes nothing while "
            f"{_zero_axes_idle(layout)}; leave it out"
            + (", or write zero=0 to split experts only" if layout.expert > 1 else "")
        ),
    ),
    Requirement(
        "layout.fsdp_gather_without_effect",
        "fsdp_gather",
        lambda layout, at: (
            layout.fsdp_gather != PLAIN.fsdp_gather
            and not (
                layout.zero == 3 and layout.runs_in_ticks and _zero_shards(layout) > 1
            )
        ),
        lambda layout, at: (
            f"fsdp_gather={layout.fsdp_gather} changes nothing without zero=3, a "
            "size for 'fsdp', and stages or microbatches; leave it out"
        ),
    ),
    Requirement(
        "layout.fsdp_prefetch_without_effect",
        "fsdp_prefetch",
        lambda layout, at: (
            layout.fsdp_prefetch != PLAIN.fsdp_prefetch
            and layout.batch_shards * layout.context == 1
        ),
        lambda layout, at: (
            f"fsdp_prefetch={layout.fsdp_prefetch} changes nothing while 'data', "
            "'fsdp', 'context' and 'expert' are 1; leave it out"
        ),
    ),
    Requirement(
        "layout.param_dtype_rounds",
        "param_dtype",
        lambda layout, at: layout.param_dtype != "fp32" and layout.precision == "fp32",
        lambda layout, at: (
            f"param_dtype={layout.param_dtype} rounds parameters that "
            "precision=fp32 computes with; set precision=bf16, or leave it out"
        ),
    ),
    *LOCAL_STEPS,
    *STASHED_WEIGHTS,
    *UNEVEN_SHARDS,
)
"""Requirements of a layout alone."""

PLATFORM = (
    Requirement(
        "layout.offload_on_cpu",
        "remat",
        lambda layout, at: (
            at.platform is not None
            and platform_named(at.platform).is_host
            and bool(_residuals(layout).offload)
        ),
        lambda layout, at: (
            "a CPU's memory is the host's own, so remat=offload would move nothing; "
            f"write remat=save:{'/'.join(_residuals(layout).every)}"
        ),
    ),
)
"""Requirements of the devices that a layout runs on."""


def _batch_words(layout: Layout, at: Facts) -> str:
    return (
        f"{f'batch[{at.array!r}]' if at.array else 'the batch'} has {at.examples} "
        f"examples, which do not divide over {layout.batch_shards} devices of data="
        f"{layout.data},fsdp={layout.fsdp}"
        + (f",expert={layout.expert}" * (layout.expert > 1))
        + (f" x microbatches={layout.microbatches}" * (layout.microbatches > 1))
        + "; pad with examples of weight 0, or change the global batch"
    )


BATCH = (
    Requirement(
        "batch.indivisible",
        "microbatches",
        lambda layout, at: (
            at.examples is not None
            and at.examples % (layout.batch_shards * layout.microbatches) > 0
        ),
        _batch_words,
    ),
)
"""Requirements of the batch."""

EXPERTS = (
    Requirement(
        "layout.expert_without_experts",
        "expert",
        lambda layout, at: layout.expert > 1 and at.num_experts == 0,
        lambda layout, at: (
            f"expert={layout.expert} splits experts, but {at.model} has no "
            "parameter with the logical axis 'experts'; set expert=1, and give 'data' "
            "or 'fsdp' its devices"
        ),
        "dead",
    ),
    Requirement(
        "layout.indivisible",
        "expert",
        lambda layout, at: (at.num_experts or 0) % layout.expert > 0,
        lambda layout, at: (
            f"experts={at.num_experts} do not divide over expert={layout.expert}; "
            "choose a divisor"
        ),
    ),
)
"""Requirements of routed experts."""

INPUTS = (
    Requirement(
        "layout.unsupported_input_gradient",
        "inputs",
        lambda layout, at: (
            bool(at.input_gradient)
            and (
                layout.sync_every > 1 or layout.context > 1 or bool(layout.data_splits)
            )
        ),
        lambda layout, at: (
            f"the gradient of input {at.input_gradient!r} is found once a step, where "
            f"its example lies and for whole sequences, but "
            f"sync_every={layout.sync_every}, context={layout.context} and data_splits="
            f"{'/'.join(map(str, layout.data_splits)) or 'none'}; leave them out"
        ),
    ),
)
"""Requirements of a model's inputs."""


def _indivisible(sizes: Mapping[str, int], degree: int) -> str:
    """Return the first size that does not divide, as `name=size`; empty if none."""
    return next((f"{name}={size}" for name, size in sizes.items() if size % degree), "")


def _state_shards(layout: Layout) -> int:
    """Return the devices that ZeRO shares states out over."""
    return math.prod(layout.mesh_shape[axis] for axis in layout.split_axes)


def _heads_words(layout: Layout, at: Facts) -> str:
    trading, context = layout.attention_method.heads, layout.context
    return (
        f"attention={layout.attention} splits heads over "
        f"{'context=' if trading == context else ''}{trading}"
        f"{f' x {at.head_shards}' if at.head_shards > 1 else ''}, which does not "
        f"divide the {at.heads} of {at.heads_in}; take attention=ring or allgather, or "
        "another context"
    )


ATTENTION = (
    Requirement(
        "attention.indivisible_heads",
        "attention",
        lambda layout, at: (
            at.heads is not None
            and at.heads % (at.head_shards * layout.attention_method.heads) > 0
        ),
        _heads_words,
    ),
)
"""Requirements of attention across `context`."""

SIZES = (
    Requirement(
        "layout.indivisible",
        "tensor",
        lambda layout, at: bool(_indivisible(at.sizes, layout.tensor)),
        lambda layout, at: (
            f"{_indivisible(at.sizes, layout.tensor)} does not divide over "
            f"tensor={layout.tensor}; choose a divisor"
        ),
    ),
    Requirement(
        "layout.indivisible",
        "tensor",
        lambda layout, at: (
            at.kv_heads is not None
            and at.kv_heads % layout.tensor > 0
            and layout.tensor % at.kv_heads > 0
        ),
        lambda layout, at: (
            f"kv_heads={at.kv_heads} and tensor={layout.tensor} do not divide one "
            "another; choose a divisor or a multiple"
        ),
    ),
    Requirement(
        "layout.indivisible",
        "sequence_parallel",
        lambda layout, at: (
            layout.sequence_parallel
            and at.seq is not None
            and at.seq % (layout.tensor * layout.context) > 0
        ),
        lambda layout, at: (
            f"{at.seq} tokens do not divide over tensor={layout.tensor} x context="
            f"{layout.context}; change the sequence, or leave sequence_parallel out"
        ),
    ),
    Requirement(
        "layout.indivisible",
        "context",
        lambda layout, at: at.seq is not None and at.seq % layout.context > 0,
        lambda layout, at: (
            f"{at.seq} tokens do not divide over context={layout.context}; change "
            "the sequence, or choose a divisor"
        ),
    ),
    Requirement(
        "layout.indivisible",
        "zero",
        lambda layout, at: bool(_indivisible(at.stored, _state_shards(layout))),
        lambda layout, at: (
            f"{_indivisible(at.stored, _state_shards(layout))} does not divide over "
            f"the {_state_shards(layout)} devices of "
            f"{' x '.join(layout.split_axes)}; choose a divisor"
        ),
    ),
)
"""Requirements of a transformer's sizes, which the planner knows before a model is."""

REQUIREMENTS = (
    *PRECISION,
    *OPTIONS,
    *PLATFORM,
    *BATCH,
    *SIZES,
    *ATTENTION,
    *EXPERTS,
    *INPUTS,
)
"""All rows, in the order in which they are reported."""


def problems(
    facts: Facts, rows: Iterable[Requirement] = REQUIREMENTS
) -> Iterator[Problem]:
    """Yield the rows that the facts break, the first of each option."""
    reported = set()
    for row in rows:
        if row.option not in reported and row.is_broken(facts.layout, facts):
            reported.add(row.option)
            yield Problem(row.option, row.words(facts.layout, facts), row.key, row.kind)


def check_precision(layout: Layout) -> None:
    """Refuse a precision that no program of ours computes in.

    Raises:
        InputError: `precision=fp8` or `mxfp8`.
    """
    for problem in problems(Facts(layout=layout), PRECISION):
        raise problem.error(layout)


def layout_errors(layout: Layout) -> dict[str, InputError]:
    """Return the errors of a layout that no training step takes, by its option."""
    found = problems(Facts(layout=layout), (*PRECISION, *OPTIONS))
    return {one.option: one.error(layout) for one in found}
