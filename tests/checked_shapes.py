"""Every test runs the shapes that annotations say, under beartype.

Loaded before the plugins that import meshpar (`-p` in pyproject.toml): what is imported
already is checked no more.
"""

import jax
import numpy as np
from beartype import BeartypeConf, FrozenDict, beartype
from jaxtyping import install_import_hook

CHECKED = [
    "meshpar.parallel.tensor",
    "meshpar.parallel.expert.experts",
    "meshpar.parallel.head_loss",
    "meshpar.parallel.reduction",
    "meshpar.parallel.tensor",
    "meshpar.train.optimizer_state",
    "meshpar.models.layers.attention",
    "meshpar.models.layers.causal_attention",
    "meshpar.models.layers.latent_attention",
    "meshpar.models.layers.mlp",
    "meshpar.models.layers.norm",
]

# Without `jit`, JAX hands NumPy's arrays on to what derivatives are made of.
checked = beartype(
    conf=BeartypeConf(
        hint_overrides=FrozenDict({jax.Array: jax.Array | np.ndarray}),
        is_pep484_tower=True,
    )
)

install_import_hook(CHECKED, "tests.checked_shapes.checked")
