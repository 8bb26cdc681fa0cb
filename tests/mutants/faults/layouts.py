"""Faults in what a layout is: the model, its rules, the lint, schedules."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="zigzag-without-the-last-chunk",
        file="meshpar/model/token_order.py",
        old="last = self.num_chunks // size - 1 - group",
        new="last = self.num_chunks // size - 2 - group",
        tests=(
            "tests/test_context_attention.py::test_groups_share_out_their_two_chunks",
        ),
    ),
    Mutant(
        name="indivisible-size-is-split",
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
        file="meshpar/lint/lint.py",
        old="first.setdefault(logical_axis, axes)",
        new="first[logical_axis] = axes",
        tests=("tests/test_lint.py::test_of_two_rules_the_first_lays_the_model_out",),
    ),
    Mutant(
        name="gradient-slot-free-too-early",
        file="meshpar/schedules/slots.py",
        old="return ticks[last], Moment.BACKWARD",
        new="return ticks[last], Moment.FORWARD",
        tests=(
            "tests/test_tick_table.py"
            "::test_no_live_value_is_overwritten_and_all_work_is_done_once",
        ),
    ),
)
