"""A model of the zoo under a layout, and beside the same modules in plain Flax."""

import functools

import jax
import optax

from meshpar import Layout, default_rules, make_train_step
from tests.test_zoo import BOUND, compare, trained
from tests.zoo.plain import train

LAYERS = 2


def plain_run(entry):
    """-> the plain run of an entry, trained once."""

    @functools.cache
    def run():
        return train(entry.ends, entry.groups(LAYERS), entry.batch(), entry.loss)

    return run


def deviating(entry, layout, wanted):
    """What of an entry's run under a layout is not within the bound, and how far."""
    deviations = compare(trained(entry, layout, LAYERS), wanted)
    return {what: error for what, error in deviations.items() if not error <= BOUND}


def step_of(entry, layout):
    """An entry's training step, on as many devices as the layout needs."""
    layout = Layout.parse(layout)
    return make_train_step(
        entry.model(LAYERS),
        optax.adamw(1e-3),
        layout,
        rules=default_rules(layout).with_rules(**entry.rules),
        devices=jax.devices()[: layout.num_devices],
    )
