"""Shallow water on a rotating band of latitudes, closed in longitude: NumPy, float64.

    dh/dt = -div(h u)
    du/dt = -q k x (h u) - grad(g h + |u|^2 / 2),    q = (f + curl u) / h

on an Arakawa C grid between two walls: heights h (m) in the middle of a cell, winds u
and v (m/s) on its eastern and northern face, potential vorticity q on its corners.
Fluxes and averages are those of Sadourny 1975's energy-conserving scheme, with lengths
of faces and areas of cells in spherical coordinates; time is classical Runge-Kutta of
order 4. So the mass is conserved up to rounding, the energy but for the error in time,
the potential enstrophy not exactly.

Reference: Sadourny 1975, "The dynamics of finite-difference models of the shallow-water
equations", J. Atmos. Sci. 32, equation 12.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

RADIUS_M, ROTATION_PER_S, GRAVITY_M_PER_S2 = 6.371e6, 7.292e-5, 9.80616
"""Constants of the Earth (Williamson et al. 1992, table 1)."""

State = tuple[np.ndarray, np.ndarray, np.ndarray]
"""u (..., height, width), v (..., height - 1, width) inside the walls, h as u."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """The grid, and what is conserved on it.

    Args:
        height, width: Cells along latitude and longitude.
        south_deg, north_deg: Where the walls are.
    """

    height: int
    width: int
    south_deg: float = 25.0
    north_deg: float = 75.0

    @cached_property
    def faces(self) -> np.ndarray:
        """Latitudes of the faces from wall to wall, rad: (height + 1, 1)."""
        ends = np.deg2rad([self.south_deg, self.north_deg])
        return np.linspace(*ends, self.height + 1)[:, None]

    @cached_property
    def middles(self) -> np.ndarray:
        """Latitudes of the cells' middles, rad: (height, 1)."""
        return (self.faces[1:] + self.faces[:-1]) / 2

    @cached_property
    def north_m(self) -> float:
        """Length of a cell along the meridian."""
        return RADIUS_M * float(self.faces[1, 0] - self.faces[0, 0])

    @cached_property
    def east_m(self) -> np.ndarray:
        """Length of a cell along its parallel: (height, 1)."""
        return RADIUS_M * np.cos(self.middles) * 2 * np.pi / self.width

    @cached_property
    def face_widths_m(self) -> np.ndarray:
        """Return the width of the faces between the walls: (height - 1, 1)."""
        return RADIUS_M * np.cos(self.faces[1:-1]) * 2 * np.pi / self.width

    @property
    def turning_per_s(self) -> np.ndarray:
        """The Coriolis parameter on the faces between the walls: (height - 1, 1)."""
        return 2 * ROTATION_PER_S * np.sin(self.faces[1:-1])

    def mass(self, state: State) -> np.ndarray:
        """Volume of water, m^3: (...)."""
        return np.sum(state[2] * self.east_m * self.north_m, axis=(-2, -1))

    def energy(self, state: State) -> np.ndarray:
        """Kinetic and potential energy over density, m^5/s^2: (...)."""
        u, v, h = state
        cells, faces = self.east_m * self.north_m, self.face_widths_m * self.north_m
        kinetic = np.sum(_east(h) * u**2 * cells, axis=(-2, -1))
        kinetic += np.sum(_north(h) * v**2 * faces, axis=(-2, -1))
        return (kinetic + GRAVITY_M_PER_S2 * np.sum(h**2 * cells, axis=(-2, -1))) / 2

    def enstrophy(self, state: State) -> np.ndarray:
        """Potential enstrophy between the walls, m/s^2: (...)."""
        q, depth = self.potential_vorticity(state)
        areas = self.face_widths_m * self.north_m
        return np.sum(q**2 * depth * areas, axis=(-2, -1)) / 2

    def potential_vorticity(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        """On corners between the walls, 1/(m s), and the depth there, m."""
        u, v, h = state
        along = u * self.east_m
        turned = (np.roll(v, -1, axis=-1) - v) * self.north_m
        turned -= along[..., 1:, :] - along[..., :-1, :]
        depth = _north(_east(h))
        curl = turned / (self.face_widths_m * self.north_m)
        return (self.turning_per_s + curl) / depth, depth

    def change(self, state: State) -> State:
        """The time derivative of a state."""
        u, v, h = state
        q, _ = self.potential_vorticity(state)
        eastward = u * _east(h) * self.north_m
        northward = v * _north(h) * self.face_widths_m
        cells = self.east_m * self.north_m
        arriving = np.roll(eastward, 1, axis=-1) - eastward
        arriving -= _between_walls(northward)
        head = GRAVITY_M_PER_S2 * h + self._kinetic(u, v) / cells
        # Half of the corner to the north, half of that to the south; walls have none.
        turning = _to_middles(q * _east(northward))
        du = (turning - (np.roll(head, -1, axis=-1) - head)) / self.east_m
        at_corners = q * _north(eastward)
        turning = (at_corners + np.roll(at_corners, 1, axis=-1)) / 2
        dv = -(turning + head[..., 1:, :] - head[..., :-1, :]) / self.north_m
        return du, dv, arriving / cells

    def _kinetic(self, u: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Return kinetic energy times area per cell, from its faces' u^2 and v^2."""
        of_u = u**2 * self.east_m * self.north_m
        of_v = v**2 * self.face_widths_m * self.north_m
        return ((of_u + np.roll(of_u, 1, axis=-1)) / 2 + _to_middles(of_v)) / 2

    def after(self, state: State, step_s: float, num_steps: int) -> State:
        """A state so many steps of Runge-Kutta later."""
        for _ in range(num_steps):
            first = self.change(state)
            second = self.change(_moved(state, first, step_s / 2))
            third = self.change(_moved(state, second, step_s / 2))
            fourth = self.change(_moved(state, third, step_s))
            state = tuple(
                x + step_s / 6 * (a + 2 * b + 2 * c + d)
                for x, a, b, c, d in zip(
                    state, first, second, third, fourth, strict=True
                )
            )
        return state


def balanced(band: Band, num_members: int, seed: int) -> State:
    """Members of a jet and random waves, whose winds balance their heights.

    Geostrophic: u = -(g / f) dh/dy and v = (g / f) dh/dx. Heights are flat at the
    walls, so that no wind blows through them.
    """
    rng = np.random.default_rng(seed)
    place = (np.arange(band.height) + 0.5)[:, None] / band.height
    longitude = np.arange(band.width) * 2 * np.pi / band.width
    envelope = np.sin(np.pi * place) ** 2
    jet_at = rng.uniform(0.35, 0.65, (num_members, 1, 1))
    jet = -rng.uniform(150, 300, jet_at.shape) * np.tanh((place - jet_at) / 0.12)
    waves = np.zeros((num_members, band.height, band.width))
    for wave in range(1, 7):
        for half_waves in range(1, 4):
            amplitude, phase = rng.normal(0, 80 / wave, (2, num_members, 1, 1))
            shape = np.cos(wave * longitude + phase) * np.sin(
                half_waves * np.pi * place
            )
            waves += amplitude * shape
    h = 3000 + jet + envelope * waves
    turning = 2 * ROTATION_PER_S * np.sin(band.middles)
    at_faces = np.pad(_north(h), [(0, 0), (1, 1), (0, 0)], mode="edge")
    u = -np.diff(_east(at_faces), axis=-2) / band.north_m / turning
    at_corners = _north(_east(h))
    v = at_corners - np.roll(at_corners, 1, axis=-1)
    v = v / band.face_widths_m / band.turning_per_s
    return GRAVITY_M_PER_S2 * u, GRAVITY_M_PER_S2 * v, h


def _moved(state: State, change: State, step_s: float) -> State:
    u, v, h = (x + step_s * dx for x, dx in zip(state, change, strict=True))
    return u, v, h


def _east(x: np.ndarray) -> np.ndarray:
    """The mean of a place and its eastern neighbour."""
    return (x + np.roll(x, -1, axis=-1)) / 2


def _north(x: np.ndarray) -> np.ndarray:
    """The mean of a place and its northern neighbour, one fewer of them."""
    return (x[..., 1:, :] + x[..., :-1, :]) / 2


def _to_middles(x: np.ndarray) -> np.ndarray:
    """The mean of the faces around each cell, of which those in walls are 0."""
    ends = [(0, 0)] * (x.ndim - 2) + [(1, 1), (0, 0)]
    return _north(np.pad(x, ends))


def _between_walls(x: np.ndarray) -> np.ndarray:
    """Return the northward flux out of each cell minus the flux from the south."""
    ends = [(0, 0)] * (x.ndim - 2) + [(1, 1), (0, 0)]
    return np.diff(np.pad(x, ends), axis=-2)
