"""V-Min: a third of the memory of 1F1B, the least that a V can hold.

It repeats the building block in which everything goes from rank to rank at once.
"""

from __future__ import annotations

from meshpar.schedules.building_blocks import Distances, repeated_block

v_min = repeated_block(
    "v_min",
    Distances(forward_0=1, forward_1=1, input_grad_1=1, input_grad_0=1),
)
