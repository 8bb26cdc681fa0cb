"""The plans of six runs that others published: fast as those ran, and beaten by none.

MFU within what is published for that hardware, and no layout among many random ones and
those an expert would write by hand is faster and fits, whatever the cost model says.
"""

import json
import random
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from meshpar import InputError
from meshpar.layout import MESH_AXES, STAGE_REMATS, Layout
from meshpar.layout.requirements import layout_errors
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.machine.execution import EXECUTIONS
from meshpar.planner.search.search import Request, search
from meshpar.planner.search.space import divisors
from meshpar.planner.workload.problems import residual_names
from meshpar.planner.workload.shapes import SHAPES
from meshpar.schedules import SCHEDULES, plan_refusal
from tests.marks import slow

NUM_RANDOM = 500
BY_HAND = json.loads(
    (Path(__file__).parent / "data" / "layouts_by_hand.json").read_text()
)


class Case(NamedTuple):
    """A run, and the MFU that others published of such runs."""

    model: str
    hardware: str
    devices: int | None
    seq: int
    global_batch: int
    published: tuple[float, float]
    source: str


CASES = {
    "llama3-70b": Case(
        *("llama3-70b", "h100-80gb", 512, 8192, 1024, (0.30, 0.52)),
        "MFU 38 to 43 % of Llama 3 405B (Llama Team 2024, table 4), 41 to 48 % of "
        "Megatron-Core's weak scaling (Megatron-LM, README), both on H100",
    ),
    "gpt3-175b": Case(
        *("gpt3-175b", "a100-80gb", 1024, 2048, 1536, (0.35, 0.58)),
        "MFU 44 to 52 % (Narayanan et al. 2021, table 1), 42 to 57 % (Korthikanti et "
        "al. 2022, table 5), 55 % on 12,288 (Jiang et al. 2024), all on A100",
    ),
    "deepseek-v3": Case(
        *("deepseek-v3", "h800", 2048, 4096, 15360, (0.10, 0.36)),
        "2.664 M H800 hours for 14.8 T tokens of 37 B active parameters, in fp8 "
        "(DeepSeek-AI 2024, table 1): 35 % of the bf16 peak, 6 FLOPs a parameter. "
        "Ours computes in bf16, and hides no all-to-all",
    ),
    "llama3-405b": Case(
        *("llama3-405b", "h100-80gb", 16384, 8192, 2048, (0.25, 0.48)),
        "MFU 41 % at 16,384 GPUs, seq 8,192, batch 2,048 (Llama Team 2024, table 4)",
    ),
    "llama3-8b": Case(
        *("llama3-8b", "tpu v5e:16x16", None, 8192, 512, (0.33, 0.72)),
        "MFU 56 to 66 % of 16B to 128B on v5e-256, seq 2,048, with splash attention "
        "(MaxText, README); ours has seq 8,192, whose attention is a fifth of the "
        "FLOPs, half of it never computed",
    ),
    "mixtral-8x7b": Case(
        *("mixtral-8x7b", "h100-80gb", 64, 4096, 1024, (0.25, 0.50)),
        "MFU 49 % of Mixtral 8x22B on H100 (Liu et al. 2025, MoE Parallel Folding)",
    ),
}
"""Published are the highest MFU, with some room above, and half of it or less."""


def request_of(case, execution="meshpar"):
    workload = SHAPES[case.model]
    return Request(
        workload=workload,
        execution=EXECUTIONS[execution],
        cluster=cluster_of(case.hardware, devices=case.devices),
        global_batch=case.global_batch,
        seq=case.seq,
    )


@cache
def best_of(name):
    return search(request_of(CASES[name])).plans[0]


def random_layout(draw, asked):
    """A layout of the whole space: any mesh, any value of any key."""
    workload, left = asked.workload, asked.cluster.num_devices
    axes = [axis for axis in MESH_AXES if axis != "expert" or workload.experts]
    sizes = dict.fromkeys(MESH_AXES, 1)
    while left > 1:
        prime = divisors(left)[1]
        sizes[draw.choice(axes)] *= prime
        left //= prime
    each = asked.global_batch // (sizes["data"] * sizes["fsdp"] * sizes["expert"])
    chosen = {**sizes, "precision": "bf16"}
    chosen["microbatches"] = draw.choice(divisors(each)) if each else 1
    chosen["zero"] = draw.choice((0, 1, 2, 3, 3))
    chosen["fsdp_gather"] = draw.choice(("step", "microbatch"))
    chosen["optimizer_memory"] = draw.choice(("device", "device", "host"))
    chosen["param_dtype"] = draw.choice(("fp32", "bf16"))
    chosen["sequence_parallel"] = draw.random() < 0.5 and sizes["tensor"] > 1
    chosen["remat"] = random_remat(draw, workload, sizes["stage"])
    if draw.random() < 0.1:
        axes = [axis for axis in ("data", "fsdp") if sizes[axis] > 1]
        chosen["zero_axes"] = tuple(axis for axis in axes if draw.random() < 0.5)
    if sizes["context"] > 1:
        chosen["attention"] = draw.choice(("ring", "allgather", "ulysses"))
    if sizes["stage"] > 1:
        chosen |= random_pipeline(draw, workload, sizes["stage"])
    return Layout(**chosen)


