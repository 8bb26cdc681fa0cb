"""HTML views of objects in notebooks: true, escaped, and readable by themselves."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar import AuditReport, Finding, Layout, LintReport, MemoryReport, make_mesh
from meshpar.html import Bar, element, grid, lanes, shade, stacked_bar, table
from meshpar.lint.findings import ParameterRow, parameter_shards
from meshpar.models.presets import build
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.search.result import ranked
from meshpar.planner.workload.shapes import SHAPES
from meshpar.schedules import make_schedule, simulate
from meshpar.train.memory_report import Part
from meshpar.train.state import TrainState
from meshpar.train.state_table import array_rows

NAME = "<img src=x onerror='alert(1)'>&\"b\""
"""Name that would be an element, if it were not escaped."""

VOID = {"wbr"}


class Page(HTMLParser):
    """Elements and texts of a page; fails where elements do not nest."""

    def __init__(self, page):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.texts.append(data)


def a_row(path):
    return ParameterRow(
        path=path,
        shape=(8, 4),
        logical_axes=("embed", NAME),
        mesh_axes=("fsdp", None),
        local_shape=(4, 4),
        bytes=64,
    )


def a_state(path="up", spec=("fsdp", None)):
    mesh = make_mesh("fsdp=2,data=4")
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    whole = put(jnp.uint32(7), PartitionSpec())
    params = {"blocks": {path: put(jnp.ones((8, 4)), PartitionSpec(*spec))}}
    return TrainState(whole, whole, whole, params, (whole, params))


def a_plan():
    workload = replace(SHAPES["tiny"], name=NAME)
    cluster = cluster_of("h100-80gb", devices=8)
    return estimate(workload, cluster, "fsdp=4,tensor=2", global_batch=8, seq=64)


FINDING = Finding(kind="dead", path=NAME, message=NAME)
PART = Part(name=NAME, formula_bytes=1 << 20, compiled_bytes=1 << 20, how=NAME)
OBJECTS = {
    "layout": lambda: Layout.parse("data=2,fsdp=2,tensor=2"),
    "open layout": lambda: Layout.parse("data=-1,tensor=2"),
    "many devices": lambda: Layout.parse("fsdp=512,tensor=8"),
    "timeline": lambda: simulate(make_schedule("interleaved_1f1b", 4, 8, 2)),
    "lint": lambda: LintReport(
        findings=(FINDING,), parameters=(a_row(NAME),), notes=(FINDING,)
    ),
    "audit": lambda: AuditReport(
        layout="data=2", target=NAME, mesh_shape={"data": 2}, notes=(NAME,)
    ),
    "no program": lambda: AuditReport(
        layout="", target="cpu", mesh_shape={}, problem=NAME, too_large=True
    ),
    "memory": lambda: MemoryReport(
        layout="data=2", parts=(PART,), at_once_bytes=1, temp_bytes=1, peak_bytes=1
    ),
    "state": lambda: a_state(NAME),
    "plan": a_plan,
    "plans": lambda: ranked([a_plan()], 80e9, 1, 0.0),
    "no plans": lambda: ranked([a_plan()], 1.0, 1, 0.0),
}
UNNAMED = {"layout", "open layout", "many devices", "timeline", "no plans"}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_shows_itself_without_scripts_or_network(name):
    shown = OBJECTS[name]()._repr_html_()
    page = Page(shown)
    assert not {tag for tag, _ in page.elements} & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?:|//|url\(|\bon\w+=['\"]?alert\(1\)['\"]?>", shown)
    assert name in UNNAMED or NAME in "".join(page.texts)


def test_every_writer_escapes():
    cells = {NAME: [Bar(0, 1, NAME, NAME, NAME)]}
    drawn = [
        table([NAME], [[NAME]]),
        stacked_bar({NAME: 1.0}, lambda size: NAME),
        lanes(cells, [NAME], NAME),
    ]
    page = Page(element(NAME, drawn))
    assert "img" not in {tag for tag, _ in page.elements}
    assert "".join(page.texts).count("<img") == 10


def colors(page):
    """Device -> its colour."""
    styles = [attrs["style"] for tag, attrs in page.elements if "title" in attrs]
    hovers = [attrs["title"] for tag, attrs in page.elements if "title" in attrs]
    pairs = zip(hovers, styles, strict=True)
    return {int(re.findall(r"\d+", hover)[0]): style for hover, style in pairs}


@pytest.mark.parametrize(
    "text",
    [
        "data=2,fsdp=2,tensor=2",
        "fsdp=8",
        "data=4,stage=2,microbatches=2",
        "data=2,fsdp=2,tensor=2,zero=1",
        "data=2,context=2,tensor=2,zero_axes=data/context",
    ],
)
def test_devices_of_one_colour_hold_the_same_shards(text):
    layout = Layout.parse(text)
    drawn = colors(Page(layout._repr_html_()))
    held = defaultdict(list)
    for shards in parameter_shards(build("test"), layout):
        for device, shard in enumerate(shards.of_device):
            held[device].append(shard)
    assert sorted(drawn) == list(range(8))
    same = {(a, b) for a in drawn for b in drawn if drawn[a] == drawn[b]}
    assert same == {(a, b) for a in held for b in held if held[a] == held[b]}


def test_as_many_colours_as_parts():
    for number in (3, 7, 8, 64):
        assert len({shade(index, number) for index in range(number)}) == number


def test_a_grid_and_lanes_keep_their_order():
    layout = Page(Layout(data=2, tensor=2)._repr_html_())
    found = [text for text in layout.texts if text in "0123"]
    assert found[:4] == ["0", "1", "2", "3"]
    assert grid(["a"], {}).count("<th>") == 2
    timeline = simulate(make_schedule("1f1b", 2, 3))
    bars = [attrs for tag, attrs in Page(timeline._repr_html_()).elements if tag == "g"]
    assert len(bars) == sum(map(len, timeline.events))


def test_a_state_prints_totals_and_no_values():
    state = a_state()
    text = repr(state)
    assert len(text.splitlines()) <= 10
    assert "params: 1 arrays, 64 B on each device" in text
    assert "float32[8, 4] as (fsdp, -), 64 B each" in text
    assert "Array(" not in text and "7" not in text


def test_a_table_of_a_state_has_the_bytes_that_a_device_holds():
    state = a_state(spec=(("fsdp", "data"), None))
    rows = {row.path: row for row in array_rows(state)}
    for path, array in jax.tree.leaves_with_path(state):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        shard = array.addressable_shards[0].data
        assert rows[name].shard == shard.shape
        assert rows[name].shard_bytes == shard.nbytes
    assert rows["params.blocks.up"].spec == "fsdp+data, -"


def test_a_state_that_is_no_arrays_prints_too():
    state = a_state()
    assert "in all" in repr(jax.eval_shape(lambda: state))
    assert repr(jax.tree.map(lambda x: x.sharding, state)).startswith("TrainState of 6")
    traced = []
    jax.eval_shape(lambda s: traced.append(repr(s)), state)
    assert "6 arrays" in traced[0]
    jax.tree.map(lambda x: x.delete(), state.params)
    assert "64 B each" in repr(state)
