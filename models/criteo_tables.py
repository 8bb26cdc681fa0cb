"""Tables of the recommendation benchmark of MLPerf Training 3.0: Criteo's features.

Rows of each feature's table, and the ids that an example has of it.

Reference: mlcommons/training, `recommendation_v2/torchrec_dlrm`, its README
(`--num_embeddings_per_feature`, `--multi_hot_sizes`; read 2026-11-22).
"""

from __future__ import annotations

ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000),
    *(3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000),
    *(40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
)

BAGS = (
    *(3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3),
    *(1, 1),
)
