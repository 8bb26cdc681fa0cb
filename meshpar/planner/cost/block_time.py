"""Time of one block's forward and backward on one device, one microbatch."""

from __future__ import annotations

from dataclasses import dataclass

from meshpar.planner.cost.activations import (
    kept_bytes,
    offloaded_bytes,
    stash_bytes,
)
from meshpar.planner.cost.elementwise import backward_bytes, forward_bytes
from meshpar.planner.cost.expert_time import (
    BACKWARD_KERNELS,
    FORWARD_KERNELS,
    biased_grad,
    host_work_s,
    routed_kernels,
    routed_linears,
)
from meshpar.planner.cost.recomputation import Again, recomputation
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.seconds import (
    ATTENTION,
    ATTENTION_AGAIN,
    COMPUTING,
    HALVES,
    HOST,
    MATMULS,
    Cost,
    attention_backward_s,
    attention_forward_s,
    cast_s,
    exposed,
    host_s,
    matmul_s,
    memory_s,
    rows_in,
)
from meshpar.planner.cost.traffic import every_block_row, repeated


@dataclass(frozen=True)
class BlockTime:
    """Costs of one block for one microbatch, collectives inside it included.

    Args:
        forward: F.
        input_grad: I, with what is recomputed before it.
        weight_grad: W, with adding it to the sum.
        spare_s: Seconds of a forward's and of a backward's work that hide none of their
            own collectives, and are left to hide those of weights.
        uncut_s: Seconds of W that a split backward leaves in I.
        stash_s: Seconds of a split backward's I to move what its W needs, and of its W.
    """

    forward: Cost
    input_grad: Cost
    weight_grad: Cost
    spare_s: tuple[float, float]
    uncut_s: float
    stash_s: float

    @property
    def backward(self) -> Cost:
        """B."""
        return self.input_grad + self.weight_grad

    @property
    def split_backward(self) -> tuple[Cost, Cost]:
        """I and W as a split backward runs them, one after the other or apart."""
        late_s = self.weight_grad.compute_s - self.uncut_s
        stash = Cost(self.stash_s)
        return self.input_grad + Cost(self.uncut_s) + stash, Cost(late_s) + stash


def block_time(run: Run, *, moe: bool) -> BlockTime:
    """Return the costs of a block with or without routed experts."""
    return BlockWork(run, moe=moe).time(run.layout.remat)


