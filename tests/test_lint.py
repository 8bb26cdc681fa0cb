"""Lint finds, without a device, every way in which a layout does less than it says."""

import dataclasses
import functools
import math
from dataclasses import replace

import jax
import optax
import pytest

from meshpar import (
    DATA_PARALLEL,
    FSDP,
    FSDP_TENSOR,
    TENSOR,
    InputError,
    Layout,
    RuleError,
    Rules,
    default_rules,
    lint,
    make_train_step,
)
from meshpar.models import presets
from meshpar.optimizers import muon
from meshpar.rules.presets import PRESETS
from tests.refusals import check_words, names

# A model that was linted once is not traced again.
build = functools.cache(presets.build)

CLEAN_LAYOUTS = [
    "data=8",
    "fsdp=8",
    "tensor=4",
    "data=2,fsdp=2,tensor=2",
    "fsdp=2,tensor=4,sequence_parallel=true",
    "data=2,stage=2,tensor=2,microbatches=4",
]


def without(rules, logical_axis):
    table = {name: axes for name, axes in rules.table.items() if name != logical_axis}
    return replace(rules, table=table)


def findings_of(layout, rules=None, *, preset="tiny", **options):
    return lint(build(preset), Layout.parse(layout), rules, **options).findings


# Each with the kind, the path, the key and what is named by one finding that it must
# give.
FINDINGS = {
    "a parameter without a rule": (
        lambda: findings_of("data=2", without(FSDP_TENSOR, "mlp")),
        "unknown",
        "blocks.mlp.down",
        ("rules.missing_rule", "'mlp'", ("layers", "mlp", "embed"), "batch"),
    ),
    "an activation without a rule": (
        lambda: findings_of("data=2", without(FSDP_TENSOR, "residual_seq")),
        "unknown",
        "activation ('batch', 'residual_seq', 'embed')",
        ("rules.missing_rule", "'residual_seq'", ("batch", "residual_seq", "embed")),
    ),
    "two rules for one logical axis": (
        lambda: findings_of("data=2", [*FSDP_TENSOR.table.items(), ("mlp", None)]),
        "shadowed",
        "mlp",
        ("rules.shadowed", "'mlp'", ("tensor",), None),
    ),
    "a parameters' rule that repeats the table's": (
        lambda: findings_of("data=2", replace(TENSOR, parameters={"mlp": "tensor"})),
        "shadowed",
        "mlp",
        ("rules.same_for_parameters", "'mlp'", ("tensor",)),
    ),
    "a rule for nothing": (
        lambda: findings_of("data=2", FSDP_TENSOR.with_rules(ffw="tensor")),
        "dead",
        "ffw",
        ("rules.dead", "'ffw'", "array"),
    ),
    "a parameters' rule for activations only": (
        lambda: findings_of("data=2", replace(TENSOR, parameters={"seq": "fsdp"})),
        "dead",
        "seq",
        ("rules.dead", "'seq'", "parameter"),
    ),
    "a parameters' rule for nothing": (
        lambda: findings_of("data=2", replace(TENSOR, parameters={"ffw": "fsdp"})),
        "dead",
        "ffw",
        ("rules.dead", "'ffw'", "parameter"),
    ),
    "a parameter that does not divide": (
        lambda: findings_of("tensor=3"),
        "indivisible",
        "blocks.attention.out",
        (
            *("layout.indivisible", "'heads'", 8, "'tensor'", 3),
            *((4, 8, 16, 128), ("layers", "heads", "head_dim", "embed")),
            *("blocks.attention.out", "replicate_if_indivisible"),
        ),
    ),
    "a residual stream that does not divide": (
        lambda: findings_of("tensor=4,sequence_parallel=true", seq=126),
        "indivisible",
        "activation ('batch', 'residual_seq', 'embed')",
        (
            *("layout.indivisible", "'residual_seq'", 126, "'tensor'", 4),
            *(("batch", "residual_seq", "embed"), (1, 126, 128)),
        ),
    ),
    "a batch that does not divide": (
        lambda: findings_of("data=2,fsdp=2", global_batch=6),
        "indivisible",
        "activation ('batch',)",
        ("layout.indivisible", "'batch'", 6, "'data' x 'fsdp'", 4),
    ),
    "a parameter that is whole on every device": (
        lambda: findings_of("fsdp=2", DATA_PARALLEL, large_bytes=1_500_000),
        "replicated",
        "blocks.mlp.gate_up",
        (
            *("rules.replicated", "blocks.mlp.gate_up", (4, 128, 2, 384)),
            *(("layers", "embed", None, "mlp"), 1572864, 1500000, "'fsdp'"),
        ),
    ),
    "a parameter that ZeRO could split over the devices of experts": (
        lambda: findings_of(
            "expert=4", DATA_PARALLEL, preset="tiny-moe", large_bytes=100_000
        ),
        "replicated",
        "token_embed",
        ("rules.replicated", "'expert'"),
    ),
    "a mesh axis that shards nothing": (
        lambda: findings_of("tensor=2", DATA_PARALLEL),
        "idle",
        "tensor",
        ("mesh.idle_axis", "'tensor'", 2, "tensor=1"),
    ),
    "an optimizer that mixes the rows of split matrices": (
        lambda: findings_of("fsdp=2,tensor=2", optimizer=optax.contrib.muon(1e-2)),
        "mixed",
        "blocks.mlp.down",
        (
            *("optimizer.mixes_rows", "blocks.mlp.down", "dot_general"),
            *("'tensor' and 'fsdp'", "meshpar.optimizers.muon"),
        ),
    ),
    "a split of the state that no training step makes": (
        lambda: findings_of("tensor=2,zero=1"),
        "unsupported",
        "zero",
        (
            *("layout.zero_without_effect", "tensor=2,zero=1", "zero=1"),
            *("data=1", "fsdp=1"),
        ),
    ),
    "rules that split the batch in part": (
        lambda: findings_of("data=2", DATA_PARALLEL.with_rules(batch="data")),
        "unknown",
        "batch",
        ("rules.wrong_batch_axes", "'batch'", ("data",), ("data", "fsdp", "expert")),
    ),
    "two dims of a parameter on one mesh axis": (
        lambda: findings_of("tensor=2", TENSOR.with_rules(embed="tensor")),
        "claimed_twice",
        "blocks.mlp.down",
        (
            *("rules.claimed_twice", "'tensor'", "'mlp' and 'embed'"),
            ("layers", "mlp", "embed"),
        ),
    ),
    "two dims of an activation on one mesh axis": (
        lambda: findings_of("tensor=2", TENSOR.with_rules(seq="tensor")),
        "claimed_twice",
        "activation ('batch', 'seq', 'heads', 'head_dim')",
        (
            *("rules.claimed_twice", "'tensor'", "'seq' and 'heads'"),
            ("batch", "seq", "heads", "head_dim"),
        ),
    ),
    "sequences longer than the model's": (
        lambda: findings_of("data=1", preset="tiny-gpt2", seq=512),
        "rank",
        "model",
        ("batch.sequence_too_long", (1, 512), "max_seq=256"),
    ),
}


