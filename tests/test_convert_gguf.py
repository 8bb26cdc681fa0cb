"""GGUF files as llama.cpp writes them, beside safetensors of the same model."""

from dataclasses import replace

import numpy as np
import pytest

from meshpar.models.convert import gguf_file
from meshpar.models.convert.chat_template import render_chat
from meshpar.models.convert.weights import read_config, read_weights
from meshpar.recipes.loaded import load
from tests.test_convert import by_path
from tests.transformers_cases import write_model

gguf = pytest.importorskip("gguf")
pytest.importorskip("safetensors")

# Their name in a layer -> that of the file.
_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
_OF = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
_ENDS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(path, architecture, tensors, tokens=(), **said):
    """Write tensors and byte pairs as `convert_hf_to_gguf.py` does."""
    writer = gguf.GGUFWriter(path, architecture)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        pairs = [" ".join(one) for one in tokens if len(one) == 2]
        writer.add_token_merges(pairs)
        writer.add_eos_token_id(len(tokens) - 1)
    for key, value in said.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(name, value)
    for name, values in tensors.items():
        stem = name.removesuffix(".weight")
        if stem in _ENDS:
            new = _ENDS[stem]
        else:
            _, _, layer, *rest = stem.split(".")
            names = {**_NAMES, **_OF[architecture]}
            new = f"blk.{layer}.{names['.'.join(rest)]}"
        if architecture == "gemma3" and "norm" in name:
            values = values + np.float32(1)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = 4 if "q_proj" in name else 2
            half = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2)
            values = np.ascontiguousarray(half.reshape(values.shape))
        writer.add_tensor(f"{new}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


SAID = {
    "block_count": 2,
    "embedding_length": 16,
    "feed_forward_length": 24,
    "attention__head_count": 4,
    "attention__head_count_kv": 2,
    "attention__layer_norm_rms_epsilon": 1e-6,
}


@pytest.fixture
def tensors_of(tmp_path):
    from safetensors.numpy import load_file

    def found(family):
        folder = write_model(tmp_path / family, family)
        return folder, load_file(folder / "model.safetensors")

    return found


@pytest.mark.parametrize("family", ["smollm2", "gemma3"])
def test_gguf_gives_the_same_values_as_safetensors(family, tensors_of, tmp_path):
    folder, tensors = tensors_of(family)
    path, said = tmp_path / "model.gguf", dict(SAID)
    if family == "gemma3":
        said |= {"block_count": 5, "attention__key_length": 8}
        said |= {"attention__sliding_window": 4}
    write_gguf(path, "gemma3" if family == "gemma3" else "llama", tensors, **said)
    wanted = read_weights(folder)
    # A file does not say how often all tokens are seen, nor what scores are divided by.
    given = wanted.config if family == "gemma3" else None
    found = read_weights(path, given)
    if given is None:
        assert found.config == replace(wanted.config, head_dim=0)
    for name, leaf in by_path(wanted.params).items():
        values = by_path(found.params)[name][...]
        tolerance = 2e-7 if family == "gemma3" and "norm" in name else 0
        np.testing.assert_allclose(values, leaf[...], atol=tolerance, rtol=0)


def test_a_model_and_its_tokenizer_come_from_one_opening(
    tensors_of, tmp_path, monkeypatch
):
    folder, tensors = tensors_of("smollm2")
    vocab, letters = len(tensors["model.embed_tokens.weight"]), "abcdefghijkl"
    pairs = [one + other for one in letters for other in letters]
    tokens = [*letters, *pairs][:vocab]
    write_gguf(tmp_path / "a.gguf", "llama", tensors, tokens=tokens, **SAID)
    opened = []

    def counted(path, read=gguf_file.read_header):
        opened.append(path)
        return read(path)

    monkeypatch.setattr(gguf_file, "read_header", counted)
    loaded = load(tmp_path / "a.gguf")
    assert opened == [tmp_path / "a.gguf"]
    assert loaded.stop_tokens == (vocab - 1,)
    assert loaded.tokenizer.encode("aab").ids == [tokens.index("aa"), 1]
    wanted = by_path(read_weights(folder).params)
    for name, leaf in by_path(loaded.params).items():
        np.testing.assert_array_equal(leaf[...], wanted[name][...])


def test_a_header_has_what_the_package_reads(tensors_of, tmp_path):
    _, tensors = tensors_of("smollm2")
    path, said = tmp_path / "a.gguf", {**SAID, "rope__freq_base": 5e5}
    write_gguf(path, "llama", tensors, tokens=["a", "\u00e9", "ab"], **said)
    theirs, ours = gguf.GGUFReader(path), gguf_file.GGUFFile(path)
    known = {key: one.contents() for key, one in theirs.fields.items()}
    assert {key: ours.metadata(key) for key in ours.keys} == {
        key: value for key, value in known.items() if not key.startswith("GGUF.")
    }
    assert len(ours.names) == len(theirs.tensors) > 0
    for one in theirs.tensors:
        assert ours.shape(one.name) == tuple(reversed(one.shape.tolist()))
        whole = tuple(slice(None) for _ in one.shape)
        np.testing.assert_array_equal(ours.read(one.name, whole), one.data)
        assert (
            one.data[1:3].tobytes()
            == ours.read(one.name, (slice(1, 3), *whole[1:]))
            .astype(one.data.dtype)
            .tobytes()
        )


def test_a_part_of_a_quantized_matrix_is_read_by_rows(tmp_path, tensors_of):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("x.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from meshpar.models.convert.gguf_file import GGUFFile

    file = GGUFFile(path)
    assert file.shape("x.weight") == (8, 64)
    part = file.read("x.weight", (slice(2, 4), slice(32, 64)))
    np.testing.assert_allclose(part, values[2:4, 32:], atol=0.02)
    assert file.bytes_read == 2 * (2 + 32) * 2  # a scale of 2 bytes for 32 values


def test_another_architecture_and_scaled_positions_are_refused(
    tmp_path, tensors_of, refuses
):
    _, tensors = tensors_of("smollm2")
    for name, said, refusal in (
        (
            "a",
            {"expert_count": 4},
            ("weights.experts_in_gguf", "llama.expert_count=4"),
        ),
        ("b", {}, ("weights.missing_config_value", "llama.attention.head_count")),
    ):
        path = tmp_path / f"{name}.gguf"
        given = {**SAID, **said} if said else {}
        write_gguf(path, "llama", tensors, **given)
        with refuses(*refusal, path.name):
            read_config(path)
    (tmp_path / "c.gguf").write_bytes(b"no such file")
    with refuses("weights.unreadable_file", "c.gguf", words=False):
        read_config(tmp_path / "c.gguf")


def test_layers_that_would_all_see_a_window_are_refused(tensors_of, tmp_path, refuses):
    _, tensors = tensors_of("gemma3")
    path = tmp_path / "model.gguf"
    write_gguf(path, "gemma3", tensors, **{**SAID, "block_count": 5})
    with refuses("weights.all_layers_windowed", 5, "6th"):
        read_config(path)


def test_a_chat_template_that_refuses_is_one_line(refuses):
    template = "{{ raise_exception('no system message') }}"
    with refuses("data.chat_template_refuses", "no system message"):
        render_chat(template, [{"role": "system", "content": "x"}])
