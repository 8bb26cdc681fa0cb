"""All mutants, a file for each group of rooms."""

from tests.mutants.faults import (
    data,
    generation,
    layouts,
    losses,
    parallel,
    planning,
    training,
)

MUTANTS = (
    *layouts.MUTANTS,
    *losses.MUTANTS,
    *parallel.MUTANTS,
    *training.MUTANTS,
    *data.MUTANTS,
    *generation.MUTANTS,
    *planning.MUTANTS,
)
