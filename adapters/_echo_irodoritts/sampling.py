"""What the sampling loops of Echo-TTS and Irodori-TTS share: times, the guidance window, speaker scaling.

Facts from jordandare/echo-tts 230202af252e30a692a6f6310789ad212f83e2bb, inference.py, and Aratako/Irodori-TTS
eaf74d6a19138f743acb5b71a445fd25a57db987, irodori_tts/rf.py. Grids are float32 and run from 0.999 to 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from voicehub_aot.adapters import Sampler
from voicehub_aot.errors import OptionUnsupported

FIRST_TIME = 0.999  # so that the temporal score rescale is defined at the first step


def rescale(name: str, k: float | None, sigma: float | None) -> tuple[float, float] | None:
    """(k, sigma), or None: upstream takes both or neither."""
    if k is None or sigma is None:
        return None
    if not k > 0:
        raise OptionUnsupported(f"{name}: rescale_k={k!r}, wanted a positive number")
    return float(k), float(sigma)


def crossing(times: Sequence[float], least: float | None) -> int | None:
    """The step that starts at `least` or above and ends below it: the last one with scaled speaker keys."""
    if least is None:
        return None
    grid = torch.tensor(times, dtype=torch.float32)
    below = ((grid[1:] < least) & (grid[:-1] >= least)).nonzero().flatten().tolist()
    return int(below[0]) if below else None


def speaker_scale(rows: int, layers: int, factor: float, first_layers: int | None) -> Tensor:
    """[rows, layers]: `factor` in the first layers, 1 in the others."""
    scale = torch.ones(rows, layers)
    scale[:, : layers if first_layers is None else max(first_layers, 0)] = factor
    return scale


def scaled_trajectory(
    sampler: Sampler, times: Sequence[float], scaled: Tensor | None, least: float | None, **arguments: Any
) -> Iterator[Tensor]:
    """A trajectory whose speaker keys and values are scaled until a step crosses `least`; None = never scaled.

    arguments: as for `Sampler.trajectory`.
    """
    if scaled is None:
        yield from sampler.trajectory(**arguments)
        return
    last = crossing(times, least)
    if last is None:
        yield from sampler.trajectory(**arguments, speaker_scale=scaled)
        return
    reached = arguments.pop("noise")
    for state in sampler.trajectory(noise=reached, stop=last + 1, **arguments, speaker_scale=scaled):
        reached = state
        yield state
    if last + 1 < len(times) - 1:
        yield from sampler.trajectory(noise=reached, start=last + 1, **arguments)
