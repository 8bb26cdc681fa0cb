"""Gradients reduced beside the last backwards of ticks: the same sums, earlier."""

import dataclasses
import math

import jax
import optax
import pytest

from meshpar import Layout, absent_mesh, audit, batch_shapes, make_train_step
from meshpar.models.presets import build
from meshpar.parallel import zero
from tests.marks import slow
from tests.pipelined import assert_equal_to_plain, mlp_of, step_of
from tests.test_audit_targets import needs_gpu_compiler


def untied(layers):
    """An MLP whose head has a table of its own, complete before the last backward."""
    model = mlp_of(layers)
    ends = {"out": model.parameters["table"], **model.parameters}

    def head(params, *rest):
        return model.head({"table": params["out"]}, *rest)

    return dataclasses.replace(model, parameters=ends, head=head, logits=None)


@pytest.mark.parametrize(
    ("layers", "line"),
    [
        (3, "data=2,microbatches=3"),
        (1, "data=2,fsdp=2,microbatches=2,zero=1"),
        (3, "data=2,stage=2,tensor=2,microbatches=3,zero=1"),  # uneven stages
        slow(4, "data=2,fsdp=2,microbatches=3,zero=2,remat=full"),
        slow(4, "fsdp=2,microbatches=3,fsdp_gather=microbatch,data=2,remat=selective"),
        slow(4, "data=2,fsdp=2,stage=2,microbatches=3,remat=stage"),
        slow(8, "data=2,stage=2,schedule=looped_bfs,microbatches=2,chunks=2,zero=0"),
        slow(
            8,
            "data=2,stage=2,tensor=2,schedule=interleaved_1f1b,chunks=2,"
            "microbatches=2,zero=1",
        ),
    ],
)
def test_gradients_equal_those_of_the_model_alone(layers, line, monkeypatch):
    monkeypatch.setattr(zero, "_HALVED_VALUES", 0)
    assert_equal_to_plain(untied(layers), f"{line},fsdp_prefetch=on")


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_each_byte_of_a_gradient_is_scattered_once(zero_stage):
    sent = {}
    for key in ("on", "off"):
        line = f"fsdp=4,microbatches=3,zero={zero_stage},fsdp_prefetch={key}"
        report = audit(step_of(mlp_of(4), line), batch_shapes(24, 16))
        assert not report.surprises
        sent[key] = report.totals()["fsdp", "reduce-scatter"]["wire_bytes"]
    assert sent["on"] == sent["off"]


@pytest.mark.slow
@needs_gpu_compiler
def test_gpus_hide_what_accumulated_gradients_send():
    layout = Layout.parse("data=64,zero=1,microbatches=4,remat=full,precision=bf16")
    step = make_train_step(
        build("llama3-8b", layers=8),
        optax.adamw(1e-3),
        layout,
        mesh=absent_mesh(layout),
        max_grad_norm=1.0,
    )
    report = audit(step, batch_shapes(256, 4096), target="gpu:h100:8x8")
    (scattered,) = (
        total
        for total in report.overlap()
        if (total.mesh_axes, total.kind) == (("data",), "reduce-scatter")
    )
    of_blocks = of_all = 0
    for path, one in jax.tree.leaves_with_path(step.model.parameters):
        size = math.prod(one.stacked_shape)
        of_all += size
        of_blocks += size * (path[0].key == "blocks")
    # With a few layers the embedding, whose gradient comes last, weighs much.
    assert scattered.hidden_share >= of_blocks / of_all
