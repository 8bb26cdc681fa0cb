"""Faults in what is known before a run: planner, audit, commands, devices, tests."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="zero-2-plans-whole-gradients",
        file="meshpar/planner/cost/memory.py",
        old='("gradient", 2)',
        new='("gradient", 3)',
        tests=(
            "tests/test_planner_memory.py::test_zero_splits_one_thing_after_another",
        ),
    ),
    Mutant(
        name="plan-without-its-bubble",
        file="meshpar/planner/cost/step_time.py",
        old="bubble_s=max(0.0, all_microbatches_s - own.total_s),",
        new="bubble_s=0.0,",
        tests=("tests/test_planner_time.py::test_the_parts_of_a_step_add_up",),
    ),
    Mutant(
        name="straggler-factor-lost",
        file="meshpar/planner/cost/step_time.py",
        old="math.sqrt(2 * math.log(devices))",
        new="math.sqrt(math.log(devices))",
        tests=(
            "tests/test_planner_time.py"
            "::test_the_slowest_device_is_the_largest_of_normal_values",
        ),
    ),
    Mutant(
        name="hops-of-one-chunk-planned",
        file="meshpar/planner/cost/traffic_bytes.py",
        old="hops = count * layout.chunks if layout.stage > 1 else 0",
        new="hops = count if layout.stage > 1 else 0",
        tests=(
            "tests/test_planner_traffic.py"
            "::test_every_chunk_of_a_schedule_sends_its_hops",
        ),
    ),
    Mutant(
        name="indivisible-microbatches-planned",
        file="meshpar/planner/search/mesh_choices.py",
        old="microbatches=tuple(count for count in counts if each % count == 0),",
        new="microbatches=tuple(counts),",
        tests=(
            "tests/test_planner_search.py"
            "::test_microbatches_that_divide_no_batch_leave_no_plan",
        ),
    ),
    Mutant(
        name="inner-loop-counted-once",
        file="meshpar/audit/loops.py",
        old="times = place.executions * (1 if trips is None else trips)",
        new="times = 1 if trips is None else trips",
        tests=("tests/test_audit_counts.py::test_trips_multiply_executions_and_flops",),
    ),
    Mutant(
        name="joined-surprise-is-hidden",
        file="meshpar/audit/reasons.py",
        old="reasons = [found for found in reasons if not found[1]] or reasons",
        new="reasons = [found for found in reasons if found[1]] or reasons",
        tests=(
            "tests/test_audit_explanations.py"
            "::test_a_surprise_stays_one_beside_what_it_is_joined_with",
        ),
    ),
    Mutant(
        name="page-title-not-escaped",
        file="meshpar/cli/report/page.py",
        old="<title>{escape(title)}</title>",
        new="<title>{title}</title>",
        tests=("tests/test_cli_plan.py::test_no_text_of_a_page_is_read_as_html",),
    ),
    Mutant(
        name="training-cost-of-the-first-plan",
        file="meshpar/cli/plan.py",
        old='plan["training"] = cost.as_json()',
        new='plan["training"] = costs[0].as_json()',
        tests=(
            "tests/test_cli_plan.py::test_each_plan_has_the_cost_of_its_own_training",
        ),
    ),
    Mutant(
        name="kernel-one-matmul-short",
        file="meshpar/hardware/splash_flops.py",
        old='"dkv": (2, 2)',
        new='"dkv": (2, 1)',
        tests=(
            "tests/test_splash_programs.py"
            "::test_each_kernel_of_attention_counts_its_own_matmuls",
        ),
    ),
    Mutant(
        name="trial-moves-too-much",
        file="meshpar/calibration/exchanges.py",
        old="values = exchange.payload_bytes // 4 // members * members",
        new="values = exchange.payload_bytes // members * members",
        tests=(
            "tests/test_calibration.py"
            "::test_an_exchange_runs_over_every_group[all-reduce]",
        ),
    ),
    Mutant(
        name="nan-within-every-bound",
        file="meshpar/testing/comparison.py",
        old="return self.error <= self.bound",
        new="return not self.error > self.bound",
        tests=("tests/test_equivalence.py::test_nan_is_never_within_a_bound",),
    ),
)
