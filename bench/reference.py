"""The eager candidates, by model: one sampling step written the way upstream writes it.

A step module maps its inputs to the next state. Imports torch and nothing of voicehub_aot, so that a fresh process
that only runs eager code pays for nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class StepModule(Protocol):
    """prepare: what upstream computes once per request. inputs: the arguments of one call, in the module's order."""

    def prepare(self, request: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]: ...

    def inputs(
        self, prepared: Mapping[str, Tensor], state: Tensor, schedule: Sequence[float], step: int
    ) -> tuple[Tensor, ...]: ...

    def __call__(self, *inputs: Tensor) -> Tensor: ...


def supports(model: str, config: Mapping[str, Any]) -> bool:
    """E2-TTS (the UNetT backbone) has no reference here."""
    return model == "supertonic" or (model == "f5tts" and config.get("backbone") == "DiT")


def plain(model: str, config: Mapping[str, Any], guidance: float, weights: Mapping[str, Tensor]) -> Any:
    """Upstream's computation in plain torch. weights: released keys without their prefix, used where they lie."""
    values = SimpleNamespace(**config)
    with torch.device("meta"):
        if model == "supertonic":
            from reference_supertonic import Graph

            module: nn.Module = Graph(values)
        else:
            from reference_f5 import Step

            module = Step(values, guidance)
    module.load_state_dict(dict(weights), assign=True)
    return module.eval().requires_grad_(False)


def own(model: str, config: Mapping[str, Any], guidance: float, weights: Mapping[str, Tensor]) -> Any | None:
    """Upstream's own module, where there is one and its package is installed."""
    if model != "f5tts":
        return None
    from reference_f5 import upstream

    return upstream(SimpleNamespace(**config), guidance, weights)


def sample(module: StepModule, request: Mapping[str, Tensor], state: Tensor, schedule: Sequence[float]) -> Tensor:
    """A whole request in upstream's loop."""
    with torch.no_grad():
        prepared = module.prepare(request, state)
        for step in range(len(schedule) - 1):
            state = module(*module.inputs(prepared, state, schedule, step))
    return state
