"""Fine-tuning lowers the loss of a model of others, and what it writes is merged."""

import json
import shutil
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tyro

from meshpar import make_train_step
from meshpar.cli.main import main as command
from meshpar.errors import DataError
from meshpar.model.lora import TARGETS
from meshpar.model.parameter import is_parameter
from meshpar.models.convert.chat_template import ChatTemplate, read_template
from meshpar.models.convert.weights import read_weights
from meshpar.models.convert.writing import write_weights
from meshpar.models.presets import build_config, configure
from meshpar.recipes.conversations import ConversationRows, read_conversations
from meshpar.recipes.finetune import (
    FinetuneConfig,
    described,
    finetune,
    main,
    make_step,
    refuse_other_run,
    template_date,
    tokenized_rows,
    validate,
)
from meshpar.recipes.loaded import WithoutTokenizer, load
from meshpar.recipes.options import with_values
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.checkpoint.contents import read_arrays
from meshpar.train.data import TokenWindows
from meshpar.train.folder_in_use import folder_in_use
from tests.bpe import write_bpe
from tests.refusals import names

pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")
optax = pytest.importorskip("optax")

TEMPLATE = (
    "{% for one in messages %}<{{ one.role }}>{{ one.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ENDS = [0, 7]
SAID = [
    {"role": "user", "content": "Who is there"},
    {"role": "assistant", "content": "Nay answer me"},
    {"role": "user", "content": "Long live the king"},
    {"role": "assistant", "content": "Barnardo"},
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory, small_text):
    """A folder as transformers writes it, of random values."""
    like = tmp_path_factory.mktemp("like")
    write_bpe(like / "tokenizer.json", [small_text.read_text()])
    (like / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"})
    )
    (like / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    folder = tmp_path_factory.mktemp("theirs") / "model"
    config = configure("test", vocab=300)
    write_weights(folder, config, values_of(build_config(config)), like=like)
    return folder


def values_of(model):
    """Scales of 1, and small values of all that is multiplied."""
    rng = np.random.default_rng(0)

    def drawn(parameter):
        values = rng.normal(0, 0.1, parameter.stacked_shape)
        is_scale = len(parameter.shape) == 1
        return (np.ones_like(values) if is_scale else values).astype(np.float32)

    return jax.tree.map(drawn, model.parameters, is_leaf=is_parameter)


@pytest.fixture(scope="module", autouse=True)
def shared_steps():
    """Starts of the same model and options share their step."""
    recipe = sys.modules[finetune.__module__]
    kept, plain = {}, recipe.make_step

    def make_step(config, loaded):
        key = loaded.config, config.lora, config.layout
        key += config.steps, config.learning_rate
        if key not in kept:
            kept[key] = plain(config, loaded)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "make_step", make_step)
        yield


SAME = ["--layout", "data=2,tensor=2", "--steps", "12", "--learning-rate", "0.03"]
SAME += ["--seq", "32"]
"""Of the run below, on a command line."""


@pytest.fixture(scope="module")
def run(theirs, small_text, tmp_path_factory):
    """A folder, and how its run ended."""
    return finetune(
        FinetuneConfig(
            from_weights=theirs,
            out=tmp_path_factory.mktemp("runs") / "run",
            text=(small_text,),
            layout="data=2,tensor=2",
            rank=4,
            steps=12,
            seq=32,
            global_batch=4,
            validation_rows=3,
            save_every=8,
            learning_rate=0.03,
        )
    )


def test_the_loss_of_text_held_out_falls(run):
    assert run.before == pytest.approx(np.log(300), rel=0.05)
    assert run.after < run.before - 0.05


def test_it_saves_on_the_way(run):
    folders = (run.folder / "checkpoints").iterdir()
    assert {one.name for one in folders if one.is_dir()} == {"8", "12"}


def test_what_ends_a_text_is_kept(run, theirs):
    assert load(theirs).stop_tokens == load(run.folder).stop_tokens == tuple(ENDS)


@pytest.mark.parametrize("num", [3, 4, 9])
def test_so_many_held_out_rows_are_looked_at_as_are_asked_for(theirs, num):
    seen = []

    class Step:
        @staticmethod
        def evaluate(state, batch):
            seen.append(batch["weights"].sum())
            return {"loss_sum": 2 * seen[-1], "weight_sum": seen[-1]}

    config = FinetuneConfig(from_weights=theirs, validation_rows=num, global_batch=4)
    rows = TokenWindows(np.arange(101, dtype=np.int32), 10)
    state = SimpleNamespace(step=0)
    assert validate(config, Step, state, rows) == 2.0
    assert sum(seen) == 10 * num


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on(run, theirs, small_text, tmp_path):
    """From the checkpoint of step 8, to the same weights after step 12."""
    out = tmp_path / "run"
    shutil.copytree(run.folder, out)
    shutil.rmtree(out / "checkpoints" / "12")
    words = ["--from", str(theirs), "--out", str(out), "--resume", "auto"]
    words += ["--text", str(small_text), *SAME, "--rank", "4", "--global-batch", "4"]
    assert main([*words, "--validation-rows", "3"]) == 0
    (_, found), (_, wanted) = (read_arrays(folder) for folder in (out, run.folder))
    jax.tree.map(
        lambda one, other: np.testing.assert_array_equal(one[...], other[...]),
        found["params"],
        wanted["params"],
    )


def test_what_is_exported_is_merged(run, theirs, tmp_path):
    assert command(["export", str(run.folder), "--to", str(tmp_path / "to")]) == 0
    before, after = read_weights(theirs), read_weights(tmp_path / "to")
    _, arrays = read_arrays(run.folder)
    down = arrays["params"]["blocks"]["mlp"]["down"]
    a, b = down["a"][...], down["b"][...]
    assert a.shape == (2, 64, 4) and b.shape == (2, 4, 32) and np.abs(b).max() > 0
    wanted = before.params["blocks"]["mlp"]["down"][...] + 16 / 4 * a @ b
    found = after.params["blocks"]["mlp"]["down"][...]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    for path in ("token_embed", "final_norm.scale"):
        one, other = before.params, after.params
        for key in path.split("."):
            one, other = one[key], other[key]
        np.testing.assert_array_equal(one[...], other[...])
    assert (tmp_path / "to" / "tokenizer.json").read_bytes()


def test_a_run_generates_from_what_is_merged(run, theirs):
    loaded = load(run.folder)
    step = make_train_step(
        loaded.model, optax.sgd(1.0), "data=1", devices=jax.devices()[:1]
    )
    tokens = np.arange(12).reshape(1, 12)
    found = step.logits(step.init(params=loaded.params), tokens)
    plain = step.logits(step.init(params=load(theirs).params), tokens)
    assert np.abs(found - plain).max() > 1e-3
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("To be")) == "To be"


