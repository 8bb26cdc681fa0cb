"""Every key of a `config.json`, left out, null and under each name, as Transformers."""

import json

import pytest

from meshpar import InputError
from meshpar.models.convert.families import to_config_json
from meshpar.models.convert.hf_config import config_from_json
from meshpar.planner.workload.config_json import KEYS, REQUIRED, workload_from_json
from tests.transformers_configs import (
    ABSENT,
    BASES,
    STORED,
    ConfigCase,
    cases_of,
    meaning,
)

THEIRS = json.loads(STORED.read_text())
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


def theirs(kind, label):
    """What a config means to Transformers; None if it refuses it."""
    difference = THEIRS[kind]["differences"][label]
    if difference is None:
        return None
    return {**THEIRS[kind]["as it is"], **difference}


def ours(kind, case, folder):
    """What it means here; None if it is refused."""
    path = folder / "config.json"
    path.write_text(json.dumps(case.values(kind)))
    try:
        found = meaning(to_config_json(config_from_json(path)))
    except InputError:
        return None
    return json.loads(json.dumps(found))


# Family -> "refused here": labels of what Transformers reads; "refused there": of what
# it refuses; "not written": keys that it writes, and a config of ours does not.
DIFFERENCES = json.loads((STORED.parent / "config_differences.json").read_text())
PLANNED_ONLY = "mistral"
READ = [kind for kind in BASES if kind != PLANNED_ONLY]


def differences(kind, folder):
    """Which cases are refused by one reader alone, and the keys that ours drops.

    Values that differ fail at once: no case may mean something else here.
    """
    found = {"refused here": [], "refused there": [], "not written": set()}
    for case in cases_of(kind):
        here, there = ours(kind, case, folder), theirs(kind, case.label)
        if here is None and there is not None:
            found["refused here"].append(case.label)
        elif here is not None and there is None:
            found["refused there"].append(case.label)
        elif here is not None:
            # A difference names a key that theirs lacks in one case as None.
            there = {key: one for key, one in there.items() if one is not None}
            here = {key: one for key, one in here.items() if one is not None}
            missing = there.keys() - here.keys()
            found["not written"] |= missing
            assert here == {k: there[k] for k in there.keys() - missing}, case.label
    return {**found, "not written": sorted(found["not written"])}


@pytest.mark.parametrize("kind", READ)
def test_a_config_means_what_it_means_to_transformers_or_is_refused(kind, tmp_path):
    assert differences(kind, tmp_path) == DIFFERENCES[kind]


SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
    "tie_word_embeddings": "tied",
}


@pytest.mark.parametrize("key", SIZES)
def test_a_plan_of_a_mistral_has_the_sizes_of_transformers(key, tmp_path):
    label, path = f"without {key}", tmp_path / "config.json"
    (case,) = (one for one in cases_of(PLANNED_ONLY) if one.label == label)
    path.write_text(json.dumps(case.values(PLANNED_ONLY)))
    if KEYS[PLANNED_ONLY].defaults[key] is REQUIRED:
        with pytest.raises(InputError):
            workload_from_json(path)
        return
    workload, wanted = workload_from_json(path), theirs(PLANNED_ONLY, label)
    assert {name: getattr(workload, field) for name, field in SIZES.items()} == {
        name: wanted[name] for name in SIZES
    }


@pytest.mark.parametrize("kind", READ)
def test_only_what_a_model_needs_is_refused_where_it_is_left_out(kind, tmp_path):
    assert ours(kind, next(cases_of(kind)), tmp_path) is not None
    for case in cases_of(kind):
        if not case.label.startswith("without "):
            continue
        (key,) = case.left_out
        is_required = KEYS[kind].defaults.get(key) is REQUIRED
        assert (ours(kind, case, tmp_path) is None) == is_required, case.label


SCALED = {
    "llama": LLAMA3,
    "qwen3_moe": LLAMA3,
    "deepseek_v3": YARN,
    "gemma3_text": {"rope_type": "linear", "factor": 2.0},
}


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_positions_are_read_under_each_of_their_names(kind, name, tmp_path):
    rope, base = SCALED[kind], BASES[kind]
    spelled = {
        ("type" if key == "rope_type" else key): one for key, one in rope.items()
    }
    if kind == "gemma3_text":
        # Of `rope_scaling` Transformers 5 reads no `type` there, and 4 does.
        spelled = rope if name == "rope_scaling" else spelled
    for said in (rope, spelled):
        nested = kind == "gemma3_text" and name == "rope_parameters"
        change = {name: {"full_attention": said} if nested else said}
        found = ours(kind, ConfigCase("", base, change), tmp_path)["rope"]
        found = found.get("full_attention", found)
        assert found["rope_type"] == rope["rope_type"]
        assert found["factor"] == rope["factor"]


UNSCALED = {"rope_type": "default", "factor": 8.0}


@pytest.mark.parametrize("kind", SCALED)
def test_a_type_that_scales_nothing_has_no_factor(kind, tmp_path):
    plain = ours(kind, ConfigCase("", BASES[kind]), tmp_path)
    scaled = ConfigCase("", BASES[kind], {"rope_scaling": UNSCALED})
    assert ours(kind, scaled, tmp_path) == plain


NULL, CONTRADICTORY = "weights.null_config_value", "weights.contradictory_config_values"
ROPE = "weights.unknown_rope_scaling"


