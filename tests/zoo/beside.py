"""A model of the zoo under a layout, and beside the same modules in plain Flax."""

import functools

import jax
import optax
from flax import nnx

from meshpar import Layout, default_rules, make_train_step
from tests.states import normal_values, with_parameters
from tests.test_zoo import BOUND, compare, errors, flat, trained
from tests.zoo.plain import Whole, by_path, train

LAYERS = 2
ADAMW = optax.adamw(1e-3)


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


def deviating_gradients(entry, step, program):
    """What of a step of SGD(1.0) is not within the bound of the plain modules.

    Beside the step itself one program is compiled.

    Args:
        entry: The entry.
        step: Of its model of one layer.
        program: (state, batch) -> the next state and metrics, such as `step`.
    """
    params = normal_values(step.state_shapes.params, scale=0.25)
    state = with_parameters(step, params)
    state, metrics = program(state, step.place(entry.batch()))
    found = jax.tree.map(
        lambda old, new: old - new, params, step.in_layer_order(state.params)
    )
    value, wanted = plain_loss_and_gradients(entry, flat(params))
    deviations = {"loss": abs(float(metrics["loss"]) / value - 1)}
    deviations |= errors(flat(found), wanted)
    return {what: error for what, error in deviations.items() if not error <= BOUND}


def plain_loss_and_gradients(entry, values):
    """Of the modules of one layer in plain Flax, with parameters by dotted path."""
    whole = nnx.eval_shape(lambda: Whole(entry.ends, entry.groups(1)))
    graph, shapes = nnx.split(whole)

    def value_of(path):
        if path[0] == "ends":
            return values[".".join(map(str, path[1:]))]
        group, layer, *rest = path
        return values[".".join([group, *map(str, rest)])][layer]

    state = nnx.from_flat_state(
        (path, leaf.replace(value_of(path))) for path, leaf in nnx.to_flat_state(shapes)
    )
    loss = lambda state: entry.loss(nnx.merge(graph, state), entry.batch(), 0)  # noqa: E731
    value, gradients = jax.jit(jax.value_and_grad(loss))(state)
    return float(value), by_path(gradients)


def step_of(entry, layout, layers=LAYERS, optimizer=ADAMW):
    """An entry's training step, on as many devices as the layout needs."""
    layout = Layout.parse(layout)
    return make_train_step(
        entry.model(layers),
        optimizer,
        layout,
        rules=default_rules(layout).with_rules(**entry.rules),
        devices=jax.devices()[: layout.num_devices],
    )
