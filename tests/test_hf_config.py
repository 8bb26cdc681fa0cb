"""A Hugging Face config is read in full, and refused where ours would differ."""

import json

import pytest

from meshpar.models.convert.hf_config import config_from_json
from meshpar.models.gpt2 import GPT2Config
from meshpar.models.layers.rope import RopeScaling
from meshpar.models.llama import LlamaConfig
from meshpar.models.presets import build

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
}
LLAMA_CONFIG = LlamaConfig(
    layers=2,
    embed=64,
    heads=4,
    kv_heads=2,
    ffn=128,
    vocab=256,
    tied=True,
    norm_epsilon=1e-5,
    rope_theta=500_000.0,
)
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 256,
    "n_positions": 128,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 4096,
}


def write_config(folder, values):
    path = folder / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return str(path)


@pytest.mark.parametrize(
    "values, path, shape",
    [
        (LLAMA, "blocks.attention.qkv", (2, 64, 2, 4, 16)),
        ({**LLAMA, "tie_word_embeddings": False}, "unembed", (256, 64)),
        ({**LLAMA, "model_type": "qwen2"}, "blocks.attention.bias", (2, 2, 4, 16)),
        (
            {**LLAMA, "model_type": "qwen3", "head_dim": 32},
            "blocks.attention.q_norm.scale",
            (2, 32),
        ),
        (GPT2, "position_embed", (128, 64)),
        ({**GPT2, "n_inner": 96}, "blocks.mlp.up", (2, 64, 96)),
    ],
)
def test_a_config_json_is_a_model(values, path, shape, tmp_path):
    model = build(config_json=write_config(tmp_path, values))
    assert model.flat_parameters()[path].stacked_shape == shape


@pytest.mark.parametrize(
    "changes, fields",
    [
        ({}, {}),
        ({"rope_scaling": None}, {}),
        ({"rope_scaling": {"rope_type": "default"}}, {}),
        (
            {"rope_scaling": LLAMA3_SCALING},
            {"rope_scaling": RopeScaling(factor=32.0, original_seq=4096)},
        ),
        (
            {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 1e6}},
            {
                "rope_theta": 1e6,
                "rope_scaling": RopeScaling(factor=32.0, original_seq=4096),
            },
        ),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6}},
            {"rope_theta": 1e6},
        ),
        ({"rope_theta": None}, {"rope_theta": 10_000.0}),
        ({"num_key_value_heads": None}, {"kv_heads": 4}),
        (
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_act": "silu",
                "mlp_bias": False,
                "attention_bias": False,
                "attention_dropout": 0.1,
                "pretraining_tp": 1,
                "max_position_embeddings": 8192,
                "layer_types": ["full_attention", "full_attention"],
                "quantization_config": None,
            },
            {},
        ),
        ({"model_type": "qwen2"}, {"qkv_bias": True}),
        (
            {
                "model_type": "qwen2",
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": False,
                "sliding_window": 32_768,
            },
            {"qkv_bias": True},
        ),
        ({"model_type": "qwen3"}, {"qk_norm": True, "head_dim": 128}),
        ({"model_type": "qwen3", "head_dim": 32}, {"qk_norm": True, "head_dim": 32}),
    ],
)
def test_every_field_of_a_llama_config_is_read(changes, fields, tmp_path):
    config = config_from_json(write_config(tmp_path, {**LLAMA, **changes}))
    assert config == LlamaConfig(**{**vars(LLAMA_CONFIG), **fields})


def test_every_field_of_a_gpt2_config_is_read(tmp_path):
    values = {
        **GPT2,
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "n_inner": None,
        "layer_norm_epsilon": 1e-6,
        "resid_pdrop": 0.1,
        "scale_attn_weights": True,
    }
    assert config_from_json(write_config(tmp_path, values)) == GPT2Config(
        layers=2, embed=64, heads=4, vocab=256, max_seq=128, norm_epsilon=1e-6
    )


OF_LLAMA = "weights.unsupported_config_value", "models/llama.py"
OF_GPT2 = "weights.unsupported_config_value", "models/gpt2.py"
QWEN2, QWEN3 = ({**LLAMA, "model_type": kind} for kind in ("qwen2", "qwen3"))

