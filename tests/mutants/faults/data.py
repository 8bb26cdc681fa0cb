"""Faults in the data that a run reads, and in how its processes come together."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="full-row-has-no-end",
        effect="a document that fills its row exactly is not marked as ended",
        file="meshpar/data/batches.py",
        old="ends_document=(starts + piece_lengths == ends)[order],",
        new="ends_document=(piece_lengths < seq)[order],",
        tests=(
            "tests/test_packing.py"
            "::test_packing_loses_no_token_and_cuts_only_what_is_longer",
        ),
    ),
    Mutant(
        name="neighbouring-seeds-share-orders",
        effect="epoch 1 of seed 0 has the order of epoch 0 of seed 1",
        file="meshpar/data/batches.py",
        old=".shuffle(seed=int(number)).repeat()",
        new=".shuffle(seed=seed).repeat()",
        tests=("tests/test_data.py::test_neighbouring_seeds_share_no_epochs_order",),
    ),
    Mutant(
        name="smaller-job-is-let-in",
        effect="a process of a job with fewer processes joins this one",
        file="meshpar/distributed/roll_call.py",
        old="if greeting.num_processes != place.num_processes:",
        new="if greeting.num_processes > place.num_processes:",
        tests=(
            "tests/test_distributed.py"
            "::test_a_process_of_a_smaller_or_larger_job_does_not_belong",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="held-out-document-is-trained-on",
        effect="the first held-out document is in the training data too",
        file="meshpar/data/token_files.py",
        old="TokenStream(self.files, bounds[: nearest + 1], self.vocab)",
        new="TokenStream(self.files, bounds[: nearest + 2], self.vocab)",
        tests=(
            "tests/test_data_formats.py"
            "::test_what_is_held_out_is_the_end_in_whole_documents_where_they_are_short",
        ),
    ),
)
