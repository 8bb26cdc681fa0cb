"""A block's schedule over time follows the scheduled program and the device's table."""

import sys
from dataclasses import replace

import pytest

from meshpar.audit.collectives import find_collectives
from meshpar.audit.hlo import parse_program
from meshpar.audit.overlap import (
    COMPUTE,
    BlockTimeline,
    block_timelines,
    target_cluster,
)
from meshpar.cli.report.audit_page import audit_page
from tests.test_cli_audit import AUDIT, CLEAN, STEP
from tests.test_overlap import MESH, TARGET, done, matmul, start

LOOP = """HloModule f, is_scheduled=true, num_partitions=2

%body (b: (s32[], bf16[8192,8192], bf16[1024,1024])) -> (s32[]) {
  %b = (s32[], bf16[8192,8192]{1,0}, bf16[1024,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %a = bf16[8192,8192]{1,0} get-tuple-element(%b), index=1
  %x = bf16[1024,1024]{1,0} get-tuple-element(%b), index=2
  LINES
  ROOT %next = (s32[]) tuple(%i)
}

%condition (c: (s32[])) -> pred[] {
  %c = (s32[]) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (t: (s32[])) -> (s32[]) {
  %t = (s32[]) parameter(0)
  ROOT %w = (s32[]) while(%t), condition=%condition, body=%body, KNOWN
}
"""


def timeline(*lines) -> BlockTimeline:
    known = 'backend_config={"known_trip_count":{"n":"3"}}'
    text = LOOP.replace("LINES", "\n  ".join(lines)).replace("KNOWN", known)
    program = parse_program(text)
    rows = find_collectives(program, MESH)
    [found] = block_timelines(program, rows, MESH, target_cluster(TARGET))
    return found


def pieces(found):
    return [(span.row, span.is_exposed) for span in found.spans]


def test_a_gather_beside_a_matmul_is_hidden_and_takes_no_time_of_its_own():
    found = timeline(start("g"), matmul("m"), done("g"))
    assert (found.name, found.executions) == ("forward", 3)
    assert pieces(found) == [(COMPUTE, False), ("tensor", False)]
    assert found.span_s == max(span.end_s for span in found.spans if not span.start_s)


def test_compute_waits_for_a_gather_that_nothing_stands_beside():
    found = timeline(start("g"), done("g"), matmul("m"))
    assert pieces(found) == [("tensor", True), (COMPUTE, False)]
    gather, product = found.spans
    assert gather.end_s == product.start_s > 0
    assert found.span_s == product.end_s


def test_a_long_gather_is_hidden_as_far_as_the_matmul_lasts():
    short = (
        "%m = bf16[1024,1024]{1,0} dot(%x, %x), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={1}"
    )
    found = timeline(start("g"), start("h"), short, done("g"), done("h"))
    product, *gathers = sorted(found.spans, key=lambda span: span.row != COMPUTE)
    assert product.row == COMPUTE
    assert [span.is_exposed for span in gathers] == [False, True, True]
    # One after another over the same devices.
    assert gathers[0].end_s == gathers[1].start_s == product.end_s
    assert gathers[1].end_s == gathers[2].start_s
    assert found.span_s == gathers[2].end_s


def test_what_is_differentiated_is_the_backward():
    path = "jit(f)/transpose(jvp(blocks))/while/body/dot_general"
    found = timeline(matmul("m").replace("jit(f)/dot_general", path))
    assert found.name == "backward"


def test_the_page_has_a_row_for_each_mesh_axis_and_says_what_is_not_known():
    found = timeline(start("g"), matmul("m"), done("g"), start("h"), done("h"))
    text = audit_page(replace(CLEAN, timelines=(found,)))
    plot = text[text.rindex("Plotly.newPlot") :]
    for word in ('"name":"hidden"', '"name":"exposed"', '"matmuls"', '"tensor"'):
        assert word in plot
    assert "Forward of a block, 3 in a step" in text
    assert "seconds are not known" in audit_page(CLEAN)


@pytest.mark.parametrize(
    ("path", "refusal"),
    [
        (
            "/no/such/folder/audit.html",
            ("command.no_folder", "--html", "'/no/such/folder'"),
        ),
        ("audit.pdf", ("command.unknown_suffix", "--html", "audit.pdf", ".html")),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_compiling(
    path, refusal, monkeypatch, refuses_command
):
    def compiles(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.setattr(sys.modules[AUDIT], "audit", compiles)
    refuses_command([*STEP, "--layout", "data=2", "--html", path], *refusal)
