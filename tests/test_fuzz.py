"""`meshpar fuzz`: what it draws and prints, and a planted error found and shrunk."""

import dataclasses
import itertools
import json
import re
from dataclasses import fields

import jax
import pytest

from meshpar import Layout
from meshpar.checks import examples
from meshpar.cli import fuzz
from meshpar.cli.main import _parser, main
from meshpar.layout import BY_COST
from meshpar.layout.layout import _CHOICES
from meshpar.parallel import placement
from meshpar.testing import comparison, equivalence, layout_cases
from meshpar.testing.comparison import Deviation, simpler_cases
from meshpar.testing.draws import DRAWS, TWISTS
from meshpar.testing.layout_cases import Case, Choices, draw_cases, refusal
from meshpar.testing.masks import MASKS
from tests.marks import slow
from tests.refusals import check_words
from tests.schedule_cases import SYNCHRONOUS

TURNS = fuzz.fuzzed_turns()
MODELS = tuple(dict.fromkeys(itertools.chain(*TURNS)))
CHOICES = Choices(
    models=MODELS, turns=TURNS, build=fuzz._build, changes=fuzz._rule_changes
)

BUILT = {
    "data",
    "fsdp",
    "stage",
    "expert",
    "tensor",
    "sequence_parallel",
    "remat",
    "precision",
}
BUILT |= {"microbatches", "schedule", "chunks", "splits", "data_splits"}
BUILT |= {"execution", "max_pending_w"}
BUILT |= {"fsdp_prefetch", "context", "attention"}
BUILT |= {"zero", "zero_axes", "fsdp_gather", "optimizer_memory", "param_dtype"}
"""What the training step lays out: a new axis or option must be added here."""


SMALL = "--model layers=2,hidden=16,heads=2,vocab=32"
FEW = dataclasses.replace(CHOICES, models=(SMALL,), turns=((SMALL,),))
"""Cases of one small model: a drawn case is traced, to see whether it is refused."""


@pytest.fixture(scope="module")
def drawn():
    """Many cases; none is run. They take a hundred seconds: for slow tests."""
    return draw_cases(120, 0, CHOICES, jax.devices())


@pytest.fixture(scope="module")
def few():
    """Some of the small model. What is drawn again is not traced again."""
    known = {}

    def traced_once(case, choices):
        if case not in known:
            known[case] = refusal(case, choices)
        return known[case]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_cases, "refusal", traced_once)
        yield draw_cases(4, 0, FEW, jax.devices())


def status_of(argv):
    """The status that the shell would see."""
    try:
        return main(argv)
    except SystemExit as end:
        return end.code


# What is drawn.


def unnamed(field, values):
    """The values of a field less the remat policies that name residuals."""
    named = {value for value in values if field == "remat" and ":" in value}
    return set(values) - named


def trained(field):
    """The choices of a field that this library trains with: 8 bits are others'."""
    return set(_CHOICES[field]) - {"fp8", "mxfp8"}


def test_every_field_of_a_layout_has_a_line_with_all_its_choices():
    assert set(DRAWS) == {field.name for field in fields(Layout)}
    for name in _CHOICES:
        assert unnamed(name, DRAWS[name].values) == trained(name), name


@pytest.mark.slow
def test_everything_built_is_drawn_and_nothing_else(drawn):
    values = {name: {getattr(case.layout, name) for case in drawn} for name in DRAWS}
    assert {name for name, found in values.items() if len(found) > 1} == BUILT
    for name in ("remat", "precision", "sequence_parallel"):
        assert unnamed(name, values[name]) == trained(name)
    assert any(remat.startswith("save:") for remat in values["remat"])
    for axis in ("data", "fsdp", "tensor"):
        assert values[axis] >= {1, 2, 4}, axis
    assert any(case.layout.num_devices % 2 for case in drawn)


@pytest.mark.slow
def test_stages_of_every_kind_are_drawn(drawn):
    layouts = [case.layout for case in drawn if case.layout.stage > 1]
    assert {layout.schedule for layout in layouts} == set(SYNCHRONOUS)
    assert any(layout.chunks > 1 for layout in layouts)
    assert any(layout.microbatches % layout.stage for layout in layouts)
    assert any(
        layout.splits != BY_COST and len(set(layout.splits)) > 1 for layout in layouts
    )
    assert any(layout.splits == BY_COST for layout in layouts)
    assert any(layout.microbatches < layout.stage for layout in layouts)


@pytest.mark.slow
def test_every_model_and_mask_and_uneven_batches_are_drawn(drawn):
    assert {case.model for case in drawn} == set(MODELS)
    assert {case.mask for case in drawn} == set(MASKS)
    assert any(case.global_batch % 2 for case in drawn)


@pytest.mark.slow
def test_families_take_turns_and_half_of_the_turns_are_of_language_models(drawn):
    families = dict.fromkeys(TURNS)
    first = [case.model for case in drawn[: len(families)]]
    assert all(sum(model in family for model in first) == 1 for family in families)
    language = {model for model in MODELS if not model.startswith("--preset")}
    language |= {model for model in MODELS if model.startswith("--preset tiny-moe")}
    assert 2 * sum(case.model in language for case in drawn) >= 0.9 * len(drawn)


