"""A run trains on data of every kind, goes on anywhere, and tells bad ones."""

import json
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from meshpar import Layout
from meshpar.data.megatron import MegatronWriter
from meshpar.distributed import Processes
from meshpar.recipes import pretrain
from meshpar.recipes.config import RunConfig
from meshpar.recipes.config_file import as_toml, read_options, save
from meshpar.recipes.corpus import load_corpus
from meshpar.recipes.model import build_model, model_sizes
from meshpar.recipes.options import parse_arguments
from meshpar.recipes.resume import changes
from meshpar.recipes.run import Run, _from_any_folder
from tests.bpe import write_bpe
from tests.conftest import rows
from tests.marks import slow
from tests.multiprocess.children import ends_of, free_port, joined, start
from tests.refusals import neutral
from tests.run_steps import compute_nothing, counted_step
from tests.run_steps import shared_steps as shared_steps

SEQ, BATCH = 16, 8
MODEL = "vocab=384"
QUICK = f"--preset test --model {MODEL} --seq {SEQ} --global-batch {BATCH}"


@pytest.fixture(scope="module")
def data(tmp_path_factory, small_text):
    """Scenes as JSON lines, tokens of Megatron, flat tokens, and a tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    scenes = [part for part in small_text.read_text().split("\n\n") if part.strip()]
    for name, texts in (("a", scenes[:60]), ("b", scenes[60:])):
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    write_bpe(folder / "tok.json", scenes)
    (folder / "ends").mkdir()
    for name, texts in (("tail", scenes[:9]), ("none", [])):
        lines = [json.dumps({"text": text}) for text in [*texts, *[""] * 3000]]
        (folder / "ends" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "short").mkdir()
    (folder / "short" / "short.txt").write_text("to be or not")
    rng = np.random.default_rng(0)
    with MegatronWriter(folder / "m.bin", np.dtype("<u2")) as writer:
        for length in rng.integers(1, 60, 40):
            writer.add(rng.integers(0, 200, length))
    (folder / "flat.bin").write_bytes(rng.integers(0, 200, 900).astype("<u2").tobytes())
    return folder


def config_of(data, out, *specs, **options):
    return RunConfig(
        data=tuple(str(spec).format(data) for spec in specs),
        out=out,
        preset="test",
        model=MODEL,
        seq=SEQ,
        global_batch=BATCH,
        **options,
    )


def made(config):
    return load_corpus(config, Processes(), lambda line: None)


MIXTURE = ("path={}/a.jsonl,weight=0.75", "path={}/b.jsonl,weight=0.25")


def test_what_is_held_out_is_not_trained_on_and_nothing_else_is_missing(data, tmp_path):
    corpus = made(config_of(data, tmp_path, "{}/*.jsonl", pack=True))
    counts = [
        sum(int((rows_[n]["segment_ids"] >= 0).sum()) for n in range(len(rows_)))
        for rows_ in (corpus.train[0], corpus.validation)
    ]
    texts = [
        json.loads(line)["text"]
        for name in "ab"
        for line in (data / f"{name}.jsonl").read_text().splitlines()
    ]
    assert sum(counts) == sum(len(text.encode()) + 1 for text in texts)
    assert counts[1] == pytest.approx(sum(counts) / 10, rel=0.5)
    assert "token 0 (NUL)" in corpus.lines[1] and corpus.stop_tokens == [0]
    assert "packed: " in corpus.lines[2] and "are cut" in corpus.lines[2]


def test_other_data_have_another_fingerprint_and_the_same_the_same(data, tmp_path):
    configs = [
        config_of(data, tmp_path / "0", "{}/a.jsonl"),
        config_of(data, tmp_path / "1", "{}/b.jsonl"),
        config_of(data, tmp_path / "2", "{}/a.jsonl", pack=True),
        config_of(data, tmp_path / "3", "{}/a.jsonl", tokenizer=data / "tok.json"),
        config_of(
            data, tmp_path / "4", "{}/a.jsonl", validation_data=f"{data}/b.jsonl"
        ),
        config_of(data, tmp_path / "5", *MIXTURE),
        config_of(data, tmp_path / "6", *MIXTURE[:1], "path={}/b.jsonl,weight=0.5"),
    ]
    found = [made(config).fingerprint for config in configs]
    assert len(set(found)) == len(found)
    again = config_of(data, tmp_path / "again", "{}/a.jsonl")
    assert made(again).fingerprint == found[0]
    shutil.copy(data / "tok.json", tmp_path / "other.json")
    named = config_of(data, tmp_path, "{}/a.jsonl", tokenizer=tmp_path / "other.json")
    assert made(named).fingerprint == found[3]
    words = "path={}/a.jsonl,weight=3", "path={}/b.jsonl,weight=1"
    assert made(config_of(data, tmp_path, *words)).fingerprint == found[5]


def test_a_long_file_says_that_it_gets_on(data, tmp_path, monkeypatch):
    monkeypatch.setattr("meshpar.data.tokenizer._GETS_ON_S", 0.0)
    said = []
    config = config_of(data, tmp_path, "{}/a.jsonl")
    load_corpus(config, Processes(), print, on_file=lambda: said.append(1))
    load_corpus(config, Processes(), print, on_file=lambda: said.append(2))
    assert said == [1, 1, 2]


def test_a_folder_of_data_that_holds_the_run_is_the_same_when_it_goes_on(
    data, tmp_path
):
    for name in ("a.jsonl", "b.jsonl"):
        shutil.copy(data / name, tmp_path / f"[{name[0]}].jsonl")
    shutil.copy(data / "tok.json", tmp_path)
    tokenizer = tmp_path / "tok.json"
    config = config_of(tmp_path, tmp_path / "run", "{}", tokenizer=tokenizer)
    files = []

    def corpus():
        return load_corpus(config, Processes(), print, on_file=lambda: files.append(1))

    first = corpus().fingerprint
    assert list((tmp_path / "run" / "tokens").glob("*.bin"))
    assert corpus().fingerprint == first
    assert len(files) == 4


def test_tokens_of_files_are_trained_on_as_they_are(data, tmp_path):
    corpus = made(config_of(data, tmp_path, "{}/flat.bin"))
    tokens = np.fromfile(data / "flat.bin", "<u2")
    first = corpus.train[0][0]
    np.testing.assert_array_equal(first["tokens"], tokens[:SEQ])
    np.testing.assert_array_equal(first["targets"], tokens[1 : SEQ + 1])
    assert corpus.tokenizer.decode(first["tokens"][:2]) == f"{tokens[0]} {tokens[1]}"


def test_a_model_that_nobody_sized_has_the_vocabulary_of_the_tokenizer(
    data, tmp_path, refuses
):
    given = dict(data=f"{data}/a.jsonl", tokenizer=data / "tok.json", out=tmp_path)
    assert (
        model_sizes(RunConfig(**given))["vocab"] == 384
    )  # 300, up to a multiple of 128
    named = RunConfig(**given, preset="tiny")
    with refuses("model.vocabulary_too_small", "'tiny'", 256, "tok.json", 300):
        build_model(named)


# Options.


def test_a_checkpoint_says_where_its_data_are_from_any_folder(data, monkeypatch):
    monkeypatch.chdir(data)
    here, full = (
        RunConfig(data=f"path={folder}a.jsonl,weight=1", tokenizer=f"{folder}tok.json")
        for folder in ("", f"{data}/")
    )
    assert _from_any_folder(here) == _from_any_folder(full)


@pytest.mark.parametrize("of", ["text", "data"])
def test_weights_that_know_a_tokenizers_tokens_do_not_learn_bytes(
    of, data, tmp_path, refuses
):
    shutil.copy(data / "tok.json", tmp_path / "tokenizer.json")
    options = {of: (str(data / "a.jsonl"),), "from_weights": tmp_path}
    config = RunConfig(
        preset="test", model=MODEL, seq=SEQ, out=tmp_path / "out", **options
    )
    with refuses("data.bytes_for_weights", "--tokenizer", "tokenizer.json"):
        made(config)
    made(replace(config, resume=True))
    gguf = replace(config, from_weights=tmp_path / "a.gguf")
    assert any("note: texts are read as bytes" in line for line in made(gguf).lines)


@pytest.mark.parametrize(
    "file, formats", [("a.jsonl", ["jsonl"]), ("m.bin", ["megatron"])]
)
def test_a_checkpoint_says_whether_its_data_are_texts_or_tokens(
    file, formats, data, tmp_path
):
    assert made(config_of(data, tmp_path, f"{{}}/{file}")).formats == formats


def test_a_look_at_first_rows_goes_on_to_those_with_targets(monkeypatch):
    pairs = [(0.0, 0.0), (0.0, 0.0), (6.0, 3.0), (8.0, 1.0)]
    names = "loss_sum", "weight_sum"
    sums = (dict(zip(names, pair, strict=True)) for pair in pairs)
    batches = [{}] * 4
    monkeypatch.setattr(pretrain, "padded_batches", lambda *args: batches)
    run = SimpleNamespace(
        texts=SimpleNamespace(validation=None),
        config=SimpleNamespace(global_batch=1, validates_average=False),
        step=SimpleNamespace(
            rows_here=lambda batch: None, evaluate=lambda *args: next(sums)
        ),
    )
    assert pretrain.validate(run, None, 1) == 2.0


def test_a_resumed_run_says_which_data_have_changed(data, tmp_path):
    path = tmp_path / "changed.jsonl"
    path.write_bytes((data / "a.jsonl").read_bytes())
    described = []
    for name in ("a", "b"):
        config = config_of(data, tmp_path / name, path)
        layout = Layout.parse("data=1")
        run = Run(
            config=config,
            step=SimpleNamespace(layout=layout),
            texts=made(config),
            checkpoints=None,
            console=None,
        )
        described.append(run.description())
        path.write_bytes((data / "b.jsonl").read_bytes())
    (told,) = changes(*described)
    assert re.fullmatch(r"data \d+ tokens, crc32 \w+ -> \d+ tokens, crc32 \w+", told)


def test_a_run_goes_on_with_data_after_a_text_and_with_a_text_after_data(
    data, tmp_path
):
    a, text = f"{data}/a.jsonl", tmp_path / "b.txt"
    of_text = RunConfig(text=text, out=tmp_path)
    of_data = RunConfig(
        data=a,
        validation_data=a,
        tokenizer=data / "tok.json",
        eos="x",
        pack=True,
        data_cache=tmp_path,
        out=tmp_path,
    )
    resume = ["--out", str(tmp_path), "--resume"]
    save(of_text, tmp_path)
    found = parse_arguments([*resume, "--data", a, "--pack"])
    assert (found.text, found.data, found.pack) == ((), (a,), True)
    save(of_data, tmp_path)
    found = parse_arguments([*resume, "--text", str(text)])
    assert replace(found, resume=False) == of_text
    b = f"{data}/b.jsonl"
    found = parse_arguments([*resume, "--data", a, "--validation_data", b])
    assert (found.validation_data, found.eos) == ((b,), "x")


def test_what_a_shell_makes_of_a_pattern_and_tables_of_a_file_are_sources(tmp_path):
    words = ["--data", "a.txt", "b.txt", "--pack", "--steps", "3"]
    assert parse_arguments(words).data == ("a.txt", "b.txt")
    path = tmp_path / "run.toml"
    path.write_text(
        '[[data]]\npath = "a.txt"\nweight = 0.7\n[[data]]\npath = "b.txt"\n'
    )
    assert read_options(path) == ["--data=path=a.txt,weight=0.7", "--data=path=b.txt"]
    given = parse_arguments(["--config", str(path), "--data", "c.txt"])
    assert given.data == ("c.txt",), "the command line wins"


def test_sources_are_saved_as_they_are_found_from_any_folder(tmp_path):
    saved = tmp_path / "config.toml"
    config = RunConfig(data=("path=a.txt,weight=2", "path=/b/*.txt,weight=1"))
    saved.write_text(as_toml(config))
    read = parse_arguments(["--config", str(saved)]).data
    here = str(Path.cwd() / "a.txt")
    assert read == (f"path={here},weight=2", "path=/b/*.txt,weight=1")


# Training.


def trained(data, out, *options):
    words = ["--data", f"path={data}/a.jsonl,weight=0.75"]
    words += ["--data", f"path={data}/b.jsonl,weight=0.25", "--pack"]
    words += ["--tokenizer", str(data / "tok.json"), "--out", str(out)]
    words += ["--sample-tokens", "2"]
    assert pretrain.main([*QUICK.split(), *words, *options, "--steps", "6"]) == 0
    return rows(out / "metrics.jsonl", "loss")


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory, shared_steps):
    return trained(data, tmp_path_factory.mktemp("whole"), "--layout", "data=2")


def test_a_packed_mixture_goes_on_with_the_batches_it_would_have_had(
    data, tmp_path, monkeypatch, capsys
):
    """A step computes nothing, and its loss tells which batch it was given."""

    def timed_step(step, state, batch):
        arrays = [np.asarray(batch[name]).tobytes() for name in sorted(batch)]
        return counted_step(state, loss=1.0 + zlib.crc32(b"".join(arrays)))

    compute_nothing(monkeypatch, timed_step)
    wanted = trained(data, tmp_path / "whole", "--layout", "data=2")
    assert len(wanted) == len({*wanted}) == 6
    options = ("--layout", "data=2", "--stop-after", "3")
    assert trained(data, tmp_path / "part", *options) == wanted[:3]
    capsys.readouterr()
    check_goes_on(tmp_path / "part", "data=2", wanted, capsys)


def check_goes_on(out, layout, wanted, capsys):
    """Holds a run that goes on after three steps to the losses of a whole one."""
    assert pretrain.main(["--out", str(out), "--resume", "--layout", layout]) == 0
    np.testing.assert_allclose(rows(out / "metrics.jsonl", "loss"), wanted, rtol=1e-5)
    output = capsys.readouterr().out
    assert "resumed after step 3, 24 windows into the text" in output
    assert "changed: sources" not in output and "changed: tokenizer" not in output
    assert "nats per token" in output and "75.0% of the rows from" in output


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data=2", "fsdp=4"])
def test_a_packed_mixture_goes_on_under_any_layout_with_the_same_losses(
    layout, data, uninterrupted, tmp_path, capsys
):
    options = ("--layout", "data=2", "--stop-after", "3")
    assert len(trained(data, tmp_path, *options)) == 3
    capsys.readouterr()
    check_goes_on(tmp_path, layout, uninterrupted, capsys)


@pytest.mark.parametrize(
    "layout",
    [
        slow("data=2,stage=2,tensor=2,microbatches=2"),
        slow("context=2,tensor=2"),
    ],
)
def test_a_packed_mixture_trains_alike_under_every_layout(
    layout, data, uninterrupted, tmp_path
):
    options = ("--layout", layout, "--bubble-rounds", "0")
    losses = trained(data, tmp_path, *options)
    np.testing.assert_allclose(losses, uninterrupted, rtol=1e-5)


@pytest.mark.slow
def test_two_processes_read_their_rows_of_a_mixture_and_one_goes_on(
    data, uninterrupted, tmp_path
):
    words = [*QUICK.split(), "--layout", "fsdp=2,tensor=2", "--steps", "6"]
    words += ["--stop-after", "3", "--start-timeout", "200", "--emulate", "2", "--pack"]
    for text in MIXTURE:
        words += ["--data", text.format(data)]
    words += ["--tokenizer", str(data / "tok.json"), "--out", str(tmp_path)]
    command = ["-m", "meshpar", "train", *words]
    children = [start([*command, *one]) for one in joined(2, free_port())]
    for end in ends_of(children, timeout_s=300):
        assert end.status == 0, end.error[-3000:]
    alone = ["--out", str(tmp_path), "--resume", "--layout", "data=2", "--emulate", "8"]
    assert pretrain.main(alone) == 0
    losses = rows(tmp_path / "metrics.jsonl", "loss")
    np.testing.assert_allclose(losses, uninterrupted, rtol=1e-5)


# Bad input, in one line.

WRONG = [
    ("--data {}/absent.jsonl", ("data.missing_file", "absent.jsonl")),
    ("--data {}/a.jsonl --text {}/a.jsonl", ("run.text_and_data", "a.jsonl")),
    ("--pack", ("run.option_without_data", "pack=True", "--data")),
    ("--tokenizer {}/tok.json", ("run.option_without_data", "tok.json", "--data")),
    ("--data path={}/a.jsonl,weight=0", ("data.weight_not_positive", "weight=0")),
    (
        "--data path={}/a.jsonl,field=body",
        ("data.missing_field", "line 1", "'body'", "'text'"),
    ),
    ("--data {}/a.jsonl --seq 9000", ("data.too_few_tokens", 9000)),
    ("--data {}/a.jsonl --seq 9000 --pack", ("data.too_few_tokens", 9000)),
    (
        "--data {}/a.jsonl --tokenizer {}/absent",
        ("data.unreadable_tokenizer", "absent"),
    ),
    ("--data {}/a.jsonl --tokenizer {}/a.jsonl", ("data.not_tokenizer", "a.jsonl")),
    (
        "--data {}/a.jsonl --tokenizer {}/tok.json --preset tiny",
        ("data.vocabulary_too_large", 300, 256),
    ),
    (
        "--data {}/flat.bin --preset tiny --model vocab=128",
        ("data.token_outside_vocabulary", "flat.bin", 128),
    ),
    (
        "--data {}/flat.bin --pack",
        ("data.no_end_of_documents", "flat.bin", "--pack", "--eos"),
    ),
    ("--data {}/a.jsonl --on-bad-line mend", ("command.bad_option", "--on-bad-line")),
    ("--data {}/a.jsonl --eos 3", ("data.eos_of_bytes", "--eos 3")),
    ("--data {}/flat.bin --eos zzz", ("data.eos_not_number", "eos='zzz'")),
    (
        "--data {}/flat.bin --pack --eos 900 --preset test --model vocab=384",
        ("data.eos_beyond_vocabulary", "--eos 900", 0, 384),
    ),
    (
        "--data path={}/short,field=zzz",
        ("data.field_without_effect", "field=zzz", "text", "jsonl"),
    ),
    (
        "--data {}/a.jsonl --validation-data path={}/b.jsonl,weight=2",
        ("data.weight_of_validation", "weight=2"),
    ),
    ("--data {}/ends/tail.jsonl --pack", ("data.no_targets", 0)),
    (
        "--data {}/a.jsonl --data {}/ends/none.jsonl --pack --validation-data "
        "{}/ends/none.jsonl",
        ("data.no_targets", 0),
    ),
    (
        "--data {}/a.jsonl --data-cache {}/tok.json",
        ("data.folder_is_file", "tok.json"),
    ),
    (
        "--text {}/short/short.txt",
        ("data.too_few_tokens", 10, "short.txt", "--seq"),
    ),
    ("--data {} --out {}", ("data.folder_is_of_run", "--data", "--out")),
]
OTHERS_WORDS = {"data.not_tokenizer", "command.bad_option"}
OF_A_FILE = re.compile(r"(?<=-)[0-9a-f]{16}(?=\.bin)|(?<=crc32 )[0-9a-f]{8}")


@pytest.mark.parametrize("words, refusal", WRONG)
def test_bad_data_are_told_in_one_line_before_anything_is_compiled(
    words, refusal, data, tmp_path, capsys, refuses, snapshot
):
    words = [word.format(data) for word in words.split()]
    words = ["--out", str(tmp_path), "--seq", "16", *words]
    with refuses(*refusal, words=False) as caught:
        pretrain.pretrain(parse_arguments(words))
    capsys.readouterr()
    assert pretrain.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"pretrain: {caught.value}"
    if refusal[0] not in OTHERS_WORDS:
        assert OF_A_FILE.sub("HASH", neutral(line)) == snapshot