@pytest.mark.parametrize(
    "find, kind, path, named", FINDINGS.values(), ids=FINDINGS.keys()
)
def test_what_a_layout_does_silently_is_found_in_words(
    find, kind, path, named, snapshot
):
    (found,) = (f for f in find() if (f.kind, f.path) == (kind, path))
    key, *values = named
    assert found.key == key
    check_words(found.message, key, values, snapshot)


@pytest.mark.parametrize("layout", CLEAN_LAYOUTS)
@pytest.mark.parametrize("preset", ["tiny", "tiny-gpt2", "llama3-8b"])
def test_the_presets_are_clean_under_the_rules_of_their_layouts(preset, layout):
    assert findings_of(layout, preset=preset) == ()


def test_a_mesh_axis_of_size_1_is_never_in_a_finding():
    rules = TENSOR.with_rules(embed="tensor", layers="expert")
    assert findings_of("data=2", rules) == ()


def test_waived_logical_axes_are_no_indivisible_finding():
    waived = replace(
        FSDP_TENSOR, replicate_if_indivisible={"heads", "kv_heads", "vocab"}
    )
    assert findings_of("tensor=3", waived) == ()


def test_a_default_rule_that_a_model_has_no_use_for_is_no_finding():
    model = build("tiny-vit")
    assert "vocab" not in {
        name for p in model.flat_parameters().values() for name in p.logical_axes
    }
    layout = Layout.parse("fsdp=2,tensor=2")
    assert lint(model, layout).findings == ()
    assert lint(model, layout, default_rules(layout)).findings == ()
    assert lint(model, layout, FSDP_TENSOR).findings == ()
    written = FSDP_TENSOR.with_rules(vocab="tensor")
    (found,) = lint(model, layout, written).findings
    assert (found.kind, found.path) == ("dead", "vocab")


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("preset", ["tiny-vit", "tiny-t5"])
def test_no_rule_of_a_preset_is_called_dead(preset, name):
    found = lint(build(preset), "data=2,fsdp=2,tensor=2", PRESETS[name]).findings
    assert "dead" not in {finding.kind for finding in found}


