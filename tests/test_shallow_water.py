"""The shallow-water simulation conserves what its scheme is said to conserve."""

import numpy as np
import pytest

from meshpar.recipes.shallow_water import Band, balanced

BAND = Band(height=8, width=16)
DAY_S = 86_400.0


def after(step_s, days=1.0):
    num_steps = round(days * DAY_S / step_s)
    return BAND.after(balanced(BAND, 2, seed=1), step_s, num_steps)


def drift(quantity, state):
    first = quantity(balanced(BAND, 2, seed=1))
    return np.max(np.abs(quantity(state) / first - 1))


def test_water_moves_and_its_mass_stays():
    state = after(1800.0)
    moved = np.abs(state[2] - balanced(BAND, 2, seed=1)[2]).max()
    assert moved > 10.0
    assert drift(BAND.mass, state) < 1e-14


def test_energy_changes_by_the_error_in_time_alone():
    coarse, fine = (drift(BAND.energy, after(step_s)) for step_s in (1800.0, 900.0))
    assert 1e-12 < coarse < 1e-4
    assert fine < coarse / 10  # of order 4 or more


def test_the_change_of_energy_is_none_before_time_is_cut_into_steps():
    state = balanced(BAND, 2, seed=1)
    change = BAND.change(state)
    size = 1e-3
    ahead, behind = (
        tuple(x + sign * size * dx for x, dx in zip(state, change, strict=True))
        for sign in (1, -1)
    )
    rate = (BAND.energy(ahead) - BAND.energy(behind)) / (2 * size)
    scale = sum(
        np.sum(np.abs(x * dx)) for x, dx in zip(state, change, strict=True)
    ) * np.max(BAND.east_m * BAND.north_m)
    assert np.max(np.abs(rate)) < 1e-6 * scale


def test_water_at_rest_stays_at_rest():
    u, v, h = balanced(BAND, 1, seed=0)
    rest = 0 * u, 0 * v, np.full_like(h, 3000.0)
    for found, wanted in zip(BAND.after(rest, 1800.0, 10), rest, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("turn", [1, 5])
def test_longitudes_are_all_alike(turn):
    state = balanced(BAND, 1, seed=2)
    turned = tuple(np.roll(x, turn, axis=-1) for x in state)
    for found, wanted in zip(
        BAND.after(turned, 1800.0, 5), BAND.after(state, 1800.0, 5), strict=True
    ):
        np.testing.assert_allclose(found, np.roll(wanted, turn, axis=-1), atol=1e-9)
