"""Files of others: each is read within bounds, or refused in one line."""

import json
import os
import struct
import time

import pytest

from meshpar.cli.main import main
from meshpar.data.documents import jsonl_documents
from meshpar.errors import DataError, Skipped
from meshpar.foreign_files import (
    parse_json,
    parse_toml,
    parse_yaml,
    read_bytes,
    read_json,
    read_json_object,
    read_text,
    read_toml,
)
from meshpar.models.convert.chat_template import read_template
from meshpar.models.convert.gguf_file import GGUFFile
from meshpar.models.convert.gguf_header import read_header
from meshpar.models.convert.weights import read_weights
from meshpar.train.checkpoint.choice import hide_late_answers
from meshpar.train.checkpoint.files import read_run

KEY = "weights.unreadable_json"
DEEP = b"[" * 100_000

BAD_JSON = {
    "deep": DEEP,
    "digits": b"1" * 5000,
    "beyond floats": b"1" * 400,
    "no UTF-8": b'{"a": "\xff"}',
    "cut": b'{"a":',
    "empty": b"",
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_that_is_none_is_refused_in_one_line(tmp_path, refuses, name):
    (tmp_path / "a.json").write_bytes(BAD_JSON[name])
    with refuses(KEY, "a.json'") as caught:
        read_json(tmp_path / "a.json", key=KEY)
    assert "\n" not in str(caught.value)


def test_a_pipe_a_folder_and_a_device_are_refused_and_not_waited_for(tmp_path, refuses):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in (
        (tmp_path / "pipe", "pipe"),
        (tmp_path, "folder"),
        ("/dev/zero", "device"),
    ):
        for reader in (read_bytes, read_text, read_json, read_toml):
            with refuses(KEY, f"a {kind}", words=False):
                reader(path, key=KEY)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "absent"])
def test_a_name_that_no_file_has_is_refused(tmp_path, refuses, name):
    with refuses(KEY, words=False):
        read_text(tmp_path / name, key=KEY)


def test_a_file_that_is_too_large_is_refused(tmp_path, refuses):
    (tmp_path / "a").write_bytes(b"x" * 101)
    with refuses(KEY, "100 bytes"):
        read_bytes(tmp_path / "a", key=KEY, most=100)


def test_json_of_another_shape_is_refused_with_a_short_value(tmp_path, refuses):
    (tmp_path / "a.json").write_text(json.dumps([list(range(1000))]))
    with refuses("weights.not_json_object") as caught:
        read_json_object(
            tmp_path / "a.json", key=KEY, shape_key="weights.not_json_object"
        )
    assert len(str(caught.value)) < 300


BAD_TOML = {
    "deep": "a = " + "[" * 10_000,
    "nested": "[" + "a." * 150 + "a]",
    "long key": "a." * 30_000 + "a = 1",
    "many bits": "a = 0x" + "f" * 100,
    "none": "a = ",
}


@pytest.mark.parametrize("name", BAD_TOML)
def test_toml_that_is_none_or_endless_is_refused(name):
    began = time.monotonic()
    with pytest.raises(ValueError) as caught:
        parse_toml(BAD_TOML[name])
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 60


def test_toml_with_many_dots_in_its_texts_is_read():
    paths = [f"web/{at}.a.jsonl" for at in range(500)]
    assert parse_toml(f"data = {json.dumps(paths)}") == {"data": paths}


ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"{chr(at)}: &{chr(at)} [{','.join(9 * ['*' + chr(at - 1)])}]"
    for at in range(ord("b"), ord("k"))
)
BAD_YAML = {
    "aliases": ALIASES,
    "cycle": "a: &a [*a]",
    "deep": "a: " + "[" * 5_000,
    "date": "a: 2024-13-45",
    "list as a key": "? [a]\n: b",
    "object": "a: !!python/object:os.system x",
    "many bits": "a: " + ":".join(["1"] * 5000),
    "long": "a: [" + "x," * 100_000 + "]",
}


@pytest.mark.parametrize("name", BAD_YAML)
def test_yaml_that_is_none_or_endless_is_refused(name):
    with pytest.raises(ValueError) as caught:
        parse_yaml(BAD_YAML[name])
    assert "\n" not in str(caught.value)


def test_yaml_gives_its_values_and_the_keys_at_its_top():
    assert parse_yaml("a: 1\nb: &x [2]\nc: *x") == (
        {"a": 1, "b": [2], "c": [2]},
        ["a", "b", "c"],
    )
    assert parse_yaml("") == (None, [])


def test_a_line_of_json_may_have_the_numbers_that_settings_have():
    assert parse_json('{"model_max_length": 1000000000000000019884624838656}')


@pytest.mark.parametrize("content", [DEEP, b"[1]", b"\xff", b"1" * 5000])
def test_settings_of_a_tokenizer_that_are_none_are_told(tmp_path, refuses, content):
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with refuses("data.unreadable_tokenizer_config", words=False):
        read_template(tmp_path)


def test_a_template_that_is_no_text_is_told(tmp_path, refuses):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with refuses("data.unreadable_chat_template"):
        read_template(tmp_path)


