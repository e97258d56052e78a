"""Speaker scaling: the speaker's keys and values count for more, in some layers and until some time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SPEAKER_SCALE = "speaker_scale"  # the region's input [B, layers] that it works through


@dataclass(frozen=True)
class SpeakerScaling:
    """factor: of the keys and values. layers: so many of the first ones; None = all.

    until: the step that crosses this time is the last one with scaled keys; None = all steps.

    Facts from jordandare/echo-tts 230202af252e30a692a6f6310789ad212f83e2bb, inference.py, and Aratako/Irodori-TTS
    eaf74d6a19138f743acb5b71a445fd25a57db987, irodori_tts/rf.py.
    """

    factor: float
    layers: int | None = None
    until: float | None = None

    def last_step(self, times: Sequence[float]) -> int | None:
        """The step that starts at `until` or above and ends below it, compared in float32; None if there is none."""
        if self.until is None:
            return None
        grid = torch.tensor(times, dtype=torch.float32)
        below = ((grid[1:] < self.until) & (grid[:-1] >= self.until)).nonzero().flatten().tolist()
        return int(below[0]) if below else None

    def scale(self, rows: int, layers: int, factor: float) -> Tensor:
        """[rows, layers] float32: `factor` in the first layers, 1 in the others."""
        scale = torch.ones(rows, layers)
        scale[:, : layers if self.layers is None else max(self.layers, 0)] = factor
        return scale
