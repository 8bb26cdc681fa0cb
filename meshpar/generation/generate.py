"""`meshpar.generate`: prompts in, completions out, under any layout."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from meshpar.errors import InputError
from meshpar.generation.agreement import check_alike
from meshpar.generation.cache_plan import DECODER_START, reads_source
from meshpar.generation.engine import Engine
from meshpar.generation.programs import PLAIN, Programs, pays_unrolled
from meshpar.generation.quantized import with_weights
from meshpar.generation.requests import Completion, Request
from meshpar.generation.sampling import Sampling
from meshpar.layout import Layout
from meshpar.model.contract import Model
from meshpar.parallel.pipeline.stages import arranged_for
from meshpar.parallel.resharding import ParameterPlacement, moved
from meshpar.rules.rules import Rules
from meshpar.train.state import TrainState, split_constants

Prompt = str | Sequence[int]


def generate(
    model: Model,
    params: Any,
    prompts: Sequence[Prompt],
    *,
    model_state: Any = None,
    layout: Layout | str = PLAIN,
    from_layout: Layout | str = PLAIN,
    weights: str | None = None,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    stop_tokens: Sequence[int] = (),
    start_tokens: Sequence[int] | None = None,
    tokenizer: Any = None,
    slots: int | None = None,
    page_size: int = 16,
    num_pages: int | None = None,
    chunk: int | None = None,
    unrolled: bool | None = None,
    rules: Rules | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> list[Completion]:
    """Generate a completion of each prompt.

    Args:
        model: It attends through `meshpar.models.layers.attention.attend`.
        params: Its parameters laid out by `from_layout`, or a `TrainState`. What each
            of several processes has whole must be equal in all; a sample is compared.
        prompts: Tokens, or texts for the tokenizer.
        model_state: The model's own state, if it has some and `params` come without;
            values that are missing begin as the model declares.
        layout: Layout of the model while it generates.
        from_layout: Layout of the given parameters.
        weights: `int8` or `fp8` keeps the matrices of the blocks in 8 bits (by qwix,
            `meshpar.generation.quantized`); the layout's dtype by default.
        max_tokens: Most tokens to add to each prompt.
        temperature: Logits are divided by it; 0 takes the likeliest token.
        top_k: As in `Sampling`.
        top_p: As in `Sampling`.
        min_p: As in `Sampling`.
        seed: Seed of the first prompt; the next prompts take the next seeds.
        stop: Texts before which a completion ends.
        stop_tokens: Tokens after which it ends; they are left out.
        start_tokens: First tokens of a decoder, if the model's encoder reads the
            prompts; T5's 0 by default.
        tokenizer: With `encode` and `decode`, as in the `tokenizers` package.
        slots: Prompts that run at once; `slots_for` them by default.
        page_size: Tokens of a page of the cache.
        num_pages: Pages of a device; enough for all slots by default.
        chunk: Most prompt tokens that one program reads for each shard of the batch;
            as in `Programs.from_model`.
        unrolled: True for programs without a loop over layers, which take longer to
            compile and less time a token; by default where that pays
            (`pays_unrolled`).
        rules: Logical axis -> mesh axes; the layout's preset by default.
        devices: Devices to use; JAX's by default.

    Raises:
        InputError: The model cannot generate, a prompt has no tokens, or numbers are
            out of their ranges.

    Example:
        >>> from meshpar.models.presets import build
        >>> model = build("test")
        >>> one = jax.devices()[:1]
        >>> prompts = [[1, 2, 3]]
        >>> found = generate(model, model.init(0), prompts, max_tokens=2, devices=one)
        >>> len(found[0].tokens), found[0].finish
        (2, 'length')
    """
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    _check_lists(prompts, stop, stop_tokens, start_tokens)
    devices = jax.devices() if devices is None else list(devices)
    layout = Layout.of(layout)
    if layout.is_open:
        layout = layout.resolve(len(devices))
    requests = make_requests(
        prompts,
        tokenizer,
        max_tokens=max_tokens,
        sampling=sampling,
        stop=tuple(stop),
        stop_tokens=tuple(stop_tokens),
        start_tokens=decoder_start(model, start_tokens),
    )
    engine = make_engine(
        model,
        params,
        requests,
        layout,
        model_state=model_state,
        from_layout=from_layout,
        weights=weights,
        tokenizer=tokenizer,
        slots=slots,
        devices=devices,
        page_size=page_size,
        num_pages=num_pages,
        chunk=chunk,
        unrolled=unrolled,
        rules=rules,
    )
    return [
        Completion(prompt=prompt, **one)
        for prompt, one in zip(prompts, _completed(engine, requests), strict=True)
    ]


def make_engine(
    model: Model,
    params: Any,
    requests: Sequence[Request],
    layout: Layout,
    *,
    model_state: Any = None,
    from_layout: Layout | str = PLAIN,
    weights: str | None = None,
    tokenizer: Any = None,
    slots: int | None = None,
    unrolled: bool | None = None,
    devices: Sequence[jax.Device],
    **options: Any,
) -> Engine:
    """Return the engine of a model, with a cache that all of the requests fit.

    Arguments are those of `generate`; `options` are further ones of
    `Programs.from_model`.
    """
    if weights is not None:
        model, params = with_weights(model, params, weights, layout, devices)
    slots = slots_for(len(requests), layout) if slots is None else slots
    if unrolled is None:
        waves = -(-len(requests) // max(slots, 1))
        num_steps = waves * (max(one.max_tokens for one in requests) - 1)
        unrolled = pays_unrolled(model, layout, num_steps)
    programs = Programs.from_model(
        model,
        layout,
        slots=slots,
        max_seq=max(len(one.tokens) + one.max_tokens for one in requests),
        max_source=max(len(one.source) for one in requests),
        unrolled=unrolled,
        devices=devices,
        **options,
    )
    decode = None if tokenizer is None else tokenizer.decode
    return Engine(
        programs, *placed(programs, model, params, from_layout, model_state), decode
    )


def _check_lists(prompts: Any, stop: Any, stop_tokens: Any, start_tokens: Any) -> None:
    if isinstance(prompts, str) or len(prompts) == 0:
        raise InputError(
            f"prompts={prompts!r}: give a list of texts or of lists of tokens",
            key="generation.prompts_not_list",
        )
    if isinstance(stop, str):
        raise InputError(
            f"stop={stop!r}: give a list of texts, such as [{stop!r}]",
            key="generation.stop_not_list",
        )
    for name, given in (("stop", stop), ("stop_tokens", stop_tokens)):
        if not isinstance(given, Iterable):
            raise InputError(
                f"{name}={given!r}: give a list, [] for none",
                key="generation.stop_not_list",
            )
    if start_tokens is not None and not isinstance(start_tokens, Iterable):
        raise InputError(
            f"start_tokens={start_tokens!r}: give a list of tokens",
            key="generation.start_tokens_not_list",
        )


def make_requests(
    prompts: Sequence[Prompt],
    tokenizer: Any,
    *,
    max_tokens: int,
    sampling: Sampling,
    stop: tuple[str, ...] = (),
    stop_tokens: tuple[int, ...] = (),
    start_tokens: tuple[int, ...] = (),
) -> list[Request]:
    """Return a request for each prompt, with seeds that count up from the first's.

    If a decoder begins with `start_tokens`, its encoder reads the prompts.

    Raises:
        InputError: A prompt has no tokens, or there are texts but no tokenizer.
    """
    if stop and tokenizer is None:
        raise InputError(
            f"stop={list(stop)} are texts, but there is no tokenizer=",
            key="generation.stop_without_tokenizer",
        )
    texts = [_tokens(prompt, tokenizer) for prompt in prompts]
    if start_tokens and not all(texts):
        raise InputError(
            "a prompt has no tokens; give at least one, such as the end",
            key="generation.empty_prompt",
        )
    return [
        Request(
            tokens=start_tokens or text,
            source=text if start_tokens else (),
            max_tokens=max_tokens,
            sampling=dataclasses.replace(sampling, seed=(sampling.seed + at) % 2**32),
            stop_tokens=frozenset(stop_tokens),
            stop=stop,
        )
        for at, text in enumerate(texts)
    ]


def decoder_start(model: Model, given: Sequence[int] | None) -> tuple[int, ...]:
    """Return the first tokens of a model's decoder; () if it has no encoder.

    Raises:
        InputError: It has none, but something is given, or the other way round.
    """
    if not reads_source(model):
        if given:
            raise InputError(
                f"start_tokens={list(given)}, but the model has no encoder: it goes on "
                "with the prompts themselves; leave them out",
                key="generation.start_tokens_without_encoder",
            )
        return ()
    found = (DECODER_START,) if given is None else tuple(given)
    if not found:
        raise InputError(
            "start_tokens=[]: a decoder begins with at least one token",
            key="generation.no_start_tokens",
        )
    return found


def slots_for(num_prompts: int, layout: Layout) -> int:
    """Return how many prompts run at once: up to 32 for each shard of the batch.

    Example:
        >>> slots_for(5, Layout(data=2)), slots_for(100, Layout(data=2))
        (6, 64)
    """
    shards = layout.batch_shards
    each = -(-num_prompts // shards)
    of_stages = layout.microbatches if layout.stage > 1 else 1
    return shards * min(max(each, of_stages), 32)


def placed(
    programs: Programs,
    model: Model,
    params: Any,
    from_layout: Layout | str = PLAIN,
    model_state: Any = None,
) -> tuple[Any, Any]:
    """Return parameters and state of a model as its programs take them.

    Args:
        programs: Of the model.
        model: As given.
        params: As `from_layout` has them, or a `TrainState`.
        from_layout: How they lie now.
        model_state: The model's own state, layers first to last, where `params` are
            without and it has some; what is missing begins as the model declares.

    Raises:
        InputError: They are not the model's, lie otherwise than they are said to, or
            differ between the processes that have them whole.
    """
    state: Any = None
    if isinstance(params, TrainState):
        apart = split_constants(model, params)
        params, state = apart.params, apart.model_state
    elif jax.tree.leaves(model.state) and model_state is None:
        raise InputError(
            "the model has state that is no parameter, such as a router's bias; give "
            "the TrainState, which has both, or model_state=",
            key="generation.missing_model_state",
        )
    check_alike(programs.mesh, (params, state, model_state))
    layout = Layout.of(from_layout)
    source = ParameterPlacement(
        model=arranged_for(model, layout), num_stages=layout.stage
    )
    target = ParameterPlacement(
        model=programs.placement.model, shardings=programs.stacked_shardings
    )
    dtype = programs.plan.layout.param_dtype
    new_params = programs.at_rest(moved(params, source, target, dtype=dtype))
    if state is None:
        return new_params, programs.first_state(model_state or {})
    source, target = (
        _state_placement(source),
        _state_placement(target, programs.state_shardings),
    )
    return new_params, moved(state, source, target)


def _state_placement(
    placement: ParameterPlacement, shardings: Any = None
) -> ParameterPlacement:
    model = dataclasses.replace(
        placement.model, parameters=placement.model.state, groups=()
    )
    return dataclasses.replace(placement, model=model, shardings=shardings)


def _tokens(prompt: Prompt, tokenizer: Any) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        try:
            return tuple(map(operator.index, prompt))
        except TypeError as error:
            raise InputError(
                f"prompt {prompt!r} is no text and no list of tokens, which are whole "
                "numbers",
                key="generation.prompt_not_tokens",
            ) from error
    if tokenizer is None:
        raise InputError(
            f"prompt {prompt[:40]!r} is a text, but there is no tokenizer=; give one, "
            "or tokens",
            key="generation.prompt_without_tokenizer",
        )
    found = tokenizer.encode(prompt)
    return tuple(getattr(found, "ids", found))


def _completed(engine: Engine, requests: Sequence[Request]) -> list[dict[str, Any]]:
    for request in requests:
        engine.submit(request)
    found: list[dict[str, Any]] = [
        {"text": "", "tokens": [], "logprobs": [], "finish": ""} for _ in requests
    ]
    for token in engine.run():
        one = found[token.request]
        if token.token >= 0:
            one["tokens"].append(token.token)
            one["logprobs"].append(token.logprob)
        one["finish"] = token.finish or ""
        one["text"] = engine.text(token.request)
    return found
