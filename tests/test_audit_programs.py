"""Texts of compiled programs, checked by hand, against what the audit reads in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshpar.audit.collectives import find_collectives, group_mesh_axes, parse_groups
from meshpar.audit.flops import program_flops
from meshpar.audit.hlo import HloError, SourceTable, parse_program
from meshpar.audit.memory import largest_buffers

PROGRAMS = Path(__file__).parent / "data" / "programs"
DATA_TENSOR = {"data": 2, "tensor": 4}
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
UNREADABLE = "audit.unreadable_program"


def text_of(name: str) -> str:
    return (PROGRAMS / f"{name}.txt").read_text()


def read(text: str, mesh_shape: dict[str, int]) -> list[tuple]:
    rows = find_collectives(parse_program(text), mesh_shape)
    return [
        (
            row.kind,
            row.mesh_axes,
            row.payload_bytes,
            row.wire_bytes,
            row.executions,
            "async" if row.is_async else "",
            "branch" if row.in_branch else "",
            row.source,
        )
        for row in rows
    ]


# An f32 array (64, 512) split over tensor: gathered over tensor, scattered over data,
# moved and exchanged along tensor, and of (128, 128) values summed over all.
WHOLE, HALF = 64 * 512 * 4, 32 * 512 * 4
TRAIN = "/home/user/train.py"


def kinds(*is_async: str) -> list[tuple]:
    rows = [
        ("all-gather", ("tensor",), WHOLE, WHOLE * 3 // 4, 28),
        ("reduce-scatter", ("data",), WHOLE, WHOLE // 2, 29),
        ("collective-permute", ("tensor",), HALF, HALF, 30),
        ("all-to-all", ("tensor",), HALF, HALF * 3 // 4, 31),
        ("all-reduce", ("data", "tensor"), 65_536, 2 * 65_536 * 7 // 8, 32),
    ]
    return [
        (*row[:4], 1, waits, "", f"{TRAIN}:{row[4]}")
        for row, waits in zip(rows, is_async, strict=True)
    ]


# A sum over tensor of 8 x 256 f32 values, and what is around it.
def sum_over_tensor(executions: int, is_async: str, branch: str, line: int) -> tuple:
    source = f"{TRAIN}:{line}"
    bytes_ = (8 * 256 * 4, 2 * 8 * 256 * 4 * 3 // 4)
    return ("all-reduce", ("tensor",), *bytes_, executions, is_async, branch, source)


@pytest.mark.parametrize(
    "name, mesh_shape, expected",
    [
        ("cpu_kinds", DATA_TENSOR, kinds("", "", "", "", "")),
        ("gpu_kinds", DATA_TENSOR, kinds(*5 * ["async"])),
        ("tpu_kinds", DATA_TENSOR, kinds("", "", "async", "", "")),
        # 5 x 3 trips, noted by XLA:GPU; XLA:TPU leaves them to be read from the text.
        ("gpu_loops", DATA_TENSOR, [sum_over_tensor(15, "async", "", 21)]),
        ("tpu_loops", DATA_TENSOR, [sum_over_tensor(15, "", "", 21)]),
        # With `branch_computations=`, and with `true_computation=`.
        ("cpu_branch", DATA_TENSOR, [sum_over_tensor(1, "", "branch", 36)]),
        ("gpu_branch", DATA_TENSOR, [sum_over_tensor(1, "async", "branch", 36)]),
        # XLA:TPU's fusion of an all-reduce and a slice; the caller's line, not a
        # library's.
        (
            "tpu_fused_scatter",
            CUBE,
            [
                (
                    *("reduce-scatter", ("tensor",), 4 * 32 * 64 * 4, 4 * 32 * 64 * 2),
                    *(1, "", "", f"{TRAIN}:12"),
                )
            ],
        ),
        # XLA:TPU's gather in parts, fused with the work of a loop: it is written out in
        # its start, in every step and in its done, and is one.
        (
            "tpu_fused_gather",
            CUBE,
            [
                (
                    *("all-gather", ("tensor",), 256 * 64 * 2, 128 * 64 * 2),
                    *(1, "async", "", f"{TRAIN}:12"),
                )
            ],
        ),
        # One, though start, update and done all name what they wrap.
        (
            "wrapped",
            CUBE,
            [
                (
                    *("all-to-all", ("fsdp",), 8 * 128 * 2, 8 * 128),
                    *(1, "async", "", "/home/user/moe.py:40"),
                )
            ],
        ),
    ],
)
def test_collectives_of_a_program_are_those_counted_by_hand(name, mesh_shape, expected):
    assert read(text_of(name), mesh_shape) == expected


@pytest.mark.parametrize("name", ["gpu_loops", "tpu_loops"])
def test_flops_of_a_program_are_those_counted_by_hand(name):
    assert program_flops(parse_program(text_of(name))).total == 15 * 2 * 8 * 256 * 256


def test_what_has_an_arguments_name_only_is_moved_for_its_first_user():
    text = """\
