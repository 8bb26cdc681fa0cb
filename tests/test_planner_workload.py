"""A workload's parameters and FLOPs are the model's, wherever its shape comes from."""

import dataclasses
import json
import math
from importlib.resources import files

import jax
import pytest

from meshpar.models.presets import PRESETS, build, planner_table
from meshpar.planner.published.megatron import megatron_sc21_flops, published
from meshpar.planner.workload.shapes import SHAPES, workload_of
from meshpar.planner.workload.workload import Workload
from tests.marks import slow

GPT = {"layers": 24, "hidden": 2304, "heads": 24, "vocab": 51_200, "tied": True}


# Of each family one is initialised by `make test`, or one of each kind of layer.
LARGER = {
    *("tiny-8", "tiny-moe-capacity", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    *("smollm2-1.7b", "llama2-7b", "llama3-8b", "llama3-70b", "llama3-405b"),
    *("qwen2-7b", "qwen3-8b", "qwen3-235b-a22b"),
}


def test_the_table_of_presets_is_what_the_models_write():
    """Write it by `python -m meshpar.models.presets > meshpar/planner/presets.json`."""
    stored = files("meshpar.planner").joinpath("presets.json").read_text()
    assert stored == planner_table()


def test_a_named_shape_has_the_sizes_of_the_preset():
    """A size of 0 follows from others."""
    other_words = {"embed": "hidden", "max_seq": "seq"}
    for name, config in PRESETS.items():
        for word, size in vars(config).items():
            size_here = getattr(SHAPES[name], other_words.get(word, word), None)
            assert size_here in (None, size) or not size, (name, word)


@pytest.mark.parametrize(
    "name", [slow(name) if name in LARGER else name for name in sorted(PRESETS)]
)
def test_a_named_shape_has_the_parameters_of_the_preset(name):
    shapes = jax.eval_shape(build(name).init, jax.numpy.uint32(0))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    assert SHAPES[name].num_parameters == count


@pytest.mark.parametrize(
    "name, billions",
    [
        # Model cards and papers: DeepSeek-AI 2024, Jiang et al. 2024, Brown et al.
        # 2020, Korthikanti et al. 2022.
        ("deepseek-v3", 671.0),
        ("mixtral-8x7b", 46.7),
        ("llama3-405b", 405.9),
        ("gpt3-175b", 174.6),
        ("22b", 22.1),
        ("530b", 529.6),
        ("1t", 1008.0),
    ],
)
def test_published_parameter_counts(name, billions):
    assert round(SHAPES[name].num_parameters / 1e9, 1) == billions


@pytest.mark.parametrize("row", published()["megatron_sc21_table1"]["rows"])
def test_megatron_sizes_and_flops_of_table_1(row):
    workload = SHAPES[f"megatron-{row['params_b']}b"]
    assert round(workload.num_parameters / 1e9, 1) == row["params_b"]
    # The paper counts a recomputed forward of the blocks: 4 passes instead of 3.
    batch, seq = row["gbs"], 2048
    head = 6 * batch * seq * workload.vocab * workload.hidden
    blocks = workload.model_flops(global_batch=batch, seq=seq) - head
    assert blocks * 4 / 3 + head == pytest.approx(
        megatron_sc21_flops(row, seq, 51_200), rel=1e-12
    )
    # Their aggregate is the printed rate times the devices, to its own digits.
    aggregate = row["tflops_gpu"] * row["gpus"] / 1e3
    assert aggregate == pytest.approx(row["agg_pflops"], rel=0.01)


@pytest.mark.parametrize("row", published()["korthikanti_2022"]["rows"])
def test_korthikanti_flops_and_mfu(row):
    """72 B L s h^2 (1 + s/6h + v/12hL), and the MFU they print from it."""
    batch, seq, hidden, layers = row["gbs"], 2048, row["hidden"], row["layers"]
    formula = 72 * batch * layers * seq * hidden**2
    formula *= 1 + seq / (6 * hidden) + 51_200 / (12 * hidden * layers)
    workload = SHAPES[row["name"].lower()]
    flops = workload.model_flops(global_batch=batch, seq=seq)
    assert flops == pytest.approx(formula, rel=1e-12)
    mfu = flops / (row["gpus"] * 312e12 * row["iter_s_sp_selective"])
    assert mfu == pytest.approx(row["mfu"], abs=0.002)


def test_experts_count_as_parameters_but_few_are_active():
    mixtral = SHAPES["mixtral-8x7b"]
    # Jiang et al. 2024: 13B active parameters.
    assert round(mixtral.active_parameters / 1e9) == 13
    deepseek = SHAPES["deepseek-v3"]
    # DeepSeek-AI 2024: 37B activated.
    assert round(deepseek.active_parameters / 1e9) == 37
    assert deepseek.moe_layers == 58 and not deepseek.is_moe(2) and deepseek.is_moe(3)


_LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}
_DEEPSEEK = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