@pytest.mark.parametrize(
    "kind, change, refusal",
    [
        ("gemma3_text", {"rope_scaling": {"type": "yarn", "factor": 8}}, (ROPE, "5")),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8}}, (ROPE, "5")),
        ("gemma3_text", {"rope_scaling": {"rope_type": "yarn"}}, (ROPE, "'yarn'")),
        ("gemma3_text", {"rope_scaling": {"factor": 8}}, (ROPE, "None")),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 3.0}}, (ROPE, "3.0")),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"type": "linear"}}},
            (ROPE, "'linear'"),
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
            ("weights.unsupported_config_value", 0.5, 1.0),
        ),
        ("gemma3_text", {"sliding_window": None}, (NULL, "sliding_window", 4096)),
        (
            "gemma3_text",
            {"layer_types": 3},
            ("weights.irregular_layer_types", "layer_types=3"),
        ),
        (
            "gemma3_text",
            {"sliding_window_pattern": "6"},
            ("value.not_whole_number", "sliding_window_pattern='6'"),
        ),
        ("deepseek_v3", {"rope_scaling": {"factor": 8}}, (ROPE, "None")),
        (
            "deepseek_v3",
            {"rope_scaling": {**YARN, "low_freq_factor": 1.0}},
            ("weights.unknown_rope_key", "'yarn'", "low_freq_factor"),
        ),
        (
            "deepseek_v3",
            {"num_key_value_heads": 8},
            ("weights.unsupported_config_value", "num_key_value_heads=8", 128),
        ),
        ("deepseek_v3", {"n_group": None}, (NULL, "n_group", 8)),
        (
            "deepseek_v3",
            {"num_local_experts": 8},
            (CONTRADICTORY, "n_routed_experts=16", "num_local_experts=8"),
        ),
        ("deepseek_v3", {"q_lora_rank": 0}, ("value.below_one", "q_lora_rank=0")),
        (
            "mixtral",
            {"partial_rotary_factor": 0.5},
            ("weights.unsupported_config_value", "partial_rotary_factor=0.5"),
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "default", "type": "yarn"}},
            (CONTRADICTORY, "'default'", "'yarn'"),
        ),
        (
            "llama",
            {"rope_scaling": LLAMA3, "original_max_position_embeddings": 99},
            (CONTRADICTORY, 99, 16),
        ),
        (
            "llama",
            {"rope_scaling": {**LLAMA3, "beta_fast": 3}},
            ("weights.unknown_rope_key", "'llama3'", "beta_fast"),
        ),
        ("gpt2", {"hidden_size": 32}, (CONTRADICTORY, "n_embd=16", "hidden_size=32")),
        ("gpt2", {"n_inner": 0}, ("value.below_one", "n_inner=0")),
        (
            "t5",
            {"dense_act_fn": "relu"},
            (CONTRADICTORY, "dense_act_fn='relu'", "'gelu_new'"),
        ),
        (
            "t5",
            {
                "num_layers": ABSENT,
                "num_hidden_layers": 2,
                "num_decoder_layers": None,
            },
            ("weights.missing_config_value", "'num_decoder_layers'"),
        ),
        (
            "vit",
            {"id2label": {}, "num_labels": ABSENT},
            ("weights.unsupported_config_value", "id2label={}"),
        ),
    ],
)
def test_what_no_model_here_computes_is_named(kind, change, refusal, tmp_path, refuses):
    gone = frozenset(key for key, one in change.items() if one is ABSENT)
    said = {key: one for key, one in change.items() if key not in gone}
    path = tmp_path / "config.json"
    case = ConfigCase("", BASES[kind], said, gone)
    path.write_text(json.dumps(case.values(kind)))
    with refuses(*refusal):
        config_from_json(path)


@pytest.mark.parametrize("kind", BASES)
def test_the_stored_meanings_are_those_of_the_installed_transformers(kind):
    pytest.importorskip("transformers")
    from tests.make_transformers_defaults import theirs as read

    for case in cases_of(kind):
        assert read(kind, case) == theirs(kind, case.label), case.label


def test_a_t5_has_as_many_decoder_layers_under_both_names(tmp_path):
    change = {"num_hidden_layers": 2}
    gone = frozenset(("num_decoder_layers",))
    found = ours("t5", ConfigCase("", BASES["t5"], change, gone), tmp_path)
    assert (found["num_layers"], found["num_decoder_layers"]) == (2, 2)


@pytest.mark.parametrize(
    "kind, key, field, value",
    [
        ("llama", "num_key_value_heads", "kv_heads", 64),
        ("mistral", "num_key_value_heads", "kv_heads", 8),
        ("qwen2", "num_key_value_heads", "kv_heads", 32),
        ("mixtral", "num_key_value_heads", "kv_heads", 8),
        ("qwen3_moe", "num_key_value_heads", "kv_heads", 4),
        ("qwen3_moe", "head_dim", "head_dim", 256 // 64),
        ("qwen3_moe", "intermediate_size", "expert_ffn", 12),
        ("deepseek_v3", "q_lora_rank", "q_lora_rank", 1536),
        ("deepseek_v3", "n_shared_experts", "shared_experts", 1),
        ("deepseek_v3", "first_k_dense_replace", "dense_layers", 3),
    ],
)
def test_a_plan_takes_the_same_defaults(kind, key, field, value, tmp_path):
    base = BASES[kind]
    path = tmp_path / "config.json"
    case = ConfigCase("", base, {}, frozenset((key,)))
    path.write_text(json.dumps(case.values(kind)))
    assert getattr(workload_from_json(path), field) == value
