"""`meshpar generate` continues texts from a run's checkpoint and from others' files."""

import io
import json

import pytest

from meshpar.cli.main import main
from meshpar.data.tokenizer import ByteTokenizer
from meshpar.recipes import pretrain
from meshpar.recipes.config import RunConfig


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_text):
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "validate", lambda *args: 5.25)
        patch.setattr(pretrain, "sample", lambda *args: pretrain.np.array([65]))
        pretrain.pretrain(
            RunConfig(
                preset="test",
                model="vocab=256",
                layout="data=2",
                seq=16,
                global_batch=4,
                steps=1,
                text=(small_text,),
                out=out,
            )
        )
    return out


def generated(capsys, *words):
    assert main(["generate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_checkpoint_goes_on_with_every_prompt(run, capsys, monkeypatch):
    words = ("--from", run, "--max-tokens", 3)
    found = generated(capsys, *words, "--prompt", "To be", "--prompt", "or")
    assert [one["prompt"] for one in found] == ["To be", "or"]
    for one in found:
        assert len(one["tokens"]) == len(one["logprobs"]) == 3
        assert one["text"] == ByteTokenizer().decode(one["tokens"])
        assert all(logprob < 0 for logprob in one["logprobs"])
    monkeypatch.setattr("sys.stdin", io.StringIO("To be\nor\n"))
    assert generated(capsys, *words) == found
    assert (
        generated(capsys, *words, "--layout", "tensor=2", "--prompt", "To be")[0][
            "tokens"
        ]
        == found[0]["tokens"]
    )


def test_the_text_of_one_prompt_is_printed(run, capsys):
    words = ["generate", "--from", str(run), "--prompt", "To be", "--max-tokens", "2"]
    assert main([*words, "--temperature", "1", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("To be")
    assert main([*words, "--temperature", "1", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "nowhere"], "no 'nowhere'"),
        (["--from", "{run}", "--step", "9"], "no checkpoint of step 9"),
        (["--from", "{run}", "--tokenizer", "none.json"], "none.json"),
        (["--from", "{run}", "--top-p", "2"], "top_p=2.0"),
        (["--from", "{run}", "--prompts", "none.txt"], "none.txt"),
        (["--from", "{run}", "--layout", "data=0"], "data=0"),
    ],
)
def test_bad_input_is_one_line(run, capsys, words, message):
    words = [word.format(run=run) for word in words]
    assert main(["generate", "--prompt", "To be", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