@pytest.mark.parametrize(
    "model_type, more, expected",
    [
        ("llama", {}, {}),
        ("mistral", {"head_dim": 32}, {"head_dim": 32}),
        ("qwen2", {}, {"qkv_bias": True}),
        ("qwen3", {}, {"qk_norm": True, "head_dim": 128}),
        (
            "mixtral",
            {"num_local_experts": 8, "num_experts_per_tok": 2},
            {"experts": 8, "top_k": 2, "expert_ffn": 96},
        ),
        (
            "qwen3_moe",
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            {"experts": 8, "top_k": 2, "expert_ffn": 24, "head_dim": 16},
        ),
        (
            "deepseek_v3",
            _DEEPSEEK,
            {"experts": 8, "dense_layers": 1, "q_lora_rank": 0, "shared_experts": 1},
        ),
    ],
)
def test_a_hugging_face_config_gives_the_same_shape(
    tmp_path, model_type, more, expected
):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **_LLAMA, **more}))
    workload = workload_of(str(path))
    assert (workload.layers, workload.kv_heads, workload.ffn) == (2, 2, 96)
    assert workload.tied and workload.gated
    for field, value in expected.items():
        assert getattr(workload, field) == value


def test_a_gpt2_config_gives_the_named_shape(tmp_path):
    path = tmp_path / "config.json"
    sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024}
    path.write_text(json.dumps({"model_type": "gpt2", "vocab_size": 50_257, **sizes}))
    assert workload_of(str(path)).num_parameters == SHAPES["gpt2"].num_parameters


def test_words_change_a_shape_and_what_follows_from_it():
    wider = workload_of("llama3-8b", words="hidden=8192,vocab=1000")
    assert (wider.hidden, wider.head_dim, wider.ffn) == (8192, 256, 14_336)
    gpt = workload_of("gpt2", words="hidden=1536,heads=24")
    assert (gpt.ffn, gpt.kv_heads, gpt.head_dim) == (4 * 1536, 24, 64)


def test_layers_with_a_window_attend_to_no_more_than_it():
    """Every second one of GPT-OSS; a causal mask hides half of what is counted."""
    shape = SHAPES["gpt-oss-120b"]
    whole = dataclasses.replace(shape, window=0, window_layers=0)
    for seq in (64, 4096):
        mean = (whole.attention_flops(seq) + whole.attention_flops(min(seq, 256))) / 2
        assert shape.attention_flops(seq) == mean


@pytest.mark.parametrize(
    "sizes, refusal",
    [
        ({"layers": 0}, ("value.below_one", "layers=0", 1)),
        ({"heads": 7}, ("model.heads_indivisible", "hidden=2304", "heads=7")),
        ({"kv_heads": 5}, ("model.kv_heads_indivisible", "heads=24", "kv_heads=5")),
        ({"top_k": 2}, ("model.no_experts", "top_k=2", "experts")),
        ({"experts": 4}, ("model.wrong_top_k", "top_k=0", "experts=4", 1)),
        (
            {"experts": 4, "top_k": 1, "dense_layers": 24},
            ("model.no_routed_layer", "dense_layers=24", "layers=24"),
        ),
        (
            {"kv_lora_rank": 8},
            ("model.missing_latent_size", "kv_lora_rank=8", "qk_nope_head_dim"),
        ),
        ({"window": 128}, ("model.wrong_window", "window=128", "window_layers=0")),
        (
            {"window": 128, "window_layers": 25},
            ("model.wrong_window", "window_layers=25", "layers=24"),
        ),
        ({"gated": 1}, ("value.not_boolean", "gated=1")),
        ({"ffn": 1.5}, ("value.not_whole_number", "ffn=1.5")),
        ({"ffn": -8}, ("value.out_of_range", "ffn=-8", 0)),
    ],
)
def test_sizes_that_are_no_model_are_refused(sizes, refusal, refuses):
    with refuses(*refusal):
        Workload(**{**GPT, **sizes})