def said_on_a_command_line(words):
    return tyro.cli(FinetuneConfig, args=with_values(words))


def test_another_run_does_not_take_its_place(run, theirs, small_text, refuses):
    words = ["--from", str(theirs), "--out", str(run.folder), "--rank", "4"]
    words += ["--text", str(small_text), *SAME]
    with refuses("run.folder_is_taken", 12, "--resume"):
        finetune(said_on_a_command_line(words))


def test_two_do_not_train_in_one_folder(run, theirs, small_text, refuses, monkeypatch):
    monkeypatch.setattr("meshpar.train.folder_in_use._WAIT_S", 0.1)
    config = FinetuneConfig(
        from_weights=theirs,
        out=run.folder,
        text=(small_text,),
        layout="data=2,tensor=2",
        rank=4,
        steps=12,
        seq=32,
        learning_rate=0.03,
        resume=True,
    )
    with folder_in_use(run.folder), refuses("run.folder_in_use", words=False):
        finetune(config)


def test_a_refused_start_leaves_the_tokenizer_as_it_was(
    run, theirs, small_text, tmp_path
):
    other = tmp_path / "other"
    shutil.copytree(theirs, other)
    write_bpe(other / "tokenizer.json", ["of other words entirely"])
    before = (run.folder / "tokenizer.json").read_bytes()
    words = ["--from", str(other), "--out", str(run.folder), "--text", str(small_text)]
    assert main([*words, *SAME, "--rank", "4"]) == 2
    assert (run.folder / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--rank", "2"], ("lora", "'rank': 4", "'rank': 2")),
        (["--rank", "4", "--seed", "1"], ("seed=0", 1)),
    ],
)
def test_another_run_is_not_gone_on_with(
    words, values, run, theirs, small_text, refuses
):
    given = ["--from", str(theirs), "--out", str(run.folder), "--resume", *words]
    given += ["--text", str(small_text), *SAME]
    with refuses("run.changed_option", *values):
        finetune(said_on_a_command_line(given))


