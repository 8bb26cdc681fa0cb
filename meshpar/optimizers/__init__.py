"""Optimizers that need whole matrices, each computed by one device: `muon`.

Any optimizer of optax trains under any layout. Those here are for optimizers that mix
the rows of a matrix: in a training step each matrix has one owner, which computes with
the whole of it. What decides the owners is `meshpar.parallel.owners`.
"""

from meshpar.optimizers.muon import muon

__all__ = ["muon"]
