"""Plan: memory, time and traffic of a step under one layout, their text and JSON.

Every planner of a training step returns it: of transformers, volumes and tables. Its
run describes the model, and a timer gives its seconds on any hardware. Generation has
no step: `meshpar.planner.inference` has other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from meshpar.hardware.device import Device
from meshpar.html import element, paragraph, stacked_bar
from meshpar.layout import Layout
from meshpar.planner.cost.step_time import EXPOSED, StepTime
from meshpar.planner.cost.step_traffic import Sent
from meshpar.planner.known_errors import ErrorRange, error_range, regime
from meshpar.planner.machine.cluster import Cluster, Link


class PlannedRun(Protocol):
    """A model on a cluster under a layout, which describes itself."""

    @property
    def cluster(self) -> Cluster: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def global_batch(self) -> int: ...

    def link(self, *mesh_axes: str) -> Link: ...

    @property
    def heading(self) -> str:
        """The model and the machine, in a line."""

    @property
    def layout_text(self) -> str:
        """The layout, and further arguments of the step."""

    @property
    def share(self) -> str:
        """Part of the batch on a device, in words."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Facts about the program and caveats on these devices."""

    @property
    def examples(self) -> tuple[float, str]:
        """Number of what a step trains on, and its name: 65536, tokens."""

    @property
    def kind(self) -> str:
        """Kind of the models that published runs of other models are compared with."""

    @property
    def model_flops(self) -> float:
        """FLOPs of one step, without recomputation."""

    @property
    def python_call(self) -> str:
        """Call that makes the training step."""

    def why_exposed(self, mesh_axis: str) -> str:
        """Return the reason why the step waits for a mesh axis."""

    def as_json(self) -> dict[str, Any]:
        """Return entries of a plan's JSON that only such models have."""


class PlannedMemory(Protocol):
    """Bytes of the fullest device."""

    @property
    def total_bytes(self) -> float: ...

    def lines(self, layout: Layout) -> list[str]:
        """Return lines of text: bytes by what they are for."""

    def as_json(self) -> dict[str, float]: ...


class PlacedPart(Protocol):
    """The part of a run that the devices of one kind have."""

    @property
    def text(self) -> str: ...

    def as_json(self) -> dict[str, Any]: ...


class Placement(NamedTuple):
    """Parts of a run that kinds of devices have, and why; () and "" of one kind."""

    parts: tuple[PlacedPart, ...]
    why: str

    @property
    def lines(self) -> list[str]:
        """Lines of text."""
        return [*(part.text for part in self.parts), *filter(None, (self.why,))]


class Orders(Protocol):
    """Step times in the orders of the mesh axes."""

    @property
    def lines(self) -> list[str]:
        """Lines of text; none if no order is faster than the run's own."""

    def as_json(self) -> dict[str, Any]: ...


RunT = TypeVar("RunT", bound=PlannedRun)
MemoryT = TypeVar("MemoryT", bound=PlannedMemory)


