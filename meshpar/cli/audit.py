"""Compile a step, here or for absent hardware; list collectives, memory, hazards."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshpar.audit.target import Target
from meshpar.cli.lint import wide_console
from meshpar.cli.options import (
    add_layout_arguments,
    add_model_arguments,
    add_values,
    chosen_layout,
    chosen_model,
)
from meshpar.cli.parsing import (
    PAGES,
    above_zero,
    check_picture,
    import_function,
    parse_sizes,
)
from meshpar.errors import InputError, local_path
from meshpar.layout import Layout
from meshpar.machine.emulate import emulate, num_cpu_devices

if TYPE_CHECKING:
    from jax import Device
    from jax.sharding import AbstractMesh
    from rich.console import Console

    from meshpar.audit.report import AuditReport
    from meshpar.model.contract import Model
    from meshpar.train.step import Batch, TrainStep

_SEQ = 1024
_GIB = 1 << 30


EXAMPLE = "meshpar audit --preset tiny --layout data=2,fsdp=2,tensor=2"
STATUSES = (
    "0 done, 1 hazards, it does not fit, --strict and surprises, or more exposed than "
    "--fail-exposed allows, 2 bad input"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add_model_arguments(parser)
    add_layout_arguments(
        parser, seq=None, seq_default=f"the model's own, at most {_SEQ}"
    )
    add = parser.add_argument
    add(
        "--recipe",
        metavar="MODULE:FUNCTION",
        help="function that takes layout= and mesh= and returns a step and its batch, "
        "instead of a model, such as meshpar.recipes.pretrain:audited",
    )
    add(
        "--target",
        type=_target,
        metavar="T",
        help="absent hardware to compile for: tpu:v5p:4x4x4 or gpu:h100:8x8 (hosts x "
        "GPUs) (default: virtual CPU devices)",
    )
    add(
        "--compiler-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="option of XLA, such as xla_tpu_enable_async_collective_fusion=true; "
        "the value none removes a default option; may be repeated (default: those of "
        "the platform)",
    )
    add("--strict", action="store_true", help="exit with status 1 on surprises too")
    share = (
        "share of the step, such as 0.1: exit with status 1 if more of it waits for "
    )
    share += "communication; needs --target (default: no limit)"
    add_values(parser, above_zero, {"--fail-exposed SHARE": share}, default=None)
    limit = "limit of compiling for an absent target, in"
    timeout = {"--timeout S": f"time {limit} seconds"}
    add_values(parser, above_zero, timeout, default=600.0)
    memory = {"--memory-gib G": f"memory {limit} GiB"}
    add_values(parser, above_zero, memory, default=16.0)
    add("--json", action="store_true", help="print one JSON object")
    add(
        "--html",
        metavar="FILE",
        help="write a page with a block's schedule over time (default: no page; needs "
        "meshpar[plots])",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if a step breaks one of the limits that were given.

    Hazards and too much memory always do.

    The step is AdamW's with gradients clipped to a global norm of 1, unless a recipe
    makes another.
    """
    if args.html:
        check_picture("--html", args.html, PAGES)
    if args.devices is None and args.target is not None:
        args.devices = args.target.num_devices
    _check_fail_exposed(args.fail_exposed, args.target)
    layout = chosen_layout(args)
    from meshpar.audit.report import audit

    compiler_options = dict(map(_compiler_option, args.compiler_option))
    step, batch = _chosen_step(args, layout)
    report = audit(
        step,
        batch,
        target=args.target,
        timeout_s=args.timeout,
        memory_bytes=int(args.memory_gib * _GIB),
        compiler_options=compiler_options,
    )
    if args.html:
        from meshpar.cli.report.audit_page import audit_page

        local_path("--html", args.html).write_text(audit_page(report), encoding="utf-8")
    if args.json:
        print(json.dumps(report.to_json()))
    else:
        _print(report, wide_console())
    bad = report.hazards or report.fits is False
    if bad or (args.strict and report.surprises):
        return 1
    if args.fail_exposed is None or report.problem:
        return 0
    return 1 if _exposed_share(report) > args.fail_exposed else 0


def _check_fail_exposed(share: float | None, target: Target | None) -> None:
    if share is None:
        return
    from meshpar.audit.overlap import target_cluster

    if share >= 1:
        raise InputError(
            f"--fail-exposed {share:g}: a share of the step is below 1; write 0.1 for "
            "a tenth",
            key="command.bad_share",
        )
    if target_cluster(target) is None:
        raise InputError(
            f"--fail-exposed {share:g} needs times of a device, which "
            f"{target or 'a virtual CPU'} has not; give --target, such as gpu:h100:8x8",
            key="command.option_without_target",
        )


def _exposed_share(report: AuditReport) -> float:
    if report.exposed_share is None:
        raise InputError(
            "--fail-exposed: the time of a collective is not known, so the exposed "
            "share is not; leave the option out, and read the report",
            key="command.unknown_share",
        )
    return report.exposed_share


def _compiler_option(text: str) -> tuple[str, str | int | bool | None]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise InputError(
            f"--compiler-option {text!r} is not NAME=VALUE; write for example "
            "xla_gpu_enable_latency_hiding_scheduler=true",
            key="command.bad_compiler_option",
        )
    if value in ("true", "false", "none"):
        return name, {"true": True, "false": False}.get(value)
    return name, int(value) if re.fullmatch(r"-?[0-9]+", value) else value


