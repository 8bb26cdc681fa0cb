"""The test kit's assertions hold what is right and say what is wrong."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import Layout, batch_shapes, make_mesh, make_train_step
from meshpar.models.presets import build
from meshpar.testing.assertions import (
    assert_collectives,
    assert_flat_in,
    assert_no_surprises,
    assert_peak_bytes,
    assert_replicated_bytes_below,
)
from tests import warm
from tests.marks import slow

TOKENS, EMBED, MLP = 8, 16, 32


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(Layout(data=2, tensor=4))


@pytest.fixture(scope="module")
def row_parallel(mesh):
    """x @ w with the contracted dim split over `tensor`, and its arguments."""

    def shape(dims, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=sharding)

    x = shape((TOKENS, MLP), "data", "tensor")
    w = shape((MLP, EMBED), "tensor", None)
    result = NamedSharding(mesh, P("data"))
    return jax.jit(jnp.matmul, out_shardings=result), (x, w)


@pytest.fixture(scope="module")
def gathered(mesh):
    """A weight that is split on the wrong dim, so that GSPMD gathers it."""

    def function(x, w):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))
        y = x @ w
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("data")))

    x = jax.ShapeDtypeStruct(
        (TOKENS, 4 * MLP), jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )
    w = jax.ShapeDtypeStruct(
        (4 * MLP, EMBED), jnp.float32, sharding=NamedSharding(mesh, P(None, "tensor"))
    )
    return function, (x, w)


def test_the_right_number_of_collectives_passes(row_parallel):
    report = assert_collectives(*row_parallel, {"tensor": {"all-reduce": 1}})
    (row,) = report.rows
    assert row.collective.payload_bytes == TOKENS // 2 * EMBED * 4


@pytest.mark.parametrize(
    ("expected", "difference"),
    [
        ({"tensor": {"all-reduce": 2}}, "tensor: all-reduce .* 1 .* 2"),
        ({"tensor": {}}, "tensor: all-reduce .* 1 .* 0"),
        ({"data": {"all-gather": 1}}, "data: all-gather .* 0 .* 1"),
    ],
)
def test_a_wrong_number_prints_the_difference_and_the_table(
    row_parallel, expected, difference
):
    with pytest.raises(AssertionError, match=difference) as failure:
        assert_collectives(*row_parallel, expected)
    assert "row-parallel output" in str(failure.value)


def test_small_collectives_can_be_left_out(row_parallel):
    assert_collectives(*row_parallel, {"tensor": {}}, min_bytes=1 << 20)


def test_a_gathered_weight_is_a_surprise(gathered):
    with pytest.raises(AssertionError, match=r"^surprise: .*test_assertions\.py:\d+"):
        assert_no_surprises(*gathered)


def test_what_the_caller_expects_is_no_surprise(gathered):
    with pytest.raises(AssertionError) as failure:
        assert_no_surprises(*gathered)
    kind = str(failure.value).split(" ")[1]
    assert_no_surprises(*gathered, expected={"tensor": {kind: "our own layout"}})


def test_the_peak_is_held_to_its_bytes(row_parallel):
    report = assert_peak_bytes(*row_parallel, at_most=1 << 20)
    peak = report.memory.peak_bytes
    with pytest.raises(AssertionError, match=f" {peak:,} .* {peak - 1:,}"):
        assert_peak_bytes(*row_parallel, at_most=peak - 1)


def test_replicated_arguments_are_counted(mesh):
    whole = jnp.zeros((EMBED, EMBED))
    split = jax.ShapeDtypeStruct(
        (TOKENS, EMBED), jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )
    size = EMBED * EMBED * 4
    assert_replicated_bytes_below(jnp.matmul, (split, whole), size + 1, mesh=mesh)
    with pytest.raises(AssertionError, match=f"^{size:,} .* {size:,};"):
        assert_replicated_bytes_below(jnp.matmul, (split, whole), size, mesh=mesh)


def test_a_step_of_ours_replicates_its_norms_only():
    step = make_train_step(build("test"), optax.adam(1e-3), "fsdp=4,tensor=2")
    assert_replicated_bytes_below(step, (batch_shapes(4, 16),), 1 << 10)


def accumulated(length, *, keep):
    """A loop that keeps every iterate, or only their sum."""

    def function(x):
        def body(carry, _):
            carry = jnp.tanh(carry)
            return carry, carry if keep else None

        last, all_of_them = jax.lax.scan(body, x, length=length)
        return last.sum() + (jnp.sort(all_of_them).sum() if keep else 0.0)

    return function, (jnp.zeros((64, 64)),)


def test_memory_that_stays_flat_passes(mesh):
    assert_flat_in("length", lambda n: accumulated(n, keep=False), (4, 64), mesh=mesh)


def test_memory_that_grows_is_told_with_both_numbers(mesh):
    with pytest.raises(AssertionError, match=r"length: [\d,]+ .* 4, [\d,]+ .* 64,"):
        assert_flat_in(
            "length", lambda n: accumulated(n, keep=True), (4, 64), mesh=mesh
        )


def run_pytest(pytester):
    """As `runpytest_subprocess`, in the warm interpreter."""
    return pytester.run(*warm.words(), "-m", "pytest", "-q")


def test_a_marked_test_gets_its_devices_or_a_clear_failure(pytester):
    pytester.makepyfile(
        """
        import jax, meshpar, pytest

        def sizes():
            counts = jax.device_count(), jax.local_device_count()
            return len(jax.devices()), len(jax.local_devices()), *counts

        @pytest.fixture
        def mesh():
            return meshpar.make_mesh("data=-1")

        @pytest.mark.devices(4)
        def test_four(mesh):
            assert sizes() == (4, 4, 4, 4) and mesh.size == 4

        @pytest.mark.devices(2)
        def test_two(mesh):
            assert sizes() == (2, 2, 2, 2) and mesh.size == 2
            assert jax.make_mesh((2,), ("x",)).size == 2

        def test_all(mesh):
            assert sizes() == (4, 4, 4, 4) and mesh.size == 4
        """
    )
    run_pytest(pytester).assert_outcomes(passed=3)


@pytest.mark.parametrize("number", ["0", slow("n=2")])
def test_a_marker_of_no_number_is_told(pytester, number):
    pytester.makepyfile(
        f"import pytest\n@pytest.mark.devices({number})\ndef test_one():\n    pass\n"
    )
    result = run_pytest(pytester)
    result.stderr.fnmatch_lines(["*write the marker as devices(8), with the number*"])


def test_a_marker_above_the_setting_fails_in_words(pytester):
    pytester.makeini("[pytest]\nmeshpar_emulate = 2\n")
    pytester.makepyfile(
        "import pytest\n@pytest.mark.devices(4)\ndef test_four():\n    pass\n"
    )
    result = run_pytest(pytester)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*needs 4 devices, but there are 2*"])
