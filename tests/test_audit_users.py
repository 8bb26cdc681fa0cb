"""What needs a collective's result is read past layout changes, copies and fusions."""

from meshpar.audit.collectives import find_collectives
from meshpar.audit.hlo import parse_program

TEXT = """HloModule jit_f, num_partitions=2

%fused_dot (p0: f32[8,4], p1: f32[4,2]) -> f32[8,2] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[4,2]{1,0} parameter(1)
  %turned = f32[8,4]{1,0} copy(%p0)
  ROOT %dot = f32[8,2]{1,0} dot(%turned, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/transpose"}
}

ENTRY %main (x: f32[4,4], w: f32[4,2]) -> (f32[8,2], f32[8,4]) {
  %x = f32[4,4]{1,0} parameter(0)
  %w = f32[4,2]{1,0} parameter(1)
  %gather = f32[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,1}}, dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(f)/squeeze"}
  %laid_out = f32[8,4]{0,1} transpose(%gather), dimensions={0,1}, metadata={op_name="jit(f)/reshape.7"}
  %product = f32[8,2]{1,0} fusion(%laid_out, %w), kind=kOutput, calls=%fused_dot, metadata={op_name="jit(f)/transpose"}
  %sums = f32[8,4]{1,0} add(%laid_out, %laid_out), metadata={op_name="jit(f)/cumsum"}
  ROOT %both = (f32[8,2]{1,0}, f32[8,4]{1,0}) tuple(%product, %sums)
}
"""  # noqa: E501


def test_uses_are_found_through_copies_and_inside_of_fusions():
    [row] = find_collectives(parse_program(TEXT), {"tensor": 2})
    assert row.operation == "squeeze"
    assert [path for path, _ in row.uses] == ["jit(f)/dot_general", "jit(f)/cumsum"]
