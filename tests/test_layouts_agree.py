"""Every layout trains the same model: the recipe's own losses, step by step."""

import jax
import numpy as np
import optax
import pytest

from meshpar import Layout, make_train_step
from meshpar.models.presets import build
from meshpar.recipes import pretrain
from tests.conftest import rows

pytestmark = pytest.mark.slow

LAYOUTS = [
    "data=8",
    "fsdp=8",
    "tensor=8",
    "data=2,fsdp=2,tensor=2",
    "data=4,tensor=2",
    "fsdp=4,tensor=2",
    "tensor=8,sequence_parallel=true",
    "data=2,fsdp=2,tensor=2,sequence_parallel=true",
]


@pytest.fixture(scope="session")
def losses_of(tmp_path_factory, small_text):
    """`losses_of(layout)`: losses of 10 steps of `python -m recipes.pretrain`."""
    known = {}

    def losses(line: str) -> list[float]:
        if line not in known:
            folder = tmp_path_factory.mktemp("run")
            log = folder / "metrics.jsonl"
            options = f"--layout {line} --preset tiny-8 --steps 10 --seed 0 --seq 64"
            options += f" --global-batch 16 --sample-tokens 1 --log-json {log}"
            options += f" --out {folder} --text {small_text}"
            assert pretrain.main(options.split()) == 0
            known[line] = rows(log, "loss")
        return known[line]

    return losses


@pytest.mark.parametrize("line", LAYOUTS)
def test_ten_steps_have_the_losses_of_one_device(losses_of, line):
    one_device = losses_of("data=1")
    assert len(one_device) == 10
    np.testing.assert_allclose(losses_of(line), one_device, rtol=1e-5)


@pytest.mark.parametrize("line", LAYOUTS)
def test_initial_parameters_are_bitwise_those_of_one_device(line):
    whole = _initial("data=1")
    for path, value in _initial(line).items():
        np.testing.assert_array_equal(value, whole[path], err_msg=path)


def _initial(line: str) -> dict[str, np.ndarray]:
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    step = make_train_step(build("tiny-8"), optax.sgd(1.0), layout, devices=devices)
    leaves = jax.tree.leaves_with_path(step.init(0).params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
