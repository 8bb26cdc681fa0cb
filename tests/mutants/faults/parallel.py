"""Faults in how the devices of a layout work together."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="hops-the-other-way",
        effect="pipeline ranks send to the rank before them",
        file="meshpar/parallel/pipeline/crossing.py",
        old="(rank, (rank + hop) % self.num_ranks) for",
        new="(rank, (rank - hop) % self.num_ranks) for",
        tests=(
            "tests/test_pipeline_value_and_grad.py"
            "::test_gradients_of_blocks_ends_and_input_are_those_of_one_device"
            "[sizes1-options1]",
        ),
    ),
    Mutant(
        name="uneven-part-starts-as-an-even-one",
        effect="uneven parts of data run some rows twice and others never",
        file="meshpar/parallel/pipeline/uneven_shard.py",
        old="np.cumsum([0, *self.counts[:-1]])",
        new="np.arange(len(self.counts)) * (self.total // len(self.counts))",
        tests=(
            "tests/test_uneven_shards.py"
            "::test_three_steps_and_what_is_read_between_them_are_those_of_one_device",
        ),
    ),
    Mutant(
        name="backward-of-newer-weights",
        effect="PipeDream's backward uses the newest weights, not its forward's",
        file="meshpar/parallel/pipeline/weight_stash.py",
        old='self._slots(row, "version_read")',
        new='self._slots(row, "version_newest")',
        tests=(
            "tests/test_pipedream_stash.py"
            "::test_ten_steps_are_those_of_delayed_gradients_with_stashed_weights"
            "[sizes0-stage=2]",
        ),
    ),
    Mutant(
        name="stash-counts-arrays",
        effect="a split backward keeps the fewest arrays, not the fewest bytes",
        file="meshpar/parallel/pipeline/minimum_stash.py",
        old="yield place, place + 1, _num_bytes(var)",
        new="yield place, place + 1, 1",
        tests=(
            "tests/test_planner_split.py"
            "::test_the_counted_stash_is_the_smallest_that_the_traced_backward_has",
        ),
    ),
    Mutant(
        name="barrier-holds-weight-gradients-back",
        effect="a split backward computes weight gradients behind barriers at once",
        file="meshpar/parallel/pipeline/split_backward.py",
        old="            operands = used",
        new="            operands = [True] * len(used)",
        tests=(
            "tests/test_collective_matmul.py"
            "::test_a_split_backward_leaves_matmuls_of_weights_for_later",
        ),
    ),
    Mutant(
        name="diverging-ranks-permute",
        effect="a permute in what one pipeline rank does by itself is compiled and run",
        file="meshpar/audit/hazards.py",
        old='        if row.in_branch and (waits or row.kind == "collective-permute"):',
        new="        if row.in_branch and waits:",
        tests=(
            "tests/test_split_backward.py"
            "::test_a_compiled_branch_is_refused_if_it_waits_for_other_ranks[permute]",
        ),
    ),
    Mutant(
        name="half-keeps-dead-carries",
        effect="a half of a split backward computes carries that it does not need",
        file="meshpar/parallel/pipeline/split_backward.py",
        old="    if looped is None or all(operands):",
        new="    if looped is None or operands:",
        tests=(
            "tests/test_split_backward.py"
            "::test_a_half_takes_what_its_own_results_need_of_a_loop[0]",
        ),
    ),
    Mutant(
        name="token-chunks-in-reverse",
        effect="a gathered matmul joins its chunks of tokens in reverse order",
        file="meshpar/parallel/collective_matmul.py",
        old="start = (rank - distance) % num_devices * tokens",
        new="start = (rank + distance) % num_devices * tokens",
        tests=(
            "tests/test_collective_matmul.py"
            "::test_chunks_have_the_values_and_gradients_of_one_device[8-True]",
        ),
    ),
    Mutant(
        name="no-gradient-of-log-sum-exp",
        effect="attention's backward leaves out a term of the softmax",
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
        effect="a row beyond the room takes a slot of the next device",
        file="meshpar/parallel/expert/routes.py",
        old="here = (rank >= 0) & (rank < room)",
        new="here = (rank >= 0) & (rank <= room)",
        tests=(
            "tests/test_experts.py"
            "::test_what_a_round_has_no_room_for_has_no_slot_of_the_next_device",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="last-token-to-a-host-is-lost",
        effect="the last token that fits a host's room is not sent",
        file="meshpar/parallel/expert/host_exchange.py",
        old="here = wanted & (count <= self.hosts.room)",
        new="here = wanted & (count < self.hosts.room)",
        tests=(
            "tests/test_experts.py"
            "::test_tokens_that_fit_a_hosts_room_are_sent_and_no_others",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="row-repeated-for-another-part",
        effect="a row is repeated from another host's tokens",
        file="meshpar/parallel/expert/host_exchange.py",
        old="slot = (device * number + each) * self.room + rank",
        new="slot = device * number * self.room + rank",
        tests=(
            "tests/test_experts.py"
            "::test_rows_that_are_sent_once_to_each_host_give_the_same"
            "[expert=8-4-parts1]",
        ),
    ),
    Mutant(
        name="scattered-gradient-summed-again",
        effect="a gradient that ZeRO has scattered is summed twice",
        file="meshpar/parallel/reduction.py",
        old="if axis not in (*spec_axes(layout.spec), *layout.loop_sums)",
        new="if axis not in layout.loop_sums",
        tests=(
            "tests/test_zero_stages.py::test_five_steps_are_those_of_zero_0[fsdp-1-4]",
        ),
    ),
    Mutant(
        name="periodic-grid-has-a-seam",
        effect="a periodic dim has zeros where its ends meet",
        file="meshpar/parallel/grids/convolution.py",
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
        effect="a vocabulary over two mesh axes is read in the wrong shard",
        file="meshpar/parallel/tensor.py",
        old="math.prod(sizes[position + 1 :])",
        new="math.prod(sizes[:position])",
        tests=(
            "tests/test_tensor_parallel.py"
            "::test_a_vocabulary_over_two_mesh_axes_is_looked_up",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="head-gradient-summed-in-bf16",
        effect="the gradient of the head's table is added up in bf16",
        file="meshpar/parallel/head_loss.py",
        old='dtable = matmul("CV,CD->VD", dlogits, chunk.x, jnp.float32)',
        new='dtable = matmul("CV,CD->VD", dlogits, chunk.x, chunk.x.dtype)',
        tests=(
            "tests/test_head_loss.py::test_the_tables_gradient_is_added_up_in_fp32",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="block-input-not-offloaded",
        effect="a block's input that is to be offloaded stays on the device",
        file="meshpar/parallel/remat.py",
        old="BLOCK_INPUT in ResidualNames.parse(remat).every",
        new="BLOCK_INPUT in ResidualNames.parse(remat).save",
        tests=(
            "tests/test_remat.py"
            "::test_a_block_s_input_is_moved_to_the_host_and_nothing_else_is_kept",
        ),
    ),
    Mutant(
        name="window-one-key-too-wide",
        effect="a query sees one key more than its window",
        file="meshpar/parallel/context/mask.py",
        old="found &= jnp.abs(q - k) < mask.window",
        new="found &= jnp.abs(q - k) <= mask.window",
        tests=(
            "tests/test_context_attention.py"
            "::test_it_equals_a_dense_softmax[ring-2-case1]",
        ),
    ),
    Mutant(
        name="norm-counts-every-copy",
        effect="the clipping norm counts a replicated value many times",
        file="meshpar/parallel/reduction.py",
        old="return jnp.sum(jnp.square(wide)) / copies",
        new="return jnp.sum(jnp.square(wide))",
        tests=("tests/test_norm.py::test_the_norm_is_that_of_the_whole_arrays",),
    ),
    Mutant(
        name="nan-of-an-earlier-owner",
        effect="a NaN in a reused page of the cache spoils the next request",
        file="meshpar/generation/paged_cache.py",
        old="seen.any(axis=1)[..., None, None]",
        new="True",
        tests=(
            "tests/test_generation.py"
            "::test_a_request_reads_nothing_that_was_in_its_pages_before",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="late-gradient-of-another-layer",
        effect="a prefetched layer's gradient goes to the layer before",
        file="meshpar/parallel/prefetch.py",
        old="totals = add(totals, reduced, place + 1)",
        new="totals = add(totals, reduced, place)",
        tests=(
            "tests/test_prefetch.py"
            "::test_small_blocks_have_the_loss_and_gradients_of_the_model_alone"
            "[3-fsdp=4,remat=full]",
        ),
    ),
)