class BlockWork:
    """Work of a block that all remat policies share, and its time under each.

    Args:
        run: The run, of any policy.
        moe: Whether the block has routed experts.
    """

    def __init__(self, run: Run, *, moe: bool) -> None:
        self._run, self._moe = run, moe
        self._halves = attention, mlp = attention_linears(run), mlp_linears(run, moe)
        linears = (attention.columns, attention.rows, mlp.columns, mlp.rows)
        self._every_linear = [one for each in linears for one in each]
        self._linears_s = [_matmuls_s(run, each) for each in linears]
        self._matmuls_s = sum(self._linears_s)
        self._elementwise_s = memory_s(run, forward_bytes(run, moe=moe))
        self._attention_s = attention_forward_s(run), attention_backward_s(run)
        self._rows = every_block_row(run, moe=moe)
        self._forward = self._forward_cost()
        self._weight_grad = _weight_grad(run, self._halves) + biased_grad(run, moe)
        self._input_grads: dict[Again, Cost] = {}
        self._routed_kernels = routed_kernels(run, moe)

    def time(self, remat: str) -> BlockTime:
        """Return the costs of the block under a remat policy."""
        run, moe = self._run, self._moe
        again = recomputation(run, moe=moe, remat=remat)
        stacked_s = _stacked_s(run, moe, remat)
        forward = self._forward + Cost(stacked_s)
        input_grad = self._input_grad(again) + Cost(stacked_s)
        moved_s = host_s(run, offloaded_bytes(run, moe=moe, remat=remat))
        forward += _waiting(moved_s, self._free_s(forward))
        input_grad += _waiting(moved_s, self._free_s(input_grad + self._weight_grad))
        forward = _launched(run, forward, FORWARD_KERNELS + self._routed_kernels)
        back_kernels = BACKWARD_KERNELS + 2 * self._routed_kernels
        input_grad = _launched(run, input_grad, again.kernels, back_kernels)
        device_s = (forward + input_grad + self._weight_grad).total_s
        # A device whose work ends before the host has launched it waits.
        launched_s = host_work_s(run, moe, again.kernels)
        input_grad += Cost(max(0.0, launched_s - device_s))
        splits, both = run.splits_backward, input_grad + self._weight_grad
        return BlockTime(
            forward=forward,
            input_grad=input_grad,
            weight_grad=self._weight_grad,
            spare_s=(
                _spare_s(run, forward, self._matmuls_s),
                _spare_s(run, both, self._backward_matmuls_s(again)),
            ),
            uncut_s=self._uncut_s(remat) if splits else 0.0,
            stash_s=_stash_s(run, moe, remat) if splits else 0.0,
        )

    def _free_s(self, cost: Cost) -> float:
        """Seconds of work beside which the link to the host's memory is free.

        A device whose collectives cross it too (PCIe) has it for one of them at a time.
        """
        shared = self._run.cluster.device.shares_host_link
        return cost.compute_s - (cost.hidden_s if shared else 0.0)

    @property
    def least_s(self) -> tuple[float, float]:
        """Seconds of a forward and a backward, below which no remat policy takes them.

        Nothing is computed again, nor is anything kept.
        """
        time, stacked_s = self.time("none"), _stacked_s(self._run, self._moe, "none")
        return time.forward.total_s - stacked_s, time.backward.total_s - stacked_s

    def _forward_cost(self) -> Cost:
        run, there_s = self._run, self._attention_s[0]
        hiding_s = {ATTENTION: there_s, MATMULS: self._matmuls_s}
        hiding_s |= _forward_matmuls_s(run, self._halves)
        computed_s = self._matmuls_s + self._elementwise_s + there_s
        computed_s += sum(
            cast_s(run, rows * inner * count)
            for rows, inner, _, count in self._every_linear
        )
        hiding_s[COMPUTING] = computed_s
        waits = exposed(run, rows_in(self._rows, "forward"), hiding_s)
        return Cost(computed_s) + waits

    def _input_grad(self, again: Again) -> Cost:
        """Cost of I if its backward recomputes so much."""
        if again not in self._input_grads:
            self._input_grads[again] = self._input_grad_cost(again)
        return self._input_grads[again]

    def _input_grad_cost(self, again: Again) -> Cost:
        run, (there_s, back_s) = self._run, self._attention_s
        attention_s, backward_s = (
            there_s * again.attention,
            self._backward_matmuls_s(again),
        )
        computed_s = backward_s - self._matmuls_s
        computed_s += memory_s(run, backward_bytes(run, moe=self._moe)) + back_s
        computed_s += attention_s + again.elementwise * self._elementwise_s
        computed_s += memory_s(run, run.tokens * again.moved_bytes)
        computed_s += sum(
            cast_s(run, rows * columns * count)
            for rows, _, columns, count in self._every_linear
        )
        hiding_s = {
            ATTENTION: back_s,
            ATTENTION_AGAIN: attention_s,
            MATMULS: backward_s,
        }
        hiding_s |= _backward_matmuls_s(run, self._halves)
        hiding_s[COMPUTING] = computed_s + self._weight_grad.compute_s
        rows = repeated(rows_in(self._rows, "backward"), again)
        return Cost(computed_s) + exposed(run, rows, hiding_s)

    def _backward_matmuls_s(self, again: Again) -> float:
        """Seconds of matmuls of a backward, those that it recomputes among them."""
        times = (again.qkv, again.out, again.up, again.down)
        more = zip(times, self._linears_s, strict=True)
        return 2 * self._matmuls_s + sum(count * seconds for count, seconds in more)

    def _uncut_s(self, remat: str) -> float:
        """Seconds of weight gradients in loops that a split backward cannot cut.

        Routed experts are such a loop.
        """
        run = self._run
        if run.workload.traced:
            share = run.workload.traced.cut(remat).uncut_share
            return share * self._weight_grad.compute_s
        return _weight_grad(run, self._halves[1:]).compute_s if self._moe else 0.0


