"""Rows find their experts, in tiles and over devices, and no row is lost."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshpar import Layout, RuleError, Scope, default_rules, make_mesh, make_train_step
from meshpar.layout import BATCH_AXES
from meshpar.machine.mesh import absent_mesh, use_mesh
from meshpar.model.contract import BlockGroup
from meshpar.model.parameter import Parameter
from meshpar.model.tracing import traced_batch
from meshpar.models.layers.router import Router, RouterConfig
from meshpar.models.presets import build, configure
from meshpar.parallel import sizes
from meshpar.parallel.expert import rounds, tiles
from meshpar.parallel.expert.experts import counted_mlp, routed_mlp
from meshpar.parallel.expert.host_exchange import HostExchange, Hosts
from meshpar.parallel.expert.routes import make_routes, sent, slots
from meshpar.parallel.remat import rematerialised
from meshpar.parallel.tensor import vocab_lookup
from meshpar.trace.walk import equations, programs_in, steps
from meshpar.train.refusals import experts_refusal
from tests.marks import slow
from tests.refusals import names
from tests.zoo.experts import SOFT_EXPERTS

EXPERTS, TOP_K, EMBED, HIDDEN, BATCH, SEQ = 8, 2, 12, 8, 8, 8
RNG = np.random.default_rng(0)
GATE_UP = (RNG.normal(size=(EXPERTS, EMBED, 2, HIDDEN)) * 0.3).astype(np.float32)
DOWN = (RNG.normal(size=(EXPERTS, HIDDEN, EMBED)) * 0.3).astype(np.float32)
X = RNG.normal(size=(BATCH, SEQ, EMBED)).astype(np.float32)
DY = RNG.normal(size=X.shape).astype(np.float32)
WEIGHTS = RNG.uniform(size=(BATCH, SEQ, TOP_K)).astype(np.float32)


def spread():
    chosen = [RNG.permutation(EXPERTS)[:TOP_K] for _ in range(BATCH * SEQ)]
    return np.array(chosen, np.int32).reshape(BATCH, SEQ, TOP_K)


def dropped():
    lost = RNG.uniform(size=(BATCH, SEQ, TOP_K)) < 0.4
    return np.where(lost, EXPERTS, spread()).astype(np.int32)


LOADS = {
    "spread": spread(),
    "all to two experts, none to the others": np.broadcast_to(
        np.array([5, 4], np.int32), (BATCH, SEQ, TOP_K)
    ),
    # Over `data` groups of devices then need other numbers of rounds.
    "half of the batch to two experts": np.where(
        np.arange(BATCH)[:, None, None] < BATCH // 2,
        np.array([1, 0], np.int32),
        spread(),
    ).astype(np.int32),
    "some dropped": dropped(),
    "all dropped": np.full((BATCH, SEQ, TOP_K), EXPERTS, np.int32),
}


@jax.jit
def plain(x, weights, gate_up, down, experts, dy):
    """Every expert of every token, and the gradients."""

    def run(x, weights, gate_up, down):
        both = jnp.einsum("BTD,EDPF->BTEPF", x, gate_up)
        out = jnp.einsum(
            "BTEF,EFD->BTED", jax.nn.silu(both[..., 0, :]) * both[..., 1, :], down
        )
        hits = (experts[..., None] == jnp.arange(EXPERTS)) * weights[..., None]
        return jnp.einsum("BTKE,BTED->BTD", hits, out)

    y, vjp = jax.vjp(run, x, weights, gate_up, down)
    return y, *vjp(dy)


def routed(scope, x, weights, gate_up, down, experts, dy):
    y, vjp = jax.vjp(
        lambda *arrays: routed_mlp(
            arrays[0], experts, *arrays[1:], scope, num_experts=EXPERTS
        ),
        *(x, weights, gate_up, down),
    )
    return y, *vjp(dy)


@pytest.fixture(scope="module")
def program():
    """`program(line)`: routed experts and their gradients under a layout, compiled."""
    known = {}

    def compiled(line, platform="cpu", hosts=1):
        key = line, platform, hosts
        if key not in known:
            known[key] = _compiled(*key)
        return known[key]

    return compiled


def _compiled(line, platform, hosts):
    layout = Layout.parse(line)
    mesh = make_mesh(layout, jax.devices()[: layout.num_devices])
    axes = tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)
    scope = Scope(
        rules=default_rules(layout),
        batch_axes=axes,
        platform=platform,
        expert_hosts=hosts,
    )

    def local(*arrays):
        y, dx, dweights, *of_experts = routed(scope, *arrays)
        # Whole over `expert` already: each device has its experts' own.
        return y, dx, dweights, *jax.lax.psum(of_experts, ("data", "fsdp"))

    examples, experts = P(BATCH_AXES), P("expert")
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(examples, examples, experts, experts, examples, examples),
        out_specs=(examples, examples, examples, experts, experts),
        axis_names=set(BATCH_AXES),
        check_vma=False,
    )

    def run(*arrays):
        with jax.set_mesh(mesh):
            return jax.jit(mapped)(*arrays)

    return run


@pytest.mark.parametrize(
    ("remat", "again"), [("full", 0), ("dots", 0), ("save:block_input", 2)]
)
def test_rows_are_sent_again_only_if_a_policy_leaves_them_out(remat, again):
    layout = Layout.parse("data=2,expert=4")
    mesh, shard = absent_mesh(layout), P(BATCH_AXES)

    def block(params, x, scope):
        chosen = jnp.argmax(x[..., :EXPERTS] * params, axis=-1)[..., None]
        weights = x[..., :1] * params
        kernels = jnp.asarray(GATE_UP[:2]), jnp.asarray(DOWN[:2])
        return routed_mlp(x, chosen, weights, *kernels, scope, num_experts=EXPERTS)

    def make_scope(_):
        return Scope(rules=default_rules(layout), batch_axes=("data", "expert"))

    def local(params, x):
        run = rematerialised(block, remat)
        return jax.grad(lambda *of: run(make_scope, *of, ()).sum())(params, x)

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), shard), out_specs=P(), check_vma=False
    )
    traced = jax.make_jaxpr(mapped)(jnp.float32(1), X)
    (shard_map,) = steps(traced)
    (body,) = programs_in(shard_map)
    loops = [one for one in equations(body) if one.primitive.name == "while"]
    in_loops = sum(_num_sent(inner) for one in loops for inner in programs_in(one))
    # Rows, their weights and the results; gradients of the three.
    assert _num_sent(body) - in_loops == 6 + again


def _num_sent(program):
    return sum(one.primitive.name == "all_to_all" for one in equations(program))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    "line",
    [
        "data=1",
        "data=2,expert=4",
        slow("expert=4"),
        slow("data=2,expert=2,tensor=2"),
        slow("expert=2"),
        slow("expert=8"),
        slow("fsdp=2,expert=4"),
    ],
)
def test_values_and_gradients_are_those_of_all_experts_of_all_tokens(
    program, line, load
):
    arrays = X, WEIGHTS, GATE_UP, DOWN, LOADS[load], DY
    for value, wanted in zip(program(line)(*arrays), plain(*arrays), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-5)


def test_rows_that_are_sent_in_parts_give_the_same(program, monkeypatch):
    monkeypatch.setattr(sizes, "LEAST_ROWS", 4)
    monkeypatch.setattr(sizes, "LEAST_BACKWARD_ROWS", 8)
    seen, by_parts = set(), rounds._by_parts

    def recorded(exchange, x, order, num_parts, *others):
        seen.add(num_parts)
        return by_parts(exchange, x, order, num_parts, *others)

    monkeypatch.setattr(rounds, "_by_parts", recorded)
    for load in LOADS.values():
        arrays = X, WEIGHTS, GATE_UP, DOWN, load, DY
        found = program("data=2,expert=4", "gpu")(*arrays)
        for value, wanted in zip(found, plain(*arrays), strict=True):
            np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-5)
    assert seen == {4, 2, 1}  # Forward, backward, further rounds.


@pytest.mark.parametrize(
    ("line", "hosts", "parts"),
    [
        ("data=2,expert=4", 2, {1}),
        ("expert=8", 4, {4, 2, 1}),
        slow("expert=8", 2, {2, 1}),
        slow("data=2,expert=2,tensor=2", 2, {1}),
    ],
)
def test_rows_that_are_sent_once_to_each_host_give_the_same(
    program, monkeypatch, line, hosts, parts
):
    monkeypatch.setattr(sizes, "_MULTIPLE", 1)
    monkeypatch.setattr(sizes, "BY_HOST", 1.0)
    platform = "cpu"
    if len(parts) > 1:
        monkeypatch.setattr(sizes, "LEAST_ROWS", 4)
        monkeypatch.setattr(sizes, "LEAST_BACKWARD_ROWS_BY_HOST", 8)
        platform = "gpu"
    seen, by_parts = [], rounds._by_parts

    def recorded(exchange, x, order, num_parts, *others):
        seen.append((type(exchange), num_parts))
        return by_parts(exchange, x, order, num_parts, *others)

    monkeypatch.setattr(rounds, "_by_parts", recorded)
    for load in LOADS.values():
        arrays = X, WEIGHTS, GATE_UP, DOWN, load, DY
        found = program(line, platform, hosts)(*arrays)
        for value, wanted in zip(found, plain(*arrays), strict=True):
            np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-5)
    assert {kind.__name__ for kind, _ in seen} == {"Exchange", "HostExchange"}
    assert {num for _, num in seen} == parts


@pytest.mark.parametrize("hosts", [1, 2])
def test_further_rounds_and_their_rows_are_counted(hosts):
    layout, room, more_room = Layout.parse("data=2,expert=4"), 8, 8
    mesh = make_mesh(layout, jax.devices()[:8])
    scope = Scope(
        rules=default_rules(layout),
        batch_axes=("data", "expert"),
        expert_hosts=hosts,
    )

    def local(x, weights, gate_up, down, experts):
        kernels = gate_up, down
        _, further, _ = counted_mlp(
            (x, experts, weights), kernels, scope, num_experts=EXPERTS
        )
        return jnp.stack(further)[None]

    examples, own = P(BATCH_AXES), P("expert")
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(examples, examples, own, own, examples),
        out_specs=examples,
        axis_names=set(BATCH_AXES),
        check_vma=False,
    )
    run = jax.jit(mapped)
    for load in LOADS.values():
        with jax.set_mesh(mesh):
            rounds, rows = run(X, WEIGHTS, GATE_UP, DOWN, load).T
        # Of each device's assignments, those to each of the four experts' devices.
        to = np.stack([np.bincount(one.ravel() // 2, minlength=5)[:4] for one in load])
        left = np.maximum(to - room, 0)
        assert rows.tolist() == left.sum(axis=1).tolist()
        of_groups = -(-left.reshape(2, 16).max(axis=1) // more_room)
        assert rounds.tolist() == np.repeat(of_groups, 4).tolist()


def test_rounds_send_every_assignment_once_to_the_device_of_its_expert():
    experts = jnp.asarray(LOADS["all to two experts, none to the others"][0])
    room = 3

    @jax.jit
    def in_round(first):
        routes = make_routes(experts, EXPERTS, 4)
        of_round = sent(routes, first, room), slots(routes, first, room)
        return routes.counts.max(), *of_round

    assert in_round(0)[0] == SEQ * TOP_K
    seen = []
    for first in range(0, SEQ * TOP_K, room):
        _, (assignment, valid), at = jax.device_get(in_round(first))
        for device, row in zip(*np.nonzero(valid), strict=True):
            number = int(assignment[device, row])
            assert experts.reshape(-1)[number] // 2 == device
            assert at[number] == device * room + row
            seen.append(number)
    assert sorted(seen) == list(range(SEQ * TOP_K))


def test_what_a_round_has_no_room_for_has_no_slot_of_the_next_device():
    experts = jnp.array([[0], [1], [0], [2], [3]])  # Two a device: three rows and two.

    @jax.jit
    def slots_of(first):
        routes = make_routes(experts, num_experts=4, num_devices=2)
        return slots(routes, first, room=2)

    none = 2 * 2
    assert slots_of(0).tolist() == [0, none, 1, 2, 3]
    assert slots_of(2).tolist() == [none, 0, none, none, none]


@pytest.mark.parametrize(
    ("room", "to_devices"), [(3, [2, 1, 1, 1]), (2, [1, 1, 1, 1]), (1, [1, 0, 1, 0])]
)
def test_tokens_that_fit_a_hosts_room_are_sent_and_no_others(room, to_devices):
    experts = jnp.array([[0], [1], [2], [0], [3]])  # Three tokens to the first host.

    @jax.jit
    def num_sent():
        routes = make_routes(experts, num_experts=4, num_devices=4, by_token=True)
        hosts = Hosts(number=2, room=room)
        exchange = HostExchange(
            mesh_axes=("expert",), room=8, routes=routes, choices=1, hosts=hosts
        )
        return exchange.num_sent

    assert num_sent().tolist() == to_devices


cut = jax.jit(tiles.cut, static_argnums=(2, 3))


@pytest.mark.parametrize("counts", [(5, 0, 11, 16), (0, 0, 0, 0), (0, 0, 0, 32)])
def test_tiles_cover_each_experts_rows_and_at_most_one_each_is_not_full(counts):
    tile = 4
    starts = np.cumsum((0, *counts))
    found = jax.device_get(cut(np.array(counts, np.int32), starts[:-1], 32, tile))
    assert found.number == sum(math.ceil(count / tile) for count in counts)
    rows = {expert: 0 for expert in range(len(counts))}
    for at in range(int(found.number)):
        expert, own = int(found.expert[at]), min(int(found.rows[at]), tile)
        assert found.first[at] == starts[expert] + rows[expert]
        rows[expert] += own
    assert tuple(rows.values()) == counts


@pytest.mark.parametrize(
    "rows, experts", [(65_536, 8), (32_768, 4), (4096, 8), (16_384, 32), (8192, 128)]
)
def test_tiles_that_are_not_full_are_an_eighth_of_the_work_at_most(rows, experts):
    tile = tiles.tile_size(rows, experts)
    assert experts * tile <= rows / 8 * 1.001


# Routers.


def chosen(config, logits, **batch):
    """Experts, weights and sums of a router whose logits are given."""
    with nnx.use_eager_sharding(False):
        router = Router(logits.shape[-1], config, init_std=0.02, rngs=nnx.Rngs(0))
    router.scores[...] = jnp.eye(logits.shape[-1])
    return router, *routed_by(router, logits, **batch)


def routed_by(router, logits, **batch):
    """Its experts, weights and sums, in one program."""
    graph, state = nnx.split(router)

    @jax.jit
    def run(state, logits, batch):
        return nnx.merge(graph, state)(logits, Scope(batch=batch))

    return run(state, jnp.asarray(logits, jnp.float32), batch)


def test_an_expert_takes_first_choices_first_then_earlier_tokens():
    config = RouterConfig(experts=2, top_k=2, capacity_factor=0.5)
    assert config.capacity(4) == 2
    logits = np.array([[[2, 1], [1, 2], [2, 1], [2, 1]]])
    _, experts, weights, sums = chosen(config, logits)
    # Expert 0 is first of tokens 0, 2 and 3, expert 1 of token 1.
    assert experts.tolist() == [[[0, 1], [1, 2], [0, 2], [2, 2]]]
    assert sums["dropped"] == 4
    assert (np.asarray(weights) == 0).tolist() == (np.asarray(experts) == 2).tolist()


def test_a_bias_moves_the_choice_and_not_the_weights_and_goes_to_the_idle():
    config = RouterConfig(experts=3, top_k=1, bias_rate=0.25, normalised=False)
    logits = np.array([[[3.0, 2.0, 1.0]] * 3])
    router, experts, _, sums = chosen(config, logits)
    assert experts.ravel().tolist() == [0, 0, 0]
    router.update(sums)
    assert router.bias[...].tolist() == [-0.25, 0.25, 0.25]
    assert router.tokens[...].tolist() == [3.0, 0.0, 0.0]
    router.update(sums)
    experts, weights, _ = routed_by(router, logits)
    assert experts.ravel().tolist() == [1, 1, 1]
    np.testing.assert_allclose(weights.ravel(), jax.nn.softmax(logits[0, 0])[1])


def test_only_the_best_groups_are_chosen_from():
    config = RouterConfig(experts=6, top_k=2, groups=3, top_groups=1, score="sigmoid")
    # The best expert is alone in its group; the best two together are 2 and 3.
    _, experts, weights, _ = chosen(config, np.array([[[5, -9, 3, 2, 1, 0]]]))
    assert experts.tolist() == [[[2, 3]]]
    assert weights.sum() == pytest.approx(1.0)


def test_an_even_load_has_a_balance_loss_of_1_a_token():
    config = RouterConfig(experts=4, top_k=1)
    _, _, _, sums = chosen(config, np.eye(4)[None] * 1e-3)
    assert sums["load_balance"] == pytest.approx(4.0, rel=1e-3)
    assert sums["expert_tokens"].tolist() == [1.0] * 4


def test_padding_goes_to_no_expert_and_counts_nowhere():
    config = RouterConfig(experts=4, top_k=2)
    logits = RNG.normal(size=(2, 6, 4))
    segments = np.array([[0, -1, 0, 1, -1, 1], [-1] * 6])
    _, experts, weights, sums = chosen(config, logits, segment_ids=segments)
    real = segments >= 0
    _, wanted, shares, alone = chosen(config, logits[:1, real[0]])
    np.testing.assert_array_equal(experts[0, real[0]], wanted[0])
    np.testing.assert_allclose(weights[0, real[0]], shares[0], rtol=1e-6)
    assert (np.asarray(experts)[~real] == 4).all() and not weights[~real].any()
    for name, value in alone.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-6, err_msg=name)


def test_padding_takes_no_place_of_an_expert():
    config = RouterConfig(experts=2, top_k=1, capacity_factor=1.0)
    logits = np.broadcast_to([2.0, 1.0], (1, 4, 2))
    segments = np.array([[-1, -1, 0, 0]])
    _, experts, _, sums = chosen(config, logits, segment_ids=segments)
    assert experts.tolist() == [[[2], [2], [0], [0]]]
    assert sums["dropped"] == 0


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({"top_k": 9}, ("model.wrong_top_k", "top_k=9", "experts=8", 8)),
        ({"groups": 3}, ("model.invalid_expert_groups", "experts=8", "groups=3")),
        (
            {"groups": 4, "top_groups": 5},
            ("model.invalid_expert_groups", "groups=4", "top_groups=5"),
        ),
        (
            {"groups": 4, "top_k": 4},
            ("model.wrong_top_k", "top_k=4", "experts=8", 2),
        ),
        (
            {"score": "relu"},
            ("model.unknown_score", "score='relu'", "softmax", "sigmoid"),
        ),
        ({"capacity_factor": -1.0}, ("value.negative", "capacity_factor=-1.0", 0)),
    ],
)
def test_a_router_that_cannot_be_is_refused(refuses, changes, refusal):
    with refuses(*refusal):
        RouterConfig(**{"experts": 8, "top_k": 2, **changes})


def test_experts_that_lie_otherwise_than_the_rules_say_are_refused(refuses):
    with refuses("model.wrong_number_of_experts", 8, 1, 9):
        routed_mlp(
            *(jnp.asarray(array) for array in (X, LOADS["spread"], WEIGHTS)),
            *(jnp.asarray(array) for array in (GATE_UP, DOWN)),
            Scope(),
            num_experts=9,
        )


def test_a_block_that_keeps_its_tokens_from_other_devices_experts_is_refused(refuses):
    step = functools.partial(
        make_train_step,
        SOFT_EXPERTS.model(2),
        optax.sgd(1.0),
        "expert=2",
        devices=jax.devices()[:2],
    )
    with refuses("model.experts_without_tokens", "'blocks'", kind=RuleError):
        step()


def test_the_batch_and_experts_alone_may_be_split_over_expert_with_zero_0(refuses):
    rules = replace(default_rules("expert=2"), parameters={"mlp": ("expert",)})
    model = build("tiny-moe", layers=1, embed=16, heads=2, kv_heads=2, expert_ffn=8)
    with refuses("rules.claimed_twice", "'mlp'", "'expert'", kind=RuleError):
        make_train_step(
            model,
            optax.sgd(0.1),
            "expert=2,zero=0",
            rules=rules,
            devices=jax.devices()[:2],
        )


def test_sizes_of_latent_attention_without_a_latent_are_refused(refuses):
    sizes = dict(layers=1, embed=16, heads=2, kv_heads=2, expert_ffn=8)
    with refuses("model.latent_size_without_rank", "q_lora_rank=4"):
        build("tiny-moe", **sizes, q_lora_rank=4)


@pytest.mark.parametrize(
    "changes, refusal",
    [
        (
            {"qk_norm": True},
            ("model.unused_with_latent", "qk_norm=True", "kv_lora_rank=512"),
        ),
        (
            {"head_dim": 64},
            ("model.unused_with_latent", "head_dim=64", "kv_lora_rank=512"),
        ),
        (
            {"kv_heads": 8},
            ("model.unused_with_latent", "kv_heads=8", "kv_lora_rank=512"),
        ),
        (
            {"qk_rope_head_dim": 63, "v_head_dim": 8},
            ("model.odd_rotary_size", "qk_rope_head_dim=63"),
        ),
    ],
)
def test_what_latent_attention_would_leave_unused_is_refused(refuses, changes, refusal):
    with refuses(*refusal):
        configure("deepseek-v3", **changes)
    assert configure("deepseek-v3", heads=8).latent is not None


def test_rules_that_split_a_tokens_values_are_refused_in_one_line(refuses):
    rules = default_rules("tensor=2").with_rules(
        embed="tensor", mlp=None, heads=None, kv_heads=None, vocab=None
    )
    scope = Scope(rules=rules)
    mesh = make_mesh("tensor=2", jax.devices()[:2])
    arrays = X, LOADS["spread"], WEIGHTS, GATE_UP, DOWN
    with use_mesh(mesh), refuses("rules.split_embed", "'embed'", "tensor"):
        jax.eval_shape(
            lambda *arrays: routed_mlp(*arrays, scope, num_experts=EXPERTS), *arrays
        )
    with use_mesh(mesh), refuses("rules.split_embed", "'embed'", "tensor"):
        jax.eval_shape(
            lambda table, tokens: vocab_lookup(table, tokens, scope),
            jnp.zeros((16, 8)),
            jnp.zeros((2, 4), jnp.int32),
        )


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16", "bf16_stochastic"])
def test_a_routers_weights_stay_in_fp32_under_bf16(param_dtype):
    seen = []
    model = build("tiny-moe", layers=1, embed=16, heads=2, kv_heads=2, expert_ffn=8)
    [group] = model.groups

    def block(params, x, scope):
        seen.append(jax.tree.map(lambda value: value.dtype, params["mlp"]))
        return group.block(params, x, scope)

    model = replace(model, groups=(replace(group, block=block),))
    step = make_train_step(
        model,
        optax.sgd(0.1),
        Layout(precision="bf16", param_dtype=param_dtype),
        devices=jax.devices()[:1],
    )
    params = step.state_shapes.params["blocks"]["mlp"]
    subject = step.audit_subject(traced_batch(model, 1, 8), gradients_only=True)
    with use_mesh(step.mesh):
        jax.eval_shape(subject.function, *subject.arguments)
    assert params["router"]["scores"].dtype == seen[-1]["router"]["scores"] == "float32"
    assert params["down"].dtype == ("float32" if param_dtype == "fp32" else "bfloat16")
    assert seen[-1]["down"] == "bfloat16"


def test_a_group_that_sends_its_experts_nothing_is_named():
    model = build("tiny-moe", layers=1, hidden=16, heads=2, kv_heads=2, vocab=32)
    [group] = model.groups
    silent = BlockGroup(name="silent", num_layers=1, block=lambda params, x, scope: x)
    parameters = {**model.parameters, "silent": model.parameters[group.name]}
    both = replace(model, parameters=parameters, groups=(group, silent))
    assert experts_refusal(model, Layout(expert=2)) is None
    found = experts_refusal(both, Layout(expert=2))
    assert found.key == "model.experts_without_tokens" and "'silent'" in str(found)


@pytest.mark.parametrize("axes", [("embed", "experts"), ("experts",)])
def test_experts_that_are_no_first_dim_of_matrices_are_refused(axes):
    """A block would see its device's experts alone of a router's scores."""
    model = build("tiny-moe", layers=1, hidden=16, heads=2, kv_heads=2, vocab=32)
    shape = (16, 8)[-len(axes) :]
    scores = Parameter(shape=shape, dtype=jnp.float32, logical_axes=axes)
    model = replace(model, parameters={**model.parameters, "scores": scores})
    found = experts_refusal(model, Layout(expert=2))
    assert found.key == "model.experts_in_other_dim"
    assert names(str(found), "scores") and str(axes) in str(found)
