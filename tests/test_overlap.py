"""Which matmuls lie beside a collective is read from the scheduled program."""

from types import SimpleNamespace

import jax
import optax
import pytest

from meshpar import audit, batch_shapes, make_train_step
from meshpar.audit.collectives import find_collectives
from meshpar.audit.hlo import parse_program
from meshpar.audit.overlap import (
    collective_wire_s,
    find_overlaps,
    overlap_totals,
    target_cluster,
)
from meshpar.audit.reasons import Explained
from meshpar.audit.report import AuditReport
from meshpar.audit.target import Target
from meshpar.models.presets import build
from meshpar.testing import assertions
from meshpar.testing.assertions import assert_overlapped
from tests.test_audit_targets import needs_gpu_compiler

TARGET = Target.parse("gpu:h100:1x2")
MESH = {"data": 1, "tensor": 2}
DOT = (
    "dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
    'metadata={op_name="jit(f)/dot_general"}'
)
ATTRIBUTES = "channel_id=1, replica_groups={{0,1}}, dimensions={0}"


def program(*lines: str) -> str:
    """A scheduled program of a large matmul operand `a`, a shard `x`, and the lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"""HloModule f, is_scheduled=true, num_partitions=2

ENTRY %main (a: bf16[8192,8192], x: bf16[1024,1024]) -> bf16[] {{
  %a = bf16[8192,8192]{{1,0}} parameter(0)
  %x = bf16[1024,1024]{{1,0}} parameter(1)
{body}
  ROOT %nothing = bf16[] constant(0)
}}
"""


def start(name: str, more: str = "") -> str:
    return (
        f"%{name} = (bf16[1024,1024]{{1,0}}, bf16[2048,1024]{{1,0}}) "
        f"all-gather-start(%x), {ATTRIBUTES}{more}"
    )


def done(name: str) -> str:
    return f"%{name}.done = bf16[2048,1024]{{1,0}} all-gather-done(%{name})"


def matmul(name: str) -> str:
    return f"%{name} = bf16[8192,8192]{{1,0}} {DOT}"


def overlaps(text: str, target: Target | None = TARGET) -> list:
    found = parse_program(text)
    rows = find_collectives(found, MESH)
    by_line = find_overlaps(found, rows, MESH, target_cluster(target))
    return [by_line[row.line] for row in rows]


def test_a_matmul_between_start_and_done_hides_a_gather():
    text = program(start("g"), matmul("m"), done("g"))
    [overlap] = overlaps(text)
    assert overlap.matmul_flops == 2 * 8192**3
    assert overlap.matmul_bytes == 3 * 2 * 8192**2
    assert overlap.is_hidden and overlap.hidden_s == overlap.wire_s > 0


@pytest.mark.parametrize(
    "lines",
    [
        (matmul("m"), start("g"), done("g")),
        (start("g"), done("g"), matmul("m")),
        (start("g", ', backend_config={"is_sync":true}'), matmul("m"), done("g")),
        (
            matmul("m"),
            f"%g = bf16[2048,1024]{{1,0}} all-gather(%x), {ATTRIBUTES}",
            matmul("n"),
        ),
    ],
    ids=["before", "after", "synchronous start", "no start"],
)
def test_what_stands_elsewhere_hides_nothing(lines):
    [overlap] = overlaps(program(*lines))
    assert not overlap.is_hidden and overlap.hidden_s == 0 < overlap.wire_s


def test_a_matmul_that_is_too_short_hides_a_part():
    small = (
        "%m = bf16[1024,1024]{1,0} dot(%x, %x), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={1}"
    )
    [overlap] = overlaps(program(start("g"), small, done("g")))
    assert 0 < overlap.hidden_s < overlap.wire_s
    assert not overlap.is_hidden


def test_two_gathers_over_the_same_axis_do_not_hide_behind_the_same_second():
    small = (
        "%m = bf16[1024,1024]{1,0} dot(%x, %x), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={1}"
    )
    alone = overlaps(program(start("g"), small, done("g")))[0].hidden_s
    text = program(start("g"), start("h"), small, done("g"), done("h"))
    assert sum(overlap.hidden_s for overlap in overlaps(text)) == pytest.approx(alone)


def test_a_wrapped_scatter_and_a_loop_of_matmuls_are_seen():
    text = f"""HloModule f, is_scheduled=true, num_partitions=2

%add (l: f32[], r: f32[]) -> f32[] {{
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %sum = f32[] add(%l, %r)
}}

%scatter (p: f32[2048,1024]) -> f32[1024,1024] {{
  %p = f32[2048,1024]{{1,0}} parameter(0)
  ROOT %s = f32[1024,1024]{{1,0}} reduce-scatter(%p), {ATTRIBUTES}, to_apply=%add
}}

