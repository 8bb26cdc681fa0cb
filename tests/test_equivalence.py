"""Layouts against the single-device program: what agrees, and what is found if not."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar import from_nnx
from meshpar.models import presets
from meshpar.testing.batches import random_batch, step_batches
from meshpar.testing.comparison import bf16_bound, bf16_chains, copies, deviations
from meshpar.testing.equivalence import check_layouts
from meshpar.testing.masks import MASKS
from meshpar.testing.reference import Values, compared_learning_rate
from tests.marks import slow
from tests.pipelined import mlp_of
from tests.test_nnx_model import Block, Ends

build = functools.cache(presets.build)
"""Whose single-device program then is compiled once."""

CASE = "--layout data=2 --global-batch {} --seq 4 --mask {} --seed 0"
QUANTITIES = ["initial", "loss", "grad_norm", "gradients", "parameters", "copies"]


def values(gradients, *, loss=1.0):
    """Values whose trees are all `gradients`."""
    gradients = {name: np.float32(value) for name, value in gradients.items()}
    return Values(
        state={},
        initial=gradients,
        loss=np.float32(loss),
        grad_norm=np.float32(1.0),
        gradients=gradients,
        parameters=gradients,
    )


def gradient_errors(found, wanted):
    compared = deviations(values(found), values(wanted), None)
    return {d.path: d for d in compared if d.quantity == "gradients"}


# What agrees.


@pytest.mark.slow
def test_drawn_layouts_train_the_model_of_one_device():
    report = check_layouts(build("test", layers=1), num=1, seed=5)
    assert report.ok
    (result,) = report.results
    assert list(result.worst) == QUANTITIES


def test_a_given_batch_is_used_and_bf16_is_within_its_bound_and_far_above_fp32():
    model = build("test", layers=1)
    batch = random_batch(model, 4, 8, seed=0)
    batch["positions"] = np.tile(np.arange(8, dtype=np.int32)[::-1], (4, 1))
    report = check_layouts(model, batch, ["tensor=2,precision=bf16"])
    (result,) = report.results
    assert (result.case.global_batch, result.case.seq) == (4, 8)
    worst = report.worst("bf16")["gradients"]
    assert 1e-4 < worst.error < worst.bound < 0.1


def test_the_compared_step_is_as_long_as_the_array_that_it_moves_most_allows():
    table, others = np.full((50, 4), 0.1), np.full(300, 1.0)
    of_table = np.zeros_like(table)
    of_table[7] = 2.0  # the row of a lone token
    params = {"table": table, "others": others}
    rate = compared_learning_rate(params, {"table": of_table, "others": others / 100})
    moved = rate * np.linalg.norm(of_table) / np.linalg.norm(table)
    np.testing.assert_allclose(moved, 0.05, rtol=1e-6)


@pytest.mark.parametrize(("near", "expected"), [(0.0, 0.05), (1e-6, 0.05 / 20)])
def test_an_array_near_zero_hardly_holds_the_compared_step_back(near, expected):
    params = {"weights": np.ones(100), "bias": np.full(1, near)}
    gradients = {"weights": np.ones(100), "bias": np.ones(1)}
    rate = compared_learning_rate(params, gradients)
    np.testing.assert_allclose(rate, expected, rtol=0.01)
    assert compared_learning_rate(params, {k: 0 * v for k, v in params.items()}) == 0


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_leaves_something_to_learn_in_every_step(mask):
    batch = random_batch(build("test"), 4, 8, seed=0)
    first, second, _ = step_batches(build("test"), batch, mask, seed=5, num_steps=3)
    assert first["weights"].any()
    assert second["weights"].any()
    assert not np.array_equal(first["tokens"], second["tokens"])


def test_the_mask_of_empty_rows_has_them():
    model = build("test")
    (batch,) = step_batches(
        model, random_batch(model, 8, 8, seed=0), "empty_rows", 0, 1
    )
    assert (batch["weights"].sum(axis=1) == 0).sum() >= 4


# Errors and their bounds.


def test_an_error_is_relative_to_the_array_it_is_in():
    errors = gradient_errors({"a": [1.0, 2.0], "b": [1.0]}, {"a": [1, 2], "b": [2]})
    assert errors["a"].ok
    assert not errors["b"].ok
    assert errors["b"].error == pytest.approx(0.5)


def test_an_array_below_the_rounding_of_all_is_measured_against_all():
    wanted = {"large": np.ones(100), "zero": np.zeros(3)}
    rounding = {"large": np.ones(100), "zero": np.full(3, 1e-8)}
    wrong = {"large": np.ones(100), "zero": np.full(3, 1e-4)}
    assert gradient_errors(rounding, wanted)["zero"].ok
    assert not gradient_errors(wrong, wanted)["zero"].ok


def test_nan_is_never_within_a_bound():
    assert not gradient_errors({"a": [np.nan]}, {"a": [1.0]})["a"].ok


def test_initial_parameters_must_be_equal_to_the_bit():
    found = deviations(values({"a": [1 + 2**-23]}), values({"a": [1.0]}), None)
    assert {d.quantity: d.ok for d in found} == {
        "initial": False,
        "loss": True,
        "grad_norm": True,
        "gradients": True,
        "parameters": True,
    }


def test_copies_that_differ_between_devices_are_found():
    devices = jax.devices()[:2]
    sharding = NamedSharding(Mesh(devices, "data"), PartitionSpec())
    for second, error in ((1.0, 0.0), (2.0, 1.0)):
        parts = [
            jax.device_put(np.float32([value]), device)
            for value, device in zip((1.0, second), devices, strict=True)
        ]
        array = jax.make_array_from_single_device_arrays((1,), sharding, parts)
        assert [d.error for d in copies({"a": array})] == [error]


@pytest.mark.slow
def test_the_bf16_bound_grows_with_the_square_root_of_the_depth():
    batch = random_batch(build("test"), 2, 8, seed=0)
    chains = {
        layers: max(bf16_chains(build("test", layers=layers), batch)[1])
        for layers in (2, 4, 6)
    }
    per_layer = chains[4] - chains[2]
    assert per_layer > 20
    assert chains[6] - chains[4] == per_layer
    assert bf16_bound(4 * 50) == pytest.approx(2 * bf16_bound(50), rel=0.1)


def test_sums_that_are_split_may_round_more_often():
    model, batch = build("test"), random_batch(build("test"), 2, 8, seed=0)
    whole, split = (bf16_chains(model, batch, sum_parts=parts) for parts in (1, 4))
    assert split[0] > whole[0]
    assert max(split[1]) > max(whole[1])


# What differs is found.


@pytest.fixture
def gradients_times(monkeypatch):
    """`gradients_times(factor)`: every step's reduced gradients, one of them wrong."""

    def plant(factor):
        from meshpar.parallel import placement

        reduce = placement.reduce_gradients

        def planted(stored, gradients, *args, **options):
            reduced = reduce(stored, gradients, *args, **options)
            return {**reduced, "table": reduced["table"] * factor}

        monkeypatch.setattr(placement, "reduce_gradients", planted)

    return plant