def _target(text: str) -> Target:
    try:
        return Target.parse(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _chosen_step(
    args: argparse.Namespace, layout: Layout
) -> tuple[TrainStep, Mapping[str, Any]]:
    import jax

    from meshpar.machine.mesh import absent_mesh
    from meshpar.model.tracing import traced_batch

    mesh = None
    if args.target is not None:
        # This process only traces, which needs no accelerator.
        jax.config.update("jax_platforms", "cpu")
        mesh = absent_mesh(layout)
    elif num_cpu_devices() < layout.num_devices:
        emulate(layout.num_devices)
    if args.recipe:
        return _recipe_step(args, layout, mesh)
    devices = None if mesh else jax.devices()[: layout.num_devices]
    step = adamw_step(chosen_model(args), layout, devices=devices, mesh=mesh)
    least = layout.batch_shards * layout.microbatches
    seq = args.seq or longest_seq(args.preset, args.model, most=_SEQ)
    return step, traced_batch(step.model, args.global_batch or least, seq)


def longest_seq(preset: str | None, model: str | None, *, most: int) -> int:
    """Return the longest sequence of a chosen model, in tokens.

    Args:
        preset: Value of `--preset`.
        model: Value of `--model`.
        most: Limit, which stands in for a model that does not say.

    Example:
        >>> longest_seq("tiny-gpt2", None, most=1024), longest_seq(None, None, most=64)
        (256, 64)
    """
    from meshpar.planner.workload.shapes import SHAPES, workload_of

    if model and Path(model).suffix == ".json":
        return min(most, workload_of(model).seq)
    sizes = parse_sizes(model) if model else {}
    known = SHAPES[preset].seq if preset in SHAPES else most
    own = sizes.get("seq", sizes.get("max_seq", known))
    return min(most, own) if isinstance(own, int) and own > 0 else most


def adamw_step(
    model: Model,
    layout: Layout | str,
    *,
    devices: Sequence[Device] | None = None,
    mesh: AbstractMesh | None = None,
) -> TrainStep:
    """Return the default step to audit: AdamW, gradients clipped to a norm of 1.

    Nothing is clipped where stages update their weights by themselves.
    """
    import optax

    from meshpar.train.make_step import make_train_step

    layout, optimizer = Layout.of(layout), optax.adamw(1e-3)
    return make_train_step(
        model,
        optimizer,
        layout,
        devices=devices,
        mesh=mesh,
        max_grad_norm=None if layout.updates_each_microbatch else 1.0,
    )


def _recipe_step(
    args: argparse.Namespace, layout: Layout, mesh: AbstractMesh | None
) -> tuple[TrainStep, Batch]:
    chosen = (args.preset, args.model, args.global_batch, args.seq)
    if any(value is not None for value in chosen):
        raise InputError(
            f"--recipe {args.recipe!r} has its own model and batch; leave --preset, "
            "--model, --global-batch and --seq out",
            key="command.recipe_and_model",
        )
    found = import_function(args.recipe, "--recipe")
    try:
        step, batch = found(layout=layout, mesh=mesh)
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"--recipe {args.recipe!r} must take layout= and mesh= and return a step "
            f"and a batch: {error}",
            key="command.bad_recipe",
        ) from error
    return step, batch


def _print(report: AuditReport, console: Console) -> None:
    from meshpar.audit.tables import (
        buffer_table,
        collective_table,
        overlap_table,
        totals_table,
    )

    say = partial(console.print, highlight=False, markup=False)
    say(
        f"layout {report.layout} compiled for {report.target} in "
        f"{report.compile_s:.1f} s"
    )
    if report.compiler_options:
        given = [
            f"{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in report.compiler_options.items()
        ]
        say(f"compiler options: {', '.join(given)}")
    if report.problem:
        say(report.problem)
    else:
        for table in (collective_table, totals_table, overlap_table, buffer_table):
            console.print(table(report))
        for line in _memory_lines(report):
            say(line)
    slow = map(str, report.slow_axes)
    for line in (*report.notes, *slow, *report.complaints()):
        say(line)


def _memory_lines(report: AuditReport) -> Iterator[str]:
    memory = report.compiled_memory
    yield (
        f"per device: arguments {memory.argument_bytes:,}, temporaries "
        f"{memory.temp_bytes:,}, results {memory.output_bytes:,} "
        f"({memory.alias_bytes:,} in place of arguments), peak {memory.peak_bytes:,} "
        f"bytes; {report.flops:.4g} matmul FLOPs"
    )
    for call in report.uncounted:
        where = call.source or "no line"
        yield f"FLOPs not counted: {call.name}, {where}, runs {call.executions:,} times"
    if report.exposed_share is not None:
        yield (
            f"exposed: {report.exposed_share:.1%} of the step, beside "
            f"{report.matmul_s:.4g} s of matmuls"
        )
    if report.capacity_bytes is not None:
        verdict = "fits" if report.fits else "does not fit"
        peak, capacity = memory.peak_bytes / _GIB, report.capacity_bytes / _GIB
        yield f"{verdict}: peak {peak:.2f} GiB of {capacity:.2f} GiB"
