"""The outer optimizer that DiLoCo was published with."""

from __future__ import annotations

import optax

LEARNING_RATE = 0.7
MOMENTUM = 0.9
"""Douillard et al. 2023, section 3: the best of those tried for Nesterov momentum."""


def nesterov(
    learning_rate: float = LEARNING_RATE, momentum: float = MOMENTUM
) -> optax.GradientTransformation:
    """SGD with Nesterov momentum (Sutskever et al. 2013).

    Args:
        learning_rate: What the outer gradient is multiplied by.
        momentum: What is kept of the earlier ones.
    """
    return optax.sgd(learning_rate, momentum=momentum, nesterov=True)
