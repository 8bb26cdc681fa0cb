"""Every layout computes the same function: in fp64, where rounding hides nothing."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# Three thousand times what was seen: 3.4e-16 to 1.5e-15.
BOUND = 4e-12

LAYOUTS = (
    "data=2,fsdp=2,tensor=2,sequence_parallel=true",
    "data=2,stage=4,microbatches=4",
    "fsdp=2,stage=2,tensor=2,microbatches=2,schedule=interleaved_1f1b,chunks=2",
)
LLAMA = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 64}
# Of 8 x 8 x 4 places: XLA:CPU is slow at convolutions in fp64.
PLACES = {"depth": 8, "height": 8, "width": 4}
UNET = {"preset": "tiny-unet3d", **PLACES, "base": 4, "groups": 2}


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ({**LLAMA, "gated": True}, (*LAYOUTS, "context=2,tensor=2,stage=2")),
        ({"preset": "tiny-moe", "layers": 4}, (LAYOUTS[1], "expert=2,fsdp=2,tensor=2")),
        ({"preset": "tiny-vit", "layers": 4, "dropout": 0.1}, LAYOUTS),
        ({"preset": "tiny-dit", "layers": 4}, LAYOUTS[:2]),
        (UNET, ("fsdp=2,tensor=2", "data=2,stage=2")),
    ],
    ids=["llama", "moe", "vit", "dit", "unet3d"],
)
def test_layouts_differ_from_one_device_by_rounding_alone(model, layouts):
    # A warm interpreter has imported meshpar, with fp32 for what is made fp64 here.
    program = [sys.executable, "-m", "tests.layouts_in_fp64", json.dumps(model)]
    done = subprocess.run([*program, *layouts], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(layouts)
    for layout, errors in zip(layouts, found, strict=True):
        for name in ("loss", "grad_norm", "gradients"):
            assert errors[name] <= BOUND, f"{layout}: {name} {errors[name]}"
