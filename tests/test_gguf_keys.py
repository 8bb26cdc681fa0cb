"""Each key of a GGUF file's model changes the config, or nothing, or is refused."""

from dataclasses import replace

import numpy as np
import pytest

from meshpar import InputError
from meshpar.models.convert.weights import read_config

gguf = pytest.importorskip("gguf")

LLAMA = {
    "block_count": 6,
    "embedding_length": 16,
    "feed_forward_length": 24,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 5000.0,
}
GEMMA3 = {**LLAMA, "attention.key_length": 8, "attention.sliding_window": 4}
BASES = {"llama": LLAMA, "gemma3": GEMMA3}


def write_said(path, kind, said, names=()):
    """A file with those keys, and a table of 32 tokens of 16 values."""
    writer = gguf.GGUFWriter(path, kind)
    for name, value in said.items():
        key = name if name.startswith("general.") else f"{kind}.{name}"
        add = {
            bool: writer.add_bool,
            float: writer.add_float32,
            int: writer.add_uint32,
            str: writer.add_string,
            list: writer.add_array,
        }[type(value)]
        add(key, value)
    for name in ("token_embd.weight", *names):
        writer.add_tensor(name, np.zeros((32, 16), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def config_of(tmp_path):
    def found(kind, names=(), **said):
        path = tmp_path / "model.gguf"
        changes = {name.replace("__", "."): value for name, value in said.items()}
        return read_config(write_said(path, kind, BASES[kind] | changes, names))

    return found


def keys_of(*groups):
    """The names, without their architecture, that the `gguf` package knows."""
    found = set()
    for group in groups:
        for value in vars(group).values():
            if isinstance(value, str) and value.startswith("{arch}."):
                found.add(value.removeprefix("{arch}."))
            elif isinstance(value, type):
                found |= {*keys_of(value)}
    return sorted(found)


KEYS = gguf.constants.Keys
WITHOUT_EFFECT = {
    *("vocab_size", "context_length", "tensor_data_layout"),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
}
NOT_OF_A_PACKAGE = ("rope.scale_linear", "attention.qk_norm", "rope.kind", "window")


@pytest.mark.parametrize("kind", BASES)
@pytest.mark.parametrize("value", [3, 0.37, True, "odd", [3, 5]])
def test_no_key_of_a_model_is_ignored(kind, value, tmp_path):
    path = tmp_path / "model.gguf"
    plain = read_config(write_said(path, kind, BASES[kind]))
    ignored = []
    for key in (*keys_of(KEYS.LLM, KEYS.Attention, KEYS.Rope), *NOT_OF_A_PACKAGE):
        try:
            config = read_config(write_said(path, kind, {**BASES[kind], key: value}))
        except InputError:
            continue
        if config == plain:
            ignored.append(key)
    # A model without it attends to what comes before, too.
    allowed = WITHOUT_EFFECT | ({"attention.causal"} if value is True else set())
    assert {*ignored} <= allowed


@pytest.mark.parametrize(
    "kind, said, changes",
    [
        ("llama", {"rope__freq_base": 300.0}, {"rope_theta": 300.0}),
        ("llama", {"rope__dimension_count": 4}, {}),
        ("llama", {"attention__key_length": 8}, {"head_dim": 8}),
        ("llama", {"attention__scale": 0.5, "attention__value_length": 4}, {}),
        ("llama", {"attention__scale": 0.0, "attention__clamp_kqv": 0.0}, {}),
        ("llama", {"attention__sliding_window": 0, "attention__causal": True}, {}),
        ("llama", {"attention__head_count_kv": [4] * 6}, {"kv_heads": 4}),
        ("llama", {"rope__scaling__factor": 1.0}, {}),
        ("llama", {"rope__scaling__factor": 0.0, "rope__scale_linear": 4.0}, {}),
        ("llama", {"rope__scale_linear": 1.0}, {}),
        ("llama", {"rope__scaling__type": "linear"}, {}),
        ("llama", {"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, {}),
        ("llama", {"residual_scale": 1.0, "final_logit_softcapping": 0.0}, {}),
        ("llama", {"expert_count": 0, "expert_used_count": 0}, {}),
        ("gemma3", {"rope__scaling__factor": 8.0}, {"rope_factor": 8.0}),
        ("gemma3", {"rope__scale_linear": 8.0}, {"rope_factor": 8.0}),
        (
            "gemma3",
            {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0},
            {"rope_factor": 8.0},
        ),
        ("gemma3", {"rope__freq_base_swa": 300.0}, {"local_rope_theta": 300.0}),
        ("gemma3", {"attention__sliding_window_pattern": 3}, {"period": 3}),
        (
            "gemma3",
            {"attention__sliding_window_pattern": [True, False] * 3},
            {"period": 2},
        ),
        # Gemma 3 27B, which llama.cpp knows by its layers.
        ("gemma3", {"block_count": 62}, {"layers": 62, "query_size": 4}),
    ],
)
def test_what_a_key_says_is_read(kind, said, changes, config_of):
    assert config_of(kind, **said) == replace(config_of(kind), **changes)


SCALED = "weights.scaled_rope_in_gguf"
VALUE, KEY = "weights.unsupported_gguf_value", "weights.unknown_gguf_key"


@pytest.mark.parametrize(
    "kind, said, refusal",
    [
        ("llama", {"rope__scaling__factor": 4.0}, (SCALED, 4.0)),
        ("llama", {"rope__scale_linear": 4.0}, (SCALED, 4.0)),
        ("llama", {"rope__scaling__type": "yarn"}, (SCALED, "'yarn'")),
        ("gemma3", {"rope__scaling__type": "longrope"}, (SCALED, "'longrope'")),
        (
            "llama",
            {"rope__dimension_count": 2},
            (VALUE, "llama.rope.dimension_count=2", 4),
        ),
        (
            "gemma3",
            {"rope__dimension_count_swa": 4},
            (VALUE, "gemma3.rope.dimension_count_swa=4", 8),
        ),
        (
            "llama",
            {"attention__scale": float("nan")},
            (VALUE, "llama.attention.scale=nan", 0.5),
        ),
        ("llama", {"attention__scale": 0.25}, (VALUE, "llama.attention.scale=0.25")),
        (
            "llama",
            {"attention__sliding_window": 4},
            (VALUE, "llama.attention.sliding_window=4", 0),
        ),
        (
            "llama",
            {"attention__clamp_kqv": 8.0},
            (VALUE, "llama.attention.clamp_kqv=8.0", 0),
        ),
        (
            "llama",
            {"attention__causal": False},
            (VALUE, "llama.attention.causal=False", True),
        ),
        (
            "llama",
            {"attention__value_length": 8},
            (VALUE, "llama.attention.value_length=8", 4),
        ),
        (
            "gemma3",
            {"final_logit_softcapping": 30.0},
            (VALUE, "gemma3.final_logit_softcapping=30.0"),
        ),
        ("llama", {"residual_scale": 0.5}, (VALUE, "llama.residual_scale=0.5", 1)),
        ("llama", {"embedding_length": 32}, (VALUE, "llama.embedding_length=32", 16)),
        (
            "llama",
            {"attention__head_count_kv": [2, 4, 2, 4, 2, 4]},
            (VALUE, "llama.attention.head_count_kv"),
        ),
        ("llama", {"block_count": "six"}, (VALUE, "llama.block_count='six'")),
        ("llama", {"rope__dimension_sections": [1, 1]}, (KEY, "[1, 1]")),
        ("llama", {"ssm__state_size": 4}, (KEY, "llama.ssm.state_size=4")),
        ("llama", {"general__type": "adapter"}, (VALUE, "general.type='adapter'")),
        (
            "gemma3",
            {"attention__sliding_window_pattern": [True] * 6},
            ("weights.irregular_layer_types", [True] * 6),
        ),
    ],
)
def test_what_no_model_here_computes_is_named(kind, said, refusal, config_of, refuses):
    with refuses(*refusal, "model.gguf"):
        config_of(kind, **said)


@pytest.mark.parametrize("key", ["rope.freq_base", "attention.sliding_window"])
def test_what_readers_of_a_gemma_take_differently_has_to_be_said(
    key, tmp_path, refuses
):
    said = {name: value for name, value in GEMMA3.items() if name != key}
    path = write_said(tmp_path / "model.gguf", "gemma3", said)
    with refuses("weights.missing_config_value", f"gemma3.{key}"):
        read_config(path)


@pytest.mark.parametrize("name", ["rope_freqs.weight", "rope_factors_long.weight"])
def test_a_tensor_that_scales_positions_is_refused(name, config_of, refuses):
    with refuses(SCALED, name) as caught:
        config_of("llama", names=(name,))
    assert "linear" not in str(caught.value)  # No key of it says so.
