"""Weights of others: logits as theirs, round trips, and what is read."""

import functools
import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from meshpar import Layout, Scope, default_rules, make_mesh, make_train_step
from meshpar.cli.main import main
from meshpar.model.parameter import is_parameter
from meshpar.model.tracing import forward
from meshpar.models.convert import export, writing
from meshpar.models.convert.families import to_config_json
from meshpar.models.convert.hf_config import config_from_json
from meshpar.models.convert.run_files import keep_files, kept_base, kept_tokenizer
from meshpar.models.convert.safetensors_folder import SafetensorsFolder
from meshpar.models.convert.weights import read_config, read_weights
from meshpar.models.convert.writing import write_weights
from meshpar.parallel.pipeline.stages import arranged_for
from meshpar.parallel.placement import Placement
from meshpar.rules.sharding import path_name
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.layer_order import values_at
from tests.marks import slow
from tests.transformers_cases import CONFIGS, inputs_of, stored, write_model

pytest.importorskip("safetensors")

FAMILIES = tuple(CONFIGS)
LAYOUTS = (
    "data=8",
    "tensor=2,fsdp=4",
    "data=2,stage=2,tensor=2,microbatches=2",
    "fsdp=4,stage=2,microbatches=2",
)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Family -> a folder of its tiny model."""
    above = tmp_path_factory.mktemp("theirs")
    return {family: write_model(above / family, family) for family in FAMILIES}


@pytest.fixture(scope="session")
def theirs(folders):
    """Family -> what is read of its folder, once."""
    return functools.cache(lambda family: read_weights(folders[family]))


def step_of(model, layout, count=8):
    return make_train_step(model, optax.sgd(0.1), layout, devices=jax.devices()[:count])


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=lambda node: not isinstance(node, dict))


def altered(folder, to, **values):
    """A copy of a folder, its config other in those values."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    said = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**said, **values}))
    return to


def check_logits(logits, family):
    kept = logits if family == "vit" else logits[:, -3:]
    wanted = np.array(stored(family)["logits"]).reshape(kept.shape)
    np.testing.assert_allclose(kept, wanted, atol=1e-4, rtol=0)


OF_STEP = "llama"
"""The family whose logits are asked of a step, too."""


@pytest.mark.parametrize(
    "family", [slow(one) if one == OF_STEP else one for one in FAMILIES]
)
def test_logits_are_those_of_transformers(family, theirs):
    """Of the model alone, in one program that reads all parameters whole."""
    weights, inputs = theirs(family), inputs_of(family)
    model = weights.model
    params = jax.tree.map(lambda leaf: leaf[...], weights.params)
    given = by_path(weights.model_state)

    def started(path, one):
        name = path_name(path)
        return given[name][...] if name in given else np.zeros(one.stacked_shape)

    state = jax.tree.map_with_path(started, model.state, is_leaf=is_parameter)

    @jax.jit
    def run(params, state):
        ends, (of_ends, _) = model.split(params)[0], model.split(state)
        x = forward(model, params, inputs, state=state)
        return model.logits(ends, x, Scope(batch=inputs, state=of_ends))

    check_logits(np.asarray(run(params, state)), family)


