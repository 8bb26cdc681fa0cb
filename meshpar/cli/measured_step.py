"""One plan's steps, timed in a process of its own: `python -m` this, a line each way.

Reads one JSON object on stdin, and prints one: `seconds`, or the `problem`.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from meshpar.errors import InputError
from meshpar.machine.emulate import emulate


def main() -> None:
    """Answers what is asked on stdin: the devices, or a layout's steps."""
    asked = json.load(sys.stdin)
    try:
        found = _devices() if asked["ask"] == "devices" else _measured(asked)
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


def _measured(asked: dict[str, Any]) -> dict[str, Any]:
    """The steps that `meshpar audit` and `--confirm` look at, too."""
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