def test_a_layout_that_a_convolution_refuses_is_not_drawn(snapshot):
    model = "--preset tiny-unet3d --model depth=8,height=4,width=4,base=4,groups=2"
    case = Case(
        layout=Layout(data=2, context=2, tensor=2),
        model=f"{model} --with-rules depth=context,height=tensor",
        global_batch=2,
        seq=8,
    )
    refused, key = refusal(case, CHOICES), "grid.short_part_beside_examples"
    assert refused.key == key
    check_words(str(refused), key, ("'depth'", "'height'"), snapshot)


@pytest.mark.slow
def test_what_is_drawn_depends_on_the_seed_alone(few):
    again = draw_cases(2, 0, FEW, jax.devices())
    other = draw_cases(1, 1, FEW, jax.devices())
    assert again == few[:2]
    assert not set(other) & set(again)


@pytest.mark.slow
def test_every_fourth_case_goes_on_under_another_layout(drawn):
    resuming = [case for case in drawn if case.resume_as is not None]
    assert len(drawn) // 6 < len(resuming) <= len(drawn) // 4
    kept = [(case.layout.param_dtype, case.resume_as.param_dtype) for case in resuming]
    assert all(one == other for one, other in kept)
    differ = [case.layout.mesh_shape != case.resume_as.mesh_shape for case in resuming]
    assert sum(differ) > len(resuming) // 2


def test_drawn_cases_are_valid_and_new_and_some_go_on_under_another_layout(few):
    assert len(set(few)) == len(few)
    assert all(refusal(case, FEW) is None for case in few[:1])
    assert any(case.resume_as is not None for case in few)


@pytest.mark.slow
def test_a_drawn_case_of_any_model_is_valid_and_new(drawn):
    assert len(set(drawn)) == len(drawn)
    assert all(refusal(case, CHOICES) is None for case in drawn[:5])


def test_a_case_is_read_back_from_its_line_and_from_its_command(few):
    assert [Case.parse(str(case)) for case in few] == few
    for case in few[:4]:
        words = case.command.split()
        args = _parser(words[1:]).parse_args(words[1:])
        assert words[0] == "meshpar"
        choices = fuzz._choices(args)
        assert fuzz._cases(args, choices, jax.devices()) == [case]


def test_simpler_cases_end(few):
    case, steps = next(one for one in few if one.layout.num_devices > 4), 0
    while simpler := [c for c in simpler_cases(case, FEW) if c != case]:
        case, steps = simpler[0], steps + 1
        assert steps < 40
    assert str(case.layout) == "data=1"
    assert (case.mask, case.seed, case.global_batch, case.seq) == ("full", 0, 1, 2)
    layers = re.findall(r"layers=(\d+)", case.model)
    assert layers and set(layers) == {"1"}


# Twists.


@pytest.mark.slow
def test_every_third_case_has_a_twist_and_every_twist_is_drawn(monkeypatch):
    monkeypatch.setattr(layout_cases, "refusal", lambda *_: None)
    choices = dataclasses.replace(FEW, twist=fuzz._twist, twists=tuple(TWISTS))
    cases = draw_cases(96, 0, choices, jax.devices())
    found = [case for case in cases if "--twist" in case.model]
    assert len(cases) // 12 < len(found) <= len(cases) // 3
    assert {case.model.split()[-1] for case in found} == set(TWISTS)
    assert all(case.layout.precision == "fp32" for case in found)
    assert [Case.parse(str(case)) for case in found] == found


