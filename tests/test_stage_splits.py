"""How layers are shared out over stages: by number, by hand, by what they cost."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshpar import Layout, batch_shapes, memory_report
from meshpar.models.presets import build
from meshpar.parallel.pipeline.stages import layer_costs, stage_layers, with_costs
from meshpar.planner.from_model import traced_workload
from meshpar.planner.workload.problems import layout_stage_blocks
from meshpar.planner.workload.shapes import workload_of
from meshpar.schedules.stage_splits import split_by_cost, split_evenly, tick_cost
from meshpar.train.memory_report import estimated_bytes
from tests.pipelined import assert_equal_to_plain, mlp_of, model_of, step_of


def every_split(num_layers, num_stages):
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        bounds = (0, *cuts, num_layers)
        yield tuple(b - a for a, b in itertools.pairwise(bounds))


def longest_tick(split, costs):
    """Every stage runs as many places as the longest, an empty one at mean cost."""
    layers, mean = iter(costs), sum(costs) / len(costs)
    stages = [list(itertools.islice(layers, size)) for size in split]
    return max(sum(stage) + mean * (max(split) - len(stage)) for stage in stages)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize(
    "costs",
    [
        (1,) * 7,
        (9, 1, 1, 1, 1, 1, 1),
        (1, 5, 2, 8, 1, 1, 3),
        (3, 1) * 4,
        (1,) * 3 + (4,) * 7,
        (0.1, 0.2, 0.3, 9.7, 0.4, 9.9, 0.1, 0.2, 0.3),
    ],
)
def test_a_split_by_cost_has_the_shortest_longest_tick_of_all(costs, num_stages):
    found = split_by_cost(costs, num_stages)
    assert sum(found) == len(costs)
    assert len(found) == num_stages
    best = min(
        longest_tick(split, costs) for split in every_split(len(costs), num_stages)
    )
    assert longest_tick(found, costs) == pytest.approx(best)
    assert tick_cost(costs, found) == pytest.approx(best)


@pytest.mark.parametrize("num_stages", [1, 3, 4, 7])
def test_layers_of_one_cost_are_split_evenly(num_stages):
    assert split_by_cost([0.1] * 30, num_stages) == split_evenly(30, num_stages)


def test_planner_and_step_split_one_model_by_cost_alike():
    """Three dense layers before thirteen of four times as many active parameters."""
    sizes = "layers=16,hidden=64,heads=4,ffn=64,vocab=64,experts=4,top_k=4"
    workload = workload_of(f"{sizes},expert_ffn=160,dense_layers=3")
    costs = [
        workload.active_block_parameters(moe=workload.is_moe(layer))
        for layer in range(16)
    ]
    layout = Layout(stage=4, microbatches=4, splits="cost")
    planned = layout_stage_blocks(workload, layout)
    model = model_of(16)
    (group,) = model.groups
    costly = replace(model, groups=(replace(group, costs=tuple(costs)),))
    assert planned == stage_layers(costly, layout) == (4, 4, 4, 4)
    assert split_by_cost([1] * 3 + [4] * 13, 4) == (4, 4, 4, 4)


def alternating(layers, heavy):
    """A model in which some layers run their block's matmuls four times."""
    model = model_of(layers)
    (group,) = model.groups

    def block(params, x, scope):
        once = group.block(params, x, scope)
        more = lambda x: lax.fori_loop(  # noqa: E731
            0, 3, lambda _, x: group.block(params, x, scope), x
        )
        is_heavy = jnp.asarray(heavy)[scope.layer]
        return lax.cond(is_heavy, more, lambda x: x, once)

    return replace(model, groups=(replace(group, block=block),))


def test_costs_are_read_from_the_branch_that_each_layer_takes():
    heavy = (True, False, False, True, False)
    even = layer_costs(model_of(5))
    found = layer_costs(alternating(5, heavy))
    assert len(set(even)) == 1
    assert found == tuple(even[0] * (4 if here else 1) for here in heavy)