@pytest.mark.parametrize(
    "family", [one if one == OF_STEP else slow(one) for one in FAMILIES]
)
def test_a_step_that_starts_from_weights_has_their_logits(family, theirs):
    weights = theirs(family)
    step = step_of(weights.model, "fsdp=2,tensor=2", 4)
    state = step.init(params=weights.params, model_state=weights.model_state)
    check_logits(np.asarray(step.logits(state, inputs_of(family))), family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip_gives_the_same_bytes(family, folders, theirs, tmp_path):
    weights = theirs(family)
    write_weights(tmp_path, weights.config, weights.params, weights.model_state)
    before, after = SafetensorsFolder(folders[family]), SafetensorsFolder(tmp_path)
    assert set(before.names) == set(after.names)
    for name in before.names:
        whole = tuple(slice(None) for _ in before.shape(name))
        assert before.read(name, whole).tobytes() == after.read(name, whole).tobytes()
    assert read_config(tmp_path) == weights.config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_device_reads_its_share_and_no_more(family, layout, theirs):
    weights = theirs(family)
    model, shardings = laid_out(weights.model, layout)
    whole = {path: leaf[...] for path, leaf in by_path(weights.params).items()}
    for device in (jax.devices()[0], jax.devices()[5]):
        read_before, share = weights.source.bytes_read, 0
        for path, parameter in model.flat_parameters().items():
            places = shardings[path].devices_indices_map(parameter.stacked_shape)
            spans = zip(places[device], parameter.stacked_shape, strict=True)
            spans = tuple(part.indices(size)[:2] for part, size in spans)
            leaf = by_path(weights.params)[path]
            values = values_at(leaf, spans, parameter)
            np.testing.assert_array_equal(
                values, values_at(whole[path], spans, parameter)
            )
            layers = parameter.places[slice(*spans[0])]
            filled = len([one for one in layers if one >= 0]) if layers else 1
            share += 4 * math.prod(values.shape) * filled // (len(layers) or 1)
        read = weights.source.bytes_read - read_before
        assert share <= read <= 1.2 * share


def laid_out(model, line):
    """The model as a step of a layout has it, and path -> the sharding at rest."""
    layout = Layout.parse(line)
    placement = Placement(
        model=arranged_for(model, layout),
        layout=layout,
        rules=default_rules(layout),
        mesh=make_mesh(layout),
        platform="cpu",
    )
    specs = by_path(placement.specs(lambda stored: stored.spec))
    found = {path: NamedSharding(placement.mesh, spec) for path, spec in specs.items()}
    return placement.model, found


def test_a_layout_lies_as_its_step_lays_it_out(theirs):
    model, line = theirs("deepseek_v3").model, LAYOUTS[2]
    assert laid_out(model, line)[1] == by_path(step_of(model, line).shardings.params)


def by_path(tree, above=""):
    found = {}
    for key, value in tree.items():
        path = f"{above}{key}"
        found |= (
            by_path(value, f"{path}.") if isinstance(value, dict) else {path: value}
        )
    return found


@pytest.mark.parametrize("family", [slow("llama"), "deepseek_v3", slow("gemma3")])
def test_every_stage_split_gets_the_same_values(family, theirs):
    weights = theirs(family)
    step = step_of(weights.model, "data=2,stage=2,tensor=2,microbatches=2")
    state = step.init(params=weights.params, model_state=weights.model_state)
    found = by_path(step.in_layer_order(jax.tree.map(np.asarray, state.params)))
    for path, leaf in by_path(weights.params).items():
        np.testing.assert_array_equal(found[path], leaf[...])


def test_several_files_have_an_index_that_is_read(theirs, tmp_path, refuses):
    weights = theirs("llama")
    files = write_weights(tmp_path, weights.config, weights.params, shard_bytes=4000)
    assert len(files) > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(weights.source.names)
    again = read_weights(tmp_path)
    for one, other in zip(leaves(again.params), leaves(weights.params), strict=True):
        np.testing.assert_array_equal(one[...], other[...])
    files[1].unlink()
    with refuses(
        "weights.missing_shard", "model.safetensors.index.json", files[1].name
    ):
        read_weights(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hostname", "a/b", 7])
def test_an_index_names_files_of_its_own_folder_alone(name, tmp_path, refuses):
    index = {"weight_map": {"model.norm.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with refuses("weights.file_outside_folder", str(name)):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_an_index_that_is_none_is_told_in_one_line(text, tmp_path, refuses):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with refuses("weights.no_weight_map"):
        SafetensorsFolder(tmp_path)


def test_two_sets_of_weights_in_a_folder_are_refused(theirs, tmp_path, refuses):
    weights = theirs("llama")
    files = write_weights(tmp_path, weights.config, weights.params, shard_bytes=4000)
    (tmp_path / "model.safetensors").write_bytes(files[0].read_bytes())
    with refuses("weights.two_sets", "model.safetensors"):
        SafetensorsFolder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    files[1].write_bytes(files[0].read_bytes())
    with refuses("weights.tensor_twice", files[0].name, files[1].name):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("dtype, digits", [("bf16", 8), ("fp16", 11)])
def test_what_is_stored_in_fewer_bits_is_read_as_fp32(dtype, digits, theirs, tmp_path):
    weights = theirs("qwen2")
    write_weights(tmp_path, weights.config, weights.params, dtype=dtype)
    again = read_weights(tmp_path)
    for one, other in zip(leaves(again.params), leaves(weights.params), strict=True):
        values, exact = one[...], other[...]
        assert values.dtype == np.float32
        assert (np.abs(values - exact) <= np.abs(exact) * 2.0**-digits).all()
        assert (values != exact).any()


def test_names_may_leave_their_prefix_out(folders, tmp_path):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folders["gpt2"] / "model.safetensors")
    short = {name.removeprefix("transformer."): one for name, one in tensors.items()}
    short["h.0.attn.bias"] = np.zeros((1, 1, 16, 16), np.float32)  # a mask
    copy = altered(folders["gpt2"], tmp_path / "short")
    save_file(short, copy / "model.safetensors")
    params = by_path(read_weights(copy).params)
    wanted = tensors["transformer.wpe.weight"]
    np.testing.assert_array_equal(params["position_embed"][...], wanted)


@pytest.mark.parametrize("family", ["smollm2", "gpt2", "gemma3", "t5"])
def test_a_tied_model_may_bring_its_head_too(family, folders, theirs, tmp_path):
    from safetensors.numpy import load_file, save_file

    copy = altered(folders[family], tmp_path / family)
    tensors = load_file(copy / "model.safetensors")
    head = np.full((32, 16), 7.0, np.float32)
    save_file({**tensors, "lm_head.weight": head}, copy / "model.safetensors")
    found, wanted = by_path(read_weights(copy).params), by_path(theirs(family).params)
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        np.testing.assert_array_equal(one[...], wanted[name][...])


def test_a_missing_an_unknown_and_a_misshapen_tensor_are_named(
    folders, tmp_path, refuses
):
    with refuses("weights.wrong_shape", (32, 16), (33, 16)):
        read_weights(altered(folders["llama"], tmp_path / "a", vocab_size=33))
    with refuses("weights.missing_tensor", "'lm_head.weight'", "unembed"):
        untied = {"tie_word_embeddings": False}
        read_weights(altered(folders["smollm2"], tmp_path / "b", **untied))
    with refuses("weights.unexpected_tensor", "model.layers.1"):
        read_weights(altered(folders["llama"], tmp_path / "c", num_hidden_layers=1))
    with refuses("weights.no_safetensors", "model.safetensors"):
        SafetensorsFolder(tmp_path)
    with refuses("weights.no_config", "config.json"):
        read_config(tmp_path)


OTHER = "weights.unsupported_config_value"


@pytest.mark.parametrize(
    "family, values, refusal",
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, (OTHER, 30.0)),
        (
            "gemma3",
            {"layer_types": ["full_attention", "x"]},
            ("weights.irregular_layer_types", ["full_attention", "x"]),
        ),
        ("gemma3", {"attention_bias": True}, (OTHER, True, "models/gemma3.py")),
        ("mixtral", {"sliding_window": 4096}, (OTHER, 4096)),
        ("qwen3_moe", {"mlp_only_layers": [1]}, (OTHER, 1)),
        ("deepseek_v3", {"rope_interleave": False}, (OTHER, False)),
        ("deepseek_v3", {"quantization_config": {}}, (OTHER, {})),
        ("t5", {"feed_forward_proj": "gated-silu"}, (OTHER, "gated-silu")),
        ("vit", {"qkv_bias": False}, (OTHER, False, "models/vit.py")),
        ("vit", {"hidden_act": "relu"}, (OTHER, "relu")),
    ],
)
def test_what_ours_would_not_compute_is_named(
    family, values, refusal, folders, tmp_path, refuses
):
    with refuses(*refusal, *values):
        read_config(altered(folders[family], tmp_path / "other", **values))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_comes_back_from_its_json(family, folders, tmp_path):
    config = read_config(folders[family])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_config_json(config)))
    assert config_from_json(path) == config


