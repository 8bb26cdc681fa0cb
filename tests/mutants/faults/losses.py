"""Faults in how a user's own loss becomes a model."""

from tests.mutants.mutant import Mutant

TESTS = "tests/test_from_loss.py"

MUTANTS = (
    Mutant(
        name="shared-mask-is-drawn-for-each",
        effect="a mask that all examples share differs with one example on a device",
        file="meshpar/model/loss/drop_ins.py",
        old="if not shape or shape in shared or shape[0] % num_examples:",
        new="if not shape or shape[0] % num_examples:",
        tests=(f"{TESTS}::test_a_mask_that_all_examples_share_is_drawn_once",),
    ),
    Mutant(
        name="derivatives-of-blocks-are-not-compared",
        effect="every block gets the second one's derivative",
        file="meshpar/model/loss/program.py",
        old="return deeper(x.f, y.f)",
        new="return True",
        tests=(f"{TESTS}::test_blocks_that_differ_inside_a_call_are_refused",),
    ),
    Mutant(
        name="layers-are-counted-over-all-kinds",
        effect="a block of the second kind reads what is of a later layer",
        file="meshpar/model/loss/from_loss.py",
        old="scope.layer - sum(one.num_layers for one in self._groups[:at])",
        new="scope.layer",
        tests=(f"{TESTS}::test_embed_block_and_head_of_a_cut_loss_are_the_loss",),
    ),
    Mutant(
        name="experts-count-one-tile-of-rows",
        effect="a plan of a traced model counts too few matmuls of experts",
        file="meshpar/parallel/expert/tiles.py",
        old="at = expect_iterations(state[0], tiles.filled)",
        new="at = expect_iterations(state[0], 1.0)",
        tests=(
            "tests/test_own_experts.py::test_a_plan_counts_the_experts_that_a_token_meets",
        ),
    ),
    Mutant(
        name="batch-statistics-are-of-one-device",
        effect="BatchNorm in a loss normalizes with one device's examples",
        file="meshpar/model/loss/user_tree.py",
        old="norm.axis_name = cast(Any, batch_axes or None)",
        new="norm.axis_name = None",
        tests=(f"{TESTS}::test_batch_norm_has_the_statistics_of_the_global_batch",),
    ),
    Mutant(
        name="stages-stay-in-their-order",
        effect="parameters come back with layers in the order of the stages",
        file="meshpar/train/step.py",
        old="self.in_layer_order(reading.params),",
        new="reading.params,",
        tests=(
            f"{TESTS}::test_parameters_come_back_as_the_tree_of_init_from_any_layout",
        ),
    ),
    Mutant(
        name="compiled-step-is-compiled-again",
        effect="a step that was compiled is compiled again when it runs",
        file="meshpar/train/batch_placement.py",
        old="struct.shape, struct.dtype, sharding=sharding",
        new="struct.shape, struct.dtype",
        tests=(f"{TESTS}::test_a_compiled_step_is_the_one_that_runs",),
    ),
)
