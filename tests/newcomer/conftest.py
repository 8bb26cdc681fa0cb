"""The machines of new users, each made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.newcomer.environment import Machine, built_wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def quick(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """With the packages of this environment."""
    return Machine(tmp_path_factory.mktemp("quick"), wheel, borrowed=True)


@pytest.fixture(scope="session")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """With its own packages, from an index."""
    return Machine(tmp_path_factory.mktemp("core"), wheel, borrowed=False)
