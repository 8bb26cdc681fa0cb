"""V-Half: half the memory of 1F1B, with a smaller bubble than 1F1B's.

It repeats V-Min's building block with two units, not one, from rank to rank for the
forwards of chunk 0 and the input gradients of chunk 1.
"""

from __future__ import annotations

from meshpar.schedules.building_blocks import Distances, repeated_block

v_half = repeated_block(
    "v_half",
    Distances(forward_0=2, forward_1=1, input_grad_1=2, input_grad_0=1),
)