OURS_SAY_OTHERWISE = {
    "max_position_embeddings",  # no limit
    *("dropout_rate", "attn_pdrop", "embd_pdrop", "resid_pdrop"),  # none in inference
    "num_nextn_predict_layers",  # no tokens further ahead
    "label2id",  # of labels by their names
}
LEFT_TO_THEIR_DEFAULTS = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "transformers_version"),
    *("use_cache", "pretraining_tp", "attention_dropout", "classifier_dropout"),
    *("sliding_window", "max_window_layers", "layer_types", "_sliding_window_pattern"),
    *("use_bidirectional_attention", "attn_logit_softcapping"),
    *("final_logit_softcapping", "output_router_logits", "router_jitter_noise"),
    *("add_cross_attention", "reorder_and_upcast_attn", "scale_attn_weights"),
    *("scale_attn_by_inverse_layer_idx", "summary_activation", "summary_type"),
    *("summary_first_dropout", "summary_proj_to_labels", "summary_use_proj"),
    *("dense_act_fn", "is_gated_act", "is_decoder", "initializer_factor"),
    *("encoder_stride", "pooler_act", "pooler_output_size", "qk_head_dim"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_config_says_what_theirs_says(family, folders):
    theirs = json.loads((folders[family] / "config.json").read_text())
    ours = to_config_json(read_config(folders[family]))
    for name in OURS_SAY_OTHERWISE | LEFT_TO_THEIR_DEFAULTS - ours.keys():
        theirs.pop(name, None)
    if family == "qwen3_moe":  # the size of dense layers, of which it has none
        del theirs["intermediate_size"]
    if family == "mixtral":  # theirs is hidden_size / num_attention_heads by default
        del theirs["head_dim"]
    assert {name: ours.get(name) for name in theirs} == theirs


def test_a_checkpoint_is_exported(folders, theirs, tmp_path, capsys, refuses_command):
    weights = theirs("llama")
    (folders["llama"] / "tokenizer.json").write_text("{}")
    step = step_of(weights.model, "stage=2,tensor=2,microbatches=2", 4)
    state = step.init(params=weights.params)
    from dataclasses import asdict

    said = {"model_sizes": asdict(weights.config), "layout": str(step.layout)}
    said["from_weights"] = str(folders["llama"])
    orders = step.layer_orders
    with Checkpoints(tmp_path / "run" / "checkpoints", layer_orders=orders) as saved:
        saved.save(state, said)
    keep_files(tmp_path / "run", started_from=folders["llama"])
    words = ["export", str(tmp_path / "run"), "--to", str(tmp_path / "theirs")]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == ["config.json", "model.safetensors", "tokenizer.json"]
    before = (folders["llama"] / "model.safetensors").read_bytes()
    found = read_weights(tmp_path / "theirs")
    assert len(before) > told["bytes"] // 2
    for one, other in zip(leaves(found.params), leaves(weights.params), strict=True):
        np.testing.assert_array_equal(one[...], other[...])
    refuses_command(words, "weights.folder_holds_model", "theirs")


OWN, THEIRS = "own", "theirs"
EXPORTED = [
    ({"tokenizer": "own.json"}, OWN, False),
    ({"tokenizer": "alike.json"}, "alike", True),
    ({"formats": ["text"], "text": []}, None, False),
    ({"sources": ["a.jsonl"], "text": []}, None, False),
    ({"formats": ["megatron"], "text": []}, THEIRS, True),
    ({"sources": ["path=a.bin,weight=1"], "text": []}, THEIRS, True),
    ({}, THEIRS, True),
]


@pytest.mark.parametrize("said, wanted, has_others", EXPORTED)
def test_the_tokenizer_that_a_run_was_trained_with_is_exported(
    said, wanted, has_others, folders, theirs, tmp_path, monkeypatch
):
    weights = theirs("llama")
    started = altered(folders["llama"], tmp_path / "started", eos_token_id=5)
    (started / "tokenizer_config.json").write_text("{}")
    paths = {OWN: tmp_path / "own.json", "alike": tmp_path / "alike.json"}
    for vocab, name, path in (
        ({"a": 0}, THEIRS, started / "tokenizer.json"),
        ({"a": 0}, "alike", paths["alike"]),
        ({"b": 0}, OWN, paths[OWN]),
    ):
        values = {"model": {"vocab": vocab}, "added_tokens": [], "name": name}
        path.write_text(json.dumps(values))
    said = {"from_weights": str(started), **said}
    if "tokenizer" in said:
        said["tokenizer"] = str(tmp_path / said["tokenizer"])
    run = tmp_path / "run"
    keep_files(run, tokenizer=said.get("tokenizer"), started_from=started)
    for folder in (started, *paths.values()):  # A run needs none of them any more.
        folder.rename(folder.with_name(f"moved {folder.name}"))
    contents = SimpleNamespace(config=said, step=1, directory=run / "checkpoints")
    found = SimpleNamespace(contents=contents, **vars(weights))
    monkeypatch.setattr(export, "read_checkpoint", lambda *args, **options: found)
    export.export(run, to := tmp_path / "to")
    file = to / "tokenizer.json"
    assert (json.loads(file.read_text())["name"] if file.exists() else None) == wanted
    assert (to / "tokenizer_config.json").exists() == has_others
    config = json.loads((to / "config.json").read_text())
    assert (config.get("eos_token_id") == 5) == has_others
    theirs = json.loads((run / "base" / "config.json").read_text())
    key = "max_position_embeddings"
    assert config[key] == theirs[key]


def test_a_run_whose_tokenizer_is_gone_is_not_exported_without(
    tmp_path, monkeypatch, refuses
):
    said = {"tokenizer": str(tmp_path / "gone.json")}
    contents = SimpleNamespace(config=said, step=1, directory=tmp_path / "run")
    found = SimpleNamespace(contents=contents)
    monkeypatch.setattr(export, "read_checkpoint", lambda *args, **options: found)
    with refuses("weights.tokenizer_gone", "gone.json", "--like"):
        export.export("run", tmp_path / "to")
    assert not (tmp_path / "to").exists()


def secret_of(tmp_path):
    """A file of the user that is none of a run, and an empty run's folder."""
    secret = tmp_path / "private_key"
    secret.write_text("secret")
    (tmp_path / "run" / "base").mkdir(parents=True)
    return secret, tmp_path / "run"


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "base/tokenizer.json", "base/config.json"]
)
def test_a_run_gives_away_no_file_outside_of_its_folder(name, tmp_path, refuses):
    secret, run = secret_of(tmp_path)
    said = {"tokenizer": str(secret), "from_weights": str(tmp_path)}
    with refuses("weights.tokenizer_gone", str(secret), "--like"):
        kept_tokenizer(run, said, instead="give --like DIR")
    (run / name).symlink_to(secret)
    with refuses("weights.file_outside_run", "private_key", name.split("/")[-1]):
        kept_tokenizer(run, said if "/" not in name else {}, instead="")
        kept_base(run, said)


