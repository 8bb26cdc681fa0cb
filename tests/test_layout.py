"""A layout's one-line text is exact, and nonsense is refused when it is built."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshpar import MESH_AXES, InputError, Layout
from meshpar.schedules import SCHEDULES

counts = st.integers(min_value=1, max_value=64)
choices = {
    "schedule": tuple(SCHEDULES),
    "execution": ("uniform", "divergent"),
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
    "splits": st.lists(counts, max_size=5).map(tuple),
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


COUNT = "must be a whole number of at least 1"
ABSORBS = (
    r"must be a whole number of at least 1 or -1 \(absorbs the remaining devices\)"
)


@pytest.mark.parametrize(
    "text, match",
    [
        ("", "layout '': '' is not key=value; write for example data=2,tensor=4"),
        ("data", "layout 'data': 'data' is not key=value"),
        ("data=2,,tensor=2", "'' is not key=value"),
        ("data=", "'data=' is not key=value"),
        ("=2", "'=2' is not key=value"),
        ("tensr=2", "layout 'tensr=2': no key 'tensr'; did you mean 'tensor'"),
        ("xyzw=2", "no key 'xyzw'; known: attention, chunks, context, data, execution"),
        ("data=2,data=4", "'data' is given twice; give it once"),
        ("data=two", f"data='two': {ABSORBS}"),
        ("data=1.5", f"data='1.5': {ABSORBS}"),
        ("data=0", f"data=0: {ABSORBS}"),
        ("data=-2", f"data=-2: {ABSORBS}"),
        ("microbatches=-1", f"microbatches=-1: {COUNT}$"),
        ("chunks=0", f"chunks=0: {COUNT}$"),
        ("splits=8/x", f"splits='x': {COUNT}$"),
        ("splits=8/0", f"splits=0: {COUNT}$"),
        ("schedule=1f2b", "no schedule '1f2b'; did you mean '1f1b'"),
        ("stage=2,schedule=zero_bubble_h1", "no schedule 'zero_bubble_h1'; known: "),
        (
            "stage=2,schedule=dualpipe_v",
            "no schedule 'dualpipe_v'; did you mean 'gpipe'",
        ),
        ("zero_axes=stage", "zero_axes=stage: must be one or more of data, fsdp, cont"),
        ("zero_axes=fsdp/data", "in this order, as data/fsdp/context"),
        ("zero=4", "zero=4: must be one of 0, 1, 2, 3"),
        ("zero=one", "zero=one: must be one of 0, 1, 2, 3"),
        ("sequence_parallel=yes", "sequence_parallel=yes: must be one of false, true"),
        ("sequence_parallel=1", "sequence_parallel=1: must be one of false, true"),
        ("remat=all", "remat=all: must be one of none, selective, full, dots"),
        ("attention=flash", "allgather, ulysses, or both degrees, each at least 2"),
        ("context=-1,attention=rnig", "attention=rnig: must be one of ring, allgather"),
        ("context=8,attention=ulysses:4", "must be one of .* ulysses:4.ring:2"),
        ("context=8,attention=ulysses:2+ring:2", "is for context=4, but context=8"),
        ("context=4,attention=ulysses:4+ring:1", "degrees are at least 2; write uly"),
        ("execution=both", "execution=both: must be one of uniform, divergent"),
        ("precision=fp16", "precision=fp16: must be one of fp32, bf16"),
        (
            "data=-1,tensor=-1",
            "mesh axes 'data' and 'tensor' are both -1; only one can absorb the "
            "remaining devices: give the others a size",
        ),
    ],
)
def test_a_line_that_makes_no_sense_is_refused(text, match):
    with pytest.raises(ValueError, match=match):
        Layout.parse(text)


@pytest.mark.parametrize(
    "field, value",
    [
        ("data", True),
        ("data", 2.0),
        ("zero", True),
        ("sequence_parallel", 1),
        ("microbatches", None),
    ],
)
def test_a_value_of_another_type_is_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}="):
        Layout(**{field: value})


@pytest.mark.parametrize("schedule", [None, 1, [["0F0", "0B0"]]])
def test_a_schedule_that_is_no_name_is_refused(schedule):
    with pytest.raises(InputError, match="^no schedule "):
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
    "text, num_devices, match",
    [
        ("data=2", 8, "layout 'data=2' needs 2 devices, but there are 8; change"),
        ("data=-1,tensor=3", 8, "needs a multiple of 3 devices, but there are 8"),
        ("data=-1,tensor=16", 8, "needs a multiple of 16 devices, but there are 8"),
        ("data=-1,tensor=2", 0, "needs a multiple of 2 devices, but there are 0"),
    ],
)
def test_devices_that_do_not_fit_are_refused(text, num_devices, match):
    with pytest.raises(ValueError, match=match):
        Layout.parse(text).resolve(num_devices)


def test_an_open_mesh_axis_has_no_size_before_it_is_resolved():
    with pytest.raises(ValueError, match=r"'fsdp' is -1.*call resolve\(num_devices\)"):
        _ = Layout(fsdp=-1).mesh_shape


@pytest.mark.parametrize(
    "text, batch_shards, num_devices",
    [("data=2,fsdp=2,tensor=2", 4, 8), ("stage=2,context=2", 1, 4), ("expert=3", 3, 3)],
)
def test_only_data_fsdp_and_expert_split_the_batch(text, batch_shards, num_devices):
    layout = Layout.parse(text)
    assert (layout.batch_shards, layout.num_devices) == (batch_shards, num_devices)
