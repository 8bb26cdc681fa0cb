"""`meshpar generate` continues texts from a run's checkpoint and from others' files."""

import contextlib
import functools
import io
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax import chain, sgd

from meshpar import make_train_step
from meshpar.cli import generate as cli_generate
from meshpar.cli.generate import _surely_shown
from meshpar.cli.main import main
from meshpar.data.tokenizer import ByteTokenizer
from meshpar.generation.generate import generate, placed
from meshpar.generation.programs import Programs
from meshpar.models.convert.run import read_checkpoint
from meshpar.models.convert.writing import write_weights
from meshpar.models.presets import build_config, configure
from meshpar.recipes import pretrain
from meshpar.recipes.config import RunConfig
from meshpar.recipes.loaded import _said, load
from meshpar.train.checkpoint import Checkpoints
from meshpar.train.checkpoint.contents import StoredArray
from meshpar.train.optimizer.average import averaged_state, parameter_average
from meshpar.train.step import TrainStep
from tests.bpe import write_bpe
from tests.run_steps import compute_nothing, counted_step
from tests.states import drawn


@pytest.fixture(scope="module")
def run(tmp_path_factory, small_text):
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        compute_nothing(patch, lambda step, state, batch: counted_step(state))
        patch.setattr(TrainStep, "init", lambda step, seed=0: drawn(step, scale=0.3))
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


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A run's folder with a checkpoint of zeros after step 1."""
    out = tmp_path_factory.mktemp("untrained")
    config = configure("test", vocab=256)
    devices = jax.devices()[:1]
    step = make_train_step(build_config(config), sgd(1.0), "data=1", devices=devices)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), step.state_shapes)
    said = {"model_sizes": asdict(config), "layout": "data=1"}
    with Checkpoints(out / "checkpoints", layer_orders=step.layer_orders) as saved:
        saved.save(replace(state, step=jnp.int32(1)), said)
    return out


load_once, programs_once = functools.cache(load), functools.cache(Programs.from_model)


def shared_programs(*given, devices=None, **options):
    devices = None if devices is None else tuple(devices)
    return programs_once(*given, devices=devices, **options)


@pytest.fixture
def shared(monkeypatch):
    """Commands of the same options share what they read and compile."""
    monkeypatch.setattr("meshpar.recipes.loaded.load", load_once)
    programs = SimpleNamespace(from_model=shared_programs)
    monkeypatch.setattr("meshpar.generation.generate.Programs", programs)


