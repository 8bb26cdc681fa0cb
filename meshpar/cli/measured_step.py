"""One plan's steps, timed in a process of its own: `python -m` this, a line each way.

Reads one JSON object on stdin, and prints one: `seconds`, or the `problem`.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from meshpar.emulate import emulate
from meshpar.errors import InputError


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
    """The steps of AdamW's, as `meshpar audit` and `--confirm` have them."""
    if asked["emulate"]:
        emulate(asked["devices"])
    import jax
    import optax

    from meshpar.calibration.step_trial import step_trial
    from meshpar.cli.confirm import chosen_model
    from meshpar.testing.batches import random_batch
    from meshpar.train.make_step import make_train_step

    model = chosen_model(argparse.Namespace(**asked["model"]))
    step = make_train_step(
        model,
        optax.adamw(1e-3),
        asked["layout"],
        devices=jax.devices()[: asked["devices"]],
        max_grad_norm=1.0,
    )
    batch = random_batch(model, asked["global_batch"], asked["seq"], seed=0)
    return {"seconds": step_trial(step, batch, steps=asked["steps"])}


if __name__ == "__main__":
    main()
