"""Makes the demo voice from nothing: espeak-ng speaks, F5-TTS's own network learns, five files are written.

    pip install espeakng-loader
    python examples/demo_voice/train.py --work demo/voice

The recordings and the state of training lie in --work, so that a run which was interrupted goes on from there to the
same result. Every random number comes from a seed and the number of the step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import random
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from voicehub_aot.adapters import f5tts
from voicehub_aot.adapters.f5tts.checkpoint import PREFIX
from voicehub_aot.adapters.f5tts.dit import DiT, DiTConfig, Modulation

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out
from voice import BINS, FOLDER, HOP, PAUSE, SAMPLE_RATE, WORDS, log_mel

VOICES = ("en-us+f2", "en-us+f5")
RATES, PITCHES = (130, 155), (30, 70)  # words a minute, and espeak-ng's scale of 0 to 100
LEAD_S = 0.1  # silence before and after the words
VALIDATION = 64  # the last utterances of the corpus


@dataclass(frozen=True)
class Settings:
    """What decides the result; a state that was made with other settings is not resumed."""

    utterances: int = 1200
    steps: int = 3000
    batch: int = 8
    rate: float = 1.5e-3
    warm_up: int = 200
    decay: float = 0.998  # of the averaged weights
    every: int = 250  # steps between two looks at the validation set and two states
    seed: int = 0


# --- the corpus


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
            raise SystemExit("train.py: espeak-ng is missing; pip install espeakng-loader") from error
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
            raise SystemExit(f"train.py: espeak-ng does not know the voice {voice!r}")
        for parameter, value in ((self.RATE, rate), (self.PITCH, pitch), (self.GAP, 4)):
            self.library.espeak_SetParameter(parameter, value, 0)
        content = text.encode()
        self.library.espeak_Synth(content, len(content) + 1, 0, 1, 0, 1, None, None)
        return torch.tensor(self.samples, dtype=torch.float32) / 32768, self.events


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


def corpus(settings: Settings, file: Path) -> list[Utterance]:
    """Reads the file if it was made with the same seed and size, else speaks everything and writes it."""
    made_with = json.dumps([settings.utterances, settings.seed, VOICES, RATES, PITCHES])
    if file.exists():
        with safe_open(file, framework="pt") as content:
            metadata = content.metadata()
            if metadata["made_with"] == made_with:
                spoken = json.loads(metadata["spoken"])
                return [Utterance(text, content.get_tensor(str(i)), spans) for i, (text, spans) in enumerate(spoken)]
    espeak, speakers = Espeak(settings.seed), random.Random(settings.seed + 1)
    texts = sentences(settings.utterances, random.Random(settings.seed))
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


@dataclass(frozen=True)
class Batch:
    """mel: [B, T, BINS] normalised; ids: [B, T], -1 = padding; lengths: [B]."""

    mel: Tensor
    ids: Tensor
    lengths: Tensor


class Data:
    """The utterances as tensors, and the batches of each step."""

    def __init__(self, utterances: list[Utterance], phones: dict[str, int], scale: dict[str, Tensor]) -> None:
        self.mels = [(u.mel - scale["mean"]) / scale["deviation"] for u in utterances]
        self.ids = [torch.tensor([phones[p] for _, p, n in u.spans for _ in range(n)]) for u in utterances]

    def batch(self, rows: list[int]) -> Batch:
        pad = nn.utils.rnn.pad_sequence
        mel = pad([self.mels[row] for row in rows], batch_first=True)
        ids = pad([self.ids[row] for row in rows], batch_first=True, padding_value=-1)
        return Batch(mel, ids, torch.tensor([len(self.ids[row]) for row in rows]))

    def step(self, step: int, settings: Settings) -> Batch:
        """Rows of about one length; every utterance once an epoch, in another order each time."""
        size = settings.batch
        epoch, place = divmod(step, max(1, len(self.ids) // size))
        rng = random.Random(f"{settings.seed} {epoch}")
        order = sorted(range(len(self.ids)), key=lambda row: len(self.ids[row]) + 10 * rng.random())
        groups = [order[at : at + size] for at in range(0, len(order) - size + 1, size)] or [order]
        rng.shuffle(groups)
        return self.batch(groups[place])


# --- training


def network(config: DiTConfig, seed: int) -> DiT:
    """As upstream begins: modulations and the last projection are zero, so that every block starts as the identity."""
    torch.manual_seed(seed)
    net = DiT(config)
    silent = [module.linear for module in net.modules() if isinstance(module, Modulation)] + [net.proj_out]
    for linear in silent:
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    return net


def loss(net: nn.Module, batch: Batch, generator: torch.Generator) -> Tensor:
    """Conditional flow matching on the frames that are to be filled in; 0 = noise, 1 = data.

    0.2 of the rows lose text and prompt, a further half the prompt alone; the others keep up to 30 % of their frames.
    """
    B, T, _ = batch.mel.shape
    uniform = torch.rand(4, B, generator=generator)
    times = (torch.randperm(B, generator=generator) + uniform[0]) / B  # stratified over the rows
    noise = torch.randn(batch.mel.shape, generator=generator)
    at = times[:, None, None]
    neither, no_prompt = uniform[1] < 0.2, uniform[1] < 0.7
    share = torch.where(no_prompt, torch.ones(B), 0.7 + 0.3 * uniform[2])
    first, count = uniform[3] * (1 - share) * batch.lengths, share * batch.lengths
    position = torch.arange(T)
    hidden = (position >= first[:, None]) & (position < (first + count)[:, None])
    velocity, _ = net(
        x=(1 - at) * noise + at * batch.mel,
        time=times,
        cond=batch.mel.masked_fill(hidden[..., None], 0.0),
        text=batch.ids,
        lengths=batch.lengths,
        extent=batch.lengths,
        drop_audio=no_prompt,
        drop_text=neither,
    )
    error = (velocity - (batch.mel - noise)).square().mean(-1)
    return error[hidden].mean()


def learning_rate(step: int, settings: Settings) -> float:
    """A linear rise, then half a cosine down to zero."""
    rise = min(1.0, (step + 1) / settings.warm_up)
    return settings.rate * rise * 0.5 * (1 + math.cos(math.pi * step / settings.steps))


class Trainer:
    def __init__(self, config: DiTConfig, settings: Settings, file: Path) -> None:
        self.settings, self.file, self.done = settings, file, 0
        self.net, self.averaged = network(config, settings.seed), network(config, settings.seed).requires_grad_(False)
        self.optimiser = torch.optim.AdamW(self.net.parameters(), betas=(0.9, 0.99), weight_decay=0.01)

    def resume(self) -> None:
        if not self.file.exists():
            return
        state = torch.load(self.file, weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise SystemExit(f"train.py: {self.file} was made with {state['settings']}; give another --work")
        self.done = state["done"]
        for name in ("net", "averaged", "optimiser"):
            getattr(self, name).load_state_dict(state[name])

    def save(self) -> None:
        state = {name: getattr(self, name).state_dict() for name in ("net", "averaged", "optimiser")}
        partial = self.file.with_suffix(".partial")
        torch.save({**state, "done": self.done, "settings": asdict(self.settings)}, partial)
        partial.replace(self.file)

    def step(self, data: Data) -> float:
        """One step of the optimiser and of the averaged weights -> the loss."""
        settings, number = self.settings, self.done
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + number)
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(number, settings)
        value = loss(self.net, data.step(number, settings), generator)
        self.optimiser.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimiser.step()
        decay = min(settings.decay, (1 + number) / (10 + number))  # short at first: it forgets where it began
        with torch.no_grad():
            for average, weight in zip(self.averaged.parameters(), self.net.parameters(), strict=True):
                average.lerp_(weight, 1 - decay)
        self.done += 1
        return value.item()

    @torch.no_grad()
    def validate(self, data: Data) -> float:
        """The averaged weights' mean loss over all of `data`, always with the same noise and times."""
        size = self.settings.batch
        rows = sorted(range(len(data.ids)), key=lambda row: len(data.ids[row]))
        groups = [rows[at : at + size] for at in range(0, len(rows), size)]
        losses = [loss(self.averaged, data.batch(g), torch.Generator().manual_seed(i)) for i, g in enumerate(groups)]
        return torch.stack(losses).mean().item()


