"""The recordings that the demo voice learns from: espeak-ng speaks, and says which phone begins where."""

from __future__ import annotations

import ctypes
import json
import math
import random
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out
from voice import FOLDER, HOP, PAUSE, SAMPLE_RATE, WORDS, log_mel

VOICES = ("en-us+f2", "en-us+f5")
RATES, PITCHES = (130, 155), (30, 70)  # words a minute, and espeak-ng's scale of 0 to 100
LEAD_S = 0.1  # silence before and after the words

# --- espeak-ng


class _Event(ctypes.Structure):
    """espeak_EVENT of espeak-ng's speak_lib.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("name", ctypes.c_char * 8),
    )


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))


class Espeak:
    """espeak-ng through its C interface, speak_lib.h: the one way to the phones and where they begin."""

    END, WORD, PHONE = 0, 1, 7  # espeak_EVENT_TYPE
    RATE, PITCH, GAP = 1, 3, 7  # espeak_PARAMETER

    def __init__(self, seed: int) -> None:
        try:
            import espeakng_loader
        except ImportError as error:
            raise SystemExit("demo voice: espeak-ng is missing; pip install espeakng-loader") from error
        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        data = espeakng_loader.get_data_path().encode()
        self.rate = self.library.espeak_Initialize(2, 0, data, 1)  # synchronous, whole buffers, phone events
        self.library.espeak_ng_SetRandSeed(ctypes.c_long(seed))  # of its breath; else from the clock
        self.samples: list[int] = []
        self.events: list[tuple[int, int, str]] = []
        self.callback = _CALLBACK(self._collect)  # kept: the library holds no reference
        self.library.espeak_SetSynthCallback(self.callback)

    def _collect(self, wave: Any, count: int, events: Any) -> int:
        if wave:
            self.samples += wave[:count]
        for event in events:
            if event.type == self.END:
                break
            name = event.name.decode() if event.type == self.PHONE else ""
            self.events.append((event.type, event.sample, name))
        return 0

    def speak(self, text: str, voice: str, rate: int, pitch: int) -> tuple[Tensor, list[tuple[int, int, str]]]:
        """-> samples in -1..1 at `self.rate`, and the events (type, sample, name of a phone)."""
        self.samples, self.events = [], []
        if self.library.espeak_SetVoiceByName(voice.encode()):
            raise SystemExit(f"demo voice: espeak-ng does not know the voice {voice!r}")
        for parameter, value in ((self.RATE, rate), (self.PITCH, pitch), (self.GAP, 4)):
            self.library.espeak_SetParameter(parameter, value, 0)
        content = text.encode()
        self.library.espeak_Synth(content, len(content) + 1, 0, 1, 0, 1, None, None)
        return torch.tensor(self.samples, dtype=torch.float32) / 32768, self.events


# --- utterances


def resample(audio: Tensor, source: int, target: int) -> Tensor:
    """audio: [samples] at `source` Hz -> the same at `target` Hz; what the lower rate cannot hold is cut off."""
    count = len(audio) * target // source
    return torch.fft.irfft(torch.fft.rfft(audio)[: count // 2 + 1], count) * (count / len(audio))


@dataclass(frozen=True)
class Utterance:
    """mel: [T, BINS] log-mel. spans: (place of the word or -1, phone, frames), T frames in all."""

    text: str
    mel: Tensor
    spans: list[tuple[int, str, int]]


def record(espeak: Espeak, text: str, rng: random.Random) -> Utterance:
    audio, events = espeak.speak(text, rng.choice(VOICES), rng.randint(*RATES), rng.randint(*PITCHES))
    starts: list[tuple[int, str, float]] = [(-1, PAUSE, 0.0)]  # word, phone, second
    word = -1
    for kind, sample, name in events:
        word += kind == Espeak.WORD
        if kind == Espeak.PHONE:
            silent = name.startswith(PAUSE)
            starts.append((-1 if silent else word, PAUSE if silent else name, LEAD_S + sample / espeak.rate))
    while starts[-2][1] == PAUSE:  # espeak-ng ends a sentence with several pauses
        starts.pop()
    end = starts[-1][2] + LEAD_S
    silence = torch.zeros(int(LEAD_S * SAMPLE_RATE))
    audio = torch.cat((silence, resample(audio, espeak.rate, SAMPLE_RATE), silence))[: int(end * SAMPLE_RATE)]
    mel = log_mel(audio)
    frames = [min(len(mel), math.ceil(second * SAMPLE_RATE / HOP)) for _, _, second in starts] + [len(mel)]
    counts = [after - before for before, after in pairwise(frames)]
    return Utterance(text, mel, [(place, phone, n) for (place, phone, _), n in zip(starts, counts, strict=True) if n])


def gate_sentences() -> set[str]:
    """The sentences of cases.toml, which judge the voice and are kept out of the corpus."""
    cases = tomllib.loads((FOLDER / "cases.toml").read_text(encoding="utf-8"))
    return {utterance["text"] for utterance in cases["utterance"]}


def sentences(count: int, rng: random.Random) -> Iterator[str]:
    """`count` sentences of 2 to 5 words, none of them the gate's."""
    gate = gate_sentences()
    while count:
        text = " ".join(rng.choices(WORDS, k=rng.randint(2, 5)))
        if text not in gate:
            count -= 1
            yield text