SMALL = "--layout {} --global-batch 2 --seq 4 --mask full --seed 0"


@pytest.mark.parametrize(
    "line, factor", [("data=1", 1.0001), slow("data=1,precision=bf16", 0.8)]
)
def test_one_gradient_that_is_a_little_wrong_is_found(gradients_times, line, factor):
    gradients_times(factor)
    with pytest.raises(AssertionError) as failure:
        check_layouts(mlp_of(1), layouts=[SMALL.format(line)])
    message = str(failure.value)
    assert "0 of 1" in message
    assert "gradients of table: error" in message
    again = re.search(
        r'again with: check_layouts\(model, \.\.\., layouts=\["(.*)"\]', message
    )
    with pytest.raises(AssertionError, match="gradients of table"):
        check_layouts(mlp_of(1), layouts=[again[1]])


# What is refused.


@pytest.mark.parametrize(
    "options, refusal",
    [
        (
            {"layouts": ["tensor=4"]},
            ("layout.indivisible", "'tensor=4'", "'kv_heads'", 2, 4),
        ),
        ({"layouts": ["data=16"]}, ("layout.wrong_device_count", 16, 8)),
        (
            {"layouts": ["--layout data=2"]},
            ("testing.incomplete_case", "'--layout data=2'", "'--global-batch'"),
        ),
        (
            {"layouts": [CASE.format(3, "full")]},
            ("layout.indivisible", "'data=2'", "'batch'", 3, 2),
        ),
        (
            {"layouts": [CASE.format(2, "hole")]},
            ("testing.unknown_mask", "'hole'", "'holes'"),
        ),
        ({"num_devices": 9}, ("mesh.too_few_devices", "num_devices=9", 8)),
        (
            {"batch": {"x": np.ones((2, 2))}},
            ("batch.missing_array", "'x'", "'tokens'"),
        ),
    ],
)
def test_what_cannot_be_checked_is_refused(options, refusal, refuses):
    with refuses(*refusal):
        check_layouts(build("test"), **options)


def test_a_model_without_a_vocabulary_needs_a_batch(refuses):
    model = from_nnx(ends=Ends, block=Block, num_layers=1)
    with refuses("testing.unknown_vocabulary", "'vocab'", "batch['tokens']"):
        check_layouts(model, layouts=["data=2"])
