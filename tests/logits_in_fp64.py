"""Logits of a GGUF file's model on several layouts, with every fp32 made fp64.

What fp32 rounds away hides what a program computes: in fp64 two programs of the same
function agree, and others do not. Run on its own, since JAX takes its width of numbers
once and meshpar names fp32 when it is imported:

    python -m tests.logits_in_fp64 FILE.gguf TOKENS.npy OUT.npz LAYOUT [LAYOUT ...]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np


def main(file: str, tokens: str, out: str, *layouts: str) -> None:
    """Writes (layouts, rows, tokens, vocab) of logits, in fp64, as `logits`."""
    jax.config.update("jax_enable_x64", True)
    jnp.float32 = jnp.float64

    from meshpar import emulate
    from meshpar.models.convert.weights import read_weights
    from tests.transformers_cases import logits_on

    emulate(4)
    weights = read_weights(file)
    rows = {"tokens": np.load(tokens)}
    found = [logits_on(weights, layout, rows)[0] for layout in layouts]
    np.savez(out, logits=np.stack(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
