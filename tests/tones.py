"""A voice that needs no training: the toy region, whose sound is one tone a word. Its recogniser reads the tones."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import toy
from torch import Tensor

from voicehub_aot.proof.quality.clip import Clip
from voicehub_aot.proof.quality.measures import Measure, Score
from voicehub_aot.proof.quality.scorers import Scored
from voicehub_aot.proof.quality.utterances import Entry

WORDS = ("window", "garden", "computer", "yellow", "river", "doctor", "monday", "banana")
RATE_HZ, FRAMES, HOP = 16000, 12, 128  # frames of a word, samples of a frame
TONES_HZ = [400.0 * 2 ** (n / 2.5) for n in range(len(WORDS))]
STEPS = (32, 16, 8, 4, 2, 1)


def request(text: str) -> dict[str, Any]:
    ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
    frames = FRAMES * ids.shape[1]
    cond = torch.nn.functional.one_hot(ids[0] % toy.COND, toy.COND).float().repeat_interleave(FRAMES, 0)[None]
    return {"cond": cond, "ids": ids, "lengths": [frames]}


def vocode(latent: Tensor, request: dict[str, Any]) -> Tensor:
    """Each word's tone, as loud as the latent says."""
    gain = torch.exp(0.2 * latent).mean(1).repeat_interleave(HOP)
    hertz = torch.tensor([TONES_HZ[i] for i in request["ids"][0]]).repeat_interleave(FRAMES * HOP)
    phase = torch.cumsum(2 * torch.pi * hertz / RATE_HZ, 0)
    return (0.05 * gain * torch.sin(phase)).float()


def heard(clip: Clip) -> str:
    """The word whose tone is loudest, for each word's time."""
    parts = clip.samples.split(FRAMES * HOP)
    spectra = [torch.fft.rfft(part * torch.hann_window(len(part))).abs() for part in parts]
    peaks = [spectrum.argmax().item() * clip.rate_hz / len(part) for spectrum, part in zip(spectra, parts, strict=True)]
    return " ".join(min(WORDS, key=lambda w: abs(TONES_HZ[WORDS.index(w)] - peak)) for peak in peaks)


def score(clip: Clip, reference: Clip) -> Scored:
    wanted, got = clip.text.split(), heard(clip).split()
    wrong = sum(a != b for a, b in itertools.zip_longest(wanted, got))
    return Scored({"tone_wer": Score(wrong / len(wanted), len(wanted))}, " ".join(got))


TONE_WER = Measure(
    "tone_wer", "word error rate", "clip", "a made-up slack", slack=0.02, counts_words=True, validates=True
)


ENTRY = Entry("the tones", RATE_HZ, request, vocode)
