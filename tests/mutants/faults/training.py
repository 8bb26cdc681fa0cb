"""Faults in training: the step, its state, optimizers, checkpoints, tables, recipes."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="skipped-step-moves-moments",
        effect="a step that is skipped still changes the optimizer state",
        file="meshpar/train/step_functions.py",
        old="opt_state=jax.tree.map(keep, new_opt_state, state.opt_state),",
        new="opt_state=new_opt_state,",
        tests=(
            "tests/test_precision.py"
            "::test_gradients_that_are_not_finite_change_nothing_and_are_counted",
        ),
    ),
    Mutant(
        name="seed-is-ignored",
        effect="every run draws the random numbers of seed 0",
        file="meshpar/train/state.py",
        old="seed=jnp.asarray(seed, jnp.uint32),",
        new="seed=jnp.zeros((), jnp.uint32),",
        tests=(
            "tests/test_given_values.py"
            "::test_a_state_is_born_with_the_seed_that_its_randomness_follows_from",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="first-layer-not-restored",
        effect="the first layer of a device is restored as zeros",
        file="meshpar/train/checkpoint/stored_arrays.py",
        old="if first <= self.places[place] < last",
        new="if first < self.places[place] < last",
        tests=(
            "tests/test_stored_arrays.py"
            "::test_layers_come_to_their_places_and_empty_places_are_zeros",
        ),
    ),
    Mutant(
        name="checksum-of-the-last-chunk",
        effect="a checksum covers only the last chunk of a file",
        file="meshpar/train/checkpoint/files.py",
        old="zlib.crc32(chunk, crc), left - len(chunk)",
        new="zlib.crc32(chunk), left - len(chunk)",
        tests=("tests/test_checksums.py::test_every_byte_is_noted_once_and_read_once",),
        missed_at_first=True,
    ),
    Mutant(
        name="empty-places-are-updated",
        effect="padding of uneven stages receives updates",
        file="meshpar/train/optimizer/by_layer.py",
        old="return _masked(array, self.filled[owner], 0)",
        new="return array",
        tests=(
            "tests/test_optimizer_by_layer.py"
            "::test_places_without_a_layer_stay_empty_whatever_is_added_to_layers",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="owners-send-all-they-have-room-for",
        effect="an owner of fewer matrices than others overwrites their results",
        file="meshpar/parallel/by_owners.py",
        old="sent, received = (counts[self._own], first), (",
        new="sent, received = (packing.room, first), (",
        tests=("tests/test_muon.py::test_owners_compute_what_one_device_does",),
    ),
    Mutant(
        name="nesterov-corrected-for-a-step-less",
        effect="Muon weighs momentum and gradient otherwise than optax's",
        file="meshpar/optimizers/muon.py",
        old="tree.tree_bias_correction(mu, beta, optax.safe_increment(count)),",
        new="tree.tree_bias_correction(mu, beta, count),",
        tests=("tests/test_muon.py::test_updates_and_state_are_those_of_optax",),
    ),
    Mutant(
        name="masters-not-averaged",
        effect="local steps go on from masters that were not averaged",
        file="meshpar/train/local_steps.py",
        old="opt_state = Mastered(jax.tree.map(lift, start), opt_state.inner)",
        new="opt_state = Mastered(opt_state.master, opt_state.inner)",
        tests=(
            "tests/test_local_steps.py"
            "::test_masters_start_an_interval_from_the_common_parameters",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="mean-square-of-local-columns",
        effect="row-wise Adagrad divides by the columns of one device",
        file="meshpar/tables/lookup.py",
        old="return total / store.dim",
        new="return total / gradients.shape[1]",
        tests=(
            "tests/test_tables.py::test_tables_of_every_placement_train_as_dense_ones",
        ),
    ),
    Mutant(
        name="learning-rate-falls-too-long",
        effect="the learning rate is too high when the run ends",
        file="recipes/optimizers.py",
        old="0.0, peak, warmup, steps, end)",
        new="0.0, peak, warmup, steps + warmup, end)",
        tests=(
            "tests/test_run_metrics.py"
            "::test_the_learning_rate_rises_for_a_tenth_and_ends_at_a_tenth",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="random-rounding-is-biased",
        effect="stochastic rounding to bf16 rounds down too often",
        file="meshpar/train/optimizer_state.py",
        old="jax.random.bits(key, x.shape, jnp.uint32) >> 16",
        new="jax.random.bits(key, x.shape, jnp.uint32) >> 17",
        tests=(
            "tests/test_precision.py"
            "::test_rounding_at_random_keeps_the_mean_and_what_needs_no_rounding",
        ),
    ),
    Mutant(
        name="late-save-is-no-copy",
        effect="the next step overwrites a state that is still being saved",
        file="meshpar/train/checkpoint/checkpoints.py",
        old="if on_host and not wait:",
        new="if on_host and wait:",
        tests=(
            "tests/test_checkpoint.py"
            "::test_a_step_takes_the_states_memory_while_it_is_saved",
        ),
    ),
    Mutant(
        name="row-updated-in-two-rounds",
        effect="a step of two rounds updates the same table row twice",
        file="meshpar/tables/exchange.py",
        old="bound = lax.pmin(bound, self.mesh_axes)",
        new="bound = jnp.asarray(bound)",
        tests=(
            "tests/test_tables_placement.py"
            "::test_all_gradients_of_a_row_come_in_one_round",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="second-resume-skips-text",
        effect="a run that resumes twice skips part of its data",
        file="recipes/resume.py",
        old="return self.windows + (done - self.step) * global_batch",
        new="return self.windows + done * global_batch",
        tests=(
            "tests/test_faults.py"
            "::test_a_rollback_goes_back_and_on_with_the_text_after_the_bad_step",
        ),
    ),
)
