"""`meshpar plan`: what it prints, what it writes, what it refuses, how it ends."""

import argparse
import contextlib
import functools
import io
import json
import re
import shlex
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshpar.audit.memory import MemoryUse
from meshpar.audit.report import AuditReport
from meshpar.cli import confirm as confirming
from meshpar.cli.main import main
from meshpar.cli.report.bars import time_plot
from meshpar.html import heading, page, paragraph, table
from meshpar.layout import Layout
from meshpar.models.presets import PRESETS
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.workload.shapes import PUBLISHED, SHAPES
from tests.marks import slow

GOOD = [
    *("plan", "--model", "llama3-8b", "--hardware", "h100-80gb"),
    *("--devices", "8", "--global-batch", "16", "--seq", "8192"),
]


def report_of(capsys, *words, status=0):
    assert main([*words, "--json"]) == status
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


@functools.cache
def report_and_page():
    """What `--json` prints and `--html` writes of one plan."""
    with tempfile.TemporaryDirectory() as folder:
        page, printed = Path(folder) / "plan.html", io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main([*GOOD, "--html", str(page), "--json"]) == 0
        assert printed.getvalue().count("\n") == 1
        return json.loads(printed.getvalue()), page.read_text()


def test_the_keys_that_scripts_rely_on():
    report, _ = report_and_page()
    counts = {"rejected_count", "considered_count", "seconds"}
    assert {"plans", "rejected", *counts} <= set(report)
    assert report["considered_count"] > report["rejected_count"] > 100
    best = report["plans"][0]
    keys = {"layout", "step_s", "mfu", "fits", "memory", "time", "collectives"}
    assert keys <= set(best)
    assert [plan["step_s"] for plan in report["plans"]] == sorted(
        plan["step_s"] for plan in report["plans"]
    )
    for other in report["rejected"]:
        assert Layout.parse(other["layout"]) and other["reason"] and "." in other["key"]


def test_the_answer_comes_first_and_the_rest_by_all(capsys):
    report, _ = report_and_page()
    assert main(GOOD) == 0
    answer = capsys.readouterr().out.splitlines()
    assert main([*GOOD, "--all"]) == 0
    everything = capsys.readouterr().out.splitlines()
    assert len(answer) <= 10
    best = report["plans"][0]
    assert f"layout {best['layout']}: " in answer[1]
    assert f"MFU {best['mfu']:.1%}" in answer[2]
    assert answer[3].startswith("h100, dense models: ")
    assert "of 84.9 GB: fits" in answer[4]
    assert answer[5].startswith("most of the step: computing ")
    decides = [one for one in report["assumptions"] if one["decides"]]
    assert bool(decides) == any("and it decides" in line for line in answer)
    for line in (*answer[:5], answer[-1]):
        assert line in everything
    for words in (
        "layouts considered in",
        "plans, fastest first:",
        "rejected, such as",
        "  twice the network: ",
        "  assumed, not measured",
    ):
        assert [line for line in everything if words in line]


def test_people_get_a_line_to_paste_into_the_recipe(capsys):
    assert main(GOOD) == 0
    text = capsys.readouterr().out
    line = text.strip().splitlines()[-1]
    words = shlex.split(line)
    assert words[:5] == ["run", "it:", "meshpar", "train", "--layout"]
    assert Layout.parse(words[5]).num_devices == 8
    model, batch = ["--preset", "llama3-8b"], ["--global-batch", "16", "--seq", "8192"]
    assert words[6:] == [*model, *batch, "--emulate", "0"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (["--preset", "tiny", "--vocab", "300"], "--preset tiny --model vocab=300"),
        (
            ["--model", "layers=2,hidden=64,heads=4,vocab=300"],
            "--model layers=2,hidden=64,heads=4,vocab=300",
        ),
    ],
)
def test_the_line_to_paste_says_which_model(capsys, model, words):
    options = ["--devices", "2", "--global-batch", "8", "--seq", "32"]
    assert main(["plan", *model, *options]) == 0
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert f"{words} --global-batch 8 --seq 32 --emulate 0" in line


def test_a_model_with_experts_has_a_line_to_paste(capsys):
    words = ["--model", "mixtral-8x7b", "--devices", "64", "--seq", "4096"]
    kept = ["--keep", "stage=1,context=1,microbatches=1,remat=full"]
    assert main(["plan", *words, "--global-batch", "1024", *kept]) == 0
    printed = capsys.readouterr().out
    (line,) = (row for row in printed.splitlines() if row.startswith("run it: "))
    assert "meshpar train --layout" in line and "--preset mixtral-8x7b" in line


