"""Faults in what is known before a run: planner, audit, commands, devices, tests."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="zero-2-plans-whole-gradients",
        effect="the plan of ZeRO-2 counts whole gradients",
        file="meshpar/planner/cost/run.py",
        old='"gradient": 1 if self.prefetches else 2,',
        new='"gradient": 1 if self.prefetches else 3,',
        tests=(
            "tests/test_planner_memory.py::test_zero_splits_one_thing_after_another",
        ),
    ),
    Mutant(
        name="plan-without-its-bubble",
        effect="planned step times leave out the pipeline's bubble",
        file="meshpar/planner/cost/step_time.py",
        old="bubble_s=max(0.0, all_microbatches_s - own.total_s),",
        new="bubble_s=0.0,",
        tests=("tests/test_planner_time.py::test_the_parts_of_a_step_add_up",),
    ),
    Mutant(
        name="straggler-factor-lost",
        effect="the expected wait for the slowest device is too short by sqrt(2)",
        file="meshpar/planner/cost/step_time.py",
        old="math.sqrt(2 * math.log(devices))",
        new="math.sqrt(math.log(devices))",
        tests=(
            "tests/test_planner_time.py"
            "::test_the_slowest_device_is_the_largest_of_normal_values",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="hops-of-one-chunk-planned",
        effect="hops of an interleaved schedule are planned for one chunk",
        file="meshpar/planner/cost/step_traffic.py",
        old="hops = count * layout.chunks if layout.stage > 1 else 0",
        new="hops = count if layout.stage > 1 else 0",
        tests=(
            "tests/test_planner_traffic.py"
            "::test_every_chunk_of_a_schedule_sends_its_hops",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="indivisible-microbatches-planned",
        effect="planned microbatches do not divide the batch",
        file="meshpar/planner/search/choices.py",
        old="microbatches=tuple(count for count in counts if each % count == 0),",
        new="microbatches=tuple(counts),",
        tests=(
            "tests/test_planner_search.py"
            "::test_microbatches_that_divide_no_batch_leave_no_plan",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="inner-loop-counted-once",
        effect="the audit counts a nested loop as if the outer one ran once",
        file="meshpar/audit/flow.py",
        old="times = place.executions * (1 if trips is None else trips)",
        new="times = 1 if trips is None else trips",
        tests=("tests/test_audit_counts.py::test_trips_multiply_executions_and_flops",),
    ),
    Mutant(
        name="joined-surprise-is-hidden",
        effect="a surprise that XLA joined with an expected sum is hidden",
        file="meshpar/audit/reasons.py",
        old="reasons = [found for found in reasons if not found[1]] or reasons",
        new="reasons = [found for found in reasons if found[1]] or reasons",
        tests=(
            "tests/test_audit_explanations.py"
            "::test_a_surprise_stays_one_beside_what_it_is_joined_with",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="page-title-not-escaped",
        effect="the name of a model can put HTML into a report",
        file="meshpar/html.py",
        old="<title>{escape(title)}</title>",
        new="<title>{title}</title>",
        tests=("tests/test_cli_plan.py::test_no_text_of_a_page_is_read_as_html",),
        missed_at_first=True,
    ),
    Mutant(
        name="training-cost-of-the-first-plan",
        effect="every plan shows the training cost of the first",
        file="meshpar/cli/plan.py",
        old='plan["training"] = cost.as_json()',
        new='plan["training"] = costs[0].as_json()',
        tests=(
            "tests/test_cli_plan.py::test_each_plan_has_the_cost_of_its_own_training",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="kernel-one-matmul-short",
        effect="the FLOPs of a splash kernel leave out a matmul",
        file="meshpar/hardware/splash_kernels.py",
        old='"dkv": (2, 2)',
        new='"dkv": (2, 1)',
        tests=(
            "tests/test_splash_programs.py"
            "::test_each_kernel_of_attention_counts_its_own_matmuls",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="trial-moves-too-much",
        effect="calibration moves four times the bytes that it reports",
        file="meshpar/calibration/trials.py",
        old="values = exchange.payload_bytes // 4 // members * members",
        new="values = exchange.payload_bytes // members * members",
        tests=(
            "tests/test_calibration.py"
            "::test_an_exchange_runs_over_every_group[all-reduce]",
        ),
    ),
    Mutant(
        name="nan-within-every-bound",
        effect="a comparison passes where the error is NaN",
        file="meshpar/testing/comparison.py",
        old="return self.error <= self.bound",
        new="return not self.error > self.bound",
        tests=("tests/test_equivalence.py::test_nan_is_never_within_a_bound",),
    ),
    Mutant(
        name="one-port-for-all-rings",
        effect="plans give the devices of a host one network port together",
        file="meshpar/planner/machine/cluster.py",
        old="bytes_per_s=min(port * inner, inside),",
        new="bytes_per_s=min(port, inside),",
        tests=(
            "tests/test_planner_hardware.py"
            "::test_rings_use_the_ports_of_all_their_members_in_a_host",
        ),
    ),
    Mutant(
        name="master-copy-not-planned",
        effect="planned memory leaves out the fp32 master of bf16 parameters",
        file="meshpar/planner/cost/run.py",
        old='master = 4 if kind == "bf16" else 0',
        new="master = 0",
        tests=("tests/test_planner_traffic.py::test_the_update_moves_what_is_stored",),
    ),
    Mutant(
        name="own-part-counted-as-sent",
        effect="wire bytes count the part that a device keeps",
        file="meshpar/collective_kinds.py",
        old="self.times * (num_devices - self.keeps_own)",
        new="self.times * num_devices",
        tests=(
            "tests/test_planner_hardware.py"
            "::test_bytes_on_the_wire_are_those_of_the_audit",
        ),
    ),
    Mutant(
        name="transposed-groups-read-as-rows",
        effect="the audit names the wrong mesh axis of a collective",
        file="meshpar/audit/collectives.py",
        old="_ids(source, order), _numbers(shape)",
        new="_ids(source, None), _numbers(shape)",
        tests=(
            "tests/test_audit_programs.py"
            "::test_groups_in_every_form_give_their_mesh_axes",
        ),
    ),
    Mutant(
        name="threads-of-one-device",
        effect="virtual devices have too few threads and can hang",
        file="meshpar/machine/emulate.py",
        old="max(usual, _THREADS_PER_DEVICE * num_devices)",
        new="max(usual, _THREADS_PER_DEVICE)",
        tests=(
            "tests/test_emulate.py"
            "::test_eight_devices_appear_and_the_users_flags_are_kept_beside_ours",
        ),
    ),
    Mutant(
        name="shards-and-copies-swapped",
        effect="the page of meshpar show swaps shards and copies",
        file="meshpar/cli/report/show_page.py",
        old="{shards.number} x {shards.copies}",
        new="{shards.copies} x {shards.number}",
        tests=("tests/test_show.py::test_a_page_is_written_and_named",),
        missed_at_first=True,
    ),
    Mutant(
        name="later-token-without-its-block",
        effect="the last stage of a model with a later token lacks that token's block",
        file="meshpar/planner/workload/problems.py",
        old="return (*others, last + workload.mtp_layers)",
        new="return (*others, last)",
        tests=(
            "tests/test_planner_mtp.py"
            "::test_the_last_stage_has_a_block_a_matrix_and_the_head_once_more",
        ),
    ),
    Mutant(
        name="recomputed-modules-are-kept",
        effect="a plan counts what the program's recomputed modules do not keep",
        file="meshpar/planner/cost/activations.py",
        old="total -= _dropped_bytes(run, moe, kept)",
        new="total -= 0.0",
        tests=(
            "tests/test_planner_bridge.py"
            "::test_a_dense_mlp_is_recomputed_in_dense_blocks",
        ),
    ),
    Mutant(
        name="token-sent-for-each-expert",
        effect="a token that goes once to a host is planned once for each expert there",
        file="meshpar/planner/cost/traffic.py",
        old="return hosts * (1 - (1 - 1 / hosts) ** copies)",
        new="return copies",
        tests=(
            "tests/test_planner_bridge.py"
            "::test_a_token_goes_once_to_each_host_that_has_its_experts",
        ),
    ),
    Mutant(
        name="chip-links-counted-for-each-device",
        effect="both devices of a v7x chip are planned to have all of its links",
        file="meshpar/planner/machine/cluster.py",
        old="groups = device.chip_devices / on_chip",
        new="groups = 1",
        tests=(
            "tests/test_planner_hardware.py::test_devices_of_a_chip_share_its_links",
        ),
    ),
    Mutant(
        name="own-mesh-order-called-fastest",
        effect="a plan calls its mesh order the fastest where another is",
        file="meshpar/planner/cost/mesh_order.py",
        old="return first if saves else self.present",
        new="return self.present",
        tests=(
            "tests/test_planner_orders.py"
            "::test_no_permutation_of_the_axes_is_faster_than_the_order_of_a_plan",
        ),
    ),
    Mutant(
        name="mxfp8-cast-as-fp8",
        effect="casts to MXFP8 are planned to cost what those to fp8 do",
        file="meshpar/planner/cost/seconds.py",
        old="each = execution.mxfp8_cast_bytes if to_mxfp8 else execution.cast_bytes",
        new="each = execution.cast_bytes",
        tests=(
            "tests/test_planner_executions.py::test_mxfp8_is_fp8_with_dearer_casts",
        ),
    ),
)
