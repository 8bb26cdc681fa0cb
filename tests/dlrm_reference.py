"""A DLRM and dense optimizers of its tables, in plain jax.numpy on one device.

Nothing of meshpar is in it: tables are whole arrays, rows are taken by indexing, and
gradients are dense.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

RATE = 0.05


def dense(layer, x):
    return x @ layer["kernel"] + layer["bias"]


def logits(params, numbers, embedded, interaction="dot"):
    """Of a tree of parameters as meshpar names them; groups stacked."""
    x = numbers
    for at in range(len(params["bottom"])):
        x = jax.nn.relu(dense(one(params["bottom"], at), x))
    vectors = jnp.concatenate([x[:, None], embedded], axis=1)
    if interaction == "dot":
        pairs = [
            jnp.sum(vectors[:, i] * vectors[:, j], axis=-1)
            for i in range(vectors.shape[1])
            for j in range(i)
        ]
        x = jnp.concatenate([x, jnp.stack(pairs, axis=1)], axis=1)
    else:
        first = x = vectors.reshape(len(vectors), -1)
        for layer in range(len(params["cross"]["down"])):
            cross = jax.tree.map(lambda leaf, at=layer: leaf[at], params["cross"])
            x = first * dense(cross["up"], x @ cross["down"]) + x
    x = jax.nn.relu(dense(params["top"], x))
    for layer in range(len(params["blocks"]["dense"]["kernel"])):
        block = jax.tree.map(lambda leaf, at=layer: leaf[at], params["blocks"])
        x = jax.nn.relu(dense(block["dense"], x))
    for at in range(len(params.get("tail", {}))):
        x = jax.nn.relu(dense(one(params["tail"], at), x))
    return dense(params["click"], x)[:, 0]


def one(layers, at):
    """Number `at` of layers that a dict has by number, whatever the keys' type."""
    return {int(key): layer for key, layer in layers.items()}[at]


def pooled(table, ids, weights, pooling):
    """(examples, dim), bag by bag; -1 is no id."""
    weights = jnp.where(ids >= 0, weights, 0.0)
    rows = table[jnp.maximum(ids, 0)]
    total = jnp.einsum("bl,bld->bd", weights, rows)
    if pooling == "mean":
        many = weights.sum(axis=1, keepdims=True)
        total = jnp.where(many == 0, 0.0, total / jnp.where(many == 0, 1.0, many))
    return total


def loss(params, tables, batch, features):
    """Mean binary cross-entropy; `features`: name -> (table, pooling)."""
    embedded = jnp.stack(
        [
            pooled(
                tables[table],
                batch[name],
                batch.get(f"{name}_weights", jnp.ones(batch[name].shape)),
                pooling,
            )
            for name, (table, pooling) in features.items()
        ],
        axis=1,
    )
    z, y = logits(params, batch["numbers"], embedded), batch["clicks"]
    losses = jnp.logaddexp(0.0, z) - y * z
    weights = batch.get("weights", jnp.ones_like(y))
    return jnp.sum(weights * losses) / jnp.sum(weights)


def adagrad_rows(table, gradient, slots, touched, count):
    total = slots["sum"] + jnp.mean(gradient**2, axis=1)
    step = RATE * gradient / (jnp.sqrt(total) + 1e-8)[:, None]
    return table - step, {"sum": total}


def sgd(table, gradient, slots, touched, count):
    return table - RATE * gradient, {}


def lazy_adam(table, gradient, slots, touched, count):
    """`optax.adam` whose untouched rows keep value and moments."""
    adam = optax.scale_by_adam()
    state = optax.ScaleByAdamState(count=count, mu=slots["mu"], nu=slots["nu"])
    step, new = adam.update(gradient, state)
    keep = lambda after, before: jnp.where(touched[:, None], after, before)  # noqa: E731
    return keep(table - RATE * step, table), {
        "mu": keep(new.mu, slots["mu"]),
        "nu": keep(new.nu, slots["nu"]),
    }


OPTIMIZERS = {"SGD": sgd, "RowwiseAdagrad": adagrad_rows, "LazyAdam": lazy_adam}


def train(params, tables, optimizer, features, batches, model_optimizer):
    """Losses, and parameters and tables after a step on each batch.

    Args:
        params: Of the model.
        tables: Name -> its rows and slots.
        optimizer: Name in `OPTIMIZERS`.
        features: As of `loss`.
        batches: With ids as they are rows' numbers.
        model_optimizer: optax's, of the model.
    """

    def touched(name, batch):
        ids = [batch[feature].ravel() for feature in features_of(name)]
        rows = jnp.concatenate(ids)
        hit = jnp.zeros(len(tables[name]["rows"]) + 1, bool)
        return hit.at[jnp.where(rows < 0, len(hit) - 1, rows)].set(True)[:-1]

    def features_of(name):
        return [one for one, (table, _) in features.items() if table == name]

    @jax.jit
    def step(params, tables, state, batch, count):
        rows = {name: table["rows"] for name, table in tables.items()}
        found, (of_params, of_rows) = jax.value_and_grad(loss, (0, 1))(
            params, rows, batch, features
        )
        updates, state = model_optimizer.update(of_params, state, params)
        params, new = optax.apply_updates(params, updates), {}
        for name, table in tables.items():
            after, slots = OPTIMIZERS[optimizer](
                rows[name], of_rows[name], table, touched(name, batch), count
            )
            new[name] = {"rows": after, **slots}
        return params, new, state, found

    losses, state = [], model_optimizer.init(params)
    for count, batch in enumerate(batches):
        params, tables, state, found = step(params, tables, state, batch, count)
        losses.append(float(found))
    return losses, params, jax.tree.map(np.asarray, tables)
