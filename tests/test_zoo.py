"""Every kind of model trains on every layout as plain Flax and optax train it."""

import functools

import jax
import numpy as np
import optax
import pytest

from meshpar import Layout, default_rules, make_train_step
from meshpar.schedules import SCHEDULES
from tests.marks import slow
from tests.schedule_cases import SYNCHRONOUS
from tests.zoo.batch_statistics import BATCH_NORM, RUNNING_MEAN
from tests.zoo.denoising import DENOISING
from tests.zoo.diffusion import DIT
from tests.zoo.experts import SOFT_EXPERTS, TWO_GROUPS
from tests.zoo.language import GPT2, LLAMA
from tests.zoo.plain import MAX_NORM, SEED, STEPS, Run, optimizer, train
from tests.zoo.ranks import IMAGES, VECTORS
from tests.zoo.recommendation import DLRM
from tests.zoo.sequence import SEQUENCE
from tests.zoo.translation import ENCODER_DECODER
from tests.zoo.vision import VIT
from tests.zoo.waves import WAVES

ZOO = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "vit": VIT,
    "encoder_decoder": ENCODER_DECODER,
    "sequence": SEQUENCE,
    "soft_experts": SOFT_EXPERTS,
    "two_groups": TWO_GROUPS,
    "denoising": DENOISING,
    "running_mean": RUNNING_MEAN,
    "batch_norm": BATCH_NORM,
    "waves": WAVES,
    "vectors": VECTORS,
    "images": IMAGES,
    "dit": DIT,
    "dlrm": DLRM,
}

BOUND = 1e-5
# An array below this share of its whole tree is held against the tree: one rounding of
# the tree (2^-24) is more than the bound of such an array.
FLOOR = 2.0**-24 / BOUND

ALL_AXES = "data=2,fsdp=2,tensor=2,sequence_parallel=true"
# Two stages a rank where a schedule exists for them.
CHUNKS = {
    name: ",chunks=2" if SCHEDULES[name].has_chunks(2) else "" for name in SYNCHRONOUS
}


def unpipelined(number, entry):
    """Layouts without stages; two layers. Of the last two every other model has one."""
    single = ("data=8", f"tensor={entry.tensor}")[number % 2]
    return [("fsdp=8", 2), (ALL_AXES, 2), (single, 2)]


def pipelined(number, entry):
    """Two schedules on 2 or 4 stages, with layers that divide over them or not.

    The first model has every schedule in two of the four shapes; any schedule and shape
    meet in some model.
    """
    if not entry.microbatches:
        return []
    found = []
    for turn, (schedule, chunks) in enumerate(CHUNKS.items()):
        tail = f"microbatches=4,schedule={schedule}{chunks}"
        shapes = [
            (f"data=2,stage=2,tensor=2,{tail}", 4),
            (f"fsdp=2,stage=2,tensor=2,{tail}", 5),
            (f"data=2,stage=4,{tail}", 8 if chunks else 4),
            (f"stage=4,tensor=2,{tail}", 9 if chunks else 5),
        ]
        if not number:
            found += shapes[turn % 2 :: 2]
        elif (number + turn) % 2 == 0:
            found.append(shapes[(number + turn) // 2 % 4])
    return found


QUICK = {
    "llama": {ALL_AXES},
    "batch_norm": {ALL_AXES},
    "images": {ALL_AXES},
    "vectors": {"data=2,stage=4,microbatches=4,schedule=1f1b"},
}
"""What `make test` trains: models of few layers each, whose programs compile soonest.

All axes for attention, state that sums over the batch and convolutions; stages for
the smallest model.
"""


def cases():
    """All; slow but those of `QUICK`."""
    found = []
    for number, (name, entry) in enumerate(ZOO.items()):
        for layout, layers in unpipelined(number, entry) + pipelined(number, entry):
            case = (name, layout, layers)
            is_quick = layout in QUICK.get(name, ())
            found.append(pytest.param(*case) if is_quick else slow(*case))
    return found


@functools.cache
def plain(name, layers):
    entry = ZOO[name]
    return train(entry.ends, entry.groups(layers), entry.batch(), entry.loss)


def laid_out(name, layout, layers):
    """The same run under a layout."""
    return trained(ZOO[name], layout, layers)


def trained(entry, layout, layers):
    """That of an entry."""
    layout = Layout.parse(layout)
    step = make_train_step(
        entry.model(layers),
        optimizer(),
        layout,
        rules=default_rules(layout).with_rules(**entry.rules),
        devices=jax.devices()[: layout.num_devices],
        max_grad_norm=MAX_NORM,
    )
    state = step.init(SEED)

    def whole(tree):
        return flat(step.in_layer_order(tree))

    run = Run(whole(state.params), [], [], {}, {}, {})
    for index in range(STEPS):
        state, metrics = step(state, entry.batch())
        run.losses.append(float(metrics["loss"]))
        run.grad_norms.append(float(metrics["grad_norm"]))
        if index == 0:
            run.moments = whole(optax.tree_utils.tree_get(state.opt_state, "mu"))
    run.parameters, run.state = whole(state.params), whole(state.model_state)
    return run


def flat(tree, path=()):
    """A nested dict's arrays by dotted path."""
    if not isinstance(tree, dict):
        return {".".join(path): tree}
    found = {}
    for key, value in tree.items():
        found |= flat(value, (*path, str(key)))
    return found


def norm(array):
    return float(np.linalg.norm(np.abs(np.asarray(array, np.complex128))))


def errors(found, wanted):
    """Relative error of each array of a tree, in the Frobenius norm."""
    assert found.keys() == wanted.keys()
    tree = np.sqrt(sum(norm(value) ** 2 for value in wanted.values()))
    return {
        path: norm(found[path] - value) / max(norm(value), FLOOR * tree)
        for path, value in wanted.items()
        if value.size
    }


def compare(found, wanted):
    """The largest error of each quantity, where it is, after the bitwise check."""
    assert found.initial.keys() == wanted.initial.keys()
    for path, value in wanted.initial.items():
        np.testing.assert_array_equal(found.initial[path], value, err_msg=path)
    scalars = {
        f"{quantity} {step}": abs(one / other - 1)
        for quantity in ("losses", "grad_norms")
        for step, (one, other) in enumerate(
            zip(getattr(found, quantity), getattr(wanted, quantity), strict=True)
        )
    }
    trees = {
        f"{quantity} {path}": error
        for quantity in ("moments", "parameters", "state")
        for path, error in errors(
            getattr(found, quantity), getattr(wanted, quantity)
        ).items()
    }
    return {**scalars, **trees}


def check(name, layout, layers):
    deviations = compare(laid_out(name, layout, layers), plain(name, layers))
    wrong = {what: error for what, error in deviations.items() if not error <= BOUND}
    assert not wrong


@pytest.mark.parametrize("name, layout, layers", cases())
def test_a_model_trains_as_plain_flax_and_optax_train_it(name, layout, layers):
    check(name, layout, layers)


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["zero=2", "fsdp_gather=microbatch"])
def test_a_table_that_a_later_group_reads_too_is_added_up_in_parts(zero):
    check("encoder_decoder", f"fsdp=2,stage=2,tensor=2,microbatches=4,{zero}", 4)