@pytest.mark.parametrize(
    ("twist", "layout", "key"),
    [
        ("extra_array", "data=2", "batch.unknown_array"),
        slow("missing_array", "data=2", "batch.missing_array"),
        slow("joined_examples", "microbatches=2", "model.joins_examples"),
        slow("joined_examples", "tensor=2", ""),
        slow("joined_tokens", "context=2", "model.joins_tokens"),
        slow("joined_tokens", "stage=2", "model.per_token_joins_tokens"),
        slow("joined_tokens", "fsdp=2", ""),
        slow("flat", "data=2,tensor=2", ""),
        slow("flat", "stage=2", ""),
        slow("injected", "fsdp=2,microbatches=2", ""),
        slow("injected", "stage=2,data=2", ""),
        slow("clipped", "data=2,context=2", ""),
    ],
)
def test_a_twisted_model_trains_or_is_refused_as_it_must_be(twist, layout, key, capsys):
    words = ["fuzz", *SMALL.split(), "--twist", twist, "--layout", layout, "--json"]
    assert status_of(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert [case["refused"] for case in report["cases"]] == [key]


@pytest.mark.slow
def test_what_trains_and_must_be_refused_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(examples, "_what_joins", lambda *_: None)
    words = ["fuzz", *SMALL.split(), "--twist", "joined_examples"]
    assert status_of([*words, "--layout", "data=2"]) == 1
    assert "model.joins_examples" in capsys.readouterr().out


# The command.


def test_drawn_layouts_agree_and_the_status_is_0(few, monkeypatch, capsys):
    """What is compared is in `tests/test_equivalence.py`."""
    equal = Deviation(quantity="loss", path="", error=0.0, bound=1e-6)
    monkeypatch.setattr(equivalence, "_compare", lambda *_: (equal,))

    def drawn_before(num, seed, choices, devices):
        assert (num, seed, choices.models, len(devices)) == (1, 4, (SMALL,), 8)
        return few[:num]

    monkeypatch.setattr(layout_cases, "draw_cases", drawn_before)
    words = ["fuzz", *SMALL.split(), "--num", "1", "--seed", "4", "--json"]
    assert status_of(words) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["agree"] is True
    assert report["smallest"] is None
    assert [case["agrees"] for case in report["cases"]] == [True]
    first = report["cases"][0]["worst"][0]
    assert set(first) == {"quantity", "path", "error", "bound"}
    assert captured.err.count("] meshpar fuzz --") == 1


@pytest.mark.parametrize(
    ("layout", "later"),
    [slow("fsdp=2", "data=2"), slow("stage=2,microbatches=2", "fsdp=2")],
)
def test_what_goes_on_under_another_layout_agrees_or_the_checkpoint_is_wrong(
    layout, later, monkeypatch, capsys
):
    made, make = {}, equivalence._make_step

    def made_once(case, choices, devices, learning_rate):
        at = str(case.layout), learning_rate
        if at not in made:
            made[at] = make(case, choices, devices, learning_rate)
        return made[at]

    monkeypatch.setattr(equivalence, "_make_step", made_once)
    words = ["fuzz", "--model", "layers=2,hidden=16,heads=2,vocab=32", "--seq", "4"]
    words += ["--layout", layout, "--resume-as", later]
    assert status_of(words) == 0
    plain = equivalence.resumed

    def forgets(step, later, state):
        state = plain(step, later, state)
        zeros = jax.tree.map(jax.numpy.zeros_like, state.opt_state)
        return dataclasses.replace(state, opt_state=zeros)

    monkeypatch.setattr(equivalence, "resumed", forgets)
    monkeypatch.setattr(comparison, "MAX_TRIES", 0)
    assert status_of(words) == 1
    assert "parameters" in capsys.readouterr().out


@pytest.mark.slow
def test_a_missing_reduction_is_found_and_shrunk_to_two_replicas(monkeypatch, capsys):
    def unreduced(stored, gradients, *_, **__):
        return gradients

    monkeypatch.setattr(placement, "reduce_gradients", unreduced)
    argv = "fuzz --layout data=2,tensor=2 --preset test --mask holes --seq 2"
    assert status_of(argv.split()) == 1
    printed = capsys.readouterr().out
    assert "0 of 1 layouts agree" in printed
    smallest = printed[printed.index("smallest failing case") :]
    assert smallest.startswith("smallest failing case: data=2\n")
    assert "gradients of " in smallest
    assert (
        "again with: meshpar fuzz --preset test --layout data=2 --global-batch 2 "
        "--seq 2 --mask full --seed 0"
    ) in smallest


@pytest.mark.slow
def test_a_layout_that_stops_is_a_failure_with_its_error(monkeypatch, capsys):
    def stops(*_, **__):
        raise TypeError("no such array")

    monkeypatch.setattr(placement, "reduce_gradients", stops)
    monkeypatch.setattr(comparison, "MAX_TRIES", 0)
    argv = f"fuzz --layout data=2 {SMALL} --seq 2 --global-batch 2"
    assert status_of(argv.split()) == 1
    assert "TypeError: no such array" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, refusal",
    [
        (
            "--layout data=2,tensr=2",
            ("layout.unknown_key", "'tensr'", "'tensor'"),
        ),
        (
            "--layout tensor=4 --preset test",
            ("layout.indivisible", "'kv_heads'", 2, "'tensor'", 4),
        ),
        ("--layout stage=8", ("layout.too_many_stages", "stage=8", 8, 4)),
        ("--layout data=16", ("layout.wrong_device_count", "'data=16'", 16, 8)),
        (
            "--layout data=2 --global-batch 3",
            ("layout.indivisible", "'batch'", 3, "'data'", 2),
        ),
        ("--preset no-such", ("model.unknown_preset", "'no-such'")),
        (
            "--num 1 --preset llama3-8b --seq 0",
            ("value.not_whole_number", "--seq", "'0'", 1),
        ),
        ("--seed -1", ("value.seed_out_of_range", "--seed -1", 0)),
        ("--mask half", ("command.bad_option", "--mask", "'half'")),
        ("--devices 3", ("mesh.already_started", 3, 8)),
        (
            "--resume-as fsdp=2",
            ("command.resume_without_layout", "--resume-as", "--layout"),
        ),
        (
            "--twist flat --preset tiny-vit",
            ("testing.unsuited_twist", "'flat'", "--preset"),
        ),
        ("--twist fat", ("testing.unknown_twist", "'fat'", "'flat'")),
    ],
)
def test_bad_input_ends_with_2_and_one_line(options, refusal, refuses_command):
    # Python's versions list the choices of an option in other words.
    of_python = options.startswith("--mask")
    refuses_command(["fuzz", *options.split()], *refusal, words=not of_python)