@dataclass(frozen=True, kw_only=True)
class Plan(Generic[RunT, MemoryT]):
    """Memory, time and traffic of a step under one layout.

    Args:
        run: Model, machine, layout and batch.
        memory: Bytes of the fullest device.
        timer: Function that times such a run, on any hardware.
        collectives: Bytes that one device sends in a step, by mesh axes and kind; None
            where the planner counts their time alone.
        placer: Function that says what each kind of device of such a run has, and why;
            None where all devices are of one kind.
        orderer: Function that times such a run in other orders of its mesh axes; None
            where they are not compared.
    """

    run: RunT
    memory: MemoryT
    timer: Callable[[RunT], StepTime]
    collectives: tuple[Sent, ...] | None = None
    placer: Callable[[RunT], Placement] | None = None
    orderer: Callable[[RunT], Orders | None] | None = None

    @cached_property
    def time(self) -> StepTime:
        """Seconds of the step, by what they are spent on."""
        return self.timer(self.run)

    @property
    def step_s(self) -> float:
        """Seconds of one step."""
        return self.time.step_s

    def step_on_s(self, change: Callable[[Device], Device]) -> float:
        """Return the seconds of a step, laid out so, on devices changed alike."""
        run: Any = self.run
        return self.timer(replace(run, cluster=run.cluster.changed(change))).step_s

    @cached_property
    def placement(self) -> Placement:
        """Parts of the run that each kind of device has, if there are several."""
        return self.placer(self.run) if self.placer else Placement((), "")

    @cached_property
    def mesh_orders(self) -> Orders | None:
        """Step times in the orders of the mesh axes, where these differ in a link."""
        return self.orderer(self.run) if self.orderer else None

    @property
    def _order_lines(self) -> list[str]:
        """Lines of text: mesh axes on slower links than in another order."""
        return self.mesh_orders.lines if self.mesh_orders else []

    @property
    def half_network_step_s(self) -> float:
        """Seconds of a step with half the bandwidth between hosts.

        Or of a torus' links. Other jobs, routes and many hosts reduce this bandwidth
        first, and no data sheet says by how much.
        """

        def halved(device: Device) -> Device:
            links: dict[str, Any] = {
                "network_bytes_per_s": device.network_bytes_per_s / 2
            }
            if device.torus_dims:
                links["link_bytes_per_s"] = device.link_bytes_per_s / 2
            return replace(device, **links)

        return self.step_on_s(halved)

    @property
    def model_flops(self) -> float:
        """FLOPs of one step, without recomputation."""
        return self.run.model_flops

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak of all devices in that time."""
        peak_flops = self.run.cluster.peak_flops(self.run.layout.precision)
        return self.model_flops / (peak_flops * self.step_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the global batch per second; volumes or examples without tokens."""
        return self.run.examples[0] / self.step_s

    @property
    def fits(self) -> bool:
        """True if the fullest device has enough memory."""
        return self.memory.total_bytes <= self.run.cluster.device.usable_bytes

    def as_json(self) -> dict[str, Any]:
        """Return what `meshpar estimate --json` prints."""
        device = self.run.cluster.device
        report = {
            "layout": str(self.run.layout),
            "step_s": self.step_s,
            "mfu": self.mfu,
            f"{self.run.examples[1]}_per_s": self.tokens_per_s,
            "half_network_step_s": self.half_network_step_s,
            "error_range": self._error_range_json,
            "fits": self.fits,
            "memory": {
                **self.memory.as_json(),
                "capacity_bytes": round(device.memory_bytes),
                "usable_bytes": round(device.usable_bytes),
            },
            "time": self.time.as_json(),
            **self.run.as_json(),
        }
        if self.placement.parts:
            report["parts"] = [part.as_json() for part in self.placement.parts]
            report["why_parts"] = self.placement.why
        if self.mesh_orders is not None:
            report["mesh_orders"] = self.mesh_orders.as_json()
        if self.collectives is not None:
            report["collectives"] = [
                {
                    **collective._asdict(),
                    "mesh_axes": list(collective.mesh_axes),
                    "wire_bytes": round(collective.wire_bytes),
                }
                for collective in self.collectives
            ]
        return report

    @property
    def answer(self) -> list[str]:
        """Six lines of text: model, layout, time, its error, memory, largest parts.

        Of mixed hardware those of each kind of device, too.
        """
        parts = self.time.parts
        first, second = sorted(parts, key=parts.__getitem__, reverse=True)[:2]
        return [
            self.run.heading,
            f"layout {self.run.layout_text}: {self.run.share}",
            self._time_line,
            self._error_line,
            self._memory_line,
            *(f"  {line}" for line in (*self.placement.lines, *self._order_lines)),
            f"most of the step: {self._part(first)}; then {self._part(second)}",
        ]

    @property
    def regime(self) -> str:
        """Device and kind of model: published runs alike in both are compared."""
        return regime(self.run.cluster.device.name, self.run.kind)

    @property
    def error_range(self) -> ErrorRange | None:
        """How far the planner was off for published runs of this regime, if any."""
        return error_range(self.regime)

    @property
    def _error_line(self) -> str:
        """Line of text: between which times published runs put this step."""
        found = self.error_range
        if found is None:
            return f"{self.regime}: no published run tells how far off this time is"
        least_s, most_s = map(milliseconds, found.step_range_s(self.step_s))
        runs = f"{found.num_runs} published run{'s' if found.num_runs > 1 else ''}"
        return (
            f"{self.regime}: {runs} took {found.least:.2f} to {found.most:.2f} of the "
            f"planned time, which makes this one {least_s} to {most_s}"
        )

    @property
    def _error_range_json(self) -> dict[str, Any] | None:
        found = self.error_range
        if found is None:
            return None
        least_s, most_s = found.step_range_s(self.step_s)
        return {
            "regime": self.regime,
            **found._asdict(),
            "least_step_s": least_s,
            "most_step_s": most_s,
        }

    def _repr_html_(self) -> str:
        """Return the answer and the parts of the time, for a notebook."""
        title, *rest = self.answer
        bar = stacked_bar(self.time.parts, milliseconds)
        return element(title, [*map(paragraph, rest[:-1]), bar])

    @property
    def lines(self) -> list[str]:
        """Lines of text: model and machine, memory, time, communication."""
        return [
            *self.answer[:2],
            *self.placement.lines,
            *self.run.notes,
            self._memory_line,
            *(f"  {line}" for line in self.memory.lines(self.run.layout)),
            self._time_line,
            self._error_line,
            *(f"  {line}" for line in self._order_lines),
            *(f"  {line}" for line in (*self._times, *self._links)),
        ]

    @property
    def _memory_line(self) -> str:
        """Line of text: memory of the fullest device against what a device has."""
        device = self.run.cluster.device
        kept = device.memory_bytes - device.usable_bytes
        reserve = f", {gigabytes(kept)} left in reserve" if kept else ""
        return (
            f"memory {gigabytes(self.memory.total_bytes)} of "
            f"{gigabytes(device.memory_bytes)}: "
            f"{'fits' if self.fits else 'does not fit'}{reserve}"
        )

    @property
    def _time_line(self) -> str:
        """Line of text: time of a step, MFU, examples per second."""
        return (
            f"step {milliseconds(self.step_s)}, MFU {self.mfu:.1%}, "
            f"{three_digits(self.tokens_per_s)} "
            f"{self.run.examples[1]}/s"
        )

    @property
    def _times(self) -> list[str]:
        time = self.time
        lines = [
            f"computing {self._share(time.compute_s)}, bubble "
            f"{self._share(time.bubble_s)}, optimizer "
            f"{self._share(time.optimizer_s)}, slowest of all devices "
            f"{self._share(time.straggler_s)}",
            f"at half the network's bandwidth {milliseconds(self.half_network_step_s)}",
        ]
        if time.host_s:
            lines.append(f"waiting for the host {self._share(time.host_s)}")
        return lines + [self._part(f"{EXPOSED}{axis}") for axis in time.exposed_s]

    def _part(self, name: str) -> str:
        """Return a part of the time in words, and why the step waits for it."""
        took, axis = self._share(self.time.parts[name]), name.removeprefix(EXPOSED)
        if axis == name:
            return f"{name} {took}"
        return (
            f"{name} ({self.run.link(axis).name}) {took}: {self.run.why_exposed(axis)}"
        )

    @property
    def _links(self) -> list[str]:
        return [
            f"{'+'.join(collective.mesh_axes)} {collective.kind} over the "
            f"{collective.link}: {gigabytes(collective.wire_bytes)} sent by a device, "
            f"{collective.reason}"
            for collective in self.collectives or ()
        ]

    def _share(self, seconds: float) -> str:
        return f"{milliseconds(seconds)} ({seconds / self.step_s:.1%})"


def gigabytes(num_bytes: float) -> str:
    """Format bytes with three digits and a unit.

    Example:
        >>> gigabytes(12.34e9), gigabytes(1234e9), gigabytes(12.3e3), gigabytes(0)
        ('12.3 GB', '1,234 GB', '12.3 kB', '0 GB')
    """
    for unit, size, least in (("GB", 1e9, 1e8), ("MB", 1e6, 1e6), ("kB", 1e3, 1e3)):
        if num_bytes >= least:
            return f"{three_digits(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B" if num_bytes >= 1 else "0 GB"


def milliseconds(seconds: float) -> str:
    """Format seconds with three digits and a unit; less than a microsecond is 0 ms.

    Example:
        >>> milliseconds(0.0123), milliseconds(12.3), milliseconds(1.78e-15)
        ('12.3 ms', '12.3 s', '0 ms')
    """
    if seconds >= 0.9995:
        return f"{three_digits(seconds)} s"
    return f"{three_digits(seconds * 1e3 if seconds >= 1e-6 else 0.0)} ms"


def three_digits(number: float) -> str:
    """Format a number with three digits, or all digits before the point.

    Example:
        >>> three_digits(12.345), three_digits(12345.6)
        ('12.3', '12,346')
    """
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"
