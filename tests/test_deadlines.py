"""What others wrote ends in time: templates, expressions, and sizes without end."""

import json
import time

import pytest

from meshpar.cli.main import main
from meshpar.data.tokenizer import FileTokenizer, whole_texts_tokenizer
from meshpar.errors import DataError
from meshpar.machine.emulate import MOST_DEVICES, emulate
from meshpar.models.convert.chat_template import render_chat
from tests.bpe import write_bpe

LOOP = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


def test_a_template_that_does_not_end_is_ended(monkeypatch, refuses):
    monkeypatch.setattr("meshpar.models.convert.chat_template._MOST_S", 0.3)
    with refuses("data.chat_template_without_end", words=False):
        render_chat(LOOP, [])
    for _ in range(100):  # Nothing of the deadline comes later.
        time.sleep(0.01)


def with_expression(tmp_path, expression):
    path = write_bpe(tmp_path / "tokenizer.json", ["to be or not to be"])
    said = json.loads(path.read_text())
    said["pre_tokenizer"] = {
        **{"type": "Split", "pattern": {"Regex": expression}},
        **{"behavior": "Isolated", "invert": False},
    }
    path.write_text(json.dumps(said))
    return path


def test_an_expression_that_does_not_end_is_told(tmp_path, monkeypatch, refuses):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr("meshpar.data.tokenizer._LEAST_S", 0.3)
    monkeypatch.setattr("meshpar.data.tokenizer._CHARACTERS_PER_S", 1e9)
    path = with_expression(tmp_path, "(a|a)+d?(?!.)")
    text = ("a" * 20 + "b") * 20
    for encode in (
        lambda: FileTokenizer(path).encode([text]),
        lambda: whole_texts_tokenizer(path).encode(text),
    ):
        with refuses("data.tokenizer_without_end", words=False, kind=DataError):
            encode()


def test_an_expression_that_the_library_gives_up_is_told(tmp_path, refuses):
    pytest.importorskip("tokenizers")
    path = with_expression(tmp_path, "(a+)+$")
    with refuses("data.tokenizer_without_end", words=False, kind=DataError):
        whole_texts_tokenizer(path).encode("a" * 40 + "b")


def test_more_virtual_devices_than_a_process_starts_are_refused(refuses):
    with refuses("mesh.too_many_virtual_devices", 99999, MOST_DEVICES):
        emulate(99999)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (
            "plan --preset tiny --hardware h100-80gb --devices 8 --global-batch 8 "
            "--plans 1000000000000",
            "plan.too_many_plans",
        ),
        (
            "schedule --schedule 1f1b --stages 9999 --microbatches 2",
            "schedule.too_large",
        ),
    ],
)
def test_sizes_without_end_are_refused_at_once(words, key, refuses_command):
    refuses_command(words.split(), key)


def test_a_cache_beyond_all_memory_is_refused(refuses):
    import jax

    from meshpar.generation.programs import Programs
    from meshpar.models.presets import build

    devices = jax.devices()[:1]
    for sizes in ({"max_seq": 10**9, "slots": 1}, {"max_seq": 8, "slots": 10**9}):
        with refuses("generation.cache_too_large", words=False):
            Programs.from_model(
                build("tiny", layers=1), "data=1", devices=devices, **sizes
            )


def test_prompts_of_a_device_are_not_read(capsys):
    words = ["generate", "--from", ".", "--prompts", "/dev/zero"]
    assert main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
