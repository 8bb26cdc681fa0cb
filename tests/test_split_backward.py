"""Split backwards: no matmul twice, and every schedule trains as one device does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh
from schedule_cases import SPLIT_NAMES

from meshpar import make_mesh, pipeline_value_and_grad
from meshpar.audit.hazards import check_divergent
from meshpar.parallel.pipeline.split_backward import split_program
from meshpar.schedules import SCHEDULES
from meshpar.trace.walk import equations
from tests.marks import slow
from tests.pipelined import assert_equal_to_plain, mlp_of, model_of, step_of

TOKENS, EMBED, HIDDEN = 16, 8, 24


def draw(seed, *shape):
    return 0.3 * jax.random.normal(jax.random.key(seed), shape)


WEIGHTS = {
    name: draw(seed, *shape)
    for seed, (name, shape) in enumerate(
        {
            "scale": (EMBED,),
            "q": (EMBED, EMBED),
            "kv": (2, EMBED, EMBED),
            "out": (EMBED, EMBED),
            "up": (EMBED, HIDDEN),
            "down": (HIDDEN, EMBED),
        }.items()
    )
}
X, DY = draw(8, TOKENS, EMBED), draw(9, TOKENS, EMBED)


@jax.custom_vjp
def linear(x, weight):
    return x @ weight


linear.defvjp(
    lambda x, weight: (x @ weight, (x, weight)),
    lambda kept, dy: (dy @ kept[1].T, kept[0].T @ dy),
)


def tiled_attention(q, k, v):
    """Attention over tiles of keys, in a loop."""

    def tile(carry, kv):
        largest, total, out = carry
        k, v = kv
        scores = q @ k.T
        new = jnp.maximum(largest, scores.max(-1))
        weights, rescale = jnp.exp(scores - new[:, None]), jnp.exp(largest - new)
        total = total * rescale + weights.sum(-1)
        return (new, total, out * rescale[:, None] + weights @ v), None

    first = jnp.full(TOKENS, -1e9), jnp.zeros(TOKENS), jnp.zeros((TOKENS, EMBED))
    tiles = k.reshape(4, -1, EMBED), v.reshape(4, -1, EMBED)
    (_, total, out), _ = jax.lax.scan(tile, first, tiles)
    return out / total[:, None]


def attention_block(weights, x):
    inside = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    inside = inside * weights["scale"]
    attend = jax.jit(tiled_attention)
    k, v = inside @ weights["kv"][0], inside @ weights["kv"][1]
    return x + attend(inside @ weights["q"], k, v) @ weights["out"]


def mlp_block(weights, x):
    return x + linear(jax.nn.silu(linear(x, weights["up"])), weights["down"])


def switching_block(weights, x):
    return jax.lax.cond(x.sum() > -1e9, mlp_block, lambda weights, x: x, weights, x)


@jax.custom_vjp
def tied_linear(x, weight):
    return linear(x, weight)


tied_linear.defvjp(
    lambda x, weight: (x @ weight, (x, weight)),
    lambda kept, dy: jax.lax.optimization_barrier((dy @ kept[1].T, kept[0].T @ dy)),
)


def tied_block(weights, x):
    """An MLP whose gradients a barrier ties."""
    return x + tied_linear(tied_linear(x, weights["up"]), weights["down"])


def layers_block(weights, x):
    stacked = jax.tree.map(lambda weight: jnp.stack([weight, 0.9 * weight]), weights)

    def layer(x, weights):
        return mlp_block(weights, attention_block(weights, x)), None

    return jax.lax.scan(layer, x, stacked)[0]


BLOCKS = [attention_block, mlp_block, tied_block, switching_block, layers_block]
REMATS = {
    "none": lambda block: block,
    "dots": lambda block: jax.checkpoint(
        block, policy=jax.checkpoint_policies.dots_saveable
    ),
    "full": jax.checkpoint,
}


def matmul_flops(program, times=1):
    """FLOPs of all matmuls of a trace, those of loops as often as they run."""
    total = 0
    jaxpr = getattr(program, "jaxpr", program)
    for equation in jaxpr.eqns:
        name, inner_times = equation.primitive.name, times
        if name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            shape = equation.invars[0].aval.shape
            size = np.prod(equation.outvars[0].aval.shape)
            total += times * 2 * size * np.prod([shape[dim] for dim in contracted])
        if name == "scan":
            inner_times *= equation.params["length"]
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    total += matmul_flops(inner, inner_times)
    return total


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_the_two_halves_are_the_backward_and_do_no_matmul_twice(block, remat):
    _, vjp = jax.vjp(REMATS[remat](block), WEIGHTS, X)
    kept, tree = jax.tree.flatten(vjp)

    def backward(kept, dy):
        of_weights, of_input = jax.tree.unflatten(tree, kept)(dy)
        return of_input, of_weights

    program = jax.make_jaxpr(backward)(kept, DY)
    wanted = [True] + [False] * len(WEIGHTS)
    cut = split_program(program, wanted, [True] * len(kept) + [False])
    (of_input,), stash = cut.run_first([*kept, DY])
    unread = [
        value if is_read else jnp.full_like(value, jnp.nan)
        for value, is_read in zip([*kept, DY], cut.second_reads, strict=True)
    ]
    of_weights = cut.run_second(unread, stash)
    expected = backward(kept, DY)
    for found, value in zip(
        [of_input, *of_weights], jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(found, value, rtol=2e-6, atol=1e-6)
    both = matmul_flops(cut.first) + matmul_flops(cut.second)
    assert both == matmul_flops(program)
    if block is not switching_block:
        assert matmul_flops(cut.second) > 0


def test_what_the_second_program_is_not_given_again_is_in_the_stash():
    def backward(w, x, dy):
        return dy @ w.T, x.T @ dy

    w, x = jnp.ones((2, 3)), jnp.ones((5, 2))
    program = jax.make_jaxpr(backward)(w, x, x @ w)
    cut = split_program(program, [True, False], [True, False, False])
    assert sorted(one.shape for one in cut.stash) == [(5, 2), (5, 3)]
    assert not any(cut.second_reads)


def test_a_second_program_that_needs_nothing_of_the_first_has_no_stash():
    def backward(w, dy):
        return dy * 2.0, jnp.zeros_like(w)

    program = jax.make_jaxpr(backward)(jnp.ones(3), jnp.ones(5))
    cut = split_program(program, [True, False], [True, False])
    assert cut.stash == ()
    assert cut.run_second([jnp.ones(3), jnp.ones(5)], [])[0].shape == (3,)


def carries_apart(x, y, z, w):
    """A loop whose carries need one another in different ways, and the last no one."""

    def one(carry, row):
        a, b, c, d = carry
        a, b = a @ w, b + row
        return (a, b, c * a, d + c), (a.sum(), b.sum())

    start = jnp.sin(x), jnp.cos(y), z, jnp.tan(z)
    (a, b, c, _), (of_a, of_b) = jax.lax.scan(one, start, jnp.exp(y))
    return a, b, c, of_a, of_b


@pytest.mark.parametrize("late", [0, *map(slow, range(1, 5))])
def test_a_half_takes_what_its_own_results_need_of_a_loop(late):
    """Whatever is wanted first: of any two results, and of all but one."""
    arguments = [draw(seed, 3, 3) / 3 for seed in range(4)]
    program, whole = (
        jax.make_jaxpr(carries_apart)(*arguments),
        carries_apart(*arguments),
    )
    for other in range(5):
        for wanted in (
            [at not in (late, other) for at in range(5)],
            [at in (late, other) for at in range(5)],
        ):
            cut = split_program(program, wanted, [True] * 4)
            first, stash = cut.run_first(arguments)
            second = cut.run_second(arguments, stash)
            made = [(first if early else second).pop(0) for early in wanted]
            for one, expected in zip(made, whole, strict=True):
                np.testing.assert_allclose(one, expected, rtol=1e-6)


def test_the_stash_is_in_the_same_order_whenever_a_backward_is_cut():
    def cut():
        _, vjp = jax.vjp(attention_block, WEIGHTS, X)
        kept, tree = jax.tree.flatten(vjp)

        def backward(kept, dy):
            of_weights, of_input = jax.tree.unflatten(tree, kept)(dy)
            return of_input, of_weights

        program = jax.make_jaxpr(backward)(kept, DY)
        wanted = [True] + [False] * len(WEIGHTS)
        return split_program(program, wanted, [False] * (len(kept) + 1))

    shapes = [str(cut().stash) for _ in range(3)]
    programs = [str(jax.make_jaxpr(run_second(cut()))()) for _ in range(3)]
    assert len({*shapes}) == len({*programs}) == 1


def run_second(cut):
    values = [jnp.zeros(aval.shape, aval.dtype) for aval in cut.second.in_avals]
    return lambda: jaxpr_as_fun(cut.second)(*values)


def test_cheap_operations_are_computed_again_where_that_keeps_fewer_bytes():
    def backward(w, x, dy):
        wide = jnp.exp(jnp.broadcast_to(x[:, None], (4, 64)))
        return (dy * wide) @ w, (wide * dy).sum(), wide.T @ dy

    arguments = jnp.ones((64, 4)), jnp.ones(4), jnp.ones((4, 64))
    program = jax.make_jaxpr(backward)(*arguments)
    cut = split_program(program, [True, False, False], [False, False, False])
    assert sorted(one.shape for one in cut.stash) == [(4,), (4, 64)]
    again = [one.primitive.name for one in equations(cut.second)]
    assert again.count("exp") == 1


AXES = "stage=2,data=2,microbatches=4"


@pytest.mark.parametrize("execution", ["uniform", "divergent"])
@pytest.mark.parametrize(
    "name",
    ["zero_bubble_h1", *(slow(name) for name in SPLIT_NAMES if name[-2:] != "h1")],
)
def test_every_split_schedule_trains_as_one_device_does(name, execution):
    chunks = SCHEDULES[name].default_chunks
    line = f"{AXES},schedule={name},chunks={chunks},execution={execution}"
    assert_equal_to_plain(mlp_of(8), line)


@pytest.mark.parametrize("execution", ["uniform", "divergent"])
@pytest.mark.parametrize(
    "line",
    [
        "stage=2,fsdp=2,microbatches=6,schedule=zero_bubble_v,chunks=2,remat=full",
        slow("stage=4,data=2,microbatches=6,schedule=zero_bubble_h2,zero=1"),
        slow("stage=3,microbatches=6,schedule=zero_bubble_h1,remat=stage"),
        slow("stage=4,microbatches=6,schedule=zero_bubble_h2,max_pending_w=2"),
        # Of ticks with a backward in their phase, some have none on any rank.
        slow("stage=2,data=2,microbatches=6,schedule=v_half,chunks=2,max_pending_w=1"),
        slow("stage=3,microbatches=6,schedule=v_min,chunks=2"),
    ],
)
def test_split_backwards_under_other_axes(line, execution):
    assert_equal_to_plain(mlp_of(8), f"{line},execution={execution}")


@pytest.mark.parametrize(
    "line",
    [
        slow("stage=2,context=2,data=2,microbatches=4,schedule=zero_bubble_h1"),
        slow(
            "stage=2,context=2,microbatches=4,schedule=zero_bubble_h1,"
            "execution=divergent,attention=allgather"
        ),
        slow(
            "stage=2,tensor=2,fsdp=2,microbatches=4,schedule=zero_bubble_v,chunks=2,"
            "sequence_parallel=true,remat=full"
        ),
        slow(
            "stage=2,tensor=2,fsdp=2,microbatches=4,schedule=zero_bubble_v,chunks=2,"
            "sequence_parallel=true,remat=full,execution=divergent"
        ),
        slow(
            "stage=4,tensor=2,microbatches=4,schedule=zero_bubble_h2,"
            "execution=divergent"
        ),
    ],
)
def test_split_backwards_of_a_llama(line):
    assert_equal_to_plain(model_of(8), line)


def runs_divergent(block, axes):
    mesh = make_mesh(axes, devices=jax.devices()[:4])
    return pipeline_value_and_grad(
        block,
        lambda scale, x, y: jnp.mean((scale * x - y) ** 2),
        mesh=mesh,
        num_microbatches=2,
        execution="divergent",
    )(jnp.ones((4, 8, 8)), jnp.ones(()), jnp.ones((8, 8)), jnp.ones((8, 8)))


def test_a_block_with_a_permute_of_its_own_is_refused_where_ranks_diverge(refuses):
    def block(w, x):
        return x + lax.ppermute(x @ w, "data", [(0, 1), (1, 0)])

    named = ("layout.divergent_collective", "execution=divergent", "ppermute", "'data'")
    with refuses(*named):
        runs_divergent(block, "data=2,stage=2")


def test_a_mesh_that_gspmd_partitions_is_refused_where_ranks_diverge(refuses):
    with refuses("layout.divergent_permute", "execution=divergent", "'tensor'"):
        runs_divergent(lambda w, x: x @ w, "stage=2,tensor=2")


def test_ranks_that_diverge_refuse_an_axis_that_permutes(refuses):
    line = "stage=2,context=2,microbatches=4,execution=divergent"
    with refuses("layout.divergent_permute", "execution=divergent", "'context'"):
        step_of(model_of(8), line)


@pytest.mark.parametrize(
    "collective, is_refused",
    [
        (lambda x: lax.psum(x, "tensor"), False),
        (lambda x: lax.psum(x, "stage"), True),
        (lambda x: lax.ppermute(x, "tensor", [(0, 1), (1, 0)]), True),
    ],
    ids=["sum over tensor", "sum over stage", "permute"],
)
def test_a_compiled_branch_is_refused_if_it_waits_for_other_ranks(
    collective, is_refused, refuses
):
    mesh = make_mesh("stage=2,tensor=2", devices=jax.devices()[:4])
    sizes = {"stage": 2, "tensor": 2}

    def on_device(x):
        own = lax.axis_index("stage") == 0
        return lax.cond(own, collective, lambda x: x, x)

    across = jax.P(("stage", "tensor"))
    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=across, out_specs=across, check_vma=False
    )
    text = jax.jit(mapped).lower(jnp.ones(4)).compile().as_text()
    if is_refused:
        with refuses("layout.divergent_permute", "execution=divergent"):
            check_divergent(text, sizes)
    else:
        check_divergent(text, sizes)


def test_ranks_of_tensor_diverge_if_their_compiled_program_allows_it(monkeypatch):
    line = "stage=2,tensor=2,microbatches=4,schedule=zero_bubble_h1,execution=divergent"
    checked = []

    def check(text, **options):
        checked.append(text)
        check_divergent(text, **options)

    monkeypatch.setattr("meshpar.train.step_programs.check_divergent", check)
    assert_equal_to_plain(mlp_of(8), line)
    assert checked and all("all-reduce" in text for text in checked)


def test_a_rank_of_one_layer_computes_a_weight_gradient_in_its_own_ticks_alone():
    ran = []

    def noted(x):
        def note(_):
            ran.append(1)
            return np.zeros((), np.float32)

        return jax.pure_callback(
            note, jax.ShapeDtypeStruct((), jnp.float32), x.ravel()[0]
        )

    @jax.custom_vjp
    def block(w, x):
        return jnp.tanh(x @ w)

    block.defvjp(
        lambda w, x: (block(w, x), (w, x)),
        lambda kept, dy: (kept[1].T @ dy + noted(dy), dy @ kept[0].T),
    )
    stages, microbatches = 2, 3
    run = pipeline_value_and_grad(
        block,
        lambda scale, x, y: jnp.mean((scale * x - y) ** 2),
        mesh=Mesh(np.array(jax.devices()[:stages]), ("stage",)),
        num_microbatches=microbatches,
        schedule="zero_bubble_h1",
        execution="divergent",
    )
    rows = jnp.ones((2 * microbatches, EMBED))
    jax.block_until_ready(
        run(jnp.ones((stages, EMBED, EMBED)), jnp.ones(()), rows, rows)
    )
    assert len(ran) == stages * microbatches