def test_a_layout_without_sizes_is_refused(theirs, capsys, refuses):
    words = ["--from", str(theirs), "--layout", "data=-1"]
    with refuses("layout.open_size", "data=-1"):
        finetune(said_on_a_command_line(words))
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert names(line, "data=-1")


def test_only_what_the_assistant_says_counts(theirs):
    tokenizer = load(theirs).tokenizer
    rows = ConversationRows(
        [SAID],
        read_template(theirs),
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        seq=200,
    )
    row = rows[0]
    assert row["tokens"].shape == row["weights"].shape == (200,)
    counted = tokenizer.decode(
        row["targets"][row["weights"] > 0], skip_special_tokens=False
    )
    assert counted == "Nay answer me<|endoftext|>Barnardo<|endoftext|>"


def chats_of(folder, *answers):
    """A file of conversations, one an answer; every tenth is held out."""
    path = folder / "chats.jsonl"
    lines = [
        {"messages": [SAID[0], {"role": "assistant", "content": answer}]}
        for answer in answers
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def rows_of_chats(theirs, chats, **options):
    config = FinetuneConfig(from_weights=theirs, chat=chats, **options)
    return tokenized_rows(config, load(theirs))


@pytest.mark.parametrize("seq", [1, 2, 8])
def test_answers_of_which_nothing_is_left_are_refused(theirs, tmp_path, seq, refuses):
    chats = chats_of(tmp_path, *["Nay answer me"] * 20)
    with refuses("data.no_answer_kept", 18, f"--seq {seq}", kind=DataError):
        rows_of_chats(theirs, chats, seq=seq)


def test_held_out_answers_of_which_nothing_is_left_are_refused(
    theirs, tmp_path, refuses
):
    """Of the rows that are looked at: others of them may have some left."""
    long = "Long live the king " * 30 + "Barnardo"
    asked = [{"role": "user", "content": long}, SAID[1]]
    lines = [{"messages": SAID}] * 30
    lines[9] = {"messages": asked}
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(map(json.dumps, lines)))
    with refuses("data.no_answer_kept", 1, "held out", kind=DataError):
        rows_of_chats(theirs, chats, seq=64, validation_rows=1)
    rows_of_chats(theirs, chats, seq=64, validation_rows=2)


def test_answers_that_are_cut_are_counted(theirs, tmp_path, caplog):
    caplog.set_level("INFO")
    long = "Nay answer me " * 40
    chats = chats_of(tmp_path, *["Barnardo"] * 10, long, long, *["Barnardo"] * 8)
    train, _ = rows_of_chats(theirs, chats, seq=48)
    (line,) = caplog.messages
    said = sum(train.kept(index).said for index in range(18))
    kept = sum(int(train[index]["weights"].sum()) for index in range(18))
    assert 0 < kept < said
    assert names(line, "2 of 18 conversations to train on")
    assert names(line, f"{said - kept} of {said} tokens") and names(line, "--seq 48")


def test_nothing_is_told_where_nothing_is_cut(theirs, tmp_path, caplog):
    caplog.set_level("INFO")
    rows_of_chats(theirs, chats_of(tmp_path, *["Barnardo"] * 20), seq=200)
    assert caplog.messages == []


def test_what_a_resumed_run_has_otherwise_is_told(
    run, theirs, small_text, tmp_path, caplog
):
    """Data of the same name and another content too."""
    loaded, text = load(theirs), tmp_path / small_text.name
    text.write_text(small_text.read_text() + "more")
    config = FinetuneConfig(
        from_weights=theirs,
        out=run.folder,
        text=(text,),
        rank=4,
        layout="data=2",
        steps=14,
        seq=16,
        global_batch=8,
        learning_rate=0.01,
        resume=True,
    )
    step = make_step(config, loaded)
    caplog.set_level("INFO")
    with Checkpoints(run.folder / "checkpoints") as checkpoints:
        refuse_other_run(config, described(config, loaded, step), checkpoints)
    lines = [one.getMessage() for one in caplog.records if "recipes" in one.name]
    told = "layout", "steps 12 -> 14", "global_batch 4 -> 8", "seq 32 -> 16"
    told += "learning_rate 0.03 -> 0.01", f"-> {text}", "data crc32"
    assert len(lines) == len(told)
    assert all(any(one in line for line in lines) for one in told), lines


