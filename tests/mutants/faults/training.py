"""Faults in training: the step, its state, optimizers, checkpoints, tables, recipes."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="skipped-step-moves-moments",
        file="meshpar/train/update.py",
        old="opt_state=jax.tree.map(keep, new_opt_state, state.opt_state),",
        new="opt_state=new_opt_state,",
        tests=(
            "tests/test_precision.py"
            "::test_gradients_that_are_not_finite_change_nothing_and_are_counted",
        ),
    ),
    Mutant(
        name="seed-is-ignored",
        file="meshpar/train/state.py",
        old="seed=jnp.asarray(seed, jnp.uint32),",
        new="seed=jnp.zeros((), jnp.uint32),",
        tests=(
            "tests/test_given_values.py"
            "::test_a_state_is_born_with_the_seed_that_its_randomness_follows_from",
        ),
    ),
    Mutant(
        name="first-layer-not-restored",
        file="meshpar/train/stored_arrays.py",
        old="if first <= self.places[place] < last",
        new="if first < self.places[place] < last",
        tests=(
            "tests/test_stored_arrays.py"
            "::test_layers_come_to_their_places_and_empty_places_are_zeros",
        ),
    ),
    Mutant(
        name="checksum-of-the-last-chunk",
        file="meshpar/train/checksums.py",
        old="zlib.crc32(chunk, crc), left - len(chunk)",
        new="zlib.crc32(chunk), left - len(chunk)",
        tests=("tests/test_checksums.py::test_every_byte_is_noted_once_and_read_once",),
    ),
    Mutant(
        name="empty-places-are-updated",
        file="meshpar/train/optimizer/layers.py",
        old="return _masked(array, self.filled[owner], 0)",
        new="return array",
        tests=(
            "tests/test_optimizer_by_layer.py"
            "::test_places_without_a_layer_stay_empty_whatever_is_added_to_layers",
        ),
    ),
    Mutant(
        name="masters-not-averaged",
        file="meshpar/train/local_steps/functions.py",
        old="opt_state = Mastered(jax.tree.map(lift, start), opt_state.inner)",
        new="opt_state = Mastered(opt_state.master, opt_state.inner)",
        tests=(
            "tests/test_local_steps.py"
            "::test_masters_start_an_interval_from_the_common_parameters",
        ),
    ),
    Mutant(
        name="mean-square-of-local-columns",
        file="meshpar/tables/lookup.py",
        old="return total / store.dim",
        new="return total / gradients.shape[1]",
        tests=(
            "tests/test_tables.py::test_tables_of_every_placement_train_as_dense_ones",
        ),
    ),
    Mutant(
        name="learning-rate-falls-too-long",
        file="recipes/model.py",
        old="0.0, peak, warmup, max(steps, 2), peak / 10",
        new="0.0, peak, warmup, max(steps, 2) + warmup, peak / 10",
        tests=(
            "tests/test_run_metrics.py"
            "::test_the_learning_rate_rises_for_a_tenth_and_ends_at_a_tenth",
        ),
    ),
)