%body (b: (s32[], bf16[8192,8192])) -> (s32[], bf16[8192,8192]) {{
  %b = (s32[], bf16[8192,8192]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %a = bf16[8192,8192]{{1,0}} get-tuple-element(%b), index=1
  {matmul("m")}
  ROOT %next = (s32[], bf16[8192,8192]{{1,0}}) tuple(%i, %m)
}}

%condition (c: (s32[], bf16[8192,8192])) -> pred[] {{
  %c = (s32[], bf16[8192,8192]{{1,0}}) parameter(0)
  ROOT %go = pred[] constant(true)
}}

ENTRY %main (y: f32[2048,1024], t: (s32[], bf16[8192,8192])) -> bf16[] {{
  %y = f32[2048,1024]{{1,0}} parameter(0)
  %t = (s32[], bf16[8192,8192]{{1,0}}) parameter(1)
  %r = ((f32[2048,1024]{{1,0}}), f32[1024,1024]{{1,0}}) async-start(%y), calls=%scatter
  %w = (s32[], bf16[8192,8192]{{1,0}}) while(%t), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
  %r.done = f32[1024,1024]{{1,0}} async-done(%r)
  ROOT %nothing = bf16[] constant(0)
}}
"""  # noqa: E501
    [overlap] = overlaps(text)
    assert overlap.matmul_flops == 3 * 2 * 8192**3
    assert overlap.is_hidden


PREPARED = """
  %c = () custom-call-start(), called_computations={%move}
  %u = () custom-call-update(%c, %x)
  %m = bf16[8192,8192]{1,0} MATMUL
  %d = bf16[2048,1024]{1,0} custom-call-done(%u)"""
CALLED = """
  %c = () call-start(%x), async_execution_thread="sparsecore", to_apply=%move
  %m = bf16[8192,8192]{1,0} MATMUL
  %d = bf16[2048,1024]{1,0} call-done(%c)"""


@pytest.mark.parametrize(
    ("lines", "is_hidden"),
    [
        (CALLED, True),
        (PREPARED, True),
        (PREPARED.replace("%u = () custom-call-update(%c, %x)\n", ""), True),
        # What stands before the operands are there hides nothing.
        (
            """
  %c = () custom-call-start(), called_computations={%move}
  %m = bf16[8192,8192]{1,0} MATMUL
  %u = () custom-call-update(%c, %x)
  %d = bf16[2048,1024]{1,0} custom-call-done(%u)""",
            False,
        ),
    ],
    ids=["call", "custom call", "not prepared", "prepared only"],
)
def test_what_a_sparse_core_moves_is_seen(lines, is_hidden):
    if "%u = " not in lines:
        lines = lines.replace("(%u)", "(%c)").replace("start()", "start(%x)")
    moved = f"""
%move (p: bf16[1024,1024]) -> bf16[2048,1024] {{
  %p = bf16[1024,1024]{{1,0}} parameter(0)
  ROOT %g = bf16[2048,1024]{{1,0}} all-gather(%p), {ATTRIBUTES}
}}
"""
    text = program(*(line.strip() for line in lines.strip().splitlines()))
    [overlap] = overlaps(text.replace("MATMUL", DOT) + moved)
    assert overlap.is_hidden is is_hidden


def test_a_scatter_over_a_whole_slice_takes_a_scatters_time():
    """A program says itself where XLA:TPU all-reduces; its scatters are scatters."""
    cluster = target_cluster(Target.parse("tpu:v5p:4x4x4"))
    assert cluster.mesh_link({"fsdp": 64}, ("fsdp",)).scatters_whole
    gather_s, scatter_s = (
        collective_wire_s(
            SimpleNamespace(
                mesh_axes=("fsdp",), part=None, kind=kind, payload_bytes=10**9
            ),
            {"fsdp": 64},
            cluster,
        )
        for kind in ("all-gather", "reduce-scatter")
    )
    assert scatter_s == gather_s


def test_groups_inside_of_hosts_take_their_links_and_groups_across_take_the_network():
    """A device sends 3 of its 4 values, to devices of its host or of three others."""
    cluster, mesh = target_cluster(Target.parse("gpu:h100:4x4")), {"expert": 16}
    inside, across = (
        "{{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}",
        "{{0,4,8,12},{1,5,9,13},{2,6,10,14},{3,7,11,15}}",
    )
    for groups, part, link in (
        (
            inside,
            ("expert", 1),
            cluster.mesh_link({"data": 4, "expert": 4}, ["expert"]),
        ),
        (across, ("expert", 4), cluster.mesh_link({"data": 4, "expert": 4}, ["data"])),
    ):
        text = (
            "%g = bf16[4096,1024]{1,0} all-to-all(%x), channel_id=1, "
            f"replica_groups={groups}, dimensions={{0}}"
        )
        found = program(text).replace("num_partitions=2", "num_partitions=16")
        [row] = find_collectives(parse_program(found), mesh)
        assert (row.mesh_axes, row.part, row.along) == (None, part, ("expert",))
        taken_s = row.payload_bytes * 3 / 4 / link.port_bytes_per_s + link.hop_s
        assert collective_wire_s(row, mesh, cluster) == pytest.approx(taken_s)


def permute(name: str, pairs: str) -> str:
    return (
        f"%{name} = (bf16[1024,1024]{{1,0}}, bf16[1024,1024]{{1,0}}) "
        f"collective-permute-start(%x), source_target_pairs={pairs}"
    )


@pytest.mark.parametrize(
    ("target", "seconds"), [("gpu:h100:1x2", 1), ("tpu:v5p:2x1x1", 2)]
)
def test_hops_both_ways_share_a_gpus_port_and_have_a_link_each_on_a_torus(
    target, seconds
):
    small = (
        "%m = bf16[1024,1024]{1,0} dot(%x, %x), lhs_contracting_dims={1}, "
        "rhs_contracting_dims={1}"
    )
    ends = [
        f"%{name}.done = bf16[1024,1024]{{1,0}} collective-permute-done(%{name})"
        for name in "gh"
    ]
    there, back = permute("g", "{{0,1}}"), permute("h", "{{1,0}}")
    chosen = Target.parse(target)
    alone = overlaps(program(there, small, ends[0]), chosen)[0].hidden_s
    both = overlaps(program(there, back, small, *ends), chosen)
    assert sum(one.hidden_s for one in both) == pytest.approx(seconds * alone)


def test_without_a_table_seconds_are_unknown():
    [overlap] = overlaps(program(start("g"), matmul("m"), done("g")), target=None)
    assert overlap.is_hidden
    assert overlap.wire_s is overlap.hidden_s is None


def test_totals_add_up_what_is_hidden_and_what_is_exposed():
    text = program(start("g"), matmul("m"), done("g"), start("h"), done("h"))
    found = parse_program(text)
    rows = find_collectives(found, MESH)
    by_line = find_overlaps(found, rows, MESH, target_cluster(TARGET))
    [total] = overlap_totals(rows, by_line)
    assert (total.mesh_axes, total.kind) == (("tensor",), "all-gather")
    assert total.wire_bytes == 2 * total.hidden_bytes == 2 * 1024 * 1024 * 2
    assert total.hidden_share == 0.5
    assert total.exposed_s == pytest.approx(total.wire_s / 2)


def fsdp_step():
    return make_train_step(build("test"), optax.sgd(0.1), "fsdp=8")


@pytest.mark.slow
def test_virtual_cpu_devices_hide_nothing_and_the_json_says_so():
    report = audit(fsdp_step(), batch_shapes(8, 16))
    rows = report.to_json()["overlap"]
    assert {row["kind"] for row in rows} >= {"all-gather", "reduce-scatter"}
    for row in rows:
        assert row["wire_bytes"] > 0 == row["hidden_bytes"]
        assert row["wire_s"] is row["exposed_s"] is None
    with pytest.raises(AssertionError, match=r"fsdp: .* 0 of [\d,]+ .* 90%"):
        assert_overlapped(fsdp_step(), batch_shapes(8, 16), {"fsdp": 0.9})


def test_a_share_and_a_mesh_axis_that_do_not_exist_are_refused(refuses, monkeypatch):
    batch = batch_shapes(8, 16)
    with refuses("value.out_of_range", 90, "fsdp", 0, 1):
        assert_overlapped(fsdp_step(), batch, {"fsdp": 90})
    report = AuditReport(layout="", target="", mesh_shape={"fsdp": 8}, rows=())
    monkeypatch.setattr(assertions, "audit", lambda *_, **__: report)
    with refuses("mesh.unknown_axis", "'fsdb'", "'fsdp'"):
        assert_overlapped(fsdp_step(), batch, {"fsdb": 0.9})


def test_a_share_that_is_hidden_passes(monkeypatch):
    found = parse_program(program(start("g"), matmul("m"), done("g")))
    rows = find_collectives(found, MESH)
    by_line = find_overlaps(found, rows, MESH, target_cluster(TARGET))
    explained = [Explained(collective=row, reason="", surprise=False) for row in rows]
    report = AuditReport(
        layout="", target="", mesh_shape=MESH, rows=tuple(explained), overlaps=by_line
    )
    monkeypatch.setattr(assertions, "audit", lambda *_, **__: report)
    assert assert_overlapped(None, {}, {"tensor": 1.0}) is report
    with pytest.raises(AssertionError, match=r"data: .* 0 of 0 .* 50%"):
        assert_overlapped(None, {}, {"data": 0.5})


@needs_gpu_compiler
def test_compiler_options_reach_an_absent_target(refuses):
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with refuses("audit.compiler_failed", "'xla_gpu_nosuch'", words=False):
        audit(
            lambda x: x @ x,
            x,
            mesh=mesh,
            target="gpu:h100:1x8",
            compiler_options={"xla_gpu_nosuch": True},
        )
