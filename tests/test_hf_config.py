"""A Hugging Face config is read in full, and refused where ours would differ."""

import json
import re

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


LLAMA_COMPUTES = "is not what models/llama.py computes, which is"
GPT2_COMPUTES = "is not what models/gpt2.py computes, which is"
QWEN2, QWEN3 = ({**LLAMA, "model_type": kind} for kind in ("qwen2", "qwen3"))

# What a config says, and would be silently left out.
NOT_COMPUTED = [
    (
        {**LLAMA, "mlp_bias": True},
        f"mlp_bias=True {LLAMA_COMPUTES} mlp_bias=False; take another config, or "
        "change a copy of that file",
    ),
    (
        {**LLAMA, "hidden_act": "gelu"},
        f"hidden_act='gelu' {LLAMA_COMPUTES} hidden_act='silu' or 'swish'",
    ),
    ({**QWEN2, "hidden_act": "relu"}, f"hidden_act='relu' {LLAMA_COMPUTES}"),
    ({**LLAMA, "attention_bias": True}, f"attention_bias=True {LLAMA_COMPUTES}"),
    ({**QWEN3, "attention_bias": True}, f"attention_bias=True {LLAMA_COMPUTES}"),
    ({**QWEN2, "use_sliding_window": True}, "use_sliding_window=True is not what"),
    (
        {**QWEN3, "layer_types": ["full_attention", "sliding_attention"]},
        f"layer_types='sliding_attention' {LLAMA_COMPUTES} layer_types=",
    ),
    ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not what"),
    (
        {**LLAMA, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        f"partial_rotary_factor=0.5 {LLAMA_COMPUTES} partial_rotary_factor=1.0",
    ),
    (
        {**LLAMA, "quantization_config": {"quant_method": "awq"}},
        f"quantization_config={{'quant_method': 'awq'}} {LLAMA_COMPUTES}",
    ),
    (
        {**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
        f"architectures='LlamaForSequenceClassification' {LLAMA_COMPUTES}",
    ),
    (
        {**GPT2, "activation_function": "relu"},
        f"activation_function='relu' {GPT2_COMPUTES} activation_function='gelu_new' or",
    ),
    (
        {**GPT2, "tie_word_embeddings": False},
        f"tie_word_embeddings=False {GPT2_COMPUTES}",
    ),
    ({**GPT2, "scale_attn_weights": False}, "scale_attn_weights=False is not what"),
    (
        {**GPT2, "scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx=True is not what",
    ),
    ({**GPT2, "add_cross_attention": True}, "add_cross_attention=True is not what"),
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
        "has model_type 'mamba'; known: deepseek_v3, gemma3_text, gpt2, llama",
    ),
    ({**LLAMA, "model_type": ["llama"]}, "has model_type ['llama']; known: deepseek"),
    ([LLAMA], "has model_type None; known: deepseek_v3, gemma3_text, gpt2, llama"),
    ({"model_type": "gpt2", "n_layer": 2}, "does not give 'n_embd'"),
    (
        {name: value for name, value in LLAMA.items() if name != "vocab_size"},
        "does not give 'vocab_size'",
    ),
    ({**LLAMA, "rope_scaling": {"type": "yarn"}}, "rope_scaling of type 'yarn'"),
    ({**LLAMA, "rope_scaling": {"type": "llama3"}}, "does not give 'factor'"),
    ({**LLAMA, "num_hidden_layers": "2"}, "layers='2': must be a whole number"),
    ({**LLAMA, "num_hidden_layers": None}, "does not give 'num_hidden_layers'"),
    ({**LLAMA, "rope_theta": "big"}, "rope_theta='big': must be a number"),
    ({**LLAMA, "rope_scaling": "yarn"}, "rope_scaling='yarn': must be an object"),
    ({**LLAMA, "rope_parameters": 3}, "rope_parameters=3: must be an object"),
    ({**LLAMA, "rope_scaling": {"factor": 2.0}}, "rope_scaling of type None"),
    (
        {**LLAMA, "rope_scaling": {**LLAMA3_SCALING, "factor": "x"}},
        "factor='x': must be a number",
    ),
    (
        {**LLAMA, "rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 1.0}},
        "high_factor=1.0: must be above low_factor=1.0",
    ),
    (
        {**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "rope_scaling of type None",
    ),
    ({**GPT2, "n_embd": None}, "does not give 'n_embd'"),
    (GEMMA3, "4 layers, of which only each 6th sees all tokens: all of them see a"),
    *NOT_COMPUTED,
    ("{", "as JSON: Expecting property name"),
]


@pytest.mark.parametrize("values, message", BAD_CONFIGS)
def test_a_config_that_ours_would_not_equal_is_refused(values, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        config_from_json(write_config(tmp_path, values))
