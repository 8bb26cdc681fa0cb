"""Faults in what a layout is: the model, its rules, the lint, schedules."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="zigzag-without-the-last-chunk",
        effect="zigzag gives the last chunk of a sequence to no device",
        file="meshpar/model/token_order.py",
        old="last = self.num_chunks // size - 1 - group",
        new="last = self.num_chunks // size - 2 - group",
        tests=(
            "tests/test_context_attention.py::test_groups_share_out_their_two_chunks",
        ),
    ),
    Mutant(
        name="indivisible-size-is-split",
        effect="a size that its mesh axis does not divide is accepted",
        file="meshpar/rules/rules.py",
        old="if shape[dim] % degree == 0:",
        new="if shape[dim] >= degree:",
        tests=(
            "tests/test_rules.py"
            "::test_what_cannot_be_laid_out_is_an_error_in_full_words",
        ),
    ),
    Mutant(
        name="second-of-two-rules-holds",
        effect="lint lays the model out by the second of two rules",
        file="meshpar/lint/lint.py",
        old="first.setdefault(logical_axis, axes)",
        new="first[logical_axis] = axes",
        tests=("tests/test_lint.py::test_of_two_rules_the_first_lays_the_model_out",),
        missed_at_first=True,
    ),
    Mutant(
        name="gradient-slot-free-too-early",
        effect="a buffer slot is reused while a backward still needs it",
        file="meshpar/schedules/tick_table.py",
        old="return ticks[reader], Moment.BACKWARD",
        new="return ticks[reader], Moment.FORWARD",
        tests=(
            "tests/test_tick_table.py"
            "::test_no_live_value_is_overwritten_and_all_work_is_done_once",
        ),
    ),
    Mutant(
        name="one-weight-gradient-too-many-waits",
        effect="lock step lets one more weight gradient wait than the limit",
        file="meshpar/schedules/ticks.py",
        old="_num_waiting(queue, ticks) == most",
        new="_num_waiting(queue, ticks) > most",
        tests=("tests/test_schedules.py::test_a_limit_moves_weight_gradients_only",),
    ),
    Mutant(
        name="gradients-wait-for-real-backwards",
        effect="a tick with a backward that no rank does loses the gradient on its way",
        file="meshpar/schedules/tick_table.py",
        old="backward = [tick for at in phases for tick in range(at.start, at.stop)]",
        new="backward = np.flatnonzero((self.backward_stage >= 0).any(axis=1))",
        tests=(
            "tests/test_tick_table.py"
            "::test_no_live_value_is_overwritten_and_all_work_is_done_once",
        ),
    ),
    Mutant(
        name="pair-waits-for-no-loss",
        effect="a backward beside its own forward starts from an older gradient",
        file="meshpar/schedules/ticks.py",
        old="last = tick if own_forward and not paired else tick - 1",
        new="last = tick if own_forward else tick - 1",
        tests=(
            "tests/test_paired_stages.py"
            "::test_pairs_take_no_more_forwards_and_backwards_and_hold_one_more[1f1b]",
        ),
    ),
    Mutant(
        name="one-weight-version-too-few",
        effect="PipeDream's stages keep one version of their weights too few",
        file="meshpar/schedules/pipedream_stash.py",
        old="max(1 + done - version for",
        new="max(done - version for",
        tests=(
            "tests/test_pipedream_stash.py"
            "::test_each_stage_keeps_and_uses_the_versions_that_were_published",
        ),
    ),
    Mutant(
        name="dropout-mask-of-the-first-tokens",
        effect="devices that share a sequence all draw its first mask",
        file="meshpar/model/scope.py",
        old="keep = keep[:, self.positions(x.shape[1])]",
        new="keep = keep[:, : x.shape[1]]",
        tests=(
            "tests/test_pipeline.py"
            "::test_dropout_does_not_depend_on_stages_or_microbatches",
        ),
    ),
    Mutant(
        name="adapters-merged-unscaled",
        effect="merged LoRA weights leave out alpha / rank",
        file="meshpar/model/lora.py",
        old="return weight + np.float32(self.lora.scale) * product",
        new="return weight + product",
        tests=("tests/test_lora.py::test_merged_weights_say_the_same",),
    ),
    Mutant(
        name="experts-do-not-split-the-batch",
        effect="a layout's number of batch shards leaves out `expert`",
        file="meshpar/layout/layout.py",
        old="return math.prod(self._mesh_shape[axis] for axis in BATCH_AXES)",
        new='return math.prod(self.mesh_shape[axis] for axis in ("data", "fsdp"))',
        tests=("tests/test_layout.py::test_only_data_fsdp_and_expert_split_the_batch",),
    ),
    Mutant(
        name="last-dim-without-its-lanes",
        effect="the memory of an array leaves out the padding of its last dim",
        file="meshpar/trace/costs.py",
        old="size = math.prod(others) * padded * dtype.itemsize",
        new="size = math.prod(others) * last * dtype.itemsize",
        tests=("tests/test_live_bytes.py::test_a_last_dim_takes_whole_lanes",),
    ),
    Mutant(
        name="halves-compared-by-their-nearest-value",
        effect="a model may join examples as long as one value does not change",
        file="meshpar/checks/halves.py",
        old="np.abs(one - other).max(initial=0)",
        new="np.abs(one - other).min(initial=0)",
        tests=("tests/test_halves.py::test_what_joins_examples_is_refused",),
    ),
)