def test_a_run_from_another_run_keeps_what_that_kept(tmp_path, refuses):
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "checkpoints" / "8" / "state").mkdir(parents=True)
    for source in (first, first / "checkpoints", first / "checkpoints" / "8"):
        keep_files(second, started_from=source)  # Bytes: there is nothing to keep.
        assert kept_base(second, {"from_weights": str(source)}) == second / "base"
        assert not list((second / "base").iterdir())
    (first / "base").mkdir()
    (first / "base" / "config.json").write_text("{}")
    (first / "tokenizer.json").write_text("[]")
    keep_files(second, started_from=first / "checkpoints")
    kept = sorted(path.name for path in (second / "base").iterdir())
    assert kept == ["config.json", "tokenizer.json"]
    (tmp_path / "private_key").write_text("secret")
    (first / "base" / "merges.txt").symlink_to(tmp_path / "private_key")
    with refuses("weights.file_outside_run", "merges.txt", "private_key"):
        keep_files(second, started_from=first)
    assert not (second / "base" / "merges.txt").exists()


def test_settings_that_a_run_has_not_kept_are_not_looked_for(tmp_path, refuses):
    said = {"from_weights": str(tmp_path / "theirs")}
    with refuses("weights.base_gone", "theirs", "--like"):
        kept_base(tmp_path / "run", said)
    assert kept_base(tmp_path, {"from_weights": "theirs.gguf"}) is None
    assert kept_base(tmp_path, {}) is None