def test_a_published_runs_shape_has_no_line_to_paste(capsys):
    words = ["--model", "megatron-1.7b", "--devices", "8", "--seq", "2048"]
    kept = ["--keep", "stage=1,context=1"]
    assert main(["plan", *words, "--global-batch", "64", *kept]) == 0
    assert "run it: not yet; a published run's shape" in capsys.readouterr().out


def test_what_is_not_published_is_a_preset_that_trains():
    for name in SHAPES:
        assert (name not in PUBLISHED) == (name in PRESETS), name


def test_what_is_kept_forbidden_and_limited_is_obeyed(capsys):
    more = ["--keep", "tensor=2", "--forbid", "stage", "--max-memory-gib", "40"]
    report = report_of(capsys, *GOOD, *more, "--layout", "remat=full", "--plans", "3")
    assert 1 <= len(report["plans"]) <= 3
    for plan in report["plans"]:
        layout = Layout.parse(plan["layout"])
        assert (layout.tensor, layout.stage, layout.remat) == (2, 1, "full")
        assert plan["memory"]["total_bytes"] <= 40 * 2**30


def test_what_fits_nowhere_ends_with_1_and_the_nearest_change(capsys):
    words = ["plan", "--model", "llama3-70b", "--devices", "8", "--global-batch", "16"]
    words += ["--forbid", "context", "--keep", "microbatches=16"]
    report = report_of(capsys, *words, status=1)
    assert report["plans"] == [] and "nothing fits in 78.1 GB" in report["problem"]
    assert any("2x devices" in change["change"] for change in report["changes"])
    assert main(words) == 1
    assert "fits with 2x devices (16): " in capsys.readouterr().out


def test_what_no_layout_has_ends_with_1_and_what_to_give_up(capsys):
    words = ["--devices", "16", "--keep", "tensor=16,stage=1,context=1"]
    report = report_of(capsys, *GOOD, *words, status=1)
    assert "kv_heads=8 does not divide over tensor=16" in report["problem"]
    (change,) = report["changes"]
    assert change["change"].startswith("fits with tensor=")
    assert Layout.parse(change["layout"]).num_devices == 16


@pytest.mark.parametrize(
    "more, refusal",
    [
        (["--devices", "0"], ("value.not_whole_number", "--devices", 0, 1)),
        (["--hardware", "h101"], ("hardware.unknown_device", "h101", "h100")),
        (["--model", "llama4"], ("model.unknown_name", "llama4")),
        (["--keep", "tensor=3"], ("plan.no_such_layout", 8, "tensor=3")),
        (["--keep", "tensr=2"], ("layout.unknown_key", "'tensr'", "'tensor'")),
        (["--forbid", "heads"], ("mesh.unknown_axis", "heads")),
        (["--max-memory-gib", "0"], ("value.not_positive", "--max-memory-gib", "'0'")),
        (
            ["--max-memory-gib", "nan"],
            ("value.not_positive", "--max-memory-gib", "nan"),
        ),
        (["--execution", "mega"], ("plan.unknown_execution", "mega")),
        (
            ["--html", "/no/such/folder/plan.html"],
            ("command.no_folder", "--html", "'/no/such/folder'"),
        ),
        (
            ["--html", "plan.pdf"],
            ("command.unknown_suffix", "--html", "plan.pdf", ".html"),
        ),
    ],
)
def test_bad_input_ends_with_2_and_one_line(more, refusal, refuses_command):
    refuses_command([*GOOD, *more], *refusal)


def test_no_batch_is_asked_for(refuses_command):
    argv = ["plan", "--model", "llama3-8b", "--devices", "8"]
    refuses_command(argv, "plan.no_batch", "--global-batch")


class Tags(HTMLParser):
    """Checks that every tag that is opened is closed, and that nothing is loaded."""

    def __init__(self):
        super().__init__()
        self.open, self.cells = [], []

    def handle_starttag(self, tag, attrs):
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag == "td":
            self.cells.append("")
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open:
            self.cells[-1] += data


def test_the_report_is_one_file_with_tables_and_a_plot():
    report, text = report_and_page()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    for plan in (*report["plans"], *report["front"], *report["rejected"]):
        assert plan["layout"] in tags.cells
    times = [cell for cell in tags.cells if re.fullmatch(r"[\d.,e+-]+ m?s", cell)]
    assert len(times) >= 3 * len(report["plans"])
    assert "0 ms" in times and not [cell for cell in times if "e" in cell]
    plot = text[text.rindex("Plotly.newPlot") :]
    for name in ("rejected", "plans", "fastest", "a device holds 78.1 GB"):
        assert f'"name":"{name}"' in plot


