"""Compare the planner's bytes with the compiler's, for absent machines.

    python -m recipes.bench.planner_memory
    python -m recipes.bench.planner_memory --target tpu --model llama3-8b
    python -m recipes.bench.planner_memory --write

compiles the steps of `meshpar/planner/compiled_memory.json` for hardware that need not
be there (the extra `aot` is needed) and prints predicted and compiled bytes per device:
memory, and what a device sends over each mesh axis. `--write` writes the memory into
the file, which `meshpar plan --validate` reads; a new step is a line there. What is
compiled for GPUs has XLA's attention, since no cuDNN can be traced without one; so has
what is predicted. Half a minute a step on 2 cores, minutes for TPUs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
from dataclasses import asdict, replace

import jax
from rich.console import Console
from rich.table import Table

from meshpar.audit.target import Target
from meshpar.cli.confirm import Confirmed, compiled, compiled_report
from meshpar.cli.options import planned_model
from meshpar.layout import Layout
from meshpar.planner.published.compiled import FILE, CompiledStep, compiled_steps


def main(argv: list[str] | None = None) -> int:
    """Compiles every step, one after another, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m recipes.bench.planner_memory")
    parser.add_argument("--model", default="", help="steps of such models only")
    parser.add_argument("--target", default="", help="steps of such targets: tpu, h100")
    parser.add_argument("--layout", default="", help="steps of such layouts only")
    parser.add_argument(
        "--write", action="store_true", help="write the memory into the file"
    )
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # this process only traces
    found, steps = [], list(compiled_steps())
    for at, step in enumerate(steps):
        model = f"{step.preset} {step.sizes}"
        asked = (args.model in model, args.target in step.target)
        if not all(asked) or args.layout not in step.layout:
            continue
        one = confirmed(step)
        found.append((step, one))
        print(*one.lines(), sep="\n", flush=True)
        if args.write and not one.problem:
            today = str(datetime.date.today())
            size = round(one.compiled_bytes)
            steps[at] = replace(step, compiled_bytes=size, date=today)
            write(steps)
    print(
        f"Python {platform.python_version()}, jax {jax.__version__}; "
        f"{datetime.date.today()}"
    )
    print(shlex.join(["python", "-m", "recipes.bench.planner_memory", *sys.argv[1:]]))
    Console(width=150).print(memory_table(found))
    return 0


def confirmed(step: CompiledStep) -> Confirmed:
    """One step, predicted and compiled."""
    words = argparse.Namespace(
        preset=step.preset or None,
        model=step.sizes or None,
        vocab=None,
        model_from=None,
    )
    model, target = planned_model(words), Target.parse(step.target)
    if step.seq:
        return compiled(model, target, step.plan)
    layout = Layout.parse(step.line)
    report = compiled_report(model, layout, target, step.global_batch, 1)
    return Confirmed(
        layout=step.layout,
        target=step.target,
        predicted_bytes=step.plan.memory.total_bytes,
        compiled_bytes=report.compiled_memory.peak_bytes,
        compile_s=report.compile_s,
    )


def write(steps: list[CompiledStep]) -> None:
    """Write the steps into the planner's file, a line each."""
    lines = []
    for step in steps:
        row = {name: value for name, value in asdict(step).items() if value}
        lines.append(f"  {json.dumps(row)}")
    conditions = (
        "python -m recipes.bench.planner_memory --write; "
        f"Python {platform.python_version()}, jax {jax.__version__}"
    )
    rows = ",\n".join(lines)
    text = f'{{\n "conditions": {json.dumps(conditions)},\n "rows": [\n{rows}\n ]\n}}\n'
    FILE.write_text(text)


def memory_table(found: list[tuple[CompiledStep, Confirmed]]) -> Table:
    """A row for each step, bytes in GB of one device."""
    table = Table(box=None, pad_edge=False)
    for heading in ("model", "machine", "layout"):
        table.add_column(heading, overflow="fold", max_width=48)
    for heading in ("predicted", "compiled", "apart", "sent over: apart"):
        table.add_column(heading, justify="right", overflow="fold")
    for step, one in found:
        row = (step.preset or step.sizes, one.target, step.layout)
        if one.problem:
            table.add_row(*row, one.problem)
            continue
        table.add_row(
            *row,
            f"{one.predicted_bytes / 1e9:.2f}",
            f"{one.compiled_bytes / 1e9:.2f}",
            f"{one.predicted_bytes / one.compiled_bytes - 1:+.1%}",
            ", ".join(
                f"{'+'.join(axes)} {ours / theirs - 1:+.1%}"
                for axes, (ours, theirs) in one.collectives.items()
                if max(ours, theirs) > 1e6 and theirs
            ),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
