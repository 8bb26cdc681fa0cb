"""`meshpar lint` ends with a status, and its output is for people or for scripts."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshpar import DATA_PARALLEL
from meshpar.cli.main import main
from meshpar.rules.spatial import SPATIAL
from tests import warm

LINT = ["lint", "--layout", "data=2"]
TINY = ["lint", "--preset", "tiny"]
CLEAN = [*TINY, "--layout", "data=2,fsdp=2,tensor=2"]
WITH_FINDINGS = [*TINY, "--layout", "tensor=8"]

FINDING_KEYS = {"kind", "path", "message", "bytes", "key"}
PARAMETER_KEYS = {
    "path",
    "shape",
    "logical_axes",
    "mesh_axes",
    "local_shape",
    "bytes",
}


def status_of(argv):
    """The status that the shell would see."""
    try:
        return main(argv)
    except SystemExit as end:
        return end.code


def report_of(argv, capsys):
    main([*argv, "--json"])
    return json.loads(capsys.readouterr().out)


def shapes_of(argv, capsys):
    parameters = report_of(argv, capsys)["parameters"]
    return {row["path"]: tuple(row["shape"]) for row in parameters}


# Status and output.


def test_a_clean_layout_ends_with_0_and_prints_every_parameter(capsys):
    assert status_of(CLEAN) == 0
    captured = capsys.readouterr()
    assert "no findings" in captured.out
    assert "blocks.mlp.gate_up" in captured.out
    assert captured.err == ""


def test_findings_end_with_1_and_are_printed_by_kind(capsys):
    assert status_of(WITH_FINDINGS) == 1
    captured = capsys.readouterr()
    assert re.search(r"^indivisible: .*'kv_heads'.* 4\b", captured.out, re.MULTILINE)
    assert "no findings" not in captured.out
    assert captured.err == ""


@pytest.mark.parametrize("argv, status", [(CLEAN, 0), (WITH_FINDINGS, 1)])
def test_json_is_one_object_with_the_promised_keys_and_nothing_else(
    argv, status, capsys
):
    assert status_of([*argv, "--json"]) == status
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert captured.err == ""
    assert bool(report["findings"]) == bool(status)
    assert all(finding.keys() >= FINDING_KEYS for finding in report["findings"])
    assert report["parameters"]
    assert all(row.keys() >= PARAMETER_KEYS for row in report["parameters"])


def test_json_bytes_are_those_of_one_device(capsys):
    whole, split = (
        sum(row["bytes"] for row in report_of([*TINY, *layout], capsys)["parameters"])
        for layout in (["--layout", "data=8"], ["--layout", "fsdp=8"])
    )
    assert split == pytest.approx(whole / 8, rel=0.01)


def test_the_module_runs_as_a_command():
    command = [*warm.words(), "-m", "meshpar", *TINY, "--layout", "data=2"]
    root = Path(__file__).parents[1]
    child = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "no findings" in child.stdout


# Options.


@pytest.mark.parametrize(
    "options, kinds",
    [
        (["--layout", "data=-1,tensor=2", "--devices", "8"], set()),
        (["--layout", "fsdp=2", "--rules", "fsdp"], set()),
        (["--layout", "fsdp=2", "--rules", "data_parallel"], {"replicated"}),
        (
            ["--layout", "fsdp=2", "--rules", "data_parallel"]
            + ["--large-bytes", "100000000"],
            set(),
        ),
        (["--layout", "data=4", "--global-batch", "8"], set()),
        (["--layout", "data=4", "--global-batch", "6"], {"indivisible"}),
        (
            ["--layout", "tensor=4,sequence_parallel=true", "--seq", "126"],
            {"indivisible"},
        ),
    ],
)
def test_each_option_reaches_the_lint(options, kinds, capsys):
    findings = report_of([*TINY, *options], capsys)["findings"]
    assert {finding["kind"] for finding in findings} - {"idle"} == kinds


def test_rules_can_be_written_out_with_the_second_of_two_a_finding(capsys):
    whole = DATA_PARALLEL.table.keys() - {"batch", "mlp", "experts", *SPATIAL}
    pairs = ",".join(f"{name}=none" for name in whole)
    rules = f"batch=data+fsdp,{pairs},mlp=tensor,mlp=none"
    report = report_of([*TINY, "--layout", "data=2,tensor=2", "--rules", rules], capsys)
    assert [(f["kind"], f["path"]) for f in report["findings"]] == [("shadowed", "mlp")]
    axes = {row["path"]: row["mesh_axes"] for row in report["parameters"]}
    assert axes["blocks.mlp.down"] == [None, "tensor", None]


# Models.


@pytest.mark.parametrize(
    "sizes, path, shape",
    [
        ("layers=2,hidden=64,heads=4,vocab=256", "blocks.mlp.up", (2, 64, 256)),
        ("layers=2,hidden=64,heads=4,vocab=256,seq=99", "position_embed", (99, 64)),
        (
            "layers=2,hidden=64,heads=4,ffn=128,vocab=256,gated=true",
            "blocks.mlp.gate_up",
            (2, 64, 2, 128),
        ),
        (
            "layers=2,hidden=64,heads=4,kv_heads=2,ffn=128,vocab=256,gated=true",
            "blocks.attention.qkv",
            (2, 64, 2, 4, 16),
        ),
        (
            "layers=2,hidden=64,heads=4,ffn=128,vocab=256,seq=64,tied=true,gated=true",
            "token_embed",
            (256, 64),
        ),
        (
            "layers=2,hidden=64,heads=4,kv_heads=4,vocab=256,tied=true,gated=false",
            "blocks.mlp.up",
            (2, 64, 256),
        ),
    ],
)
def test_sizes_alone_are_a_model(sizes, path, shape, capsys):
    argv = [*LINT, "--model", sizes, "--seq", "64"]
    assert shapes_of(argv, capsys)[path] == shape


def test_sizes_beside_a_preset_are_what_differs_from_it(capsys):
    argv = [*LINT, "--preset", "tiny", "--model", "layers=2,tied=true"]
    shapes = shapes_of(argv, capsys)
    assert shapes["blocks.mlp.down"] == (2, 384, 128)
    assert "unembed" not in shapes


def test_a_model_can_come_from_a_function_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_model.py").write_text(
        "from meshpar.models.presets import build\n\n\ndef two_layers():\n"
        "    return build('tiny', layers=2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    argv = [*LINT, "--model-from", "own_model:two_layers"]
    assert shapes_of(argv, capsys)["blocks.mlp.down"] == (2, 384, 128)


@pytest.fixture
def gpt2_config(tmp_path):
    path = tmp_path / "config.json"
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256}
    values = {"model_type": "gpt2", **sizes, "n_positions": 128}
    path.write_text(json.dumps(values))
    return path


def test_a_hugging_face_config_is_a_model(gpt2_config, capsys):
    argv = [*LINT, "--model", str(gpt2_config)]
    assert status_of(argv) == 0
    capsys.readouterr()
    assert shapes_of(argv, capsys)["position_embed"] == (128, 64)


# Bad input.

SIZES = "hidden=64,heads=4,vocab=256"

BAD_INPUT = [
    ([*LINT, "--preset", "tny"], ("model.unknown_preset", "tny", "tiny")),
    ([*TINY, "--layout", "data"], ("layout.not_key_value", "'data'")),
    ([*TINY, "--layout", "dta=2"], ("layout.unknown_key", "dta=2", "'dta'", "'data'")),
    ([*TINY, "--layout", "data=0"], ("layout.not_whole_number", "data=0", 1)),
    ([*TINY, "--layout", "data=-1"], ("layout.open_size", "data", -1, "--devices")),
    (
        [*LINT, "--preset", "tiny", "--devices", "4"],
        ("layout.wrong_device_count", "data=2", 2, 4),
    ),
    (LINT, ("command.no_model", "--preset", "--model")),
    ([*LINT, "--model", "layers"], ("model.not_key_value", "--model 'layers'")),
    ([*LINT, "--model", "=2"], ("model.not_key_value", "--model '=2'")),
    (
        [*LINT, "--preset", "tiny", "--rules", "=data"],
        ("rules.not_key_value", "'=data'"),
    ),
    ([*LINT, "--model", "layers=1,layers=2"], ("model.repeated_key", "'layers'")),
    (
        [*LINT, "--model", "layers=2"],
        ("model.missing_sizes", "embed", "heads", "vocab"),
    ),
    (
        [*LINT, "--preset", "tiny", "--model", "layrs=2"],
        ("model.unknown_size", "LlamaConfig", "'layrs'", "'layers'"),
    ),
    (
        [*LINT, "--model", "layers=2,hidden=64,heads=5,vocab=256"],
        ("model.heads_indivisible", "embed=64", "heads=5"),
    ),
    ([*LINT, "--model", "absent.json"], ("weights.unreadable_json", "absent.json")),
    (
        [*LINT, "--preset", "tiny", "--model", "absent.json"],
        ("model.preset_and_model", "tiny", "absent.json"),
    ),
    (
        [*LINT, "--model-from", "meshpar.models.presets"],
        ("command.not_module_function", "meshpar.models.presets"),
    ),
    ([*LINT, "--model-from", "no.such:build"], ("command.function_not_found", "'no'")),
    (
        [*LINT, "--model-from", "meshpar.models.presets:no"],
        ("command.function_not_found", "'no'"),
    ),
    (
        [*LINT, "--preset", "tiny", "--rules", "fsdpp"],
        ("rules.unknown_preset", "fsdpp", "fsdp"),
    ),
    ([*LINT, "--preset", "tiny", "--rules", "mlp="], ("rules.not_key_value", "'mlp='")),
    (
        [*LINT, "--preset", "tiny", "--rules", "mlp=tensr"],
        ("rules.unknown_mesh_axis", "mlp", "tensr", "tensor"),
    ),
    ([*LINT, "--no-such-option"], ("command.unknown_option", "--no-such-option")),
    ([*LINT, "--seq", "many"], ("value.not_whole_number", "--seq", "many", 1)),
    ([*LINT, "--seq", "0"], ("value.not_whole_number", "--seq", 0, 1)),
    ([*LINT, "--global-batch", "0"], ("value.not_whole_number", "--global-batch", 0)),
    ([*LINT, "--global-batch", "-4"], ("value.not_whole_number", "--global-batch", -4)),
    (
        [*LINT, "--model", f"layers=abc,{SIZES}"],
        ("value.not_whole_number", "layers", "abc"),
    ),
    (
        [*LINT, "--model", f"layers=2.5,{SIZES}"],
        ("value.not_whole_number", "layers=2.5"),
    ),
    (
        [*LINT, "--model", f"layers=true,{SIZES}"],
        ("value.not_whole_number", "layers=True"),
    ),
    (
        [*LINT, "--preset", "tiny", "--model", "tied=no"],
        ("value.not_boolean", "tied", "no"),
    ),
    (
        [*LINT, "--preset", "tiny", "--model", "norm_epsilon=x"],
        ("value.not_number", "norm_epsilon", "x"),
    ),
    (
        [*LINT, "--preset", "tiny", "--model", "head_dim=-1"],
        ("value.negative", "head_dim=-1", 0),
    ),
    ([*LINT, "--model", f"layers=2,{SIZES},ffn=-1"], ("value.negative", "ffn=-1", 0)),
    (
        [*LINT, "--model", f"layers=2,{SIZES},tied=false"],
        ("model.value_fixed_by_family", "tied=False"),
    ),
    (
        ["lint", "--preset", "tiny", "--layout", "data=8", "--model", "experts=8"],
        ("model.no_experts", "experts=8", "LlamaConfig"),
    ),
    (
        [*LINT, "--model", f"layers=2,{SIZES},experts=8"],
        ("model.missing_sizes", "top_k", "expert_ffn"),
    ),
    (
        [*LINT, "--model", "config_json=3"],
        ("command.not_a_size", "config_json", "--model PATH"),
    ),
    (
        [*LINT, "--model", "preset=tiny"],
        ("command.not_a_size", "preset", "--preset NAME"),
    ),
    ([*LINT, "--model-from", "os:sep"], ("command.not_a_function", "os:sep", "str")),
    (
        [*LINT, "--model-from", "json:loads"],
        ("command.bad_model_function", "json:loads", "loads"),
    ),
    (
        [*LINT, "--model-from", "os:getcwd"],
        ("command.no_model_returned", "os:getcwd", "str"),
    ),
    ([*LINT, "--model-from", "..:x"], ("command.function_not_found", "'..:x'")),
    ([*LINT, "--model-from", ":x"], ("command.function_not_found", "':x'")),
    (TINY, ("command.missing_option", "--layout")),
    (["lnt"], ("command.unknown_command", "lnt", "lint")),
    ([], ("command.missing_option", "COMMAND")),
]


@pytest.mark.parametrize("argv, refusal", BAD_INPUT)
def test_bad_input_is_one_line_on_stderr_and_status_2(argv, refusal, refuses_command):
    refuses_command(argv, *refusal)


@pytest.mark.parametrize(
    "text, refusal",
    [
        (
            '{"model_type": "mamba"}',
            ("weights.unknown_model_type", "'mamba'", "deepseek_v3", "gpt2", "llama"),
        ),
        ("{", ("weights.unreadable_json", "config.json", 1, 2)),
    ],
)
def test_a_bad_config_json_is_one_line_on_stderr_and_status_2(
    text, refusal, gpt2_config, refuses_command
):
    gpt2_config.write_text(text)
    refuses_command([*LINT, "--model", str(gpt2_config)], *refusal)


def test_a_value_error_of_a_function_of_ones_own_is_one_line(
    tmp_path, monkeypatch, refuses_command
):
    code = "def odd(layers):\n    raise ValueError('layers must be odd')\n"
    (tmp_path / "odd_model.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    argv = [*LINT, "--model-from", "odd_model:odd", "--model", "layers=2"]
    refuses_command(argv, "command.bad_model_function", "layers", "odd")


def test_a_bug_keeps_its_traceback_and_has_a_status_of_its_own(monkeypatch, capsys):
    bug = ValueError("shapes do not match")

    def fail(*args, **kwargs):
        raise bug

    monkeypatch.setattr(sys.modules["meshpar.lint.lint"], "lint", fail)
    assert main(CLEAN) == 70
    *trace, line = capsys.readouterr().err.splitlines()
    assert trace[0].startswith("Traceback") and str(bug) in trace[-1]
    assert line.startswith("meshpar") and "ValueError" in line