def test_several_faults_are_all_found_in_one_report():
    rules = without(FSDP_TENSOR, "residual_seq").with_rules(ffw=None)
    kinds = {finding.kind for finding in findings_of("tensor=3", rules)}
    assert kinds >= {"unknown", "dead", "indivisible"}


@pytest.mark.parametrize(
    "layout, options, kind",
    [
        ("data=2", {"preset": "tiny-gpt2", "seq": 512}, "rank"),
        ("data=4", {"global_batch": 6}, "indivisible"),
        ("data=2", {"global_batch": 0}, "rank"),
    ],
)
def test_a_batch_that_cannot_run_leaves_no_mesh_axis_idle(layout, options, kind):
    kinds = {finding.kind for finding in findings_of(layout, **options)}
    assert "idle" not in kinds
    if options.get("global_batch") != 0:
        assert kinds == {kind}


def test_a_global_batch_of_0_is_not_taken_for_the_default():
    model, shapes = build("tiny"), []
    embed = model.embed

    def seen(params, batch, scope):
        shapes.append(batch["tokens"].shape)
        return embed(params, batch, scope)

    lint(replace(model, embed=seen), Layout(data=2), global_batch=0)
    assert shapes == [(0, 128)]


@pytest.mark.parametrize("second", [None, "fsdp", ("data", "fsdp")])
def test_two_rules_are_told_in_the_words_of_the_rules(second):
    pairs = [*FSDP_TENSOR.table.items(), ("mlp", second)]
    (found,) = (f for f in findings_of("data=2", pairs) if f.kind == "shadowed")
    with pytest.raises(RuleError) as caught:
        Rules(pairs)
    assert found.message == str(caught.value)


def test_of_two_rules_the_first_lays_the_model_out():
    pairs = [*FSDP_TENSOR.table.items(), ("mlp", None)]
    rows = lint(build("tiny"), "tensor=2", pairs).parameters
    (down,) = (row for row in rows if row.path == "blocks.mlp.down")
    assert down.mesh_axes == (None, "tensor", None)


REFUSED = [
    "expert=2",
    "data=2,chunks=2",
    "tensor=2,zero=2",
    "data=2,zero=1,zero_axes=fsdp",
    "fsdp=2,zero=0,zero_axes=fsdp",
    "fsdp=2,fsdp_gather=microbatch",
    "data=2,param_dtype=bf16",
    "stage=8",
    "stage=2,splits=1/4",
]


@pytest.mark.parametrize("layout", REFUSED)
def test_a_layout_that_the_training_step_refuses_is_one_finding_in_its_words(layout):
    (found,) = findings_of(layout)
    devices = jax.devices()[: Layout.parse(layout).num_devices]
    with pytest.raises(InputError) as caught:
        make_train_step(build("tiny"), optax.sgd(1.0), layout, devices=devices)
    assert found.key == caught.value.key
    assert found.message in str(caught.value)


@pytest.mark.parametrize(
    "rules",
    [
        DATA_PARALLEL.with_rules(embed="fsdp"),
        replace(DATA_PARALLEL, parameters={"layers": "fsdp"}),
    ],
)
def test_rules_that_the_training_step_refuses_are_findings_in_its_words(rules):
    messages = {finding.message for finding in findings_of("data=8", rules)}
    with pytest.raises(RuleError) as caught:
        make_train_step(build("tiny"), optax.sgd(1.0), "data=8", rules=rules)
    assert str(caught.value) in messages


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        (
            "data=2,fsdp=4,zero_axes=data/fsdp",
            ("layout.zero_axes_without_effect", "fsdp", "zero_axes=data/fsdp"),
        ),
        (
            "data=8,microbatches=2,fsdp_gather=microbatch",
            ("layout.fsdp_gather_without_effect", "fsdp_gather=microbatch", "'fsdp'"),
        ),
    ],
)
def test_keys_of_zero_that_the_rules_leave_idle_are_refused_and_found(
    line, refusal, refuses
):
    (found,) = (f for f in findings_of(line, FSDP) if f.kind == "dead")
    with refuses(*refusal, kind=RuleError) as caught:
        make_train_step(build("tiny"), optax.sgd(1.0), line, rules=FSDP)
    assert (found.key, found.message) == (caught.value.key, str(caught.value))


