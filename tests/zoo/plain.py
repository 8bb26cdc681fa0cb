"""Plain training of Flax NNX modules: layers in a Python loop, and optax.

Nothing of meshpar is in it but the keys that modules start from.
"""

import dataclasses

import jax
import numpy as np
import optax
from flax import nnx

from meshpar import initial_key

SEED, STEPS, MAX_NORM = 3, 3, 1.0


def optimizer():
    """AdamW, whose `eps` keeps the rounding of a gradient of 0 from becoming a step.

    With steps of 1e-2 the gradients of the third differ by 6e-6 between two ways to
    compile the plain program (two groups, 9 layers); shorter ones leave room.
    """
    return optax.adamw(3e-3, eps=1e-3)


class Whole(nnx.Module):
    """All modules of a model: `ends`, and a list of blocks for each group.

    Args:
        ends: Builds the module of embedding and head.
        groups: Name -> (what builds a block, how many there are).
    """

    def __init__(self, ends, groups):
        self.names = tuple(groups)
        # Logical axes mean nothing to Flax alone, which would look for a mesh.
        with nnx.use_eager_sharding(False):
            self.ends = ends(nnx.Rngs(initial_key(SEED, "ends")))
            for name, (block, count) in groups.items():
                keys = [initial_key(SEED, name, layer) for layer in range(count)]
                setattr(self, name, nnx.List([block(nnx.Rngs(key)) for key in keys]))


@dataclasses.dataclass
class Run:
    """What a run is compared by: numpy arrays by path, layers stacked."""

    initial: dict
    losses: list
    grad_norms: list
    moments: dict  # a tenth of the first step's clipped gradients
    parameters: dict
    state: dict


def mean_loss(whole, batch, step):
    """The loss of modules that need nothing but stream and batch."""
    x = whole.ends.embed(batch)
    for name in whole.names:
        for block in getattr(whole, name):
            x = block(x)
    total, weight = whole.ends.head(x, batch)
    return total / weight


def train(ends, groups, batch, loss=mean_loss):
    """A run of `STEPS` steps on one batch.

    Args:
        ends: As of `Whole`.
        groups: As of `Whole`.
        batch: Arrays by name.
        loss: (whole, batch, step) -> scalar; may assign to the modules' state.
    """
    whole = nnx.eval_shape(lambda: Whole(ends, groups))
    graph = nnx.graphdef(whole)
    chain = optax.chain(optax.clip_by_global_norm(MAX_NORM), optimizer())

    def first():
        _, params, state = nnx.split(Whole(ends, groups), nnx.Param, ...)
        return params, state, chain.init(params)

    def loss_of(params, state, step):
        whole = nnx.merge(graph, params, state, copy=True)
        found = loss(whole, batch, step)
        return found, nnx.split(whole, nnx.Param, ...)[2]

    @jax.jit
    def update(params, state, opt_state, step):
        value_and_grad = jax.value_and_grad(loss_of, has_aux=True)
        (found, state), gradients = value_and_grad(params, state, step)
        updates, opt_state = chain.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, state, opt_state, found, optax.tree.norm(gradients)

    params, state, opt_state = jax.jit(first)()
    run = Run(by_path(params), [], [], {}, {}, {})
    for step in range(STEPS):
        counted = np.uint32(step)  # One program for all steps.
        params, state, opt_state, found, norm = update(
            params, state, opt_state, counted
        )
        run.losses.append(float(found))
        run.grad_norms.append(float(norm))
        if step == 0:
            run.moments = by_path(optax.tree_utils.tree_get(opt_state, "mu"))
    run.parameters, run.state = by_path(params), by_path(state)
    return run


def by_path(state):
    """Arrays of a `Whole`: of the ends, and of each group stacked over its layers."""
    found, layers = {}, {}
    for path, leaf in nnx.to_flat_state(state):
        value = np.asarray(leaf.get_value())
        if path[0] == "ends":
            found[".".join(map(str, path[1:]))] = value
        else:
            group, _, *rest = path
            layers.setdefault(".".join([group, *rest]), []).append(value)
    return {**found, **{name: np.stack(values) for name, values in layers.items()}}


def normal(rngs, shape, *axes, std=0.3):
    """A parameter with logical axes, which Flax alone makes nothing of."""
    value = nnx.initializers.normal(std)(rngs.params(), shape)
    return nnx.Param(value, out_sharding=axes) if axes else nnx.Param(value)
