"""A clip of speech, and what every scorer needs of it: its level, its rate, its bytes."""

from __future__ import annotations

import io
import math
import wave
from dataclasses import dataclass

import torch

QUIETEST_DB = -120.0  # the level of silence


@dataclass(frozen=True)
class Clip:
    """text: what was to be spoken. samples: float32 [N], nominally -1 to 1. rate_hz: samples a second."""

    text: str
    samples: torch.Tensor
    rate_hz: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate_hz

    @property
    def level_db(self) -> float:
        """Root mean square in dB of full scale, at least QUIETEST_DB."""
        power = self.samples.double().square().mean().item()
        return max(QUIETEST_DB, 10 * math.log10(power)) if power > 0 else QUIETEST_DB

    @property
    def finite(self) -> bool:
        return bool(self.samples.isfinite().all())

    def at(self, rate_hz: int) -> torch.Tensor:
        """The samples at another rate, float32 [N * rate / own rate]: band-limited, through the spectrum."""
        if rate_hz == self.rate_hz:
            return self.samples
        count = max(1, round(len(self.samples) * rate_hz / self.rate_hz))
        spectrum = torch.fft.rfft(self.samples.double())
        kept = torch.zeros(count // 2 + 1, dtype=spectrum.dtype)
        common = min(len(kept), len(spectrum))
        kept[:common] = spectrum[:common]
        resampled: torch.Tensor = torch.fft.irfft(kept, n=count) * (count / len(self.samples))
        return resampled.float()


def pcm16(samples: torch.Tensor) -> bytes:
    """float32 [N] -> 16-bit little-endian samples; what lies beyond full scale is clipped."""
    scaled = samples.nan_to_num(0.0).clamp(-1.0, 1.0).mul(32767).round().to(torch.int16)
    return scaled.numpy().astype("<i2").tobytes()


def wav(clip: Clip) -> bytes:
    """A WAV file of one channel and 16 bits."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(clip.rate_hz)
        file.writeframes(pcm16(clip.samples))
    return buffer.getvalue()
