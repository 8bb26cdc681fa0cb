"""The same bf16 training step in PyTorch, compiled by `torch.compile`.

Imported only where torch is installed. Autocast to bf16 over fp32 parameters, fused
attention and AdamW, as nanoGPT (Karpathy 2022) trains; the parameters are those that
meshpar starts from, in their layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from meshpar.recipes.bench.plain_step import PlainModel


class TorchModel(nn.Module):
    """GPT-2 or Llama over a flat dict of arrays, named by path."""

    def __init__(self, model: PlainModel, arrays: Mapping[str, np.ndarray]) -> None:
        super().__init__()
        self.model = model
        self.num_layers = arrays["blocks.attention.out"].shape[0]
        flat = {}
        for path, array in arrays.items():
            if not path.startswith("blocks."):
                flat[path] = array
                continue
            for layer in range(self.num_layers):
                flat[f"{layer}.{path.removeprefix('blocks.')}"] = array[layer]
        self.values = nn.ParameterDict(
            {
                path.replace(".", "/"): nn.Parameter(torch.from_numpy(np.array(array)))
                for path, array in flat.items()
            }
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy."""
        x = self._get("token_embed")[tokens]
        if self.model.frequencies is None:
            x = x + self._get("position_embed")[: tokens.shape[1]]
        for layer in range(self.num_layers):
            x = self._block(str(layer), x)
        table = self._get("unembed")
        table = self._get("token_embed") if table is None else table
        logits = functional.linear(self._norm(x, "final_norm"), table)
        return functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten().long()
        )

    def _get(self, path: str) -> torch.Tensor | None:
        path = path.replace(".", "/")
        return self.values.get(path)

    def _block(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        embed = x.shape[-1]
        normed = self._norm(x, f"{layer}.attention_norm")
        qkv = self._get(f"{layer}.attention.qkv")
        bias = self._get(f"{layer}.attention.bias")
        projected = functional.linear(
            normed, qkv.reshape(embed, -1).T, None if bias is None else bias.flatten()
        )
        mixed = self._attention(projected.unflatten(-1, qkv.shape[1:]))
        x = x + functional.linear(
            mixed,
            self._get(f"{layer}.attention.out").reshape(-1, embed).T,
            self._get(f"{layer}.attention.out_bias"),
        )
        return x + self._mlp(layer, self._norm(x, f"{layer}.mlp_norm"))

    def _mlp(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        gate_up = self._get(f"{layer}.mlp.gate_up")
        if gate_up is None:
            up = self._get(f"{layer}.mlp.up")
            hidden = functional.linear(x, up.T, self._get(f"{layer}.mlp.up_bias"))
            hidden = functional.gelu(hidden, approximate="tanh")
        else:
            both = functional.linear(x, gate_up.reshape(x.shape[-1], -1).T)
            gate, up = both.chunk(2, dim=-1)
            hidden = functional.silu(gate) * up
        down = self._get(f"{layer}.mlp.down")
        return functional.linear(hidden, down.T, self._get(f"{layer}.mlp.down_bias"))

    def _attention(self, qkv: torch.Tensor) -> torch.Tensor:
        # (batch, seq, kv heads, queries per kv head + 2, head_dim)
        q, k, v = qkv[:, :, :, :-2].flatten(2, 3), qkv[:, :, :, -2], qkv[:, :, :, -1]
        if self.model.frequencies is not None:
            q, k = self._rotated(q), self._rotated(k)
        mixed = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.model.kv_heads != self.model.heads,
        )
        return mixed.transpose(1, 2).flatten(2)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.tensor(self.model.frequencies, device=x.device)
        positions = torch.arange(x.shape[1], device=x.device)
        angles = positions[:, None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = x.float().chunk(2, dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(rotated, dim=-1).to(x.dtype)

    def _norm(self, x: torch.Tensor, path: str) -> torch.Tensor:
        shape, scale = x.shape[-1:], self._get(f"{path}.scale")
        bias = self._get(f"{path}.bias")
        if bias is None:
            return functional.rms_norm(x, shape, scale, self.model.epsilon)
        return functional.layer_norm(x, shape, scale, bias, self.model.epsilon)


def torch_step(
    model: PlainModel,
    arrays: Mapping[str, np.ndarray],
    *,
    device: str,
    learning_rate: float,
    max_grad_norm: float,
) -> Callable[[Mapping[str, np.ndarray]], torch.Tensor]:
    """Batch -> loss, the parameters updated in place; wait with `float(loss)`."""
    torch.set_float32_matmul_precision("high")
    module = TorchModel(model, arrays).to(device)
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=learning_rate,
        weight_decay=1e-4,  # optax.adamw's
        fused=device == "cuda",
    )
    compiled = torch.compile(module) if device == "cuda" else module
    placed: dict[int, Any] = {}

    def step(batch: Mapping[str, np.ndarray]) -> torch.Tensor:
        if id(batch) not in placed:
            placed[id(batch)] = [
                torch.from_numpy(batch[name]).to(device)
                for name in ("tokens", "targets")
            ]
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = compiled(*placed[id(batch)])
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
