"""Assertions on compiled programs; a failure prints the audit's table.

Each takes a function as `meshpar.audit` does: jitted or not, or a training step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshpar.audit.collectives import axes_text
from meshpar.audit.report import AuditReport, audit
from meshpar.audit.subject import make_subject
from meshpar.audit.tables import as_text, buffer_table, collective_table, overlap_table
from meshpar.collective_kinds import KINDS
from meshpar.errors import InputError, nearest, whole_number

Counts = Mapping[str, Mapping[str, int]]
"""Mesh axes (`tensor`, or `data+fsdp`) -> kind of collective -> executions."""


def assert_collectives(
    function: Any,
    arguments: Sequence[Any],
    expected: Counts,
    *,
    min_bytes: int = 0,
    **options: Any,
) -> AuditReport:
    """Assert the number of collectives over some mesh axes.

    Args:
        function: What to compile.
        arguments: Its arguments, or their shapes.
        expected: For each mesh axes named, the executions of every kind in one run;
            kinds that are left out must not run. Mesh axes that are left out are not
            looked at.
        min_bytes: Collectives of a smaller payload do not count.
        options: As for `meshpar.audit`: `mesh`, `target`, ...

    Returns:
        The report.

    Raises:
        AssertionError: A number differs.
    """
    report = _audit(function, arguments, options)
    expected = _in_mesh_order(expected, report.mesh_shape)
    found: dict[str, Counter[str]] = {axes: Counter() for axes in expected}
    for row in report.rows:
        collective = row.collective
        axes = axes_text(collective.mesh_axes)
        if axes in found and collective.payload_bytes >= min_bytes:
            found[axes][collective.kind] += collective.executions
    differences = [
        f"over {axes}: {kind} runs {found[axes][kind]} times, expected {wanted}"
        for axes, counts in expected.items()
        for kind in sorted({*found[axes], *counts})
        for wanted in (counts.get(kind, 0),)
        if found[axes][kind] != wanted
    ]
    _hold(differences, report)
    return report


def assert_no_surprises(
    function: Any, arguments: Sequence[Any], **options: Any
) -> AuditReport:
    """Assert that a program has no unexpected collective and no hazard.

    Arguments, result and `options` as for `assert_collectives`; `expected=` of
    `meshpar.audit` names those that the program asks for in words of its own.
    """
    report = _audit(function, arguments, options)
    _hold(report.complaints(), report)
    return report


def assert_overlapped(
    function: Any,
    arguments: Sequence[Any] | Mapping[str, Any],
    least: Mapping[str, float],
    **options: Any,
) -> AuditReport:
    """Assert the share of the bytes sent that matmuls hide, per mesh axis.

    A collective is hidden where matmuls that take at least as long, by the table of
    devices, stand between its start and its done in the scheduled program. XLA:CPU
    starts none so: give `target=`.

    Args:
        function: What to compile.
        arguments: Its arguments, or their shapes; of a step a batch will do.
        least: Mesh axis, several with `+` between -> least share, 0 to 1, of the bytes
            of all collectives over them.
        options: As for `meshpar.audit`: `target`, `compiler_options`, ...

    Returns:
        The report.

    Raises:
        AssertionError: Less is hidden, or nothing is sent over a mesh axis named.
        InputError: There is no such mesh axis, or a share outside of 0 to 1.

    Example:
        ```python
        assert_overlapped(step, batch, {"fsdp": 0.9}, target="gpu:h100:8x8")
        ```
    """
    for axes, share in least.items():
        if not 0 <= share <= 1:
            raise InputError(
                f"least share {share} over {axes}: must be from 0 to 1",
                key="value.out_of_range",
            )
    given = [arguments] if isinstance(arguments, Mapping) else arguments
    report = _audit(function, given, options)
    problems = []
    for named, share in least.items():
        [axes] = _in_mesh_order({named: {}}, report.mesh_shape)
        totals = [
            each for each in report.overlap() if axes_text(each.mesh_axes) == axes
        ]
        sent = sum(each.wire_bytes for each in totals)
        hidden = sum(each.hidden_bytes for each in totals)
        if hidden < share * sent or not sent:
            problems.append(
                f"over {axes}: matmuls hide {hidden:,} of {sent:,} bytes, less than "
                f"{share:.0%}"
            )
    if problems:
        table = as_text(overlap_table(report), collective_table(report))
        raise AssertionError("\n".join([*problems, table]))
    return report


def assert_peak_bytes(
    function: Any, arguments: Sequence[Any], *, at_most: int, **options: Any
) -> AuditReport:
    """Assert that the peak memory per device is at most `at_most` bytes."""
    report = _audit(function, arguments, options)
    peak = report.compiled_memory.peak_bytes
    if peak > at_most:
        raise AssertionError(
            f"the peak is {peak:,} bytes per device, more than {at_most:,}\n"
            f"{as_text(buffer_table(report))}"
        )
    return report


def assert_replicated_bytes_below(
    function: Any, arguments: Sequence[Any], limit: int, *, mesh: Any = None
) -> None:
    """Assert that arguments replicated on every device take less than `limit` bytes.

    An array without a known sharding counts as whole. Compiles nothing.
    """
    whole_number("limit", limit, least=0)
    flat = make_subject(function, tuple(arguments), mesh=mesh).flat()
    whole = [
        (leaf.size * leaf.dtype.itemsize, leaf)
        for leaf, sharding in zip(flat.leaves, flat.in_shardings, strict=True)
        if sharding is None or sharding.is_fully_replicated
    ]
    total = sum(size for size, _ in whole)
    if total >= limit:
        largest = sorted(whole, key=lambda pair: -pair[0])[:10]
        lines = [f"{size:,} bytes: {leaf.dtype}{leaf.shape}" for size, leaf in largest]
        raise AssertionError(
            f"{total:,} bytes are replicated on every device, not below {limit:,}; the "
            "largest:\n    " + "\n    ".join(lines)
        )


def assert_flat_in(
    name: str,
    program: Callable[[int], tuple[Any, Sequence[Any]]],
    values: Sequence[int],
    *,
    within: float = 0.01,
    **options: Any,
) -> None:
    """Assert that temporary memory stays the same while a number grows.

    Args:
        name: What grows, such as `num_microbatches`, for the message.
        program: Its value -> a function and its arguments.
        values: At least two; no program's temporaries may be more than `within` above
            those of the least value.
        within: The fraction of the least value's.
        options: As for `meshpar.audit`.

    Raises:
        AssertionError: Memory grows; both numbers are in the message.
        InputError: Fewer than two values.
    """
    if len(set(values)) < 2:
        raise InputError(
            f"{name}: {list(values)} has not two values to compare",
            key="testing.too_few_values",
        )
    used = {
        value: _audit(*program(value), options).compiled_memory.temp_bytes
        for value in values
    }
    first, *rest = sorted(used)
    for value in rest:
        if used[value] > used[first] * (1 + within):
            table = ", ".join(f"{value}: {size:,}" for value, size in used.items())
            raise AssertionError(
                f"temporaries grow with {name}: {used[first]:,} bytes at {first}, "
                f"{used[value]:,} at {value}, more than {within:.1%} apart ({table})"
            )


def _audit(
    function: Any, arguments: Sequence[Any], options: Mapping[str, Any]
) -> AuditReport:
    report = audit(function, *arguments, **options)
    if report.problem:
        raise AssertionError("\n".join([report.problem, *report.complaints()]))
    return report


def _in_mesh_order(expected: Counts, mesh_shape: Mapping[str, int]) -> Counts:
    """Write `fsdp+data` as `data+fsdp`; refuse unknown names."""
    in_order = {}
    for axes, counts in expected.items():
        names = axes.split("+")
        for name in names:
            if name not in mesh_shape:
                known = nearest(name, mesh_shape)
                raise InputError(
                    f"no mesh axis {name!r} in {axes!r}; {known}",
                    key="mesh.unknown_axis",
                )
        for kind in counts:
            if kind not in KINDS:
                raise InputError(
                    f"no collective {kind!r}; {nearest(kind, KINDS)}",
                    key="audit.unknown_collective",
                )
        in_order["+".join(sorted(names, key=list(mesh_shape).index))] = counts
    return in_order


def _hold(problems: list[str], report: AuditReport) -> None:
    if problems:
        table = as_text(collective_table(report))
        raise AssertionError("\n".join(problems) + f"\n\n{table}")
