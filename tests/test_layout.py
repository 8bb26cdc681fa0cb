"""A layout's one-line text is exact, and nonsense is refused when it is built."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar import MESH_AXES, Layout
from meshpar.schedules import SCHEDULES

counts = st.integers(min_value=1, max_value=64)
choices = {
    "schedule": tuple(SCHEDULES),
    "execution": ("uniform",),
    "zero": (0, 1, 2, 3),
    "zero_axes": ((), ("data",), ("fsdp", "context"), ("data", "fsdp")),
    "fsdp_gather": ("step", "microbatch"),
    "fsdp_prefetch": ("auto", "on", "off"),
    "optimizer_memory": ("device", "host"),
    "sequence_parallel": (False, True),
    "attention": ("ring", "allgather", "ulysses"),
    "remat": ("none", "selective", "full", "dots"),
    "precision": ("fp32", "bf16"),
    "param_dtype": ("fp32", "bf16", "bf16_stochastic"),
}
values = {
    **{key: counts for key in (*MESH_AXES, "microbatches", "chunks", "sync_every")},
    "max_pending_w": st.integers(min_value=0, max_value=64),
    "splits": st.lists(counts, max_size=5).map(tuple),
    "data_splits": st.lists(counts, max_size=5).map(tuple),
    **{key: st.sampled_from(known) for key, known in choices.items()},
}


@st.composite
def layouts(draw):
    chosen = draw(st.fixed_dictionaries({}, optional=values))
    open_axis = draw(st.sampled_from((None, *MESH_AXES)))
    return Layout(**(chosen if open_axis is None else {**chosen, open_axis: -1}))


def test_the_strategy_draws_every_key():
    assert set(values) == set(Layout.__dataclass_fields__)


@given(layouts())
def test_parsing_what_was_printed_gives_the_same_layout(layout):
    assert Layout.parse(str(layout)) == layout


@given(layouts())
def test_printing_leaves_out_exactly_the_defaults_in_the_order_of_the_fields(layout):
    keys = [part.partition("=")[0] for part in str(layout).split(",")]
    default = Layout()
    changed = [
        key
        for key in Layout.__dataclass_fields__
        if getattr(layout, key) != getattr(default, key)
    ]
    assert keys == (changed or ["data"])


def test_the_default_prints_as_one_device_in_data():
    assert str(Layout()) == "data=1"
    assert Layout.parse("data=1") == Layout()


@pytest.mark.parametrize(
    "text, layout",
    [
        ("data=2,tensor=4,remat=full", Layout(data=2, tensor=4, remat="full")),
        (" tensor = 4 , data=2 ", Layout(data=2, tensor=4)),
        ("stage=4,splits=8/8/7/7", Layout(stage=4, splits=(8, 8, 7, 7))),
        ("sequence_parallel=true", Layout(sequence_parallel=True)),
        ("fsdp=-1,zero=1", Layout(fsdp=-1, zero=1)),
    ],
)
def test_a_line_reads_as_the_layout_it_says(text, layout):
    assert Layout.parse(text) == layout


SCHEDULE, VALUE = "schedule.unknown_name", "layout.unknown_value"
PAIR, NUMBER = "layout.not_key_value", "layout.not_whole_number"
METHOD = "attention.unknown_method"


@pytest.mark.parametrize(
    "text, refusal",
    [
        ("", (PAIR, "layout ''", "data=2,tensor=4")),
        ("data", (PAIR, "layout 'data'")),
        ("data=2,,tensor=2", (PAIR, "''")),
        ("data=", (PAIR, "layout 'data='")),
        ("=2", (PAIR, "layout '=2'")),
        ("tensr=2", ("layout.unknown_key", "layout 'tensr=2'", "'tensr'", "'tensor'")),
        ("xyzw=2", ("layout.unknown_key", "'xyzw'", "attention, chunks, context")),
        ("data=2,data=4", ("layout.repeated_key", "'data'")),
        ("data=two", (NUMBER, "data='two'", 1, -1)),
        ("data=1.5", (NUMBER, "data='1.5'", 1, -1)),
        ("data=0", (NUMBER, "data=0", 1, -1)),
        ("data=-2", (NUMBER, "data=-2", 1, -1)),
        ("microbatches=-1", (NUMBER, "microbatches=-1", 1)),
        ("chunks=0", (NUMBER, "chunks=0", 1)),
        ("splits=8/x", (NUMBER, "splits='x'", 1)),
        ("splits=8/0", (NUMBER, "splits=0", 1)),
        ("schedule=1f2b", (SCHEDULE, "'1f2b'", "'1f1b'")),
        ("stage=2,schedule=zero_bubble_h3", (SCHEDULE, "'zero_bubble_h3'")),
        (
            "zero_axes=stage",
            ("layout.wrong_zero_axes", "zero_axes=stage", "data, fsdp"),
        ),
        (
            "zero_axes=fsdp/data",
            ("layout.wrong_zero_axes", "zero_axes=fsdp/data", "data/fsdp/context"),
        ),
        ("zero=4", (VALUE, "zero=4", "0, 1, 2, 3")),
        ("zero=one", (VALUE, "zero=one", "0, 1, 2, 3")),
        ("sequence_parallel=yes", (VALUE, "sequence_parallel=yes", "false, true")),
        ("sequence_parallel=1", (VALUE, "sequence_parallel=1", "false, true")),
        ("remat=all", (VALUE, "remat=all", "none, selective, full, dots")),
        ("attention=flash", (METHOD, "attention=flash", "allgather, ulysses", 2)),
        ("context=-1,attention=rnig", (METHOD, "attention=rnig", "ring, allgather")),
        ("context=8,attention=ulysses:4", (METHOD, "ulysses:4+ring:2")),
        (
            "context=8,attention=ulysses:2+ring:2",
            ("attention.degrees_not_context", "context=4", "context=8"),
        ),
        (
            "context=4,attention=ulysses:4+ring:1",
            ("attention.degree_too_small", 2, "ulysses"),
        ),
        ("precision=fp16", (VALUE, "precision=fp16", "fp32, bf16")),
        ("data=-1,tensor=-1", ("layout.two_open_sizes", "'data' and 'tensor'", -1)),
        ("execution=diverging", (VALUE, "execution=diverging", "uniform")),
    ],
)
def test_a_line_that_makes_no_sense_is_refused(text, refusal, refuses):
    with refuses(*refusal):
        Layout.parse(text)


@pytest.mark.parametrize(
    "field, value, refusal",
    [
        ("data", True, (NUMBER, "data=True")),
        ("data", 2.0, (NUMBER, "data=2.0")),
        ("zero", True, (VALUE, "zero=true")),
        ("sequence_parallel", 1, (VALUE, "sequence_parallel=1")),
        ("microbatches", None, (NUMBER, "microbatches=None")),
    ],
)
def test_a_value_of_another_type_is_refused(field, value, refusal, refuses):
    with refuses(*refusal):
        Layout(**{field: value})


@pytest.mark.parametrize("schedule", [None, 1, [["0F0", "0B0"]]])
def test_a_schedule_that_is_no_name_is_refused(schedule, refuses):
    with refuses(SCHEDULE, schedule):
        Layout(schedule=schedule)


def test_layouts_tell_steps_in_ticks_from_one_pass():
    assert not Layout(data=2).runs_in_ticks
    assert Layout(microbatches=2).runs_in_ticks
    assert Layout(stage=2).runs_in_ticks


@pytest.mark.parametrize(
    "text, num_devices, resolved",
    [
        ("data=-1,tensor=2", 8, "data=4,tensor=2"),
        ("data=-1", 1, "data=1"),
        ("fsdp=2,tensor=-1", 2, "fsdp=2"),
        ("data=2,tensor=4", 8, "data=2,tensor=4"),
    ],
)
def test_resolving_fits_the_layout_to_the_devices(text, num_devices, resolved):
    layout = Layout.parse(text).resolve(num_devices)
    assert str(layout) == resolved
    assert layout.num_devices == num_devices


@pytest.mark.parametrize(
    "text, num_devices, needed",
    [
        ("data=2", 8, 2),
        ("data=-1,tensor=3", 8, 3),
        ("data=-1,tensor=16", 8, 16),
        ("data=-1,tensor=2", 0, 2),
    ],
)
def test_devices_that_do_not_fit_are_refused(text, num_devices, needed, refuses):
    with refuses("layout.wrong_device_count", text, needed, num_devices):
        Layout.parse(text).resolve(num_devices)


def test_an_open_mesh_axis_has_no_size_before_it_is_resolved(refuses):
    with refuses("layout.open_size", "'fsdp'", -1, "resolve(num_devices)"):
        _ = Layout(fsdp=-1).mesh_shape


@pytest.mark.parametrize(
    "text, batch_shards, num_devices",
    [("data=2,fsdp=2,tensor=2", 4, 8), ("stage=2,context=2", 1, 4), ("expert=3", 3, 3)],
)
def test_only_data_fsdp_and_expert_split_the_batch(text, batch_shards, num_devices):
    layout = Layout.parse(text)
    assert (layout.batch_shards, layout.num_devices) == (batch_shards, num_devices)