def test_costs_of_a_matmul_are_its_flops():
    costs = layer_costs(model_of(1), seq=8)
    short = layer_costs(model_of(1), seq=4)
    params = jax.tree.leaves(model_of(1).parameters["blocks"])
    weights = sum(leaf.struct.size for leaf in params if len(leaf.shape) > 1)
    assert short[0] >= 2 * 4 * weights
    attention = costs[0] - 2 * short[0]  # half of what grows with seq squared
    assert costs[0] - 2 * attention == 2 * 8 * weights


def test_stages_are_balanced_by_measured_costs_or_by_those_given():
    layout = Layout(stage=2, microbatches=2, splits="cost")
    heavy_first = alternating(5, (True, True, True, False, False))
    assert stage_layers(heavy_first, layout) == (2, 3)
    heavy_last = alternating(5, (False, False, True, True, True))
    assert stage_layers(heavy_last, layout) == (3, 2)
    model = model_of(5)
    (group,) = model.groups
    given = replace(model, groups=(replace(group, costs=(9, 9, 9, 1, 1)),))
    assert stage_layers(given, layout) == (2, 3)
    assert split_evenly(5, 2) == (3, 2)


def test_a_step_takes_the_costs_of_its_layers_and_stays_equal_to_the_model_alone():
    step = step_of(
        mlp_of(5), "stage=2,microbatches=2,splits=cost", layer_costs=[9, 9, 9, 1, 1]
    )
    orders = {
        parameter.layer_order
        for parameter in step.model.flat_parameters().values()
        if parameter.num_layers
    }
    assert orders == {(0, 1, -1, 2, 3, 4)}
    assert_equal_to_plain(mlp_of(5), "stage=3,microbatches=2,splits=cost")


def steps_by_cost_and_by_hand():
    costs = {"layer_costs": [9, 9, 9, 1, 1]}
    return tuple(
        step_of(mlp_of(5), f"stage=2,microbatches=4,splits={splits}", **more)
        for splits, more in (("cost", costs), ("2/3", {}))
    )


@pytest.mark.slow
def test_a_step_of_stages_by_cost_is_that_of_the_same_stages_given():
    batch = batch_shapes(16, 16)
    by_cost, by_hand = steps_by_cost_and_by_hand()
    assert by_cost.layers_of_stages == by_hand.layers_of_stages == (2, 3)
    assert estimated_bytes(by_cost, batch) == estimated_bytes(by_hand, batch)
    found, given = (
        step.audit_subject(batch).lower().as_text() for step in (by_cost, by_hand)
    )
    assert found == given


@pytest.mark.slow
def test_a_memory_report_is_of_the_stages_that_the_step_has():
    """However `layer_costs` split them: as if the sizes had been given."""
    by_cost, by_hand = steps_by_cost_and_by_hand()
    assert by_cost.layers_of_stages == by_hand.layers_of_stages == (2, 3)
    found, given = (
        memory_report(step, batch_shapes(16, 16)) for step in (by_cost, by_hand)
    )
    assert found.at_once_bytes == given.at_once_bytes
    assert found.temp_bytes == given.temp_bytes


@pytest.mark.parametrize(
    ("line", "costs", "refusal"),
    [
        (
            "stage=2,microbatches=2",
            [1] * 5,
            ("layout.unused_layer_costs", "layer_costs", "splits=cost"),
        ),
        ("stage=2,splits=cost", [1] * 4, ("model.wrong_number_of_costs", 5, 4)),
        (
            "stage=2,splits=cost",
            [1, 1, 0, 1, 1],
            ("model.cost_not_positive", (1, 1, 0, 1, 1)),
        ),
        ("stage=8,splits=cost", None, ("layout.too_many_stages", "stage=8", 8, 5)),
    ],
)
def test_costs_that_do_not_fit_are_refused(line, costs, refusal, refuses):
    with refuses(*refusal):
        step_of(model_of(5), line, layer_costs=costs)


