"""A model's `logits`, traced on no device as its other functions are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshpar.model.contract import Model
from meshpar.model.tracing import traced_forward, tracing_scope


def traced_logits(model: Model, batch: Any, **fields: Any) -> Callable[..., Any]:
    """(params, state, batch) -> what `logits` gives of one layer of each group.

    Args:
        model: The model, which has `logits`.
        batch: Shapes of a batch.
        fields: As `traced_forward` takes them.
    """
    once, *_ = traced_forward(model, batch, head=False, **fields)
    of_scope = {k: v for k, v in fields.items() if k not in ("ends_only", "run")}

    def logits(params: Any, state: Any, batch: Any) -> Any:
        x = once(params, state, batch)
        assert model.logits is not None
        scope = tracing_scope(batch, state[0], **of_scope)
        return model.logits(params[0], x, scope)

    return logits
