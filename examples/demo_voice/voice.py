"""The demo voice's text front end and vocoder: words -> a request of `Runtime.sample`, and its latent -> a waveform.

Everything that both training and speaking must agree about stands here. It needs torch and safetensors, not espeak.
T frames of 16 ms, 80 mel bins.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from voicehub_aot.errors import UsageError

FOLDER = Path(__file__).parent
SAMPLE_RATE = 16000
WINDOW, HOP, BINS = 1024, 256, 80
FLOOR = 1e-2  # of a mel magnitude, before the logarithm
GUIDANCE, STEPS = 1.0, 8  # the pair that the voice is spoken with
PAUSE = "_"  # the phone of silence: espeak-ng's name for it
WORDS = (
    *("window", "garden", "computer", "yellow", "river", "elephant", "doctor", "monday"),
    *("banana", "music", "table", "orange", "hundred", "december", "backward", "south"),
)

# --- text


@cache
def vocabulary() -> tuple[dict[str, int], dict[str, list[str]]]:
    """Token ids by phone, and phones by word."""
    content = json.loads((FOLDER / "vocabulary.json").read_text(encoding="utf-8"))
    return content["phones"], content["words"]


@cache
def durations() -> dict[str, list[int]]:
    """Frames of every phone of a word; `_` holds those of the pause before, between and after words."""
    frames: dict[str, list[int]] = json.loads((FOLDER / "durations.json").read_text(encoding="utf-8"))
    return frames


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case. UsageError for a text without words, or with one the voice does not know."""
    words = text.lower().split()
    unknown = sorted(set(words) - set(WORDS))
    if unknown or not words:
        what = f"does not know {', '.join(map(repr, unknown))}" if unknown else f"got no words in {text!r}"
        raise UsageError(f"demo voice: {what}; it speaks {', '.join(WORDS)}")
    return words


def tokens(text: str) -> Tensor:
    """text -> [T] int64: the id of the phone that sounds in each frame."""
    ids, phones = vocabulary()
    before, between, after = durations()[PAUSE]
    frames: list[int] = [ids[PAUSE]] * before
    for place, word in enumerate(words_of(text)):
        frames += [ids[PAUSE]] * (between if place else 0)
        for phone, count in zip(phones[word], durations()[word], strict=True):
            frames += [ids[phone]] * count
    return torch.tensor(frames + [ids[PAUSE]] * after)


def request(text: str) -> dict[str, Any]:
    """The keyword arguments of `Runtime.sample` for one row, but noise and program. There is no audio prompt."""
    ids = tokens(text)
    return {"text": ids[None], "cond": torch.zeros(1, len(ids), BINS), "lengths": [len(ids)]}


# --- mel


@cache
def filters() -> Tensor:
    """[WINDOW / 2 + 1, BINS]: triangles, equally spaced on HTK's mel scale, 2595 log10(1 + f / 700)."""
    top = 2595 * torch.log10(torch.tensor(1 + SAMPLE_RATE / 2 / 700))
    edges = 700 * (10 ** (torch.linspace(0, 1, BINS + 2) * top / 2595) - 1)
    hertz = torch.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1)[:, None]
    rising = (hertz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hertz) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp(min=0)


def spectrum(audio: Tensor) -> Tensor:
    """audio: [samples] -> [WINDOW / 2 + 1, 1 + samples / HOP] complex; frame n is centred at sample n HOP."""
    return torch.stft(audio, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True)


def log_mel(audio: Tensor) -> Tensor:
    """audio: [samples] in -1..1 -> [T, BINS], natural logarithm of the mel magnitude."""
    return (spectrum(audio).abs().T @ filters()).clamp(min=FLOOR).log()


@cache
def statistics() -> tuple[Tensor, Tensor]:
    """Mean and deviation of every bin's log-mel over the training set, [BINS] each."""
    content = load_file(FOLDER / "mel.safetensors")
    return content["mean"], content["deviation"]


# --- vocoder


def magnitudes(mel: Tensor, updates: int = 20) -> Tensor:
    """mel: [T, BINS] magnitudes -> [WINDOW / 2 + 1, T], not negative, whose mel is nearest in the squares.

    The pseudo-inverse begins, the multiplicative updates of Lee and Seung (2001) go on.
    """
    bank = filters()
    spread = (mel @ torch.linalg.pinv(bank)).clamp(min=1e-5)
    for _ in range(updates):
        spread = spread * (mel @ bank.T) / (spread @ bank @ bank.T).clamp(min=1e-8)
    return spread.T


def griffin_lim(magnitude: Tensor, iterations: int = 32, momentum: float = 0.99) -> Tensor:
    """magnitude: [WINDOW / 2 + 1, T] -> [(T - 1) HOP] samples. The fast variant of Perraudin et al. (2013)."""
    window = torch.hann_window(WINDOW)
    phase = torch.rand(magnitude.shape, generator=torch.Generator().manual_seed(0)) * 2 * torch.pi
    angles, previous = torch.polar(torch.ones_like(phase), phase), torch.zeros((), dtype=torch.complex64)
    for _ in range(iterations):
        rebuilt = spectrum(torch.istft(magnitude * angles, WINDOW, HOP, window=window))
        ahead = rebuilt + momentum * (rebuilt - previous)
        angles, previous = ahead / ahead.abs().clamp(min=1e-8), rebuilt
    return torch.istft(magnitude * angles, WINDOW, HOP, window=window)


def waveform(mel: Tensor) -> Tensor:
    """mel: [T, BINS] log-mel -> [(T - 1) HOP] float32 samples in -1..1."""
    return griffin_lim(magnitudes(mel.exp())).clamp(-1, 1)


def vocode(latent: Tensor, request: dict[str, Any]) -> Tensor:
    """latent: [T, BINS] normalised log-mel, the final state of `request` -> [(T - 1) HOP] float32 samples in -1..1."""
    mean, deviation = statistics()
    return waveform(latent.float() * deviation + mean)
