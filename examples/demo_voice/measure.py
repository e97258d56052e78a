"""Word error rate of the demo voice over the sentences of cases.toml, eager in float32, for steps and guidance scales.

python examples/demo_voice/measure.py --steps 16,8,4,2 --guidance 1
python examples/demo_voice/measure.py --floor     # the recogniser's own: espeak-ng's speech through the vocoder
"""

from __future__ import annotations

import argparse
import random
import sys
import tomllib
from pathlib import Path

import jiwer
import torch

from voicehub_aot.compiler import models
from voicehub_aot.proof.quality.clip import Clip
from voicehub_aot.proof.quality.scorers import sphinx
from voicehub_aot.runtime.eager import eager_runtime

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out
from corpus import Espeak, record
from voice import FOLDER, GUIDANCE, SAMPLE_RATE, WORDS, request, vocode, waveform


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def spoken(texts: list[str], seeds: list[int], steps: int, guidance: float, folder: Path) -> list[str]:
    """What is heard of every text, seed by seed."""
    model = models.resolve("f5tts", str(folder / "config.json"), str(folder / "model.safetensors"))
    runtime = eager_runtime(model.region, [models.program(model, steps)], "demo voice")
    hear, heard = sphinx.recogniser(WORDS), []
    for seed in seeds:
        for text in texts:
            asked = request(text)
            samples = vocode(runtime.sample(seed=seed, guidance=guidance, **asked)[0], asked)
            heard.append(hear(Clip(text, samples, SAMPLE_RATE)))
    return heard


def recorded(texts: list[str], seeds: list[int]) -> list[str]:
    """What is heard of espeak-ng's own speech once it has been a mel spectrogram."""
    espeak, hear = Espeak(seed=0), sphinx.recogniser(WORDS)
    speakers = [random.Random(seed) for seed in seeds]
    clips = (Clip(text, waveform(record(espeak, text, rng).mel), SAMPLE_RATE) for rng in speakers for text in texts)
    return [hear(clip) for clip in clips]


def show(name: str, texts: list[str], seeds: list[int], heard: list[str]) -> None:
    """The pooled rate, and that of every seed."""
    found = jiwer.process_words(texts * len(seeds), heard)
    faults = f"{found.substitutions} substituted, {found.deletions} lost, {found.insertions} inserted"
    parts = [heard[at : at + len(texts)] for at in range(0, len(heard), len(texts))]
    alone = ", ".join(f"{100 * jiwer.wer(texts, part):.1f}" for part in parts)
    print(f"{name}: WER {100 * found.wer:.1f} % ({faults}; by seed {alone})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=numbers, default=[16, 8, 4, 2], help="default %(default)s")
    parser.add_argument("--guidance", type=numbers, default=[GUIDANCE], help="default %(default)s")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="with config.json and model.safetensors")
    parser.add_argument("--floor", action="store_true", help="of espeak-ng's own speech; needs espeakng-loader")
    options = parser.parse_args()
    cases = tomllib.loads((FOLDER / "cases.toml").read_text(encoding="utf-8"))
    texts, seeds = [utterance["text"] for utterance in cases["utterance"]], cases["seeds"]
    torch.set_num_threads(1)
    if options.floor:
        show("espeak-ng", texts, seeds, recorded(texts, seeds))
        return
    for guidance in options.guidance:
        for steps in map(int, options.steps):
            heard = spoken(texts, seeds, steps, guidance, options.folder)
            show(f"{steps} steps, guidance {guidance:g}", texts, seeds, heard)


if __name__ == "__main__":
    main()
