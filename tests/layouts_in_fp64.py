"""How far layouts are from one device with every fp32 made fp64, as lines of JSON.

In fp32 an error below the bound of 1e-5 would pass for rounding; in fp64 rounding is
1e-15. Run on its own, since JAX takes its width of numbers once and meshpar names fp32
when it is imported:

    python -m tests.layouts_in_fp64 '{"preset": "tiny-vit"}' LAYOUT [LAYOUT ...]
"""

import json
import sys

import jax
import jax.numpy as jnp


def main(sizes: str, *layouts: str) -> None:
    """Prints, for each layout, what is compared -> its largest relative error."""
    jax.config.update("jax_enable_x64", True)
    jnp.float32 = jnp.float64

    from meshpar import emulate
    from meshpar.models.presets import build
    from meshpar.testing.equivalence import check_layouts

    emulate(8)
    for result in check_layouts(build(**json.loads(sizes)), layouts=layouts).results:
        print(json.dumps({name: one.error for name, one in result.worst.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