def test_what_zero_splits_without_a_rule_is_noted():
    rules = replace(DATA_PARALLEL, parameters={"vocab": "fsdp"})
    report = lint(build("tiny"), Layout(fsdp=8), rules)
    notes = {note.path: note.message for note in report.notes}
    assert names(notes["final_norm.scale"], "'fsdp', so ZeRO")
    assert "token_embed" not in notes
    lines = str(report).splitlines()
    kinds = {note.key for note in report.notes}
    assert len(lines) == len(kinds) + max(1, len(report.findings))
    (moved,) = (line for line in lines if "ZeRO" in line)
    assert moved.endswith(f"(and {len(notes) - 1} more)")


def test_bytes_are_those_of_the_dtype_that_parameters_are_stored_in():
    wide, narrow = (
        sum(row.bytes for row in lint(build("tiny"), Layout.parse(line)).parameters)
        for line in ("data=8", "data=8,precision=bf16,param_dtype=bf16")
    )
    assert wide == 2 * narrow


def test_microbatches_that_do_not_divide_the_batch_are_one_finding():
    (found,) = findings_of("data=2,microbatches=3", global_batch=8)
    assert (found.kind, found.key) == ("indivisible", "batch.indivisible")
    assert all(names(found.message, value) for value in (8, 2, "microbatches=3"))


def test_uneven_stages_are_no_finding_and_their_padding_is_counted():
    report = lint(build("test", layers=7), Layout(stage=4))
    assert report.findings == ()
    row = {row.path: row for row in report.parameters}["blocks.attention.out"]
    assert (row.shape[0], row.local_shape[0]) == (8, 2)


# Parameters.


def test_every_parameter_has_a_row_even_where_it_cannot_be_laid_out():
    report = lint(build("tiny"), Layout(tensor=3))
    shapes = {row.path: row.shape for row in report.parameters}
    parameters = build("tiny").flat_parameters()
    assert shapes == {path: p.stacked_shape for path, p in parameters.items()}
    row = {row.path: row for row in report.parameters}["blocks.attention.out"]
    assert row.local_shape == row.shape
    (finding,) = (f for f in report.findings if f.path == row.path)
    assert finding.bytes == row.bytes == 4 * math.prod(row.shape)


@pytest.mark.parametrize("layout", CLEAN_LAYOUTS)
def test_a_row_is_one_devices_share_of_every_dim(layout):
    layout = Layout.parse(layout)
    for row in lint(build("tiny"), layout).parameters:
        for size, local, axes in zip(
            row.shape, row.local_shape, row.mesh_axes, strict=True
        ):
            names = (axes,) if isinstance(axes, str) else axes or ()
            assert size == local * math.prod(layout.mesh_shape[name] for name in names)
        assert row.bytes == 4 * math.prod(row.local_shape)


@pytest.mark.parametrize("preset", ["tiny", "gpt2", "llama3-8b", "llama3-405b"])
def test_fsdp_leaves_each_device_its_part_of_the_bytes(preset):
    model = build(preset)
    rows = lint(model, Layout(fsdp=8)).parameters
    whole_bytes = 4 * model.num_parameters
    assert sum(row.bytes for row in rows) == pytest.approx(whole_bytes / 8, rel=0.01)


def test_rules_for_the_batch_alone_leave_every_parameter_unknown():
    parameters = build("test").flat_parameters()
    report = lint(build("test"), Layout(data=2), Rules({"batch": ("data", "fsdp")}))
    unknown = {finding.path for finding in report.findings if finding.kind == "unknown"}
    assert unknown >= parameters.keys()
    assert {axis for row in report.parameters for axis in row.mesh_axes} == {None}


def test_a_model_that_reads_more_of_the_batch_is_a_finding():
    plain = build("test")

    def embed(ends, batch, scope):
        return plain.embed(ends, batch, scope) + batch["positions"][..., None]

    report = lint(dataclasses.replace(plain, embed=embed), Layout(data=2))
    (finding,) = (row for row in report.findings if row.kind == "rank")
    assert "'positions'" in finding.message


def test_an_optimizer_by_owners_or_of_rows_that_no_device_splits_is_no_finding():
    for optimizer, layout in (
        (muon(1e-2), "fsdp=2,tensor=2"),
        (optax.adafactor(1e-2), "fsdp=2,tensor=2"),
        (optax.contrib.muon(1e-2), "data=4"),
    ):
        assert findings_of(layout, optimizer=optimizer) == ()
