"""What a kind of collective is, sends and takes stands in one row, which all read."""

import pytest

from meshpar import collective_kinds
from meshpar.audit.collectives import find_collectives
from meshpar.audit.hlo import parse_program
from meshpar.collective_kinds import KINDS, CollectiveKind
from meshpar.planner.machine.cluster import Link
from meshpar.planner.machine.collective_cost import (
    all_gather_s,
    collective_s,
    wire_bytes,
)

LINK = Link(name="host", bytes_per_s=100e9, hop_s=0.0)

PROGRAM = """HloModule m, is_scheduled=true

ENTRY %main (p: f32[2,4]) -> f32[8,4] {
  %p = f32[2,4]{1,0} parameter(0)
  ROOT %g = f32[8,4]{1,0} KIND(f32[2,4]{1,0} %p), replica_groups={{0,1,2,3}}, \
dimensions={0}, metadata={op_name="jit(f)/KIND"}
}
"""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_sends_no_more_than_twice_its_array_and_takes_time(kind):
    sent, of = KINDS[kind].sent(4)
    assert 0 < sent <= 2 * of
    assert wire_bytes(kind, 1000, 4) == 1000 * sent / of
    assert collective_s(kind, 8e9, 4, LINK) > 0


def test_no_primitive_becomes_two_kinds():
    names = [name for kind in KINDS.values() for name in kind.primitives]
    assert len(names) == len(set(names)) == len(collective_kinds.WRITTEN_AS)


def test_a_new_kind_is_one_row(monkeypatch):
    name = "ragged-all-gather"
    text = PROGRAM.replace("KIND", name)
    assert find_collectives(parse_program(text), {"data": 4}) == ()
    row = CollectiveKind(
        name=name, primitives=("ragged_all_gather",), takes_as="all-gather"
    )
    monkeypatch.setitem(KINDS, name, row)
    [found] = find_collectives(parse_program(text), {"data": 4})
    assert (found.kind, found.mesh_axes) == (name, ("data",))
    assert (found.payload_bytes, found.wire_bytes) == (128, 96)
    assert collective_s(name, 8e9, 4, LINK) == all_gather_s(8e9, 4, LINK)
