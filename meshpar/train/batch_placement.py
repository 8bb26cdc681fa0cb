"""A batch checked against what the model declares, and put on the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshpar.errors import InputError
from meshpar.layout import Layout
from meshpar.model.batch_checks import check_batch, check_values
from meshpar.model.inputs import Input
from meshpar.train.refusals import batch_refusal


@dataclass(frozen=True, kw_only=True)
class BatchPlacement:
    """Where batches lie, and what they are.

    Args:
        inputs: What the model declares.
        check_sequences: Refuses sequences that cannot be split.
        layout: Whose batch axes and microbatches a batch divides over.
        sharding: How every array lies, the example first.
    """

    inputs: Mapping[str, Input]
    check_sequences: Callable[[Mapping[str, Any]], None]
    layout: Layout
    sharding: NamedSharding
    _passed: set[tuple[Any, ...]] = field(default_factory=set, compare=False)

    def place(
        self,
        batch: Mapping[str, Any],
        microbatches: int | None = None,
        *,
        partly: bool = False,
    ) -> dict[str, jax.Array]:
        """The batch on the devices; as it is where it lies so.

        Args:
            batch: Arrays by name.
            microbatches: Parts that it is cut into; the layout's when absent.
            partly: Whether it may be without arrays that are declared.

        Raises:
            InputError: It is not as declared, or does not divide.
        """
        self._check_once(batch, microbatches, partly=partly)
        if all(map(self._is_placed, batch.values())):
            return dict(batch)
        return jax.device_put(dict(batch), self.sharding)

    def check(
        self,
        batch: Mapping[str, Any],
        microbatches: int | None = None,
        *,
        partly: bool = False,
    ) -> None:
        """Refuses a batch that `place` refuses."""
        inputs = self.inputs
        if partly:
            inputs = {name: one for name, one in inputs.items() if name in batch}
        num_examples = check_batch(inputs, batch)
        self.check_sequences(batch)
        self.check_examples(num_examples, next(iter(batch)), microbatches)

    def check_examples(
        self, num_examples: int, name: str = "", microbatches: int | None = None
    ) -> None:
        """Refuses a global batch that does not divide over the batch axes."""
        refused = batch_refusal(self.layout, num_examples, name, microbatches)
        if refused is not None:
            raise InputError(refused)

    def _is_placed(self, array: Any) -> bool:
        return isinstance(array, jax.Array) and array.sharding == self.sharding

    def _check_once(
        self, batch: Mapping[str, Any], microbatches: int | None, *, partly: bool
    ) -> None:
        """`check`; of shapes and dtypes that have passed it the values alone."""
        try:
            shapes = tuple(
                (name, array.shape, array.dtype) for name, array in batch.items()
            )
        except AttributeError:  # No arrays by name: the check says so.
            shapes = ()
        key = (shapes, microbatches, partly)
        if shapes and key in self._passed:
            check_values(self.inputs, batch)
            return
        self.check(batch, microbatches, partly=partly)
        self._passed.add(key)