@pytest.mark.parametrize("content", [DEEP, b"[1]", b"", b"\xff"])
def test_what_a_checkpoint_says_of_its_run_is_an_object(tmp_path, refuses, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metadata").write_bytes(content)
    with refuses("checkpoint.unreadable", words=False):
        read_run(tmp_path)


# GGUF: a count of tensors, one of named values, then both.


def gguf(*parts: bytes, tensors: int = 0, values: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, values) + b"".join(parts)


def text(value: bytes, size: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if size is None else size) + value


NAME = text(b"general.architecture")
BAD_GGUF = {
    "empty": b"",
    "of another kind": b"PK\x03\x04" + bytes(100),
    "version": b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
    "cut": gguf()[:10],
    "2^60 tensors": gguf(tensors=1 << 60),
    "2^60 values": gguf(values=1 << 60),
    "a name of 2^60": gguf(text(b"x", 1 << 60), values=1),
    "a text of 2^60": gguf(NAME, struct.pack("<I", 8), text(b"", 1 << 60), values=1),
    "a list of 2^60": gguf(NAME, struct.pack("<IIQ", 9, 0, 1 << 60), values=1),
    "a list of 2^22": gguf(NAME, struct.pack("<IIQ", 9, 4, 1 << 22), values=1),
    "a list of lists": gguf(NAME, struct.pack("<IIQ", 9, 9, 1), values=1),
    "a type that is none": gguf(NAME, struct.pack("<I", 77), values=1),
    "a tensor of 2^120": gguf(
        NAME, struct.pack("<IQQIQ", 2, 1 << 60, 1 << 60, 0, 0), tensors=1
    ),
    "an offset of 2^60": gguf(NAME, struct.pack("<IQIQ", 1, 1, 0, 1 << 60), tensors=1),
    "a cut tensor": gguf(NAME, struct.pack("<IQIQ", 1, 4, 0, 0), tensors=1),
    "a name twice": gguf(*(2 * (NAME, struct.pack("<I", 8), text(b"llama"))), values=2),
    "a name of no text": gguf(
        text(b"\xff\xfe"), struct.pack("<I", 8), text(b"llama"), values=1
    ),
}


@pytest.mark.parametrize("name", BAD_GGUF)
def test_a_gguf_file_whose_header_is_wrong_is_told(tmp_path, refuses, name):
    pytest.importorskip("gguf")
    (tmp_path / "a.gguf").write_bytes(BAD_GGUF[name])
    with refuses("weights.unreadable_file", words=False) as caught:
        GGUFFile(tmp_path / "a.gguf")
    assert "\n" not in str(caught.value)


def test_a_gguf_file_without_a_table_of_tokens_is_told(tmp_path, refuses):
    pytest.importorskip("gguf")
    values = NAME, struct.pack("<I", 8), text(b"llama")
    (tmp_path / "a.gguf").write_bytes(gguf(*values, values=1))
    read_header(tmp_path / "a.gguf")
    with refuses("weights.missing_tensor", "'token_embd.weight'", words=False):
        GGUFFile(tmp_path / "a.gguf").shape("token_embd.weight")


@pytest.mark.parametrize("size", [1 << 60, (1 << 64) - 1, 1 << 26])
def test_a_safetensors_header_beyond_any_model_is_told(tmp_path, refuses, size):
    pytest.importorskip("safetensors")
    config = {
        **{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8},
        **{"num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 8},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", size) + b"{}")
    with refuses("weights.unreadable_file", f"{size:,}", words=False):
        read_weights(tmp_path)


def test_a_config_with_heads_beyond_any_models_is_told_at_once(refuses):
    from meshpar.models.presets import build

    with refuses("model.head_too_large", 1 << 15):
        build(preset="tiny", embed=1 << 15, heads=1, kv_heads=1)
    with refuses("value.above_limit", "vocab", 10**20):
        build(preset="tiny", vocab=10**20)


def test_a_line_that_is_longer_than_any_document_is_told_or_skipped(
    tmp_path, refuses, monkeypatch
):
    monkeypatch.setattr("meshpar.data.documents._LONGEST_BYTES", 100)
    path = tmp_path / "a.jsonl"
    long = json.dumps({"text": "x" * 450})
    path.write_text(f'{{"text": "one"}}\n{long}\n{{"text": "two"}}\n')
    skipped = Skipped(policy="skip")
    assert [*jsonl_documents(path, "text", skipped)] == ["one", "two"]
    assert skipped.count == 1
    with refuses("data.line_too_long", 2, 100, kind=DataError):
        list(jsonl_documents(path, "text", Skipped(policy="stop")))


def test_a_fault_of_the_program_has_a_status_of_its_own(monkeypatch, capsys):
    def fail(args):
        raise KeyError("mlp")

    monkeypatch.setattr("meshpar.cli.schedule.run", fail)
    words = ["schedule", "--schedule", "1f1b", "--stages", "2", "--microbatches", "2"]
    assert main(words) == 70
    captured = capsys.readouterr()
    assert captured.out == ""
    *trace, last = captured.err.splitlines()
    assert trace[0].startswith("Traceback") and "KeyError: 'mlp'" in last
    assert main([*words, "--json"]) == 70
    assert json.loads(capsys.readouterr().out)["error"]["key"] == "program.fault"


def test_a_path_that_no_file_system_takes_is_told_while_options_are_parsed(capsys):
    words = ["schedule", "--schedule", "1f1b", "--stages", "2", "--microbatches", "2"]
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main([*words, "--trace", "/" + "x" * 5000]))
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_late_answers_of_a_full_disk_leave_no_trace(monkeypatch, capsys):
    """As TensorStore's threads call Orbax's event loop when it is closed."""
    import asyncio
    import ctypes
    import sys

    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    hide_late_answers()
    loop = asyncio.new_event_loop()
    loop.close()
    call = ctypes.CFUNCTYPE(None)(lambda: loop.call_soon_threadsafe(print))
    call()  # A frame of this program's is in its trace: that one stays.
    assert len(seen) == 1
    trace = seen[0].exc_traceback.tb_next
    late = type(seen[0])((RuntimeError, seen[0].exc_value, trace, None, None))
    sys.unraisablehook(late)
    assert len(seen) == 1
