"""What of a request can be known not to fit before it runs."""

from __future__ import annotations

from meshpar.errors import InputError
from meshpar.generation.cache_plan import CachePlan
from meshpar.generation.pages import PageBook
from meshpar.generation.requests import Request
from meshpar.generation.texts import tokens_below
from meshpar.model.contract import Model


def check_request(
    request: Request, model: Model, plan: CachePlan, book: PageBook
) -> None:
    """Refuses a request that can never have room, or that is another model's.

    Args:
        request: What is asked for.
        model: That is to generate.
        plan: Of its cache.
        book: Of the pages of a device.

    Raises:
        InputError: It is.
    """
    _check_tokens(request.tokens, tokens_below(model))
    _check_tokens(request.source, tokens_below(model, of_source=True))
    _check_source(len(request.source), plan.max_source)
    most = len(request.tokens) + request.max_tokens
    if most > plan.max_seq:
        raise InputError(
            f"a prompt of {len(request.tokens)} tokens and max_tokens="
            f"{request.max_tokens} make {most}, but max_seq={plan.max_seq}; "
            "shorten it, or raise max_seq",
            key="generation.request_too_long",
        )
    if book.needed(most) > plan.num_pages:
        raise InputError(
            f"{most} tokens need {book.needed(most)} pages, but a device "
            f"has num_pages={plan.num_pages}; raise it",
            key="generation.too_few_pages",
        )


def _check_source(num: int, most: int) -> None:
    if num and not most:
        raise InputError(
            f"a source of {num} tokens, but the model has no encoder to read it; give "
            "them as tokens=",
            key="generation.source_without_encoder",
        )
    if num > most:
        raise InputError(
            f"a source of {num} tokens, but max_source={most}; shorten it, or raise "
            "max_source",
            key="generation.source_too_long",
        )
    if most and not num:
        raise InputError(
            f"a source of 0 tokens, but the model's encoder reads one of up to "
            f"max_source={most}; give source=",
            key="generation.missing_source",
        )


def _check_tokens(tokens: tuple[int, ...], below: int | None) -> None:
    for token in tokens:
        if token < 0 or (below is not None and token >= below):
            raise InputError(
                f"a prompt has token {token}, but the model's are from 0 to below "
                f"{below or 2**31}; is the tokenizer the model's own?",
                key="generation.token_outside_vocabulary",
            )