@pytest.mark.parametrize("ends, wanted", [([3], 3), ([3, 5], [3, 5]), ([], None)])
def test_what_ends_a_text_is_exported(ends, wanted, folders, theirs, tmp_path):
    weights = theirs("llama")
    like = altered(folders["llama"], tmp_path / "like", eos_token_id=9, bos_token_id=1)
    (like / "generation_config.json").write_text('{"eos_token_id": 9, "top_k": 4}')
    write_weights(
        tmp_path / "to", weights.config, weights.params, like=like, stop_tokens=ends
    )
    written = [
        json.loads((tmp_path / "to" / name).read_text())
        for name in ("config.json", "generation_config.json")
    ]
    assert [one["eos_token_id"] for one in written] == [wanted, wanted]
    assert (written[0]["bos_token_id"], written[1]["top_k"]) == (1, 4)
    write_weights(tmp_path / "bare", weights.config, weights.params, stop_tokens=ends)
    bare = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert (bare["bos_token_id"], bare["eos_token_id"]) == (None, wanted)


def test_what_no_model_of_theirs_has_is_not_exported(tmp_path, refuses):
    from dataclasses import replace

    from meshpar.models.presets import PRESETS, configure

    windowed = replace(PRESETS["test"], window=4)
    with refuses("weights.window_in_all_layers", "window=4", "llama", "qwen2", "qwen3"):
        write_weights(tmp_path, windowed, {})
    with refuses("weights.only_of_deepseek", "bias_rate=0.001", "mixtral", "qwen3_moe"):
        write_weights(tmp_path, PRESETS["tiny-moe"], {})
    tiny_t5 = configure("tiny-t5", scaled_scores=False, activation="relu")
    with refuses("weights.value_not_of_family", "mlp_bias=True", "t5", False):
        write_weights(tmp_path, tiny_t5, {})
    with refuses("weights.missing_parameter", "'token_embed'"):
        write_weights(tmp_path, PRESETS["test"], {})


