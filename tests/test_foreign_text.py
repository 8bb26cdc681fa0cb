"""Text and paths of others: nothing of them acts on the terminal, or is misread."""

import unicodedata
from argparse import Namespace
from pathlib import Path

import pytest

from meshpar.cli.generate import _completed, _for_terminal
from meshpar.cli.parsing import one_line
from meshpar.data.sources import DataSource
from meshpar.errors import InputError, local_path, printable
from meshpar.models.convert.weights import read_config, read_weights
from meshpar.recipes.config import RunConfig
from meshpar.recipes.finetune import FinetuneConfig
from meshpar.recipes.loaded import load
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.checkpoint.contents import read_contents

CONTROLS = [
    character
    for character in map(chr, range(0x100))  # Unicode has no other controls
    if unicodedata.category(character) == "Cc" and character not in "\n\t"
]


def test_no_control_character_is_printed_and_all_else_is_as_it_was():
    for character in (*CONTROLS, "\u202e", "\u2066"):
        assert character not in printable(f"a{character}b")
    for text in ("plain\n\ttext", "Ω λ \u3000 你好", "👩\u200d🔬", "\u00a0"):
        assert printable(text) == text


def test_an_error_about_a_foreign_name_is_one_harmless_line():
    line = one_line(InputError("no array '\x1b]0;title\x07'\nin the file"))
    assert line == "no array '\\x1b]0;title\\x07'; in the file"


class Engine:
    """Gives one text, a character a token."""

    def __init__(self, text):
        self._text, self.done = text, ""

    def submit(self, request):
        pass

    def run(self):
        for at, character in enumerate(self._text):
            self.done += character
            is_last = at == len(self._text) - 1
            yield Namespace(
                request=0, token=1, logprob=0.0, finish="end" if is_last else None
            )

    def text(self, request):
        return self.done


@pytest.mark.parametrize("raw", [False, True])
def test_generated_text_is_escaped_unless_it_is_asked_for_raw(raw, capsys):
    show = lambda text: _for_terminal(Namespace(raw=raw), text)  # noqa: E731
    text = "a \x1b[31mred\x1b[0m b"
    found = _completed(Engine(text), ["say"], [Namespace(stop=())], show)
    printed = capsys.readouterr().out
    assert ("\x1b" in printed) is raw
    assert found[0]["text"] == text and "red" in printed


DOORS = {
    "run": lambda url: RunConfig(out=url),
    "text": lambda url: RunConfig(text=(url,)),
    "data": lambda url: DataSource.parse(str(url)),
    "fine-tuned": lambda url: FinetuneConfig(from_weights=url, text=("a.txt",)),
    "fine-tuned into": lambda url: FinetuneConfig(
        from_weights=".", out=url, text=("a.txt",)
    ),
    "loaded": load,
    "weights": read_weights,
    "config": read_config,
    "checkpoints": Checkpoints,
    "contents": read_contents,
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://b/r", "file:///tmp/run"])
def test_a_url_is_refused_where_files_of_this_machine_are_meant(url, door, refuses):
    for given in (url, Path(url)):
        with refuses("value.url", str(given)):
            DOORS[door](given)


def test_paths_with_colons_are_paths():
    for path in ("a:b/c", "runs/12:30", "./gs:/x", "C:/runs"):
        assert local_path("--out", path) == Path(path)