def write_voice(folder: Path, files: dict[str, Any], scale: dict[str, Tensor], net: nn.Module) -> None:
    """The five files that a request needs, the weights in bfloat16 under F5-TTS's own keys."""
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    save_file(scale, folder / "mel.safetensors")
    parameters = {PREFIX + key: weight.bfloat16() for key, weight in net.named_parameters()}
    tables = {PREFIX + key: table.clone() for key, table in net.named_buffers()}
    save_file(parameters | tables, folder / "model.safetensors")


def train(settings: Settings, work: Path, output: Path, sizes: dict[str, int] | None = None) -> float:
    """-> the last validation loss. sizes: of the network, other than the voice's own, for a trial."""
    work.mkdir(parents=True, exist_ok=True)
    utterances = corpus(settings, work / "corpus.safetensors")
    held_back = min(VALIDATION, len(utterances) // 2)
    vocabulary, durations = front_end(utterances)
    scale = statistics(utterances[:-held_back])
    chosen = {"dim": 192, "depth": 4, "heads": 3, "dim_head": 64, "ff_mult": 2, "text_dim": 64, "conv_layers": 2}
    values = {**chosen, **(sizes or {}), "mel_dim": BINS, "text_num_embeds": len(vocabulary["phones"])}
    learnt, judged = (
        Data(part, vocabulary["phones"], scale) for part in (utterances[:-held_back], utterances[-held_back:])
    )
    trainer = Trainer(f5tts.config_from(values), settings, work / "state.pt")
    trainer.resume()
    began, validation = time.perf_counter(), math.nan
    while trainer.done < settings.steps:
        value = trainer.step(learnt)
        if trainer.done % settings.every == 0 or trainer.done == settings.steps:
            validation = trainer.validate(judged)
            trainer.save()
            entry = {"step": trainer.done, "loss": value, "validation": validation, "s": time.perf_counter() - began}
            print(json.dumps(entry), file=sys.stderr, flush=True)
            with (work / "log.jsonl").open("a") as log:
                log.write(json.dumps(entry) + "\n")
    files = {"config.json": values, "vocabulary.json": vocabulary, "durations.json": durations}
    write_voice(output, files, scale, trainer.averaged)
    return validation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("demo/voice"), help="default %(default)s")
    parser.add_argument("--output", type=Path, default=FOLDER, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="default %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    torch.set_flush_denormal(True)
    train(Settings(steps=options.steps), options.work, options.output)


if __name__ == "__main__":
    main()
