"""A U-Net trains alike however its volumes are cut, and says what it cannot do."""

import functools

import pytest

from tests.marks import slow
from tests.test_zoo import BOUND, compare, trained
from tests.zoo import volumes
from tests.zoo.plain import train

ENTRIES = {
    "slabs": volumes.SLABS,
    "beams": volumes.BEAMS,
    "idle": volumes.IDLE,
    "crossed": volumes.CROSSED,
    "patched": volumes.PATCHED,
    "batch_norm": volumes.BATCH_NORMED,
}


@functools.cache
def plain(name, layers):
    entry = ENTRIES[name]
    return train(entry.ends, entry.groups(layers), entry.batch(), entry.loss)


def of(name):
    """Entries that differ in their rules alone have one plain program."""
    return name if name in ("batch_norm", "patched") else "slabs"


@pytest.mark.parametrize(
    "name, layout, layers",
    [
        slow("beams", "data=2,context=2,tensor=2", 1),
        slow("idle", "data=2,context=2,tensor=2", 1),
        slow("idle", "context=2,tensor=2,remat=full", 1),
        slow("crossed", "context=2,tensor=2", 1),
        slow("patched", "data=2,context=2,tensor=2", 1),
        slow("slabs", "context=4", 2),
        slow("slabs", "fsdp=2,context=2,tensor=2", 1),
        slow("slabs", "tensor=4,fsdp=2,remat=full", 1),
        slow("slabs", "data=4,tensor=2,microbatches=2", 1),
        slow("slabs", "fsdp=8", 1),
        slow("beams", "context=2,tensor=4,remat=dots", 1),
        slow("beams", "data=2,fsdp=2,tensor=2,zero=2", 1),
        slow("batch_norm", "data=2,context=2,tensor=2", 1),
        slow("batch_norm", "fsdp=2,tensor=4", 1),
    ],
)
@pytest.mark.filterwarnings("ignore::meshpar.IdleMeshAxisWarning")
def test_a_unet_trains_as_plain_flax_and_optax_train_it(name, layout, layers):
    found = trained(ENTRIES[name], layout, layers)
    deviations = compare(found, plain(of(name), layers))
    assert not {what: error for what, error in deviations.items() if not error <= BOUND}
