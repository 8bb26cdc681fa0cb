"""A jitted function of a batch whose arrays lie each in its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

Make = Callable[[Any], Any]
"""How a batch lies -> the jitted function."""


class BatchProgram:
    """`jax.jit` of (state, batch), one for each set of arrays that a batch may have.

    Args:
        make: How a batch lies, a tree of shardings beside it -> the function.
        sharding_of: (name, array or its shape) -> its sharding.
        check: Refuses what `jax.jit(f).trace` gives; for each set of shapes, before
            anything of it runs.
    """

    def __init__(
        self,
        make: Make,
        sharding_of: Callable[[str, Any], Any],
        check: Callable[[Any], None] | None = None,
    ) -> None:
        self._make, self._sharding_of, self._check = make, sharding_of, check
        self._checked: set[tuple] = set()
        self._made: dict[tuple, Any] = {}

    def __call__(self, state: Any, batch: Mapping[str, Any]) -> Any:
        """What the function gives."""
        return self._program(state, batch)(state, batch)

    def lower(self, state: Any, batch: Mapping[str, Any]) -> jax.stages.Lowered:
        """As of what `jax.jit` returns."""
        return self._program(state, batch).lower(state, batch)

    def _program(self, state: Any, batch: Mapping[str, Any]) -> Any:
        lie = {name: self._sharding_of(name, array) for name, array in batch.items()}
        key = tuple(sorted(lie.items(), key=lambda item: item[0]))
        if key not in self._made:
            self._made[key] = self._make(lie)
        program = self._made[key]
        if self._check is not None:
            shapes = tuple(sorted((name, array.shape) for name, array in batch.items()))
            if (key, shapes) not in self._checked:
                self._check(program.trace(state, batch))
                self._checked.add((key, shapes))
        return program
