"""The report of `meshpar plan --html`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from meshpar.cli.report.page import heading, page, paragraph, plot, table
from meshpar.cli.report.plan_plot import plan_plot
from meshpar.planner.cost.estimate import (
    Estimate,
    at_half_network_s,
    gigabytes,
    milliseconds,
)
from meshpar.planner.cost.in_words import estimate_in_words
from meshpar.planner.search.search import SearchResult
from meshpar.planner.search.sensitivity import sensitivities

if TYPE_CHECKING:  # It needs jax, which the page does not.
    from meshpar.cli.confirm import Confirmed
    from meshpar.cli.measure import Measured
    from meshpar.planner.search.training_cost import TrainingCost


def plan_page(
    found: SearchResult,
    confirmed: Sequence[Confirmed] = (),
    costs: Sequence[TrainingCost] = (),
    measured: Measured | None = None,
) -> str:
    """The file's text, of a search that found plans."""
    best = found.plans[0]
    run = best.run
    title = f"{run.workload.name} on {run.cluster.text}"
    parts = [
        paragraph(
            f"{found.considered_count:,} layouts considered in {found.seconds:.1f} s; "
            f"{found.rejected_count:,} rejected. {run.global_batch} sequences of "
            f"{run.seq} tokens a step."
        ),
        *(paragraph(note) for note in found.notes),
        heading("Plans, fastest first"),
        _plans(found.plans),
        *_training(found.plans, costs),
        heading("Time against memory"),
        plot(plan_plot(found)),
        heading("Smallest for their time"),
        _plans(found.front),
        heading("The first plan"),
        *(paragraph(line.strip()) for line in estimate_in_words(best)),
        *(paragraph(change.text) for change in sensitivities(best)),
        heading("Rejected, such as"),
        table(
            ["layout", "reason"],
            [(str(other.layout), other.reason) for other in found.rejected],
        ),
    ]
    if measured:
        parts += [
            heading("Predicted against measured"),
            table(["layout", "predicted", "measured", "difference"], measured.rows()),
            *(paragraph(line) for line in measured.fitted_lines()),
        ]
    if confirmed:
        parts += [heading("Predicted against compiled"), *_confirmed(confirmed)]
    return page(title, parts)


def _plans(plans: Iterable[Estimate]) -> str:
    return table(
        [
            *("layout", "step", "MFU", "half the network", "memory"),
            *("computing", "bubble", "exposed", "host", "optimizer", "slowest device"),
        ],
        [
            (
                str(plan.run.layout),
                milliseconds(plan.step_s),
                f"{plan.mfu:.1%}",
                milliseconds(at_half_network_s(plan)),
                gigabytes(plan.memory.total_bytes),
                milliseconds(plan.time.compute_s),
                milliseconds(plan.time.bubble_s),
                _exposed(plan),
                milliseconds(plan.time.host_s),
                milliseconds(plan.time.optimizer_s),
                milliseconds(plan.time.straggler_s),
            )
            for plan in plans
        ],
    )


def _training(
    plans: Sequence[Estimate], costs: Sequence[TrainingCost]
) -> Iterable[str]:
    if not costs:
        return
    yield heading("The whole training")
    yield table(
        ["layout", "what it takes"],
        [
            (str(plan.run.layout), cost.text)
            for plan, cost in zip(plans, costs, strict=True)
        ],
    )


def _exposed(plan: Estimate) -> str:
    """Time by mesh axis, each in one piece."""
    each = [
        f"{axis} {milliseconds(seconds)}".replace(" ", "\N{NO-BREAK SPACE}")
        for axis, seconds in plan.time.exposed_s.items()
    ]
    return ", ".join(each) or "nothing"


def _confirmed(confirmed: Sequence[Confirmed]) -> Iterable[str]:
    for one in confirmed:
        yield paragraph(f"{one.layout} for {one.target}")
        yield table(["what", "predicted", "compiled", "difference"], one.rows())