def _waiting(moved_s: float, hidden_s: float) -> Cost:
    """Cost of waiting for the host, less the work that hides it."""
    return Cost(0.0, {HOST: max(0.0, moved_s - hidden_s)})


def _spare_s(run: Run, cost: Cost, matmuls_s: float) -> float:
    """Seconds left to hide weights: of all work, or of matmuls where measured."""
    hiding_s = matmuls_s if run.execution.measured_overlap else cost.compute_s
    return max(0.0, hiding_s - cost.hidden_s)


def _matmuls_s(run: Run, linears: tuple) -> float:
    return sum(
        matmul_s(run, rows, inner, columns, count=count)
        for rows, inner, columns, count in linears
    )


def _forward_matmuls_s(run: Run, halves: tuple[Linears, ...]) -> dict[str, float]:
    """Seconds of the matmuls of a forward that hide chunks over `tensor`."""
    if not run.execution.tensor_ring:
        return {}
    return {
        f"{name} outputs": _matmuls_s(run, half.columns + half.rows)
        for name, half in zip(HALVES, halves, strict=True)
    }


def _backward_matmuls_s(run: Run, halves: tuple[Linears, ...]) -> dict[str, float]:
    """Seconds of the matmuls of a backward that hide collectives over `tensor`.

    The matmuls for a half's inputs take as long as those for its weights.
    """
    if not run.execution.tensor_overlap:
        return {}
    return {
        f"{name} {gradients}": sum(
            matmul_s(run, inner, rows, columns, count=count)
            for rows, inner, columns, count in half.columns
        )
        for name, half in zip(HALVES, halves, strict=True)
        for gradients in ("inputs", "weights")
    }


def _weight_grad(run: Run, halves: tuple[Linears, ...]) -> Cost:
    seconds = sum(
        weight_grad_s(run, rows, inner, columns, count=count)
        for half in halves
        for rows, inner, columns, count in half.columns + half.rows
    )
    return Cost(seconds)


def weight_grad_s(
    run: Run,
    rows: float,
    inner: float,
    columns: float,
    *,
    count: float = 1,
    unscaled: bool = False,
) -> float:
    """Return the seconds of gradients of `count` weights (inner, columns), added up.

    A matmul that adds to the sum hides its traffic as it hides that of its operands;
    otherwise another kernel reads the gradient and the sum, and writes it.
    """
    execution = run.execution
    if execution.fused_accumulation:
        each = execution.gradient_bytes
        return matmul_s(
            run, inner, rows, columns, count=count, sum_bytes=each, unscaled=unscaled
        )
    added_s = accumulated_s(run, count * inner * columns)
    product_s = matmul_s(run, inner, rows, columns, count=count, unscaled=unscaled)
    return product_s + added_s


def accumulated_s(run: Run, parameters: float) -> float:
    """Return the seconds of a kernel that adds gradients to their sums.

    Where an execution repacks, the seconds of copies from and to the buffers of
    collectives: weights for the forward and for the backward (read, write), gradients
    (read, written in fp32).
    """
    each = 2 * run.execution.gradient_bytes + run.dtype_bytes
    if run.execution.repacks and run.layout.zero == 3 and run.state_shards > 1:
        each = 2 * 2 * run.gathered_bytes + run.dtype_bytes + 4
    return memory_s(run, parameters * each)


def _stacked_s(run: Run, moe: bool, remat: str) -> float:
    """Seconds to put what a block keeps on its stack, or to take it from there.

    A compiled loop over layers copies it into an array of all layers (read, write),
    and in microbatches once more into the slot of its microbatch.
    """
    if run.execution.eager:
        return 0.0
    copies = 2 if run.layout.runs_in_ticks else 1
    return memory_s(run, 2 * copies * kept_bytes(run, moe=moe, remat=remat))


