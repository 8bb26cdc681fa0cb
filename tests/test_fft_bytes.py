"""A distributed FFT sends its closed form and gathers nothing, on GPUs and TPUs too."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar import Layout, Scope, absent_mesh, audit, fft, make_mesh
from tests.marks import slow
from tests.test_audit_targets import needs_gpu_compiler, needs_tpu_compiler
from tests.test_fft import CASES, SIZES, over_of, rules_of

FFT = "asked by fft: a split dim made whole, or back"
# For each case the devices of each all-to-all of a transform, in order.
MOVES = {
    "rows": ([4, 4], [4]),
    "rows_and_columns": ([4, 4, 2, 2], [4, 4, 2]),
    "rows_over_two": ([8, 8], [8]),
    "volume": ([4, 2, 2, 4], [4, 2]),
    "whole": ([], []),
}
# And of a real one what is moved: real values, or the frequencies that are kept.
REAL_MOVES = {
    "rows": (["kept", "kept"], ["kept"]),
    "rows_and_columns": (["real", *["kept"] * 3], ["real", "kept", "kept"]),
    "volume": (["kept"] * 4, ["kept"] * 2),
}

# Sizes of which the frequencies that are kept divide as those of `MOVES` do.
REAL_SIZES = {"rows_and_columns": ((2, 8, 16, 3), 8)}


class Transform:
    """Transforms of a case on a mesh: what is audited, and what they send."""

    def __init__(self, case, mesh):
        self.axes, self.split, *sizes = CASES[case]
        self.shape, self.modes = REAL_SIZES.get(case, sizes)
        self.case, self.mesh, self.rules = case, mesh, rules_of(self.split)
        self.given = self.axes, over_of(self.axes), Scope(rules=self.rules)
        self.last = self.axes.index(over_of(self.axes)[-1])

    def array(self, dtype, *, kept=False):
        shape = list(self.shape)
        if kept:
            shape[self.last] = self.modes
        sharding = self.rules.sharding(self.mesh, self.axes, shape)
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)

    def function(self, name):
        """What is audited, and its arguments."""
        size = self.shape[self.last]
        weight = jax.ShapeDtypeStruct(
            (), jnp.float32, sharding=NamedSharding(self.mesh, PartitionSpec())
        )
        options = {"modes": self.modes}
        return {
            "fftn": (lambda x: fft.fftn(x, *self.given), [self.array(jnp.complex64)]),
            "ifftn": (lambda x: fft.ifftn(x, *self.given), [self.array(jnp.complex64)]),
            "rfftn": (
                lambda x: fft.rfftn(x, *self.given, **options),
                [self.array(jnp.float32)],
            ),
            "irfftn": (
                lambda y: fft.irfftn(y, *self.given, size=size),
                [self.array(jnp.complex64, kept=True)],
            ),
            "filtered": (
                lambda x, weight: fft.filtered(
                    x, lambda w, y: w * y, weight, *self.given, **options
                ),
                [self.array(jnp.float32), weight],
            ),
        }[name]

    def sent(self, name):
        """Bytes that a device sends in each move."""
        sharding = self.rules.sharding(self.mesh, self.axes, self.shape)
        whole = math.prod(sharding.shard_shape(self.shape))
        moved = {
            "complex": 8 * whole,
            "real": 4 * whole,
            "kept": 8 * whole * (self.modes or 0) // self.shape[self.last],
        }
        transposed = name == "filtered"
        degrees = MOVES[self.case][transposed]
        what = ["complex"] * len(degrees)
        if name not in ("fftn", "ifftn"):
            what = REAL_MOVES[self.case][transposed]
        found = [
            moved[one] * (n - 1) // n for one, n in zip(what, degrees, strict=True)
        ]
        return 2 * found if name == "filtered" else found


def gradient(function, arguments):
    def total(*arguments):
        return jnp.sum(jnp.abs(function(*arguments)) ** 2)

    return jax.grad(total, argnums=tuple(range(len(arguments))))


def check_sends(case, name, *, target=None, with_gradient=False):
    layout = Layout(**SIZES)
    mesh = make_mesh(layout) if target is None else absent_mesh(layout)
    transform = Transform(case, mesh)
    function, arguments = transform.function(name)
    wanted = transform.sent(name)
    if with_gradient:
        function, wanted = gradient(function, arguments), 2 * wanted
    report = audit(function, *arguments, target=target, mesh=mesh)
    assert report.complaints() == []
    moves = [row for row in report.rows if row.reason == FFT]
    assert {row.collective.kind for row in moves} <= {"all-to-all"}
    sent = [row.collective.wire_bytes for row in moves]
    # XLA:TPU sends complex numbers as two real arrays.
    if target is not None and target.startswith("tpu"):
        sent, wanted = [sum(sent)], [sum(wanted)]
    assert sorted(sent) == sorted(wanted)
    # Beside them the weight's gradient alone is sent: one number.
    others = [row.collective for row in report.rows if row not in moves]
    has_weight = with_gradient and name == "filtered"
    assert [(one.kind, one.payload_bytes) for one in others] == (
        [("all-reduce", 4)] if has_weight else []
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", MOVES)
def test_a_transform_sends_its_closed_form_and_gathers_nothing(case, transposed):
    axes, split, shape, _ = CASES[case]
    rules, mesh = rules_of(split), make_mesh(Layout(**SIZES))
    sharding = rules.sharding(mesh, axes, shape)
    given = axes, over_of(axes), Scope(rules=rules)
    degrees = MOVES[case][transposed]
    with jax.set_mesh(mesh):
        report = audit(
            lambda x: fft.fftn(x, *given, transposed=transposed),
            jax.ShapeDtypeStruct(shape, jnp.complex64, sharding=sharding),
        )
        listed = fft.moves_of(shape, *given, transposed=transposed)
    own_bytes = 8 * math.prod(sharding.shard_shape(shape))
    assert not report.surprises
    assert {row.reason for row in report.rows} <= {FFT}
    assert [row.collective.kind for row in report.rows] == ["all-to-all"] * len(degrees)
    assert [row.collective.wire_bytes for row in report.rows] == [
        own_bytes * (n - 1) // n for n in degrees
    ]
    assert [math.prod(SIZES[axis] for axis in move.mesh_axes) for move in listed] == (
        degrees
    )


@pytest.mark.parametrize(
    "case, name",
    [
        ("rows_and_columns", "rfftn"),
        ("rows_and_columns", "filtered"),
        slow("rows_and_columns", "ifftn"),
        slow("rows_and_columns", "irfftn"),
        *(
            slow(case, name)
            for case in ("rows", "volume")
            for name in ("ifftn", "rfftn", "irfftn", "filtered")
        ),
    ],
)
def test_inverse_real_and_filtered_transforms_send_their_closed_form(case, name):
    check_sends(case, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn", "filtered"])
@pytest.mark.parametrize("case", REAL_MOVES)
def test_gradients_send_as_much_again(case, name):
    check_sends(case, name, with_gradient=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn", "filtered"])
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("gpu:h100:1x8", marks=needs_gpu_compiler),
        pytest.param("tpu:v5p:2x2x2", marks=needs_tpu_compiler),
    ],
)
def test_absent_devices_send_the_closed_form_in_all_to_alls(target, name):
    check_sends("rows_and_columns", name, target=target, with_gradient=True)