def test_the_parts_of_every_bar_add_up_to_its_step():
    pytest.importorskip("plotly")
    lines = ("fsdp=8", "stage=2,fsdp=2,tensor=2,microbatches=4", "data=8,zero=1")
    cluster, size = cluster_of("h100-80gb", devices=8), {"global_batch": 64, "seq": 64}
    plans = [estimate(SHAPES["tiny-8"], cluster, line, **size) for line in lines]
    figure = time_plot(plans)
    unit = {"time of a step, s": 1.0, "time of a step, ms": 1e-3}
    seconds = unit[figure.layout.xaxis.title.text]
    for place, plan in enumerate(plans, 1):
        drawn = {
            bar.name: length * seconds
            for bar in figure.data
            for row, length in zip(bar.y, bar.x, strict=True)
            if row == f"plan {place}"
        }
        assert sum(drawn.values()) == pytest.approx(plan.step_s, rel=1e-9)
        assert drawn == pytest.approx(
            {name: part for name, part in plan.time.parts.items() if part}
        )
    names = {bar.name for bar in figure.data}
    assert {"computing", "bubble", "optimizer", "exposed on tensor"} <= names


def test_assumed_numbers_and_the_answer_head_the_page():
    report, text = report_and_page()
    assert text.count('<p class="assumed"') == len(report["assumptions"]) >= 2
    head = text[text.index("<h1>") : text.index("<h2>")]
    assert f"MFU {report['plans'][0]['mfu']:.1%}" in head
    assert "most of the step: computing" in head and "not measured" in head


def test_no_text_of_a_page_is_read_as_html():
    text = "<script>a & b</script>"
    parts = [heading(text), paragraph(text), table([text], [[text]])]
    found = page(text, parts)
    assert text not in found
    # Title, first heading, heading, paragraph; a cell, its head, and the head's row.
    assert found.count("&lt;script&gt;a &amp; b&lt;/script&gt;") == 7


def test_each_plan_has_the_cost_of_its_own_training(capsys):
    words = ["--keep", "stage=1,context=1", "--tokens", str(16 * 8192 * 1000)]
    report = report_of(capsys, *GOOD, *words, "--price", "2")
    assert len({plan["step_s"] for plan in report["plans"]}) > 1
    for plan in report["plans"]:
        training = plan["training"]
        assert training["steps"] == 1000
        assert training["train_s"] == pytest.approx(1000 * plan["step_s"])
        assert training["price"] == pytest.approx(2 * training["device_hours"])


MEMORY = MemoryUse(
    argument_bytes=1,
    output_bytes=1,
    temp_bytes=1,
    alias_bytes=0,
    peak_bytes=123_456_789,
)


def test_confirmed_plans_stand_beside_what_was_compiled(capsys, monkeypatch):
    asked = []

    def compiled(step, batch, *, target):
        asked.append((str(step.layout), str(target), batch["tokens"].shape))
        return AuditReport(
            layout=str(step.layout),
            target=str(target),
            mesh_shape=step.layout.mesh_shape,
            memory=MEMORY,
        )

    monkeypatch.setattr(confirming, "audit", compiled)
    words = ["plan", "--model", "tiny-8", "--devices", "8", "--global-batch", "16"]
    more = ["--seq", "64", "--keep", "tensor=2", "--confirm", "2"]
    report = report_of(capsys, *words, *more)
    assert [one["layout"] for one in report["confirmed"]] == [
        plan["layout"] for plan in report["plans"][:2]
    ]
    assert {target for _, target, _ in asked} == {"gpu:h100:1x8"}
    assert {shape for *_, shape in asked} == {(16, 64)}
    for one, plan in zip(report["confirmed"], report["plans"], strict=False):
        assert one["compiled_bytes"] == MEMORY.peak_bytes
        # XLA's attention is compiled, which builds the scores of some heads.
        assert one["predicted_bytes"] >= plan["memory"]["total_bytes"]
        axes = {tuple(row["mesh_axes"]) for row in one["collectives"]}
        assert ("tensor",) in axes


@pytest.mark.parametrize(
    "hardware, devices, target",
    [
        ("h100-80gb", 64, "gpu:h100:8x8"),
        ("a100-80gb", 8, "gpu:a100:1x8"),
        ("tpu v5p:4x4x8", None, "tpu:v5p:4x4x8"),
    ],
)
def test_clusters_are_targets_of_the_audit(hardware, devices, target):
    cluster = cluster_of(hardware, devices=devices)
    assert str(confirming.cluster_target(cluster)) == target


def test_a_machine_without_a_compiler_is_refused(refuses_command):
    words = [*GOOD, "--keep", "stage=1,context=1"]
    words += ["--hardware", "gb200", "--confirm", "1"]
    refuses_command(words, "hardware.no_target", "--confirm", 8, "gb200-186gb")