# What a config says, and would be silently left out.
NOT_COMPUTED = [
    (
        {**LLAMA, "mlp_bias": True},
        (*OF_LLAMA, "mlp_bias=True", "mlp_bias=False"),
    ),
    (
        {**LLAMA, "hidden_act": "gelu"},
        (*OF_LLAMA, "hidden_act='gelu'", "hidden_act='silu'", "'swish'"),
    ),
    ({**QWEN2, "hidden_act": "relu"}, (*OF_LLAMA, "hidden_act='relu'")),
    ({**LLAMA, "attention_bias": True}, (*OF_LLAMA, "attention_bias=True")),
    ({**QWEN3, "attention_bias": True}, (*OF_LLAMA, "attention_bias=True")),
    ({**QWEN2, "use_sliding_window": True}, (*OF_LLAMA, "use_sliding_window=True")),
    (
        {**QWEN3, "layer_types": ["full_attention", "sliding_attention"]},
        (*OF_LLAMA, "layer_types='sliding_attention'"),
    ),
    (
        {**LLAMA, "partial_rotary_factor": 0.5},
        (*OF_LLAMA, "partial_rotary_factor=0.5"),
    ),
    (
        {**LLAMA, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        (*OF_LLAMA, "partial_rotary_factor=0.5", "partial_rotary_factor=1.0"),
    ),
    (
        {**LLAMA, "quantization_config": {"quant_method": "awq"}},
        (*OF_LLAMA, "quantization_config={'quant_method': 'awq'}"),
    ),
    (
        {**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
        (*OF_LLAMA, "architectures='LlamaForSequenceClassification'"),
    ),
    (
        {**GPT2, "activation_function": "relu"},
        (*OF_GPT2, "activation_function='relu'", "activation_function='gelu_new'"),
    ),
    ({**GPT2, "tie_word_embeddings": False}, (*OF_GPT2, "tie_word_embeddings=False")),
    ({**GPT2, "scale_attn_weights": False}, (*OF_GPT2, "scale_attn_weights=False")),
    (
        {**GPT2, "scale_attn_by_inverse_layer_idx": True},
        (*OF_GPT2, "scale_attn_by_inverse_layer_idx=True"),
    ),
    ({**GPT2, "add_cross_attention": True}, (*OF_GPT2, "add_cross_attention=True")),
]

GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 256,
}

BAD_CONFIGS = [
    (
        {**LLAMA, "model_type": "mamba"},
        ("weights.unknown_model_type", "'mamba'", "gemma3_text", "gpt2", "llama"),
    ),
    (
        {**LLAMA, "model_type": ["llama"]},
        ("weights.unknown_model_type", ["llama"], "deepseek_v3"),
    ),
    ([LLAMA], ("weights.unknown_model_type", None, "gemma3_text", "gpt2", "llama")),
    (
        {"model_type": "gpt2", "n_layer": 2},
        ("weights.missing_config_value", "'n_embd'"),
    ),
    (
        {name: value for name, value in LLAMA.items() if name != "vocab_size"},
        ("weights.missing_config_value", "'vocab_size'"),
    ),
    (
        {**LLAMA, "rope_scaling": {"type": "yarn"}},
        ("weights.unknown_rope_scaling", "'yarn'"),
    ),
    (
        {**LLAMA, "rope_scaling": {"type": "llama3"}},
        ("weights.missing_config_value", "'factor'"),
    ),
    ({**LLAMA, "num_hidden_layers": "2"}, ("value.not_whole_number", "layers='2'")),
    (
        {**LLAMA, "num_hidden_layers": None},
        ("weights.missing_config_value", "'num_hidden_layers'"),
    ),
    ({**LLAMA, "rope_theta": "big"}, ("value.not_number", "rope_theta='big'")),
    (
        {**LLAMA, "rope_scaling": "yarn"},
        ("weights.rope_scaling_not_object", "rope_scaling='yarn'"),
    ),
    (
        {**LLAMA, "rope_parameters": 3},
        ("weights.rope_scaling_not_object", "rope_parameters=3"),
    ),
    (
        {**LLAMA, "rope_scaling": {"factor": 2.0}},
        ("weights.unknown_rope_scaling", "rope_scaling", None),
    ),
    (
        {**LLAMA, "rope_scaling": {**LLAMA3_SCALING, "factor": "x"}},
        ("value.not_number", "factor='x'"),
    ),
    (
        {**LLAMA, "rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 1.0}},
        ("model.rope_factors_reversed", "high_factor=1.0", "low_factor=1.0"),
    ),
    (
        {**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        ("weights.unknown_rope_scaling", "rope_scaling", None),
    ),
    ({**GPT2, "n_embd": None}, ("weights.missing_config_value", "'n_embd'")),
    (GEMMA3, ("weights.all_layers_windowed", 4, "6th")),
    *NOT_COMPUTED,
    ("{", ("weights.unreadable_json",)),
]


@pytest.mark.parametrize("values, refusal", BAD_CONFIGS)
def test_a_config_that_ours_would_not_equal_is_refused(
    values, refusal, tmp_path, refuses
):
    words = refusal[0] != "weights.unreadable_json"  # Python's json's.
    with refuses(*refusal, words=words):
        config_from_json(write_config(tmp_path, values))
