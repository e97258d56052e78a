"""Makes the demo voice from nothing: espeak-ng speaks, F5-TTS's own network learns, five files are written.

    pip install espeakng-loader
    python examples/demo_voice/train.py --work demo/voice

The recordings and the state of training lie in --work, so that a run which was interrupted goes on from there to the
same result. Every random number comes from a seed and the number of the step.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from voicehub_aot.adapters import f5tts
from voicehub_aot.adapters.f5tts.checkpoint import PREFIX
from voicehub_aot.adapters.f5tts.dit import DiT, DiTConfig, Modulation

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out
from corpus import Utterance, corpus, front_end, statistics
from voice import BINS, FOLDER

VALIDATION = 64  # the last utterances of the corpus
SIZES = {"dim": 192, "depth": 4, "heads": 3, "dim_head": 64, "ff_mult": 2, "text_dim": 64, "conv_layers": 2}


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


# --- batches


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


def write_log(file: Path, entry: dict[str, float]) -> None:
    """A line of the log, and on stderr. s: seconds since this run began."""
    line = json.dumps(entry)
    print(line, file=sys.stderr, flush=True)
    with file.open("a", encoding="utf-8") as log:
        log.write(line + "\n")


def write_voice(folder: Path, files: dict[str, Any], scale: dict[str, Tensor], net: nn.Module) -> None:
    """The five files that a request needs, the weights in bfloat16 under F5-TTS's own keys."""
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    save_file(scale, folder / "mel.safetensors")
    parameters = {PREFIX + key: weight.bfloat16() for key, weight in net.named_parameters()}
    tables = {PREFIX + key: table.clone() for key, table in net.named_buffers()}
    save_file(parameters | tables, folder / "model.safetensors")


def train(settings: Settings, work: Path, output: Path, sizes: dict[str, int] | None = None) -> None:
    """sizes: of the network, other than the voice's own, for a trial."""
    work.mkdir(parents=True, exist_ok=True)
    utterances = corpus(settings.utterances, settings.seed, work / "corpus.safetensors")
    held_back = min(VALIDATION, len(utterances) // 2)
    vocabulary, durations = front_end(utterances)
    scale = statistics(utterances[:-held_back])
    values = {**SIZES, **(sizes or {}), "mel_dim": BINS, "text_num_embeds": len(vocabulary["phones"])}
    parts = utterances[:-held_back], utterances[-held_back:]
    learnt, judged = (Data(part, vocabulary["phones"], scale) for part in parts)
    trainer = Trainer(f5tts.config_from(values), settings, work / "state.pt")
    trainer.resume()
    began = time.perf_counter()
    while trainer.done < settings.steps:
        value = trainer.step(learnt)
        if trainer.done % settings.every == 0 or trainer.done == settings.steps:
            entry = {"step": trainer.done, "loss": value, "validation": trainer.validate(judged)}
            write_log(work / "log.jsonl", {**entry, "s": time.perf_counter() - began})
            trainer.save()
    files = {"config.json": values, "vocabulary.json": vocabulary, "durations.json": durations}
    write_voice(output, files, scale, trainer.averaged)


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