@pytest.mark.parametrize(
    "model, refusal",
    [
        ("llama3-9b", ("model.unknown_name", "'llama3-9b'", "'llama3-8b'")),
        ("layers=2,hidden=64", ("model.missing_sizes", "heads, vocab")),
        ("layers=2,hiden=64", ("model.unknown_size", "'hiden'", "'hidden'")),
        ("layers=2,embd=64", ("model.unknown_size", "'embd'", "'embed'")),
        ("embed=64,hidden=128", ("model.repeated_size", "embed is hidden")),
        ("layers=two,hidden=64", ("model.unreadable_size", "layers=two")),
        ("/nowhere/config.json", ("weights.unreadable_json", "/nowhere/config.json")),
    ],
)
def test_models_that_are_not_there_are_refused(model, refusal, refuses):
    with refuses(*refusal):
        workload_of(model)


@pytest.mark.parametrize(
    "values, refusal",
    [
        (
            {"model_type": "bert"},
            ("weights.unknown_model_type", "'bert'", "deepseek_v3, gpt2"),
        ),
        (
            {"model_type": "llama"},
            ("weights.missing_config_value", "'num_attention_heads'"),
        ),
        (
            {"model_type": "llama", **_LLAMA, "num_key_value_heads": 3},
            ("model.kv_heads_indivisible", "config.json", "kv_heads=3"),
        ),
        ([], ("weights.unknown_model_type", None)),
    ],
)
def test_configs_that_cannot_be_read_are_refused(tmp_path, values, refusal, refuses):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with refuses(*refusal):
        workload_of(str(path))


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({"model_type": ["llama"]}, ("weights.unknown_model_type", "['llama']")),
        ({"attention_bias": True}, ("weights.unplanned_key", "attention_bias=True")),
        ({"mlp_bias": True}, ("weights.unplanned_key", "mlp_bias=True")),
        ({"mlp_only_layers": [0]}, ("weights.unplanned_key", "mlp_only_layers=[0]")),
        (
            {"decoder_sparse_step": 2},
            ("weights.unplanned_key", "decoder_sparse_step=2"),
        ),
    ],
)
def test_configs_that_say_what_nothing_counts_are_refused(
    tmp_path, changes, refusal, refuses
):
    path = tmp_path / "config.json"
    values = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 96,
    }
    path.write_text(json.dumps(values))
    assert workload_of(str(path)).layers == 2
    path.write_text(json.dumps({**values, **changes}))
    with refuses(*refusal):
        workload_of(str(path))


@pytest.mark.parametrize(
    "words, refusal",
    [
        ("traced=3", ("model.unknown_size", "'traced'")),
        (
            "layers=99999999999999999999999999",
            ("value.out_of_range", "layers", 0, 100000),
        ),
        (
            "hidden=99999999999999999999999999",
            ("value.out_of_range", "hidden", 0, 1000000000),
        ),
    ],
)
def test_words_that_are_no_sizes_are_refused_at_once(words, refusal, refuses):
    with refuses(*refusal):
        workload_of("tiny", words=words)


def test_dropout_is_a_share_in_words_as_models_have_it():
    assert workload_of("tiny-gpt2", words="dropout=0.1").dropout
    assert not workload_of("tiny-gpt2", words="dropout=0").dropout


def test_the_words_of_the_models_own_configs_are_known():
    one = workload_of("layers=2,embed=64,heads=4,vocab=128,max_seq=32")
    assert (one.hidden, one.seq) == (64, 32)