def _stash_s(run: Run, moe: bool, remat: str) -> float:
    """Seconds to put a block's stash in its slot, or to take it from there.

    As `_stacked_s`: in lock step it is stacked with those of other blocks, and copied
    to the slot; where ranks diverge it is written there at once.
    """
    copies = 1 if run.layout.divergent else 2
    return memory_s(run, 2 * copies * stash_bytes(run, moe=moe, remat=remat))


def _launched(run: Run, cost: Cost, forward: int, backward: int = 0) -> Cost:
    """Add the time in which one kernel has ended and the next has not begun.

    A forward's kernels, a recomputed one's too, wait for Python besides; a backward's
    are launched by autograd's engine, or all by a compiled program.
    """
    device_s = run.cluster.device.efficiency.launch_s
    launched_s = (forward + backward) * device_s + forward * run.execution.launch_s
    return cost + Cost(launched_s)


@dataclass(frozen=True)
class Linears:
    """Matmuls with weights of one half of a block, by their sizes on one device."""

    columns: tuple[tuple[float, float, float, float], ...]
    """(rows, inner, columns, count) of matmuls that read the residual stream."""
    rows: tuple[tuple[float, float, float, float], ...]
    """The same of matmuls that write it."""


def attention_linears(run: Run) -> Linears:
    """Return the matmuls of attention: queries, keys and values in, the output out."""
    workload, tensor, tokens = run.workload, run.layout.tensor, run.tokens
    heads, hidden = workload.heads / tensor, workload.hidden
    out = ((tokens, heads * workload.value_dim, hidden, 1.0),)
    if not workload.kv_lora_rank:
        kv_heads = max(1.0, workload.kv_heads / tensor)
        wide = (heads + 2 * kv_heads) * workload.head_dim
        return Linears(((tokens, hidden, wide, 1.0),), out)
    down = workload.q_lora_rank + workload.kv_lora_rank + workload.qk_rope_head_dim
    query_inner = workload.q_lora_rank or hidden
    expanded = heads * (workload.qk_nope_head_dim + workload.v_head_dim)
    columns = (
        (tokens, hidden, down, 1.0),
        (tokens, query_inner, heads * workload.query_dim, 1.0),
        (tokens, workload.kv_lora_rank, expanded, 1.0),
    )
    return Linears(columns, out)


def mlp_linears(run: Run, moe: bool) -> Linears:
    """Return the matmuls of the MLP, or of a device's experts and their router."""
    workload, tensor, tokens = run.workload, run.layout.tensor, run.tokens
    hidden, wide = workload.hidden, 2 if workload.gated else 1
    if workload.traced:
        return _traced_linears(run)
    if not moe:
        ffn = workload.ffn / tensor
        return Linears(
            ((tokens, hidden, wide * ffn, 1.0),), ((tokens, ffn, hidden, 1.0),)
        )
    ffn = workload.expert_ffn / tensor
    columns, out = map(list, routed_linears(run))
    if workload.shared_experts:
        shared = workload.shared_experts * ffn
        columns.append((tokens, hidden, wide * shared, 1.0))
        out.append((tokens, shared, hidden, 1.0))
    columns.append((tokens, hidden, float(workload.experts), 1.0))
    return Linears(tuple(columns), tuple(out))


def _traced_linears(run: Run) -> Linears:
    """Matmuls of a traced block besides the attention of its sizes.

    Counted as one matmul in and one out, of as many FLOPs.
    """
    workload = run.workload
    rest = (
        workload.active_block_parameters(moe=False)
        - workload.attention_matrix_parameters
    )
    columns = max(0.0, rest) / 2 / workload.hidden / run.layout.tensor
    return Linears(
        ((run.tokens, workload.hidden, columns, 1.0),),
        ((run.tokens, columns, workload.hidden, 1.0),),
    )
