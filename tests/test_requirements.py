"""One fault of a layout has one key: in lint, the step, the planner and the fuzzer."""

from collections import Counter

import optax
import pytest

from meshpar import InputError, Layout, absent_mesh, lint, make_train_step
from meshpar.layout.requirements import (
    OPTIONS,
    REQUIREMENTS,
    Facts,
    layout_errors,
    problems,
)
from meshpar.models.presets import build
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.workload.shapes import SHAPES
from meshpar.testing.layout_cases import Case, Choices, refusal

# Layout and examples -> the key that all four give. Of two layers and two heads.
REFUSED = {
    ("data=2,schedule=gpipe", 8): "layout.option_without_axis",
    ("data=2,chunks=2", 8): "layout.option_without_axis",
    ("data=2,microbatches=2,data_splits=1/2", 8): "layout.wrong_data_splits",
    ("data=2,stage=2,microbatches=2,data_splits=1/3", 8): "layout.needs_even_shards",
    ("fsdp=2,attention=ulysses", 8): "layout.option_without_axis",
    ("data=2,remat=stage", 8): "layout.stage_remat_without_stages",
    ("stage=2,context=2,execution=divergent", 8): "layout.divergent_permute",
    ("stage=2,schedule=pipedream_stash,execution=uniform", 8): (
        "layout.stash_in_lock_step"
    ),
    (
        "stage=2,fsdp=2,schedule=pipedream_stash",
        8,
    ): "layout.needs_one_update",
    ("microbatches=2,remat=offload:mlp_hidden", 8): "layout.offload_in_ticks",
    ("tensor=2,zero=1", 8): "layout.zero_without_effect",
    ("fsdp=2,zero=0,zero_axes=fsdp", 8): "layout.zero_axes_without_effect",
    ("fsdp=2,zero=2,zero_axes=data", 8): "layout.zero_axes_without_effect",
    ("fsdp=2,fsdp_gather=microbatch", 8): "layout.fsdp_gather_without_effect",
    ("stage=2,fsdp_prefetch=on", 8): "layout.fsdp_prefetch_without_effect",
    ("data=2,param_dtype=bf16", 8): "layout.param_dtype_rounds",
    ("data=2,precision=fp8", 8): "layout.precision_of_others",
    ("fsdp=2,sync_every=4", 8): "layout.sync_of_one_replica",
    ("data=2,zero=1,sync_every=4", 8): "layout.sync_with_shared_states",
    ("data=2,optimizer_memory=host,sync_every=4", 8): "layout.sync_with_host_memory",
    ("data=3,microbatches=2", 8): "batch.indivisible",
    ("data=2,expert=2", 8): "layout.expert_without_experts",
    ("tensor=3", 8): "layout.indivisible",
    ("context=16,attention=ulysses", 8): "attention.indivisible_heads",
    ("stage=8", 8): "layout.too_many_stages",
    ("stage=2,splits=1/4", 8): "layout.splits_not_layers",
    ("stage=2,chunks=2", 8): "schedule.unsupported_chunks",
    ("stage=2,microbatches=2,remat=save:none_such", 8): "layout.unknown_residual",
}
SEQ = 64


@pytest.fixture(scope="module")
def model():
    return build("tiny")


def error_key(call):
    """The key of the error that a call ends with; None if it does not."""
    try:
        call()
    except InputError as error:
        return error.key
    return None


@pytest.mark.parametrize("line, examples", REFUSED)
def test_lint_step_planner_and_fuzzer_give_one_fault_one_key(line, examples, model):
    layout, key = Layout.parse(line), REFUSED[line, examples]
    found = lint(model, layout, global_batch=examples, seq=SEQ).findings
    assert key in {finding.key for finding in found}

    choices = Choices(models=("",), build=lambda _: model)
    case = Case(layout=layout, global_batch=examples, seq=SEQ)
    refused = refusal(case, choices)
    assert refused is not None and refused.key == key

    cluster = cluster_of("h100-80gb", devices=layout.num_devices)
    size = {"global_batch": examples, "seq": SEQ}
    assert key == error_key(lambda: estimate(SHAPES["tiny"], cluster, layout, **size))

    def step():
        mesh = absent_mesh(layout)
        made = make_train_step(model, optax.sgd(1e-3), layout, mesh=mesh)
        made.audit_subject({"tokens": (examples, SEQ), "targets": (examples, SEQ)})

    if key != "batch.indivisible":
        assert key == error_key(step)


def test_each_row_of_options_is_broken_by_one_of_these_layouts():
    broken = {
        problem.key
        for line, _ in REFUSED
        for problem in problems(Facts(layout=Layout.parse(line)), OPTIONS)
    }
    assert broken == {row.key for row in OPTIONS}


def test_a_layout_without_facts_breaks_no_row():
    assert [*problems(Facts(layout=Layout()), REQUIREMENTS)] == []
    assert layout_errors(Layout.parse("data=2,fsdp=2,tensor=2,remat=full")) == {}


def test_keys_stand_in_one_row_but_for_those_of_several_options():
    numbers = Counter((row.key, row.option) for row in REQUIREMENTS)
    assert {key for key, number in numbers.items() if number > 1} == {
        ("layout.indivisible", "tensor")
    }
