"""Plans run on the devices that are there: predicted, measured, and what fits both.

Each runs in a process of its own (`python -m` this, a JSON object each way), so that
the command needs no JAX, and what one plan leaves behind cannot slow the next.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshpar.errors import InputError
from meshpar.hardware.platforms import platform_named
from meshpar.machine.emulate import emulate
from meshpar.planner.cost.estimate import Estimate
from meshpar.planner.machine.cluster import Cluster
from meshpar.planner.machine.mixed import check_one_kind
from meshpar.planner.plan import milliseconds

STEPS = 5
"""Steps of each plan, of which the median counts."""

_TIMEOUT_S = 1800


@dataclass(frozen=True, kw_only=True)
class MeasuredPlan:
    """One plan.

    Args:
        layout: What ran.
        predicted_s: The planner's time of a step.
        measured_s: The median of those that ran; None where it could not.
        fitted_s: What the planner says with the fitted efficiency.
        problem: Why it could not run; empty if it did.
    """

    layout: str
    predicted_s: float
    measured_s: float | None = None
    fitted_s: float | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All plans that ran, and the efficiency that comes closest to them.

    Args:
        plans: In their order.
        efficiency: Field of `[efficiency]` -> its fitted value; empty where none ran.
    """

    plans: tuple[MeasuredPlan, ...]
    efficiency: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """Two keys of what `meshpar plan --json` prints."""
        return {
            "measured": [asdict(plan) for plan in self.plans],
            "fitted_efficiency": self.efficiency,
        }

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Layout, predicted, measured, and how far apart."""
        return [
            (
                plan.layout,
                milliseconds(plan.predicted_s),
                milliseconds(plan.measured_s),
                f"{plan.predicted_s / plan.measured_s - 1:+.1%}",
            )
            if plan.measured_s
            else (plan.layout, milliseconds(plan.predicted_s), plan.problem, "")
            for plan in self.plans
        ]

    def fitted_lines(self) -> list[str]:
        """The efficiency as `--hardware FILE.toml` takes it, and what it then says."""
        if not self.efficiency:
            return []
        errors = [
            abs(plan.fitted_s / plan.measured_s - 1)
            for plan in self.plans
            if plan.fitted_s and plan.measured_s
        ]
        mean = sum(errors) / len(errors)
        return [
            f"efficiency that fits them, mean error then {mean:.1%}:",
            "[efficiency]",
            *(f"{name} = {value:.4g}" for name, value in self.efficiency.items()),
        ]

    def lines(self) -> list[str]:
        """The same as text."""
        head = f"{'predicted':>10} {'measured':>10}   median of {STEPS} steps"
        rows = [
            f"{predicted:>10} {measured:>10} {apart:>8}  {layout}"
            for layout, predicted, measured, apart in self.rows()
        ]
        return [head, *rows, *self.fitted_lines()]


def check_measurable(cluster: Cluster) -> None:
    """Passes a cluster whose devices are here; those of a CPU can be virtual.

    Raises:
        InputError: Other devices are here, or too few.
    """
    check_one_kind(cluster, "--measure runs on")
    wanted = cluster.device.platform
    if platform_named(wanted).is_host:
        return
    here = _child({"ask": "devices"})
    if "problem" in here:
        raise InputError(
            f"--measure finds no devices here: {here['problem']}",
            key="hardware.no_devices",
        )
    if here.get("platform") != wanted or here["count"] < cluster.num_devices:
        raise InputError(
            f"--measure runs plans on the devices that are here, {here['count']} x "
            f"{here['kind']}, but they are for {cluster.text}; leave it out, or give "
            "--hardware FILE.toml of `meshpar calibrate` and --devices N",
            key="hardware.other_devices",
        )


def measure(args: argparse.Namespace, plans: Sequence[Estimate]) -> Measured:
    """Runs each plan for some steps; one that cannot run says why."""
    found = [_measured(args, plan) for plan in plans]
    ran = [
        (plan, one.measured_s)
        for plan, one in zip(plans, found, strict=True)
        if one.measured_s
    ]
    if not ran:
        return Measured(plans=tuple(found), efficiency={})
    from meshpar.calibration.fit import fitted_efficiency  # numpy, scipy

    efficiency, refit = fitted_efficiency(*zip(*ran, strict=True))
    fitted = iter(refit)
    return Measured(
        plans=tuple(
            replace(one, fitted_s=next(fitted)) if one.measured_s else one
            for one in found
        ),
        efficiency=efficiency,
    )


def _measured(args: argparse.Namespace, plan: Estimate) -> MeasuredPlan:
    run = plan.run
    options = ("preset", "model", "model_from", "vocab")
    model = {name: getattr(args, name) for name in options}
    answer = _child(
        {
            "ask": "step",
            "layout": str(run.layout),
            "model": model,
            "global_batch": run.global_batch,
            "seq": run.seq,
            "devices": run.cluster.num_devices,
            "emulate": platform_named(run.cluster.device.platform).is_host,
            "steps": STEPS,
        }
    )
    return MeasuredPlan(
        layout=str(run.layout),
        predicted_s=plan.step_s,
        measured_s=answer.get("seconds"),
        problem=answer.get("problem", ""),
    )


def _child(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of this file's `main` in a fresh process."""
    command = [sys.executable, "-m", "meshpar.cli.measure"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"did not end within {_TIMEOUT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        told = done.stderr.strip().splitlines() or ["no message"]
        return {"problem": f"ended with status {done.returncode}: {told[-1]}"}
    return json.loads(lines[-1])


def main() -> None:
    """Answer one JSON object on stdin: the devices, or the seconds of a step."""
    asked = json.load(sys.stdin)
    try:
        found = _devices() if asked["ask"] == "devices" else _step(asked)
    except InputError as error:
        found = {"problem": str(error)}
    print(json.dumps(found))


def _devices() -> dict[str, Any]:
    import jax

    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
    }


def _step(asked: dict[str, Any]) -> dict[str, Any]:
    """Time the step that `meshpar audit` and `--confirm` compile, too."""
    if asked["emulate"]:
        emulate(asked["devices"])
    import jax

    from meshpar.calibration.trials import step_trial
    from meshpar.cli.audit import adamw_step
    from meshpar.cli.options import planned_model
    from meshpar.testing.batches import random_batch

    model = planned_model(argparse.Namespace(**asked["model"]))
    devices = jax.devices()[: asked["devices"]]
    step = adamw_step(model, asked["layout"], devices=devices)
    batch = random_batch(model, asked["global_batch"], asked["seq"], seed=0)
    return {"seconds": step_trial(step, batch, steps=asked["steps"])}


if __name__ == "__main__":
    main()