def test_a_model_that_reads_more_than_tokens_needs_costs_given(refuses):
    model = model_of(5)

    def embed(params, batch, scope):
        return model.embed(params, batch, scope) * batch["gain"][:, None, None]

    reads_more = replace(model, embed=embed)
    with refuses("batch.missing_array", "batch['gain']", "layer_costs="):
        step_of(reads_more, "stage=2,splits=cost")


def test_matmuls_in_a_loop_of_unknown_length_need_costs_given(refuses):
    model = model_of(3)
    (group,) = model.groups

    def block(params, x, scope):
        return lax.while_loop(
            lambda state: (jnp.abs(state[0]).sum() < 1e9) & (state[1] < 5),
            lambda state: (group.block(params, state[0], scope), state[1] + 1),
            (x, 0),
        )[0]

    loops = replace(model, groups=(replace(group, block=block),))
    with refuses("model.unknown_trip_count", "while_loop", "layer_costs="):
        layer_costs(loops)
    layout = Layout.parse("stage=2,splits=cost,microbatches=2")
    assert stage_layers(with_costs(loops, [1, 1, 3], layout), layout) == (1, 2)


@pytest.mark.parametrize("stages", [2, 8])
@pytest.mark.parametrize("preset", ["mixtral-8x7b", "deepseek-v3"])
def test_stages_of_experts_are_those_of_the_plan(preset, stages):
    layout = Layout.parse(f"stage={stages},microbatches={stages},splits=cost")
    planned = layout_stage_blocks(workload_of(preset), layout)
    assert stage_layers(build(preset), layout) == planned


def test_a_layer_of_experts_costs_what_a_token_meets():
    """Mixtral's block: 2 of 8 experts, the router, attention's weights and scores."""
    (group,) = build("mixtral-8x7b").groups
    experts, attention = 2 * 3 * 4096 * 14_336, 2 * 4096 * (4096 + 1024)
    weights, scores = experts + attention + 4096 * 8, 2 * 32 * (128 + 128) * 8
    assert set(group.costs) == {8 * (2 * weights + scores)}


UNEQUAL = {"layers": 7, "dense_layers": 2, "ffn": 2048, "expert_ffn": 192}
WORDS = ",".join(f"{name}={size}" for name, size in UNEQUAL.items())


@pytest.mark.parametrize("preset", ["tiny", "tiny-gpt2"])
def test_costs_by_arithmetic_are_those_of_the_trace(preset):
    assert layer_costs(build(preset)) == workload_of(preset).layer_costs


def test_layers_of_experts_and_dense_ones_cost_what_their_trace_says():
    model = build("tiny-moe", **UNEQUAL)
    declared = layer_costs(model)
    assert declared == workload_of("tiny-moe", words=WORDS).layer_costs
    assert declared[0] == declared[1] > declared[2]
    undeclared = tuple(replace(group, costs=None) for group in model.groups)
    assert layer_costs(replace(model, groups=undeclared)) == declared


def test_unequal_layers_are_split_alike_by_step_estimate_and_traced_model():
    model = build("tiny-moe", **UNEQUAL)
    layout = Layout.parse("stage=3,microbatches=3,splits=cost")
    workload = workload_of("tiny-moe", words=WORDS)
    planned = layout_stage_blocks(workload, layout)
    assert planned == (1, 3, 3) == stage_layers(model, layout)
    traced = traced_workload(model, seq=16, precision="fp32")
    assert layout_stage_blocks(traced, layout) == planned


@pytest.mark.parametrize("line", ["stage=2,splits=cost", "stage=4,splits=3/1/2/1"])
def test_splits_are_parsed_and_printed_exactly(line):
    assert str(Layout.parse(line)) == line


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("costs", ("layout.not_whole_number", "splits='costs'")),
        ("1/cost", ("layout.not_whole_number", "splits='cost'")),
        ("cost/cost", ("layout.not_whole_number", "splits='cost'")),
        ("", ("layout.not_key_value", "'splits='")),
    ],
)
def test_other_words_are_no_splits(text, refusal, refuses):
    with refuses(*refusal):
        Layout.parse(f"stage=2,splits={text}")