def test_a_resumed_run_keeps_the_day_of_its_chat_template(theirs, tmp_path):
    """Its rows have the tokens that they had; a run that begins has today's."""
    chats = chats_of(tmp_path, *["Barnardo"] * 20)
    config = FinetuneConfig(
        from_weights=theirs, out=tmp_path / "run", chat=chats, resume="auto"
    )
    today = {date.today(), template_date(config), date.today()}
    assert template_date(config) in today and len(today) <= 2
    assert template_date(replace(config, chat=None)) is None
    loaded, day = load(theirs), date(2024, 2, 29)
    step = SimpleNamespace(layout="data=1")
    said = described(config, loaded, step, day)
    assert said["chat_date"] == "2024-02-29"
    kept = config.out / "checkpoints" / "3" / "run"
    kept.mkdir(parents=True)
    (kept / "metadata").write_text(json.dumps(said))
    assert template_date(config) == template_date(replace(config, chat=None)) == day
    assert template_date(replace(config, resume=False)) != day
    train, held_out = tokenized_rows(config, loaded, day)
    assert train.template.today == held_out.template.today == day


def test_a_template_that_changes_what_was_said_is_refused(refuses):
    growing = ChatTemplate("{{ messages | length }}{{ messages[0].content }}")
    rows = ConversationRows([SAID], growing, lambda text: list(text.encode()), seq=9)
    with refuses("data.chat_template_changes_text", 1, kind=DataError):
        rows[0]


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("{}\n", ("data.no_messages", 1, "'messages'")),
        ("no JSON\n", ("data.not_json", 1)),
        (json.dumps({"messages": SAID[:1]}), ("data.no_assistant", 1)),
        (
            json.dumps({"messages": [{**SAID[0], "content": "a\ud800"}, *SAID[1:]]}),
            ("data.unpaired_surrogate", "line 1", "character 1"),
        ),
        (json.dumps({"messages": SAID}), ("data.too_few_conversations", 1, 2)),
    ],
)
def test_a_broken_file_of_conversations_is_named(tmp_path, text, refusal, refuses):
    file = tmp_path / "chats.jsonl"
    file.write_text(text)
    words = refusal[0] != "data.not_json"  # Those are Python's.
    with refuses(*refusal, "chats.jsonl", kind=DataError, words=words):
        read_conversations(file)


@pytest.mark.parametrize(
    "words", [["--text", "a", "b"], ["--text", "a", "--text", "b"]]
)
def test_all_texts_and_targets_that_are_given_are_meant(words, monkeypatch):
    configs = []
    monkeypatch.setattr(f"{finetune.__module__}.finetune", configs.append)
    assert main(["--from", "model", *words, "--targets", "query", "value"]) == 0
    assert configs[0].text == (Path("a"), Path("b"))
    assert configs[0].targets == ("query", "value")
    assert main(["--from", "model"]) == 0
    assert (configs[1].text, configs[1].targets) == ((), TARGETS)


def test_options_that_cannot_be_are_named(theirs, tmp_path, refuses):
    with refuses("run.text_and_chat", tmp_path):
        FinetuneConfig(from_weights=theirs, text=(tmp_path,), chat=tmp_path)
    with refuses("value.not_whole_number", "rank=-1", 0):
        FinetuneConfig(from_weights=theirs, rank=-1)


def test_a_run_on_tokens_without_a_tokenizer_learns_no_text(small_text, refuses):
    config = FinetuneConfig(from_weights=Path("run"), text=(small_text,))
    with refuses("data.no_tokenizer", "'run'", "--tokenizer"):
        tokenized_rows(config, SimpleNamespace(tokenizer=WithoutTokenizer("run")))


def test_a_model_without_a_template_is_named(tmp_path, refuses):
    with refuses("data.no_chat_template", tmp_path):
        read_template(tmp_path)


@pytest.mark.slow
def test_all_weights_learn_conversations(theirs, tmp_path):
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join([json.dumps({"messages": SAID})] * 20))
    found = finetune(
        FinetuneConfig(
            from_weights=theirs,
            out=tmp_path / "run",
            chat=chats,
            layout="fsdp=2,stage=2,microbatches=2",
            rank=0,
            steps=16,
            seq=64,
            global_batch=4,
            learning_rate=1e-2,
        )
    )
    assert found.after < found.before / 2