def corpus(count: int, seed: int, file: Path) -> list[Utterance]:
    """Reads the file if it was made with the same count and seed, else speaks everything and writes it."""
    made_with = json.dumps([count, seed, VOICES, RATES, PITCHES])
    if file.exists():
        with safe_open(file, framework="pt") as content:
            metadata = content.metadata()
            if metadata["made_with"] == made_with:
                spoken = json.loads(metadata["spoken"])
                return [Utterance(text, content.get_tensor(str(i)), spans) for i, (text, spans) in enumerate(spoken)]
    espeak, speakers = Espeak(seed), random.Random(seed + 1)
    texts = sentences(count, random.Random(seed))
    made = [record(espeak, text, speakers) for text in texts]
    metadata = {"made_with": made_with, "spoken": json.dumps([(u.text, u.spans) for u in made])}
    save_file({str(i): u.mel for i, u in enumerate(made)}, file, metadata)
    return made


# --- what the corpus tells: phones, durations, statistics


def front_end(utterances: list[Utterance]) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """What vocabulary.json and durations.json hold: of each word the most frequent phones, and their mean frames."""
    phones = sorted({phone for u in utterances for _, phone, _ in u.spans})
    spoken: dict[str, list[tuple[tuple[str, ...], tuple[int, ...]]]] = {word: [] for word in WORDS}
    pauses: list[list[int]] = [[], [], []]  # before, between and after words
    for u in utterances:
        for place, word in enumerate(u.text.split()):
            own = [(phone, frames) for at, phone, frames in u.spans if at == place]
            spoken[word].append((tuple(phone for phone, _ in own), tuple(frames for _, frames in own)))
        for n, (at, _, frames) in enumerate(u.spans):
            if at < 0:
                pauses[0 if n == 0 else 2 if n == len(u.spans) - 1 else 1].append(frames)
    words, durations = {}, {PAUSE: [round(sum(p) / len(p)) for p in pauses]}
    for word in filter(spoken.get, WORDS):
        usual = Counter(names for names, _ in spoken[word]).most_common(1)[0][0]
        counts = [frames for names, frames in spoken[word] if names == usual]
        ends = torch.tensor(counts).float().mean(0).cumsum(0).round().int().tolist()
        words[word] = list(usual)
        durations[word] = [max(1, end - start) for start, end in pairwise([0, *ends])]
    return {"phones": {phone: n for n, phone in enumerate(phones)}, "words": words}, durations


def statistics(utterances: list[Utterance]) -> dict[str, Tensor]:
    """Mean and deviation of each bin, [BINS]."""
    frames = torch.cat([u.mel for u in utterances])
    return {"mean": frames.mean(0), "deviation": frames.std(0)}
