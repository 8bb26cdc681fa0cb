"""Faults in generation, and in the models that generate and their weights."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="window-ring-one-page-short",
        effect="keys of a window are overwritten while a query needs them",
        file="meshpar/generation/cache_plan.py",
        old="return -(-tokens // self.tokens_per_page) + 1",
        new="return -(-tokens // self.tokens_per_page)",
        tests=("tests/test_generation.py::test_windows_keep_no_more_than_a_window",),
    ),
    Mutant(
        name="same-noise-for-every-token",
        effect="all tokens of a request are drawn with the same noise",
        file="meshpar/generation/sampling.py",
        old="key = jax.random.fold_in(jax.random.key(seed), position)",
        new="key = jax.random.key(seed)",
        tests=(
            "tests/test_generation.py"
            "::test_every_place_and_every_seed_has_a_draw_of_its_own",
        ),
        missed_at_first=True,
    ),
    Mutant(
        name="first-token-never-stops",
        effect="a stop token does not end a request if it comes first",
        file="meshpar/generation/requests.py",
        old="if token in self.request.stop_tokens:",
        new="if self.new and token in self.request.stop_tokens:",
        tests=(
            "tests/test_generation.py::test_a_request_ends_at_a_token_and_at_a_text",
        ),
    ),
    Mutant(
        name="rotary-base-is-wrong",
        effect="rotary frequencies fall faster than their formula",
        file="models/layers/rope.py",
        old="np.arange(0, head_dim, 2, dtype=np.float64) / head_dim",
        new="np.arange(0, head_dim, 2, dtype=np.float64) / (head_dim - 2)",
        tests=(
            "tests/test_models.py"
            "::test_rotary_frequencies_fall_from_1_to_nearly_1_over_theta",
        ),
    ),
    Mutant(
        name="gguf-values-are-turned",
        effect="value weights of a GGUF file are permuted as queries are",
        file="models/convert/tables/gguf.py",
        old='turned = not is_gemma and ".self_attn.v_proj" not in row.theirs',
        new="turned = not is_gemma",
        tests=(
            "tests/test_convert_gguf.py"
            "::test_gguf_gives_the_same_values_as_safetensors[smollm2]",
        ),
    ),
    Mutant(
        name="balance-of-a-devices-own-tokens",
        effect="the load-balance loss counts one device's tokens only",
        file="models/layers/router.py",
        old="scope.sequence_sum(lax.stop_gradient(tokens_BE))",
        new="lax.stop_gradient(tokens_BE)",
        tests=(
            "tests/test_moe_training.py"
            "::test_steps_are_those_of_the_plain_program"
            "[capacity-data=2,context=2,expert=2]",
        ),
    ),
    Mutant(
        name="heads-and-their-dims-swapped",
        effect="GPT-2's attention output weights are read in another order",
        file="models/convert/tables/gpt2.py",
        old='"(N H) D -> N H D"',
        new='"(H N) D -> N H D"',
        tests=("tests/test_convert.py::test_logits_are_those_of_transformers[gpt2]",),
    ),
    Mutant(
        name="guidance-one-too-strong",
        effect="diffusion samples are guided by 1 more than asked",
        file="models/dit_sampling.py",
        old="return found[1::2] + guidance",
        new="return found[::2] + guidance",
        tests=("tests/test_sampling.py::test_samples_are_those_of_one_device",),
    ),
)
