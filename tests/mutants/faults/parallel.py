"""Faults in how the devices of a layout work together."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="hops-the-other-way",
        file="meshpar/parallel/pipeline/hops.py",
        old="(rank, (rank + hop) % self.num_ranks) for",
        new="(rank, (rank - hop) % self.num_ranks) for",
        tests=(
            "tests/test_pipeline_value_and_grad.py"
            "::test_gradients_of_blocks_ends_and_input_are_those_of_one_device"
            "[sizes1-options1]",
        ),
    ),
    Mutant(
        name="no-gradient-of-log-sum-exp",
        file="meshpar/parallel/context/shards.py",
        old="output.astype(jnp.float32), -1) - dlse",
        new="output.astype(jnp.float32), -1)",
        tests=(
            "tests/test_context_attention.py"
            "::test_it_equals_a_dense_softmax[ring-4-case0]",
        ),
    ),
    Mutant(
        name="row-past-the-room-is-sent",
        file="meshpar/parallel/expert/routes.py",
        old="here = (rank >= 0) & (rank < room)",
        new="here = (rank >= 0) & (rank <= room)",
        tests=(
            "tests/test_experts.py"
            "::test_what_a_round_has_no_room_for_has_no_slot_of_the_next_device",
        ),
    ),
    Mutant(
        name="scattered-gradient-summed-again",
        file="meshpar/parallel/data.py",
        old="if axis not in spec_axes(layout.state_spec)",
        new="if axis not in spec_axes(layout.spec)",
        tests=(
            "tests/test_zero_stages.py::test_five_steps_are_those_of_zero_0[fsdp-1-4]",
        ),
    ),
    Mutant(
        name="periodic-grid-has-a-seam",
        file="meshpar/parallel/grid_convolution.py",
        old="for rank in range(n if closes else n - 1)]",
        new="for rank in range(n - 1)]",
        tests=(
            "tests/test_grid_convolution.py"
            "::test_a_periodic_convolution_and_its_gradients_are_those_of_one_device"
            "[split1-5]",
        ),
    ),
    Mutant(
        name="vocabulary-axes-swapped",
        file="meshpar/parallel/tensor.py",
        old="math.prod(sizes[position + 1 :])",
        new="math.prod(sizes[:position])",
        tests=(
            "tests/test_tensor_parallel.py"
            "::test_a_vocabulary_over_two_mesh_axes_is_looked_up",
        ),
    ),
    Mutant(
        name="head-gradient-summed-in-bf16",
        file="meshpar/parallel/head_loss.py",
        old='dtable = matmul("CV,CD->VD", dlogits, chunk.x, jnp.float32)',
        new='dtable = matmul("CV,CD->VD", dlogits, chunk.x, chunk.x.dtype)',
        tests=(
            "tests/test_head_loss.py::test_the_tables_gradient_is_added_up_in_fp32",
        ),
    ),
    Mutant(
        name="block-input-not-offloaded",
        file="meshpar/parallel/remat.py",
        old="BLOCK_INPUT not in ResidualNames.parse(remat).every",
        new="BLOCK_INPUT not in ResidualNames.parse(remat).save",
        tests=(
            "tests/test_remat.py"
            "::test_a_block_s_input_is_moved_to_the_host_and_nothing_else_is_kept",
        ),
    ),
)
