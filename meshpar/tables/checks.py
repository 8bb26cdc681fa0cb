"""Whether a step, tables and a batch are what a step with tables takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshpar.errors import InputError, nearest
from meshpar.model.inputs import Inputs
from meshpar.tables.tables import EmbeddingTables
from meshpar.train.step import TrainStep


def check_parts(step: TrainStep, tables: EmbeddingTables) -> None:
    """Refuses what `with_tables` cannot put together.

    Raises:
        InputError: One of them is something else, or the step has tables already.
    """
    if not isinstance(step, TrainStep):
        raise InputError(
            f"with_tables was given a {type(step).__name__}; give what make_train_step "
            "returned, and all tables at once",
            key="tables.not_train_step",
        )
    if not isinstance(tables, EmbeddingTables):
        raise InputError(
            f"with_tables was given a {type(tables).__name__}; give what "
            "embedding_tables returned",
            key="tables.not_embedding_tables",
        )


def check_arrays(
    inputs: Inputs, outputs: Mapping[str, Sequence[str]], batch: Mapping[str, Any]
) -> None:
    """Refuses arrays that no one reads, and a batch of no examples.

    A misspelt `NAME_weights` would leave its bags unweighted without a word.

    Args:
        inputs: What the tables, and the model beside them, read.
        outputs: Input of the model -> the features that are looked up into it.
        batch: What was given.

    Raises:
        InputError: An array is not declared or looked up, or there are no examples.
    """
    for name in batch:
        if name in outputs:
            raise InputError(
                f"batch[{name!r}] is given, but is looked up in tables from "
                f"{', '.join(map(repr, outputs[name]))}; leave it out",
                key="batch.looked_up_array",
            )
        if name not in inputs:
            raise InputError(
                f"batch[{name!r}] is read by no table and not declared by the model; "
                f"leave it out, or declare it in inputs=: {nearest(str(name), inputs)}",
                key="batch.unknown_array",
            )
    shapes = [getattr(array, "shape", None) for array in batch.values()]
    if shapes and all(shape and shape[0] == 0 for shape in shapes):
        raise InputError(
            "the batch has 0 examples; give 1 or more", key="batch.no_examples"
        )
