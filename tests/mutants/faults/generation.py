"""Faults in generation, and in the models that generate and their weights."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="window-ring-one-page-short",
        file="meshpar/generation/cache_plan.py",
        old="return -(-tokens // (self.page_size * self.layout.context)) + 1",
        new="return -(-tokens // (self.page_size * self.layout.context))",
        tests=("tests/test_generation.py::test_windows_keep_no_more_than_a_window",),
    ),
    Mutant(
        name="same-noise-for-every-token",
        file="meshpar/generation/sampling.py",
        old="key = jax.random.fold_in(jax.random.key(seed), position)",
        new="key = jax.random.key(seed)",
        tests=(
            "tests/test_generation.py"
            "::test_every_place_and_every_seed_has_a_draw_of_its_own",
        ),
    ),
    Mutant(
        name="first-token-never-stops",
        file="meshpar/generation/requests.py",
        old="if token in self.request.stop_tokens:",
        new="if self.new and token in self.request.stop_tokens:",
        tests=(
            "tests/test_generation.py::test_a_request_ends_at_a_token_and_at_a_text",
        ),
    ),
    Mutant(
        name="rotary-base-is-wrong",
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
        file="models/convert/tables/gguf.py",
        old='turned = not is_gemma and ".self_attn.v_proj" not in row.theirs',
        new="turned = not is_gemma",
        tests=(
            "tests/test_convert_gguf.py"
            "::test_gguf_gives_the_same_values_as_safetensors[smollm2]",
        ),
    ),
)
