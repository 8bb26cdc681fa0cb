"""A workload: the shape of a model, its parameters and its FLOPs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from meshpar.errors import InputError
from meshpar.parallel.sizes import COST_TOKENS, LOGITS_BYTES


class Cut(NamedTuple):
    """A traced backward in two, I and W.

    Args:
        stash_bytes: Bytes that I leaves for W, of a token.
        uncut_share: Part of the FLOPs of weight gradients that stay in I.
    """

    stash_bytes: float
    uncut_share: float


class LiveBackward(NamedTuple):
    """Fullest moment of a traced backward, but for gradients of weights.

    Args:
        bytes: Bytes of a token of all arrays.
        stream_bytes: Those of arrays of the width of the residual stream.
    """

    bytes: float
    stream_bytes: float


class Needed(NamedTuple):
    """Bytes of a token that a block's backward needs, by remat policy.

    Args:
        mean: Of all blocks.
        fullest: Of the group of equal blocks that needs most without remat.
    """

    mean: Mapping[str, float]
    fullest: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TracedBlock:
    """Mean block of a traced model, not described by sizes; FLOPs and bytes a token.

    Args:
        parameters: Parameters of one block.
        linear_flops: FLOPs of the forward's matmuls with weights.
        mixing_flops: FLOPs of the forward's matmuls between activations, such as
            attention's.
        seq: Tokens of the sequence that was traced: mixing grows with it.
        needed: What the backward needs where attention keeps its softmax.
        kernel_needed: Function that traces it where attention runs in a fused kernel or
            in tiles, which keep none.
        backward: Function that traces a backward that keeps the block's input alone;
            (True if gradients of weights are made last, True if scores count).
        input_bytes: Bytes of the batch, as a step is given it.
        embedding_bytes: Bytes that the embedding keeps for its backward besides these.
        residual_dtype_bytes: Bytes of one value in that trace.
        other_end_parameters: Parameters outside the blocks besides embedding and head.
        layer_costs: Function that traces the cost of each layer, as a step does.
        cut: Function that traces the backward in two, under a remat policy.
    """

    parameters: int
    linear_flops: float
    mixing_flops: float
    seq: int
    needed: Needed
    kernel_needed: Callable[[], Needed]
    backward: Callable[[bool, bool], LiveBackward]
    input_bytes: float
    embedding_bytes: float
    residual_dtype_bytes: int
    other_end_parameters: int
    layer_costs: Callable[[], tuple[float, ...]]
    cut: Callable[[str], Cut]

    def score_bytes(self) -> float:
        """Return the bytes of a token of all softmax that its fullest block stores."""
        kernel = self.kernel_needed().fullest["none"]
        return max(0.0, self.needed.fullest["none"] - kernel)


_COUNTS = ("layers", "hidden", "heads", "vocab")
# Beyond any model, and as far as every layer can be looked at, every size multiplied.
_MOST = defaultdict(lambda: 10**9, layers=100_000)
_MLA = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Shape of a transformer: a decoder, unless fields say otherwise.

    Args:
        name: Name in reports.
        layers: Number of blocks.
        hidden: Width of the residual stream.
        heads: Attention heads.
        vocab: Number of tokens.
        kv_heads: Key/value heads; `heads` when 0.
        head_dim: Size of a head; `hidden / heads` when 0.
        ffn: Hidden size of a dense MLP; `4 * hidden` when 0.
        seq: Longest sequence; the number of `learned_positions`.
        gated: True if MLPs have a gate (SwiGLU).
        tied: True if the head reuses the embedding table.
        learned_positions: True if positions are a table of `seq` rows.
        layer_norm: LayerNorm (scale and bias) instead of RMSNorm (scale).
        biases: Biases on every matmul of a block.
        qkv_bias: Biases on queries, keys and values only.
        qk_norm: RMSNorm on queries and keys.
        dropout: True if both branches of a block drop values, whose masks are kept.
        experts: Routed experts of an MoE layer; 0 for a dense model.
        top_k: Experts that a token goes to.
        expert_ffn: Hidden size of an expert; `ffn` when 0.
        shared_experts: Experts that every token goes to.
        dense_layers: Layers before the first MoE layer.
        mtp_layers: Further blocks behind the last that predict a later token each
            (multi-token prediction): a matrix that joins the block before and the next
            token's embedding, a block, and the head once more.
        q_lora_rank: Compressed queries of multi-head latent attention (MLA); 0 for
            queries straight from the residual stream.
        kv_lora_rank: Compressed keys and values of MLA; 0 for usual attention.
        qk_nope_head_dim: Dims of a query and key of MLA without positions.
        qk_rope_head_dim: Its rotated dims.
        v_head_dim: Dims of its values.
        window: Tokens before it that a token of some layers attends to; 0 for all.
        window_layers: Number of layers with that window.
        causal: True if a token sees none that follow it.
        modulations: Vectors of `hidden` values that scale, shift and gate a block, 6 of
            a Diffusion Transformer, from a matrix that each example meets once. Tokens
            are patches then, of `vocab` numbers each, which no devices share out.
        other_end_parameters: Parameters outside the blocks besides embedding and head.
        logits_bytes: Most bytes of fp32 logits that its head makes at a time; 0 for
            those of all tokens of a microbatch.
        traced: A traced block, whose parameters, FLOPs and residuals replace those that
            follow from sizes.

    Raises:
        InputError: Sizes are no whole numbers, or do not fit together.

    Example:
        >>> gpt3 = Workload(
        ...     layers=96, hidden=12288, heads=96, vocab=51200, tied=True
        ... )
        >>> round(gpt3.num_parameters / 1e9)
        175
    """

    name: str = "custom"
    layers: int
    hidden: int
    heads: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    seq: int = 2048
    gated: bool = False
    tied: bool = False
    learned_positions: bool = False
    layer_norm: bool = False
    biases: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    dropout: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    mtp_layers: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    window: int = 0
    window_layers: int = 0
    causal: bool = True
    modulations: int = 0
    other_end_parameters: int = 0
    logits_bytes: int = LOGITS_BYTES
    traced: TracedBlock | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), field.default)
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise InputError(
                    f"{name}={getattr(self, name)}: must be at least 1",
                    key="value.below_one",
                )
        for name, value in (
            ("kv_heads", self.heads),
            ("ffn", 4 * self.hidden),
            ("expert_ffn", self.ffn or 4 * self.hidden),
        ):
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        _check_attention(self)
        _check_experts(self)
        if not self.head_dim and not self.kv_lora_rank:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)

    @property
    def query_dim(self) -> int:
        """Size of a query and a key of one head."""
        if self.kv_lora_rank:
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim

    @property
    def value_dim(self) -> int:
        """Size of a value of one head."""
        return self.v_head_dim if self.kv_lora_rank else self.head_dim

    @property
    def moe_layers(self) -> int:
        """Number of layers whose MLP is routed."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def block_kinds(self) -> tuple[tuple[bool, int], ...]:
        """Pairs of True for routed experts, and the number of such blocks."""
        moe = self.moe_layers
        return (False, self.layers - moe), (True, moe)

    def is_moe(self, layer: int) -> bool:
        """Return True if that layer's MLP is routed."""
        return bool(self.experts) and layer >= self.dense_layers

    def count_moe_layers(self, layers: range) -> int:
        """Return how many of these consecutive layers are routed."""
        if not self.experts:
            return 0
        return max(0, layers.stop - max(layers.start, self.dense_layers))

    @property
    def attention_matrix_parameters(self) -> int:
        """Number of parameters of the matrices of one layer's attention."""
        if not self.kv_lora_rank:
            wide = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
            return self.hidden * wide
        query = (
            self.q_lora_rank * (self.hidden + self.heads * self.query_dim)
            if self.q_lora_rank
            else self.hidden * self.heads * self.query_dim
        )
        compressed = self.hidden * (self.kv_lora_rank + self.qk_rope_head_dim)
        expanded = self.heads * (self.qk_nope_head_dim + self.v_head_dim)
        out = self.heads * self.v_head_dim * self.hidden
        return query + compressed + self.kv_lora_rank * expanded + out

    def mlp_matrix_parameters(self, ffn: int) -> int:
        """Return the parameters of the matrices of one MLP of that hidden size."""
        return (3 if self.gated else 2) * self.hidden * ffn

    def block_matrix_parameters(self, *, moe: bool) -> int:
        """Return the parameters of the matrices of one layer, the router's included."""
        if self.traced:
            return self.traced.parameters
        mlp = self.mlp_matrix_parameters(self.ffn)
        if moe:
            experts = self.experts + self.shared_experts
            mlp = experts * self.mlp_matrix_parameters(self.expert_ffn)
            mlp += self.hidden * self.experts
        return self.attention_matrix_parameters + mlp + self._modulation_parameters

    @property
    def _modulation_parameters(self) -> int:
        return self.modulations * self.hidden**2

    def expert_parameters(self, *, moe: bool) -> int:
        """Return the parameters of a layer's routed experts, which `expert` splits."""
        return self.experts * self.mlp_matrix_parameters(self.expert_ffn) if moe else 0

    def active_block_parameters(self, *, moe: bool) -> int:
        """Return the parameters of the matrices of one layer that one token uses."""
        if self.traced:
            return round(self.traced.linear_flops / 2)
        if not moe:
            return self.block_matrix_parameters(moe=False) - self._modulation_parameters
        experts = self.top_k + self.shared_experts
        routed = experts * self.mlp_matrix_parameters(self.expert_ffn)
        return self.attention_matrix_parameters + routed + self.hidden * self.experts

    def block_vector_parameters(self, *, moe: bool) -> int:
        """Return the parameters of norm scales and biases of one layer."""
        if self.traced:
            return 0
        norms = 2 * self.hidden * (2 if self.layer_norm else 1)
        if self.modulations:  # the norms have none, the vectors' matrix has a bias
            norms = self.modulations * self.hidden
        if self.qk_norm:
            norms += 2 * self.query_dim
        if self.kv_lora_rank:
            norms += self.q_lora_rank + self.kv_lora_rank
        biases = 0
        if self.biases or self.qkv_bias:
            biases += (self.heads + 2 * self.kv_heads) * self.head_dim
        if self.biases:
            up = self.ffn * (2 if self.gated else 1)
            biases += self.hidden + (0 if moe else up + self.hidden)
        return norms + biases

    def block_parameters(self, *, moe: bool) -> int:
        """Return the parameters of one layer."""
        return self.block_matrix_parameters(moe=moe) + self.block_vector_parameters(
            moe=moe
        )

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding: tokens, and positions where learned."""
        rows = self.vocab + (self.seq if self.learned_positions else 0)
        return rows * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the head's own matrix; 0 where it is tied."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def final_norm_parameters(self) -> int:
        """Parameters of the norm before the head, and others outside the blocks."""
        if self.traced:
            return self.traced.other_end_parameters
        if self.modulations:
            return self.other_end_parameters
        norm = self.hidden * (2 if self.layer_norm else 1)
        return norm + self.other_end_parameters

    @property
    def mtp_matrix_parameters(self) -> int:
        """Parameters of the matrices by which `mtp_layers` join two streams."""
        return self.mtp_layers * 2 * self.hidden**2

    @property
    def mtp_parameters(self) -> int:
        """The same with their norms: of both streams, and before the head."""
        return self.mtp_matrix_parameters + 3 * self.mtp_layers * self.hidden

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        last = self.is_moe(self.layers)
        blocks = sum(
            count * self.block_parameters(moe=moe) for moe, count in self.block_kinds
        )
        blocks += self.mtp_layers * self.block_parameters(moe=last)
        ends = self.embedding_parameters + self.head_parameters
        return blocks + self.mtp_parameters + ends + self.final_norm_parameters

    @property
    def active_parameters(self) -> int:
        """Matrix parameters that one token uses, those of each head included."""
        last = self.is_moe(self.layers)
        blocks = sum(
            count * self.active_block_parameters(moe=moe)
            for moe, count in self.block_kinds
        )
        blocks += self.mtp_layers * self.active_block_parameters(moe=last)
        heads = (1 + self.mtp_layers) * self.vocab * self.hidden
        return blocks + self.mtp_matrix_parameters + heads

    def attention_flops(self, seq: int) -> int:
        """Return the FLOPs of scores and mixed values of one token and layer, forward.

        All `seq` keys count, also those that a causal mask hides, as in Megatron-LM and
        most published MFUs; of layers with a window twice the window. The mean of all
        layers.
        """
        if self.traced:
            return round(self.traced.mixing_flops * seq / self.traced.seq)
        share = self.window_layers / self.layers if self.window else 0.0
        keys = round(share * min(seq, 2 * self.window) + (1 - share) * seq)
        return 2 * self.heads * (self.query_dim + self.value_dim) * keys

    @property
    def layer_costs(self) -> tuple[float, ...]:
        """Cost of each layer (`splits=cost`): FLOPs of its forward's matmuls.

        On one sequence of `COST_TOKENS`, as a step counts them in a model's trace
        (`meshpar.parallel.pipeline.stages.layer_costs`).
        """
        if self.traced:
            return self.traced.layer_costs()
        mixing = self.attention_flops(COST_TOKENS)
        once = 2.0 * self._modulation_parameters
        costs = {
            moe: COST_TOKENS * (2 * self.active_block_parameters(moe=moe) + mixing)
            + once
            for moe, _ in self.block_kinds
        }
        return tuple(costs[self.is_moe(layer)] for layer in range(self.layers))

    def model_flops(self, *, global_batch: int, seq: int) -> int:
        """Return the FLOPs of one step, forward and backward, without recomputation.

            3 * tokens * (2 * active parameters + layers * attention)

        For a GPT with `ffn = 4 hidden` this is 72 B L s h^2 (1 + s/6h + V/12hL).

        Reference: Narayanan et al. 2021, appendix; Korthikanti et al. 2022, eq. 7.

        Example:
            >>> gpt = Workload(layers=2, hidden=64, heads=4, vocab=96, tied=True)
            >>> flops = 72 * 8 * 2 * 32 * 64**2 * (1 + 32 / (6 * 64) + 96 / (24 * 64))
            >>> gpt.model_flops(global_batch=8, seq=32) == flops
            True
        """
        layers = self.layers + self.mtp_layers
        token = 2 * self.active_parameters + layers * self.attention_flops(seq)
        return 3 * global_batch * seq * token


def _check_type(name: str, value: object, default: object) -> None:
    if name in ("name", "traced"):
        return
    wanted: type = bool if isinstance(default, bool) else int
    if not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool):
        kind = "true or false" if wanted is bool else "a whole number"
        fault = "not_boolean" if wanted is bool else "not_whole_number"
        raise InputError(f"{name}={value!r}: must be {kind}", key=f"value.{fault}")
    if wanted is int and not 0 <= value <= _MOST[name]:  # type: ignore[operator]
        raise InputError(
            f"{name}={value}: must be at least 0 and at most {_MOST[name]}",
            key="value.out_of_range",
        )


def _check_attention(workload: Workload) -> None:
    window, layers = workload.window, workload.window_layers
    if bool(window) != bool(layers) or layers > workload.layers:
        raise InputError(
            f"window={window} of window_layers={layers}, of layers={workload.layers}: "
            "give both, for as many layers as there are at most, or neither",
            key="model.wrong_window",
        )
    if workload.kv_lora_rank:
        for name in _MLA:
            if not getattr(workload, name):
                raise InputError(
                    f"kv_lora_rank={workload.kv_lora_rank} is latent attention, which "
                    f"needs {name} too; give it a size",
                    key="model.missing_latent_size",
                )
        return
    if workload.heads % workload.kv_heads:
        raise InputError(
            f"heads={workload.heads} is not a multiple of kv_heads="
            f"{workload.kv_heads}; every key/value head serves as many query heads",
            key="model.kv_heads_indivisible",
        )
    if not workload.head_dim and workload.hidden % workload.heads:
        raise InputError(
            f"hidden={workload.hidden} is not a multiple of heads={workload.heads}; "
            "give head_dim",
            key="model.heads_indivisible",
        )


def _check_experts(workload: Workload) -> None:
    if not workload.experts:
        for name in ("top_k", "shared_experts", "dense_layers"):
            if getattr(workload, name):
                raise InputError(
                    f"{name}={getattr(workload, name)} without experts; give experts, "
                    f"or leave {name} out",
                    key="model.no_experts",
                )
        return
    if not 1 <= workload.top_k <= workload.experts:
        raise InputError(
            f"top_k={workload.top_k} of experts={workload.experts}: must be at least "
            "1 and at most as many as there are",
            key="model.wrong_top_k",
        )
    if workload.dense_layers >= workload.layers:
        raise InputError(
            f"dense_layers={workload.dense_layers} of layers={workload.layers}: no "
            "layer has experts; leave experts out",
            key="model.no_routed_layer",
        )