def generated(capsys, *words):
    assert main(["generate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("shared")
@pytest.mark.slow
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


@pytest.mark.usefixtures("shared")
def test_the_text_of_one_prompt_is_printed(run, capsys):
    words = ["generate", "--from", str(run), "--prompt", "To be", "--max-tokens", "3"]
    words += ["--slots", "2"]
    assert main([*words, "--temperature", "1", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("To be")
    assert main([*words, "--temperature", "1", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first


def test_each_part_of_a_checkpoint_is_read_once(run, monkeypatch):
    asked, read = [], StoredArray.__getitem__

    def counted(self, index):
        asked.append((self.path, read(self, index)))
        return asked[-1][1]

    monkeypatch.setattr(StoredArray, "__getitem__", counted)
    loaded = load(run)
    programs = Programs.from_model(
        loaded.model, "tensor=2", slots=1, max_seq=8, devices=jax.devices()[:2]
    )
    placed(programs, loaded.model, loaded.params, model_state=loaded.model_state)
    assert sum(part.size for _, part in asked) == loaded.model.num_parameters
    down = [part.shape for path, part in asked if path[-1] == "down"]
    assert down == [(2, 32, 32)] * 2, "of 64 rows each device has half"


def test_the_average_is_loaded_in_place_of_the_trained_parameters(tmp_path):
    config = configure("test", vocab=256)
    optimizer = chain(sgd(1.0), parameter_average(0.9))
    devices = jax.devices()[:1]
    step = make_train_step(build_config(config), optimizer, "data=1", devices=devices)
    state = drawn(step, scale=0.3, steps_done=1)
    said = {"model_sizes": asdict(config), "layout": "data=1"}
    with Checkpoints(tmp_path, layer_orders=step.layer_orders) as saved:
        saved.save(state, said)
    average = averaged_state(step, state).params
    for wanted, options in ((state.params, {}), (average, {"average": True})):
        found = load(tmp_path, **options).params
        same = jax.tree.map(lambda one, x: np.allclose(one[...], x), found, wanted)
        assert all(jax.tree.leaves(same)), options


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--from", "nowhere"], ("weights.no_such_file", "'nowhere'")),
        (["--from", "{run}", "--step", "9"], ("checkpoint.no_such_step", "step 9")),
        (
            ["--from", "{run}", "--tokenizer", "none.json"],
            ("data.unreadable_tokenizer", "none.json"),
        ),
        (
            ["--from", "{run}", "--top-p", "2"],
            ("generation.top_p_out_of_range", "top_p=2.0"),
        ),
        (
            ["--from", "{run}", "--prompts", "none.txt"],
            ("command.unreadable_file", "none.txt"),
        ),
        (
            ["--from", "{run}", "--layout", "data=0"],
            ("layout.not_whole_number", "data=0", 1, -1),
        ),
        (["--from", "{run}", "--average"], ("checkpoint.no_average", "--ema-decay")),
    ],
)
def test_bad_input_is_one_line(untrained, words, refusal, refuses_command):
    words = [word.format(run=untrained) for word in words]
    refuses_command(["generate", "--prompt", "To be", *words], *refusal)


def test_a_run_on_tokens_without_a_tokenizer_reads_no_text(
    untrained, tmp_path, monkeypatch, refuses_command
):
    def of_tokens(*args, **options):
        found = read_checkpoint(*args, **options)
        said = {**found.contents.config, "formats": ["megatron"], "eos": "7"}
        return replace(found, contents=replace(found.contents, config=said))

    monkeypatch.setattr("meshpar.models.convert.run.read_checkpoint", of_tokens)
    words = ["generate", "--from", str(untrained), "--prompt", "To be"]
    refuses_command(words, "data.no_tokenizer", "'To be'", "--tokenizer")
    loaded = load(untrained)
    assert loaded.tokenizer.decode([7, 9]) == "7 9" and loaded.stop_tokens == (7,)
    tokenizer = write_bpe(tmp_path / "tokenizer.json", ["to be or not to be"])
    assert load(untrained, tokenizer=tokenizer).tokenizer.encode("to be")


BROKEN = [
    ("{", ("weights.unreadable_json",)),
    ("[]", ("weights.not_json_object", [])),
    ('{"eos_token_id": "x"}', ("weights.bad_token_number", "eos_token_id", "'x'")),
]


@pytest.mark.parametrize("content, refusal", BROKEN)
def test_settings_that_are_broken_are_one_line(content, refusal, tmp_path, refuses):
    (tmp_path / "generation_config.json").write_text(content)
    words = refusal[0] != "weights.unreadable_json"  # Python's json's.
    with refuses(*refusal, "generation_config.json", words=words):
        _said(tmp_path, "eos_token_id")


class Input:
    """A standard input of other bytes, as often as it is read."""

    def read(self):
        return io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8").read()


@pytest.mark.parametrize("of", ["file", "input", "word"])
def test_prompts_of_other_bytes_are_one_line(
    of, tmp_path, monkeypatch, refuses, refuses_command
):
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9\n")
    monkeypatch.setattr("sys.stdin", Input())
    of_bytes = "generation.input_not_utf8", 3, "0xe9"
    words, *refusal = {
        "file": (["--prompts", str(tmp_path / "latin1.txt")], *of_bytes, "latin1.txt"),
        "input": (["--prompts", "-"], *of_bytes),
        "word": (["--prompt", "caf\udce9"], "generation.prompt_not_utf8", 3),
    }[of]
    refuses_command(["generate", "--from", "nowhere", *words], *refusal)
    with refuses("data.unpaired_surrogate", 3, r"\udce9"):
        ByteTokenizer().encode(["caf\udce9"])


@pytest.fixture
def pod(monkeypatch):
    """A pod of Kubernetes, where no scheduler says how many there are."""
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")


def test_a_pod_is_told_to_say_which_devices_it_has(pod, refuses_command):
    words = ["generate", "--from", "nowhere", "--prompt", "To be"]
    refuses_command(words, "processes.unknown_number", "--emulate 0")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_pod_leaves_others_alone_where_there_are_some(
    num_processes, pod, monkeypatch, capsys
):
    left = []
    joined = SimpleNamespace(
        num_processes=num_processes, is_first=False, gather=lambda one: [one] * 2
    )
    started = contextlib.nullcontext(joined)
    monkeypatch.setattr(cli_generate, "start", lambda **options: started)
    monkeypatch.setattr(cli_generate, "leave", lambda status: left.append(status) or 2)
    words = ["--from", "nowhere", "--prompt", "To be", "--emulate", "0"]
    assert main(["generate", *words]) == 2
    assert "'nowhere'" in capsys.readouterr().err
    assert left == [2] * (num_processes - 1)


T5 = dict(
    **dict(embed=16, heads=4, ffn=32, init_std=0.3, scaled_head=True),
    **dict(relative_buckets=8, relative_distance=6, scaled_scores=False),
    **dict(activation="relu", mlp_bias=False),
)
"""As the first T5."""


@pytest.mark.slow
def test_an_encoder_decoder_of_others_writes_about_the_prompt(tmp_path, capsys):
    pytest.importorskip("safetensors")
    pytest.importorskip("tokenizers")
    folder = tmp_path / "theirs"
    like = tmp_path / "like"
    like.mkdir()
    write_bpe(like / "tokenizer.json", ["to be or not to be"])
    (like / "generation_config.json").write_text(
        json.dumps({"decoder_start_token_id": 3, "eos_token_id": 299})
    )
    config = configure("tiny-t5", vocab=300, **T5)
    model = build_config(config)
    write_weights(folder, config, model.init(0), like=like)
    words = ("--from", folder, "--layout", "tensor=2", "--max-tokens", 3)
    found = generated(capsys, *words, "--prompt", "to be", "--prompt", "or")
    prompts = [load(folder).tokenizer.encode(one).ids for one in ("to be", "or")]
    wanted = generate(
        model,
        model.init(0),
        prompts,
        start_tokens=[3],
        stop_tokens=[299],
        max_tokens=3,
        devices=jax.devices()[:1],
    )
    assert [one["tokens"] for one in found] == [one.tokens for one in wanted]


def test_a_stream_holds_back_what_may_become_a_text_to_stop_at():
    assert _surely_shown("To be, or n", ("not", "or not")) == "To be, "
    assert _surely_shown("To be, or no!", ("not",)) == "To be, or no!"
    assert _surely_shown("caf\ufffd", ()) == "caf"