HloModule jit_program

ENTRY %main (x: f32[8,16], w: f32[16,4]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0), metadata={op_name="x"}
  %w = f32[16,4]{1,0} parameter(1), metadata={op_name="w"}
  %whole = f32[16,16]{0,1} all-gather(%w), replica_groups=[2,4]<=[8], dimensions={1}, metadata={op_name="w"}
  %laid = f32[16,16]{1,0} copy(%whole), metadata={op_name="w"}
  ROOT %y = f32[8,16]{1,0} dot(%x, %laid), lhs_contracting_dims={1}, metadata={op_name="jit(f)/dot_general" source_file="f.py" source_line=7}
}
"""  # noqa: E501
    [row] = find_collectives(parse_program(text), DATA_TENSOR)
    assert (row.op_path, row.source) == ("jit(f)/dot_general", "f.py:7")


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("", ("jit(f)/reshape", True)),
        (', metadata={op_name="jit(f)/psum"}', ("jit(f)/psum", False)),
    ],
)
def test_a_collective_without_a_path_borrows_that_of_what_it_moves(path, found):
    text = f"""\
HloModule jit_program

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[16]) -> f32[16,1] {{
  %x = f32[16]{{0}} parameter(0)
  %laid = f32[16,1]{{1,0}} reshape(%x), metadata={{op_name="jit(f)/reshape"}}
  ROOT %y = f32[16,1]{{1,0}} all-reduce(%laid), replica_groups=[2,4]<=[8], to_apply=%add{path}
}}
"""  # noqa: E501
    [row] = find_collectives(parse_program(text), DATA_TENSOR)
    assert (row.op_path, row.borrows_path) == found


# Groups, in every form.

ONE_COLLECTIVE = """\
HloModule jit_program

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  ROOT %y = f32[64]{0} OPERATION
}
"""


@pytest.mark.parametrize(
    "groups, mesh_axes",
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("fsdp",)),
        ("{{0,1,4,5},{2,3,6,7}}", ("data", "tensor")),
        ("{{5,4,1,0},{2,3,6,7}}", ("data", "tensor")),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "fsdp", "tensor")),
        ("{}", ("data", "fsdp", "tensor")),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("{{0,3},{1,2},{4,7},{5,6}}", None),
        ("{{0,1},{2,3}}", None),
        ("[4,2]<=[8]", ("tensor",)),
        ("[2,4]<=[8]", ("fsdp", "tensor")),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("data", "tensor")),
        ("mesh['a'=4,'b'=2] {'b'}", ("tensor",)),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ("data", "tensor")),
        ("mesh['a'=2,'b'=4] {'a'}", ("data",)),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("data",)),
    ],
)
def test_groups_in_every_form_give_their_mesh_axes(groups, mesh_axes):
    operation = f"all-reduce(%x), replica_groups={groups}, to_apply=%add"
    text = ONE_COLLECTIVE.replace("OPERATION", operation)
    [row] = find_collectives(parse_program(text), CUBE)
    assert row.mesh_axes == mesh_axes


@pytest.mark.parametrize(
    "pairs, mesh_axes",
    [
        ("{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}", ("tensor",)),
        ("{0,4},{1,5},{2,6},{3,7}", ("data",)),
        ("{0,3},{3,0}", ("fsdp", "tensor")),
        ("{0,0},{1,1}", ()),
    ],
)
def test_pairs_give_the_mesh_axes_along_which_they_move(pairs, mesh_axes):
    operation = f"collective-permute(%x), source_target_pairs={{{pairs}}}"
    text = ONE_COLLECTIVE.replace("OPERATION", operation)
    [row] = find_collectives(parse_program(text), CUBE)
    assert (row.mesh_axes, row.payload_bytes, row.wire_bytes) == (mesh_axes, 256, 256)


def test_an_axis_of_size_1_is_never_named():
    groups = parse_groups("replica_groups=[4,2]<=[8]", 8)
    shape = {"data": 4, "stage": 1, "tensor": 2, "expert": 1}
    assert group_mesh_axes(groups, shape) == ("tensor",)


# Loops whose trips XLA does not note.

LOOP = """\
HloModule jit_program

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (state: (s32[], f32[64])) -> (s32[], f32[64]) {
  %state = (s32[], f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %step = s32[] constant(1)
  %next = s32[] add(%i, %step)
  %x = f32[64]{0} get-tuple-element(%state), index=1
  %y = f32[64]{0} all-reduce(%x), replica_groups={}, to_apply=%add
  ROOT %new = (s32[], f32[64]{0}) tuple(%next, %y)
}

%condition (state.1: (s32[], f32[64])) -> pred[] {
  %state.1 = (s32[], f32[64]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %limit = s32[] constant(7)
  %x.1 = f32[64]{0} get-tuple-element(%state.1), index=1
  %more = pred[] custom-call(%x.1), custom_call_target="more"
  %below = pred[] compare(%i.1, %limit), direction=LT
  ROOT %both = pred[] bitcast(%below)
}

ENTRY %main (x.2: f32[64]) -> f32[64] {
  %x.2 = f32[64]{0} parameter(0)
  %start = s32[] constant(2)
  %first = (s32[], f32[64]{0}) tuple(%start, %x.2)
  %loop = (s32[], f32[64]{0}) while(%first), condition=%condition, body=%body
  ROOT %y.2 = f32[64]{0} get-tuple-element(%loop), index=1
}
"""


def and_below(limit: int, element: int) -> str:
    """The loop's test, and that an element of its state is below a limit."""
    return (
        f"and(%below, %less)\n"
        f"  %less = pred[] compare(%j, %lower), direction=LT\n"
        f"  %lower = s32[] constant({limit})\n"
        f"  %j = s32[] get-tuple-element(%state.1), index={element}"
    )


@pytest.mark.parametrize(
    "old, new, executions, counted",
    [
        ("", "", 5, True),
        ("bitcast(%below)", and_below(4, 0), 2, True),
        ("bitcast(%below)", and_below(9, 0), 5, True),
        ("constant(7)", "constant(1)", 0, True),
        ("body=%body", 'body=%body, x={"known_trip_count":{"n":"4"}}', 4, True),
        ("add(%i, %step)", "add(%step, %i)", 5, True),
        # It may end early, counts in other steps, or starts or ends we know not where.
        ("bitcast(%below)", "and(%below, %more)", 1, False),
        ("bitcast(%below)", and_below(4, 1), 1, False),
        ("constant(1)", "constant(3)", 1, False),
        ("%limit = s32[] constant(7)", "%limit = s32[] bitcast(%i.1)", 1, False),
        ("%start = s32[] constant(2)", "%start = s32[] rng()", 1, False),
        ("direction=LT", "direction=NE", 1, False),
    ],
)
def test_trips_are_read_from_the_loop_or_said_to_be_unknown(
    old, new, executions, counted
):
    text = LOOP.replace(old, new)
    [row] = find_collectives(parse_program(text), {"data": 8})
    assert (row.executions, row.counted, row.in_loop) == (executions, counted, True)


def test_a_collective_in_a_condition_runs_once_more_than_the_body():
    operation = "%all = f32[64]{0} all-reduce(%x.1), replica_groups={}, to_apply=%add"
    text = LOOP.replace("  %more =", f"  {operation}\n  %more =")
    rows = find_collectives(parse_program(text), {"data": 8})
    assert [row.executions for row in rows] == [5, 6]


# Texts that are broken.


def line_of(text: str, part: str) -> int:
    return text[: text.index(part)].count("\n") + 1


@pytest.mark.parametrize(
    "old, new, values",
    [
        ("{{0,1,2,3},{4,5,6,7}}", "{{0,1,2,3},{4,5", ["replica_groups"]),
        ("{{0,1,2,3},{4,5,6,7}}", "{{0,1,2,3},{4,5,6,9}}", ["device 9"]),
        ("{{0,1,2,3},{4,5,6,7}}", "[2,3]<=[8]", ["[2,3]", 8]),
        ("{{0,1,2,3},{4,5,6,7}}", "mesh['a'=8] {'b'}", ["'b'"]),
        (" replica_groups={{0,1,2,3},{4,5,6,7}},", "", ["replica_groups"]),
        ("{{0,1},{1,2},{2,3}", "{{0,1},{1,2},{2", ["source_target_pairs"]),
        ("{{0,1},{1,2}", "{{0,1,2},{1,2}", ["source_target_pair"]),
        ("= f32[512,32]", "= f99[512,32]", ["'f99'"]),
        ("= f32[512,32]{1,0} transpose", "= [512,32] transpose", ["shape"]),
        ("transpose(%param_0.12", "transpose (%param_0.12", ["opcode"]),
        ("transpose(%param_0.12)", "transpose(%param_0.12", ["transpose"]),
        (" line=29 end_line=29", "", ["FileLocations"]),
        ('user/train.py"', "user/tra", ["FileNames"]),
        ("{file_location_id=3 parent", "{file_lo", ["StackFrames"]),
        ("%wrapped_sine = ", "%wrapped_sine ", ["instruction"]),
        ("calls=%wrapped_sine", "calls=%nowhere", ["'nowhere_computation'"]),
        ("calls=%wrapped_sine_computation", "", ["fusion", "calls="]),
        ("start(%wrapped_sine)", "start(%gone)", ["'gone'"]),
        ("((f32[64,512]{1,0}), f32[32,512]{1,0})", "(f32[64,512])", []),
    ],
)
def test_a_broken_text_is_an_error_that_names_its_line(refuses, old, new, values):
    whole = text_of("gpu_kinds")
    broken = whole.replace(old, new, 1)
    line = line_of(whole, old)
    with refuses(UNREADABLE, f"line {line}", *values, kind=HloError):
        read(broken, DATA_TENSOR)


@pytest.mark.parametrize(
    "text, line",
    [
        ("", 1),
        ("no program at all\n", 1),
        (text_of("gpu_kinds").replace("ENTRY ", ""), 1),
        (text_of("gpu_kinds").rstrip().rstrip("}"), 52),
    ],
    ids=["empty", "no_program", "no_entry", "no_end"],
)
def test_a_text_without_a_whole_entry_is_an_error(refuses, text, line):
    with refuses(UNREADABLE, f"line {line}", "ENTRY", kind=HloError):
        parse_program(text)


def test_a_matmul_whose_dims_do_not_agree_is_an_error_that_names_its_line(refuses):
    whole = text_of("gpu_loops")
    broken = whole.replace("lhs_contracting_dims={0}", "lhs_contracting_dims={5}")
    line = line_of(whole, "lhs_contracting_dims")
    with refuses(UNREADABLE, f"line {line}", "dims", kind=HloError):
        program_flops(parse_program(broken))


@pytest.mark.parametrize("name", ["gpu_kinds", "tpu_loops", "cpu_branch"])
def test_a_line_cut_anywhere_is_a_clear_error_or_no_matter(name):
    lines = text_of(name).splitlines()
    for number, line in enumerate(lines):
        for kept in (len(line) // 3, len(line) // 2, len(line) - 1):
            cut = [*lines[:number], line[: max(kept, 0)], *lines[number + 1 :]]
            try:
                program = parse_program("\n".join(cut))
                find_collectives(program, DATA_TENSOR)
                program_flops(program)
                largest_buffers(program)
            except HloError as error:
                assert re.match(r"line \d+ of the program: ", str(error))


# Sources.


@pytest.mark.parametrize("offset", [0, 1])
def test_the_source_is_the_innermost_line_outside_of_installed_packages(offset):
    # Some versions of XLA print a caller's id one too high.
    text = f"""
FileNames
1 "/home/user/train.py"
2 "/env/lib/python3.11/site-packages/library/layer.py"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=5 end_line=5 column=1 end_column=2}}
2 {{file_name_id=1 function_name_id=2 line=9 end_line=9 column=1 end_column=2}}
3 {{file_name_id=2 function_name_id=3 line=99 end_line=99 column=1 end_column=2}}

StackFrames
1 {{file_location_id=1 parent_frame_id={offset}}}
2 {{file_location_id=2 parent_frame_id={1 + offset}}}
3 {{file_location_id=3 parent_frame_id={2 + offset}}}
"""
    table = SourceTable.parse(text)
    assert table.source('metadata={op_name="f" stack_frame_id=3}') == f"{TRAIN}:9"
    assert table.source('metadata={op_name="f" stack_frame_id=1}') == f"{TRAIN}:5"
    assert table.source('metadata={op_name="f"}') == ""
