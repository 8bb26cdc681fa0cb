"""Plans cross `context` by the method that waits least, and say so."""

from dataclasses import replace

import pytest

from meshpar.layout import Layout
from meshpar.planner.cost.seconds import row_link
from meshpar.planner.cost.traffic import context_rows
from meshpar.planner.cost.workspace import in_chunks_bytes
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.search.method import why_method, with_method
from meshpar.planner.search.search import Request, search
from meshpar.planner.search.space import Constraints
from meshpar.planner.workload.shapes import SHAPES

LONG = dict(global_batch=1, seq=131072)


def like(hardware="h100-80gb", devices=8):
    cluster = cluster_of(hardware, devices=devices)
    return Request(workload=SHAPES["llama3-8b"], cluster=cluster, **LONG).run


def method(mesh, run, **kept):
    return with_method(Layout.parse(mesh), run, Constraints(kept=kept)).attention


def test_whole_sequences_are_taken_for_a_fused_kernel():
    assert method("context=8,precision=bf16", like()) == "ulysses"


def test_heads_that_do_not_divide_go_round_a_ring():
    run = like()
    odd = replace(run, workload=replace(run.workload, heads=12, kv_heads=4))
    assert method("context=8,precision=bf16", odd) == "ring"
    assert "ulysses: the heads do not divide" in why_method(Layout(context=8), odd)


def test_heads_of_a_host_are_traded_inside_it_and_keys_go_around_the_hosts():
    run = like(devices=16)
    few = replace(run, workload=replace(run.workload, heads=8, kv_heads=8))
    mesh = "context=16,precision=bf16"
    assert method(mesh, few) == "ulysses:8+ring:2"
    line = why_method(Layout.parse(f"{mesh},attention=ulysses:8+ring:2"), few)
    assert line.startswith("attention=ulysses:8+ring:2 over context=16")
    assert line.endswith("ulysses: the heads do not divide")


def test_both_degrees_send_inside_a_host_and_across():
    layout = Layout.parse("context=16,precision=bf16,attention=ulysses:8+ring:2")
    run = replace(like(devices=16), layout=layout)
    rows = [row for row in context_rows(run) if row.passes == "forward"]
    links = [row_link(run, row) for row in rows]
    assert [row.kind for row in rows] == ["all-to-all", "collective-permute"]
    assert [row.members for row in rows] == [8, 2]
    assert [link.name for link in links] == ["host", "network"]
    assert links[1].inner == 1


def test_what_is_kept_stays():
    kept = {"attention": "allgather"}
    mesh = "context=8,precision=bf16,attention=allgather"
    assert method(mesh, like(), **kept) == "allgather"


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_the_methods_are_held_against_each_other_in_one_line(attention):
    line = why_method(Layout(context=8, precision="bf16", attention=attention), like())
    assert line.startswith(f"attention={attention} over context=8")
    assert all(f"{name} " in line for name in ("ring", "allgather", "ulysses"))


def test_a_long_sequence_is_planned_over_context_and_the_plan_says_why():
    cluster = cluster_of("h100-80gb", devices=8)
    keep = Constraints(kept={"context": 8, "zero_axes": ("context",)})
    found = search(
        Request(
            workload=SHAPES["llama3-8b"], cluster=cluster, constraints=keep, **LONG
        ),
        num_plans=1,
    )
    assert found.plans[0].run.layout.context == 8
    assert found.notes[-1].startswith("attention=ulysses over context=8")


@pytest.mark.parametrize("kv_heads, tensor, sent", [(4, 1, 12), (8, 1, 8), (1, 2, 12)])
def test_kv_heads_are_sent_as_often_as_lets_them_divide(kv_heads, tensor, sent):
    """Of 24 heads over 4 or 6 devices that trade, a device's."""
    trading = 6 if kv_heads == 4 else 4
    layout = Layout.parse(
        f"context={trading},tensor={tensor},attention=ulysses,precision=bf16"
    )
    run = replace(like(devices=trading * tensor), layout=layout)
    run = replace(run, workload=replace(run.workload, heads=24, kv_heads=kv_heads))
    (row, *_) = context_rows(run)
    head_bytes = run.tokens * 2 * run.workload.head_dim * run.dtype_bytes
    assert row.payload_bytes == (24 / tensor + sent) * head_bytes


def test_chunks_of_an_mlp_are_counted_with_their_weights_in_fp32():
    def spared(layout):
        run = replace(like(), seq=2**17, layout=Layout.parse(layout))
        return in_chunks_bytes(run, moe=False)

    for precision in ("bf16", "fp32"):
        line = f"precision={precision}"
        whole = spared(f"{line},remat=full")
        assert whole == spared(f"{line},remat=stage_full") > 0 == spared(line)
    narrow, wide = (spared(f"precision={one},remat=full") for one in ("bf16", "fp32"))
    assert narrow < wide / 2  # half the bytes of tokens, less the weights' copies
