"""No layout that the estimate accepts is much faster than the plan."""

import math
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from meshpar.errors import InputError
from meshpar.layout import MESH_AXES, REMATS, ZERO_AXES, Layout
from meshpar.layout.context_method import CONTEXT_METHODS
from meshpar.layout.layout import ATTENTION_MIXED, BLOCK_INPUT
from meshpar.planner.cost.estimate import estimate
from meshpar.planner.machine.clusters import cluster_of
from meshpar.planner.search.search import Request, search
from meshpar.planner.search.space import divisors
from meshpar.planner.workload.problems import residual_names
from meshpar.planner.workload.shapes import workload_of
from meshpar.schedules import SCHEDULES, plan_refusal
from tests.marks import slow

RTX_4090 = str(Path(__file__).parent / "data" / "rtx_4090.toml")
LLAMA_3B = (
    "layers=28,hidden=3072,heads=24,kv_heads=8,head_dim=128,ffn=8192,gated=true,"
    "vocab=128256"
)
"""Sizes of Llama 3.2 3B (Meta, its config.json)."""
LIKE_KIMI = "experts=384,heads=64,kv_heads=64,dense_layers=1,vocab=163840"
"""Sizes of Kimi K2 (1.03 T parameters) unlike DeepSeek-V3's (its config.json)."""
REQUESTS = {
    "host memory": ("llama3-70b", "h100-80gb", 16, 64, 4096),
    "one long sequence": ("llama3-70b", "h100-80gb", 64, 1, 131072),
    "two long sequences": ("llama3-8b", "h100-80gb", 16, 2, 131072),
    "long, experts": ("qwen3-30b-a3b", "h100-80gb", 32, 1, 131072),
    "full host links": ("llama3-70b", "tpu-v6e:16x16", 256, 1024, 8192),
    "small": ("llama3-8b", "h100-80gb", 8, 256, 8192),
    "data": ("llama3-8b", "h100-80gb", 64, 64, 8192),
    "experts": ("mixtral-8x7b", "h100-80gb", 64, 256, 4096),
    "small experts": ("qwen3-30b-a3b", "h100-80gb", 32, 256, 4096),
    "tensor": ("gpt3-175b", "a100-80gb", 1024, 1536, 2048),
    "pipeline": ("llama3-70b", "h100-80gb", 64, 256, 8192),
    "latent attention": ("deepseek-v3", "h100-80gb", 2048, 15360, 4096),
    "torus": ("llama3-8b", "tpu-v5p:4x4x4", 64, 256, 8192),
    "large torus": ("llama3-70b", "tpu-v5p:4x8x8", 256, 512, 8192),
    "experts on a torus": ("mixtral-8x7b", "tpu-v5p:4x4x4", 64, 256, 4096),
    "two devices a chip": ("llama3-70b", "v7x:4x4x4", 128, 256, 8192),
    "racks": (f"deepseek-v3 {LIKE_KIMI}", "gb200-186gb", 256, 1024, 4096),
    "slow network": (LLAMA_3B, RTX_4090, 32, 256, 4096),
}
FAST = ("one long sequence", "two long sequences")


def request_named(name):
    model, device, devices, global_batch, seq = REQUESTS[name]
    model, _, words = model.partition(" ")
    return Request(
        workload=workload_of(model, words=words or None),
        cluster=cluster_of(device, devices=devices),
        global_batch=global_batch,
        seq=seq,
    )