def test_an_array_without_a_place_in_their_files_is_refused(theirs, tmp_path, refuses):
    weights = theirs("llama")
    mixer = {"blocks": {"mixer": {"A": np.zeros(2)}}}
    given = dict(weights.params), {}
    given[0]["lora"] = {"A": np.zeros(2)}
    lost = "blocks.mixer.A", "lora.A", "LlamaConfig"
    with refuses("weights.parameter_without_place", *lost):
        write_weights(tmp_path / "new", weights.config, given[0], mixer)
    assert not (tmp_path / "new").exists()
    counted = {"blocks": {"mlp": {"router": {"tokens": np.zeros((2, 4))}}}}
    assert write_weights(tmp_path / "new", weights.config, weights.params, counted)


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (lambda like: None, ("weights.no_like_folder", "typo")),
        (lambda like: like.write_text("{}"), ("weights.no_like_folder", "typo")),
        (
            lambda like: config_in(like, "{"),
            ("weights.unreadable_json", "config.json"),
        ),
        (
            lambda like: config_in(like, "[1]"),
            ("weights.not_json_object", "config.json", [1]),
        ),
    ],
)
def test_a_like_that_cannot_be_read_is_refused(
    make, refusal, theirs, tmp_path, refuses
):
    weights = theirs("llama")
    like = tmp_path / "typo"
    make(like)
    words = refusal[0] != "weights.unreadable_json"  # Python's json's.
    with refuses(*refusal, words=words):
        write_weights(tmp_path / "new", weights.config, weights.params, like=like)
    assert not (tmp_path / "new").exists()


def config_in(folder, text):
    folder.mkdir()
    (folder / "config.json").write_text(text)


def test_layers_are_read_as_many_at_once_as_memory_has_room_for(monkeypatch):
    monkeypatch.setattr(writing, "_BLOCK_VALUES", 20)  # of 6 values each
    values, reads = np.arange(48).reshape(8, 2, 3), []

    class Stored:
        shape = values.shape

        def __getitem__(self, index):
            reads.append(index)
            return values[index]

    block, stored_ = writing._Block(), (Stored(), Stored())
    for one in stored_:
        for layer in range(8):
            np.testing.assert_array_equal(block.layer(one, layer), values[layer])
    assert len(reads) == 2 * 3
    np.testing.assert_array_equal(block.layer(stored_[0], None), values)
