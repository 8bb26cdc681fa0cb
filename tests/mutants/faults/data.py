"""Faults in the data that a run reads, and in how its processes come together."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="full-row-has-no-end",
        file="meshpar/data/packing.py",
        old="ends_document=(starts + piece_lengths == ends)[order],",
        new="ends_document=(piece_lengths < seq)[order],",
        tests=(
            "tests/test_packing.py"
            "::test_packing_loses_no_token_and_cuts_only_what_is_longer",
        ),
    ),
    Mutant(
        name="neighbouring-seeds-share-orders",
        file="meshpar/data/mixture.py",
        old=".shuffle(seed=int(one)).repeat()",
        new=".shuffle(seed=seed).repeat()",
        tests=("tests/test_data.py::test_neighbouring_seeds_share_no_epochs_order",),
    ),
    Mutant(
        name="smaller-job-is-let-in",
        file="meshpar/distributed/roll_call.py",
        old="if number != place.num_processes:",
        new="if number > place.num_processes:",
        tests=(
            "tests/test_distributed.py"
            "::test_a_process_of_a_smaller_or_larger_job_does_not_belong",
        ),
    ),
)