def random_remat(draw, workload, stages):
    words = ["none", "selective", "dots", "full", *(STAGE_REMATS if stages > 1 else ())]
    if draw.random() < 0.4:
        return draw.choice(words)
    ways = {"save": [], "offload": []}
    for name in residual_names(workload):
        way = draw.choice(("save", "offload", None))
        if way:
            ways[way].append(name)
    text = "+".join(f"{way}:{'/'.join(names)}" for way, names in ways.items() if names)
    return text or "full"


def random_pipeline(draw, workload, stages):
    names = [name for name in SCHEDULES if plan_refusal(name) is None]
    name = draw.choice(names)
    chunks = 1
    if SCHEDULES[name].num_chunks is not None:
        chunks = SCHEDULES[name].num_chunks
    else:
        chunks = draw.choice(divisors(max(1, workload.layers // stages)))
    chosen = {"schedule": name, "chunks": chunks}
    places = stages * chunks
    if draw.random() < 0.3 and places <= workload.layers:
        splits = [workload.layers // places] * places
        for _ in range(workload.layers % places):
            splits[draw.randrange(places)] += 1
        for _ in range(draw.randint(0, 3)):
            one, other = draw.randrange(places), draw.randrange(places)
            if splits[one] > 1:
                splits[one], splits[other] = splits[one] - 1, splits[other] + 1
        chosen["splits"] = tuple(splits)
    return chosen


def estimated(asked, layout):
    """Its estimate; None where it cannot be, or the step refuses it."""
    refused = layout_errors(layout).keys() - {"context", "expert"}
    if refused:
        return None
    size = {"global_batch": asked.global_batch, "seq": asked.seq}
    try:
        return estimate(asked.workload, asked.cluster, layout, **size)
    except InputError:
        return None


@pytest.mark.parametrize("name", [slow(name) for name in CASES])
def test_no_random_layout_is_faster_and_fits(name):
    asked, best, draw = request_of(CASES[name]), best_of(name), random.Random(14)
    seen = set()
    while len(seen) < NUM_RANDOM:
        layout = random_layout(draw, asked)
        found = None if str(layout) in seen else estimated(asked, layout)
        if found is None:
            continue
        seen.add(str(layout))
        faster = found.step_s < best.step_s * (1 - 1e-9)
        assert not (faster and found.fits), (best.step_s, found.step_s, str(layout))


@pytest.mark.parametrize("name", [slow(name) for name in CASES])
def test_no_layout_made_by_hand_is_faster_and_fits(name):
    asked, best = request_of(CASES[name]), best_of(name)
    lines = BY_HAND[name]
    assert len(set(lines)) == len(lines) >= 50
    for line in lines:
        found = estimated(asked, Layout.parse(line))
        assert found is not None, line
        faster = found.step_s < best.step_s * (1 - 1e-9)
        assert not (faster and found.fits), (best.step_s, found.step_s, line)


UNMEASURED = pytest.mark.xfail(
    strict=True,
    reason="MFU 62 %: the plan hides traffic over data as compiled steps do, and has "
    "no pipeline; no published run on A100 confirms it",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[UNMEASURED] if name == "gpt3-175b" else [])
        for name in CASES
    ],
)
def test_a_plan_is_as_fast_as_runs_that_were_published(name):
    least, most = CASES[name].published
    best = best_of(name)
    assert least <= best.mfu <= most, (best.mfu, CASES[name].source)


@pytest.mark.slow
def test_with_the_published_programs_attention_a_plan_is_as_fast_as_that_ran():
    """What ours lacks on TPUs is the kernel, not the layout."""
    best = search(request_of(CASES["llama3-8b"], "maxtext")).plans[0]
    assert 0.56 <= best.mfu <= 0.68
