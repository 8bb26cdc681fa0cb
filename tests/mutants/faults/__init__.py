"""All mutants, a file for each group of rooms."""

from tests.mutants.faults import (
    data,
    generation,
    layouts,
    parallel,
    planning,
    training,
)

MUTANTS = (
    *layouts.MUTANTS,
    *parallel.MUTANTS,
    *training.MUTANTS,
    *data.MUTANTS,
    *generation.MUTANTS,
    *planning.MUTANTS,
)