LARGE = {
    "llama3-405b": ["--hardware", "h100", "--devices", "16384", "--seq", "8192"],
    "mixtral-8x7b": ["--hardware", "h100", "--devices", "64", "--seq", "4096"],
    # With the batch of its authors (DeepSeek-AI 2024, section 4.2).
    "deepseek-v3": [
        *("--hardware", "h800", "--devices", "2048"),
        *("--seq", "4096", "--global-batch", "15360"),
    ],
    "llama3-70b": ["--hardware", "tpu v5p:8x8x8", "--seq", "8192"],
}


@pytest.mark.parametrize(
    "model, kept",
    [
        ("llama3-405b", ["--keep", "tensor=8,stage=16"]),
        slow("mixtral-8x7b", ["--keep", "tensor=1,context=1"]),
        *(slow(model, []) for model in LARGE),
    ],
)
def test_large_machines_have_a_plan_within_memory(capsys, model, kept):
    words = ["--model", model, "--global-batch", "2048", *LARGE[model], *kept]
    report = report_of(capsys, "plan", *words)
    best = report["plans"][0]
    assert best["fits"] and 0.2 < best["mfu"] < 0.8
    assert best["memory"]["total_bytes"] <= best["memory"]["capacity_bytes"]
    notes = " ".join(report["notes"])
    assert "does not lay out" not in notes


def test_the_vocabulary_of_a_file_is_changed_there(refuses):
    args = argparse.Namespace(
        preset=None, model="config.json", model_from=None, vocab=300
    )
    values = ("--vocab", 300, "config.json", "vocab_size")
    with refuses("command.vocab_of_config_file", *values):
        confirming.planned_model(args)


OWN = """
import jax.numpy as jnp
from meshpar import Input, from_loss

def init(key):
    layers = [{"up": jnp.ones((16, 32))} for _ in range(3)]
    return {"layers": layers, "write": jnp.ones((16, 2))}

def loss(params, batch, key):
    x = batch["x"]
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["up"]) @ layer["up"].T
    return (x @ params["write"]).sum(), jnp.float32(len(x))

def build(seq=5):
    names = {"**/up": ("embed", "mlp")}
    inputs = {"x": Input(("batch", "seq", None), shape=(None, seq, 16))}
    return from_loss(init, loss, names=names, blocks="layers", inputs=inputs)

def build_open():
    return build(None)

def build_rows():
    inputs = {"x": Input(("batch", None, None), shape=(None, 8, 16))}
    return from_loss(init, loss, blocks="layers", inputs=inputs)
"""


@pytest.fixture
def own_model(tmp_path, monkeypatch):
    (tmp_path / "own_planned.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return ["--model-from", "own_planned:build"]


def test_a_model_of_ones_own_is_planned_from_its_trace(own_model, capsys):
    found = report_of(capsys, "estimate", *own_model, "--layout", "fsdp=4")
    parameter_bytes = 4 * (3 * 16 * 32 + 16 * 2) / 4
    assert found["memory"]["parameter_bytes"] == pytest.approx(
        parameter_bytes, rel=0.03
    )
    words = ["plan", *own_model, "--devices", "8", "--global-batch", "64"]
    best = report_of(capsys, *words)["plans"][0]["layout"]
    assert main(words) == 0
    assert f"make_train_step(model, optimizer, '{best}')" in capsys.readouterr().out


def test_a_model_without_sequences_is_planned_without_context(own_model, capsys):
    words = ["plan", "--model-from", "own_planned:build_rows", "--devices", "8"]
    plans = report_of(capsys, *words, "--global-batch", "4")["plans"]
    assert plans and not [plan for plan in plans if "context" in plan["layout"]]


def test_seq_is_given_if_the_models_inputs_leave_it_open(own_model, refuses_command):
    words = ["estimate", "--layout", "data=2"]
    fixed = [*words, *own_model, "--seq", "8"]
    refuses_command(fixed, "command.seq_of_fixed_sizes", "--seq", 8)
    open_ = [*words, "--model-from", "own_planned:build_open"]
    refuses_command(open_, "command.no_seq_of_model", "seq", "--seq")
    vocab = [*words, *own_model, "--vocab", "9"]
    refuses_command(vocab, "command.vocab_of_own_model", "--vocab", 9)


def test_a_plan_in_fp8_has_no_command_of_ours(capsys):
    words = "--preset llama3-8b --hardware h100 --devices 8 --global-batch 8 --seq 2048"
    kept = "fsdp=8,precision=fp8,remat=full,zero=3"
    program = ["--execution", "torch-fsdp2", "--keep", kept]
    assert main(["plan", *words.split(), *program]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last == "run it: not yet; torch-fsdp2 trains in fp8, meshpar does not"
