"""FLOPs of splash attention's kernels, which their compiled text does not show.

The program names the scope of its calls after what they make; whoever reads the
compiled program finds that in the calls' paths.
"""

from __future__ import annotations

import re

_SCOPE = re.compile(r"splash_pairs_(\d+)_(\d+)_(\d+)")

# Matmuls over each pair of a query and a key: (of the query's size, of the value's).
# Forward: scores; mixed values. Queries' gradient: scores and it; the softmax's
# gradient. Keys' and values': scores and keys'; the softmax's gradient and values'.
_MATMULS = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)}
_KERNEL = re.compile(rf"splash_mha_({'|'.join(_MATMULS)})_")

BACKWARD_MATMULS = 3.5
"""Of the backward's two kernels, for each of the forward's: seven to its two."""


def scope_of(pairs: int, query_dim: int, value_dim: int) -> str:
    """The name of a scope that says what the calls in it make.

    Args:
        pairs: Of a query and a key whose scores are made, all examples and heads.
        query_dim: Size of a query.
        value_dim: Size of a value.
    """
    return f"splash_pairs_{pairs}_{query_dim}_{value_dim}"


def splash_flops(path: str) -> int | None:
    """FLOPs of the kernel at a path of operations; None if it is none of these.

    Example:
        >>> splash_flops("splash_pairs_10_4_4/splash_mha_fwd_no_residuals/pallas_call")
        160
    """
    scope, kernel = _SCOPE.search(path), _KERNEL.search(path)
    if not scope or not kernel:
        return None
    pairs, query_dim, value_dim = map(int, scope.groups())
    of_query, of_value = _MATMULS[kernel[1]]
    return 2 * pairs * (of_query * query_dim + of_value * value_dim)