class Draws:
    """Layouts of a request, drawn over all keys that leave the update as it is."""

    def __init__(self, asked, seed):
        self.asked, self.random = asked, random.Random(seed)
        experts = bool(asked.workload.experts)
        self.axes = [axis for axis in MESH_AXES if experts or axis != "expert"]

    def remat(self):
        if self.random.random() < 0.4:
            return self.random.choice(REMATS)
        names = [*residual_names(self.asked.workload), ATTENTION_MIXED, BLOCK_INPUT]
        ways = {"save": [], "offload": []}
        for name in names:
            way = self.random.choice(["", "", "save", "offload"])
            if way:
                ways[way].append(name)
        parts = [f"{way}:{'/'.join(its)}" for way, its in ways.items() if its]
        return "+".join(parts) or "full"

    def keys(self, layout):
        """Return a way to draw each key of a mesh shape."""
        choice, sizes = self.random.choice, layout.mesh_shape
        each = max(1, self.asked.global_batch // layout.batch_shards)
        methods = list(CONTEXT_METHODS)
        for heads in divisors(layout.context)[1:-1]:
            methods.append(f"ulysses:{heads}+ring:{layout.context // heads}")
        token = [axis for axis in ZERO_AXES if sizes[axis] > 1]
        schedules = [name for name in SCHEDULES if plan_refusal(name) is None]
        return {
            "microbatches": lambda: choice(divisors(each)),
            "schedule": lambda: choice(schedules if layout.stage > 1 else ["1f1b"]),
            "chunks": lambda: choice((1, 1, 2, 3, 4)) if layout.stage > 1 else 1,
            "zero": lambda: choice((0, 1, 2, 3, 3)),
            "zero_axes": lambda: tuple(axis for axis in token if choice((0, 1))),
            "fsdp_gather": lambda: choice(("step", "microbatch")),
            "fsdp_prefetch": lambda: choice(("auto", "on", "off")),
            "optimizer_memory": lambda: choice(("device", "device", "host")),
            "sequence_parallel": lambda: layout.tensor > 1 and choice((True, False)),
            "attention": lambda: choice(methods) if layout.context > 1 else "ring",
            "remat": self.remat,
            "param_dtype": lambda: choice(("fp32", "bf16")),
        }

    def layout(self):
        """Draw a mesh shape and all keys."""
        sizes, rest = dict.fromkeys(MESH_AXES, 1), self.asked.cluster.num_devices
        while rest > 1:
            factor = divisors(rest)[1]
            sizes[self.random.choice(self.axes)] *= factor
            rest //= factor
        mesh = Layout(**sizes, precision="bf16")
        return replace(mesh, **{key: draw() for key, draw in self.keys(mesh).items()})

    def beside(self, layout):
        """Draw a layout with other values of one or two keys, or two other axes."""
        keys = self.keys(layout)
        drawn = self.random.sample(list(keys), self.random.choice((1, 1, 2)))
        changed = {key: keys[key]() for key in drawn}
        smaller, larger = self.random.sample(self.axes, 2)
        size = getattr(layout, smaller)
        if self.random.random() < 0.2 and size % 2 == 0:
            changed[smaller] = size // 2
            changed[larger] = getattr(layout, larger) * 2
        return replace(layout, **changed)

    def seconds(self, draw):
        """Return a drawn layout and its step time; infinite if it cannot be."""
        try:
            layout = draw()
            found = estimate(
                self.asked.workload,
                self.asked.cluster,
                layout,
                global_batch=self.asked.global_batch,
                seq=self.asked.seq,
            )
        except InputError:
            return None, math.inf
        return layout, found.step_s if found.fits else math.inf


@pytest.mark.parametrize(
    "name", [one if one in FAST else slow(one) for one in REQUESTS]
)
def test_no_layout_drawn_over_all_keys_is_faster_than_the_plan(name):
    """Drawn anywhere, and step by step away from the plans to whatever is faster."""
    asked = request_named(name)
    plans = search(asked, plans_only=True).plans
    draws, count = Draws(asked, seed=name), 100 if name in FAST else 1000
    drawn = [draws.seconds(draws.layout) for _ in range(count)]
    for plan in plans[:3]:
        at = plan.run.layout, plan.step_s
        for _ in range(count):
            other = draws.seconds(lambda at=at: draws.beside(at[0]))
            at = min(at, other, key=lambda one: one[1])
        drawn.append(at)
    layout, step_s = min(drawn, key=lambda one: one[1])
    assert step_s > 0.99 * plans[0].step_s, (asdict(layout), plans[0].run.layout)
