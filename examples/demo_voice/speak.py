"""Speaks words with the demo voice's artifact and writes a WAV.

    voicehub-aot build f5tts --config examples/demo_voice/config.json \\
        --checkpoint examples/demo_voice/model.safetensors --buckets frames=128,256 text=256 --steps 8 \\
        -o demo/demo_voice.aot
    python examples/demo_voice/speak.py "yellow river garden" --output hello.wav --artifact demo/demo_voice.aot
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from torch import Tensor

import voicehub_aot
from voicehub_aot.errors import AotError, MissingDependency
from voicehub_aot.proof.quality.clip import Clip, wav
from voicehub_aot.proof.quality.scorers import sphinx

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out
from voice import GUIDANCE, SAMPLE_RATE, STEPS, WORDS, request, vocode


def speak(runtime: voicehub_aot.Runtime, text: str, seed: int, steps: int, guidance: float) -> tuple[Tensor, float]:
    """-> samples, and how many seconds denoising took."""
    asked = request(text)
    start = time.perf_counter()
    latent = runtime.sample(seed=seed, program=steps, guidance=guidance, **asked)
    denoising_s = time.perf_counter() - start
    return vocode(latent[0], asked), denoising_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="words that the voice knows")
    parser.add_argument("--output", type=Path, default=Path("hello.wav"), help="default %(default)s")
    parser.add_argument("--artifact", type=Path, default=Path("demo/demo_voice.aot"), help="default %(default)s")
    parser.add_argument("--program", type=int, default=STEPS, help="steps; default %(default)s")
    parser.add_argument("--guidance", type=float, default=GUIDANCE, help="scale, 0 = none; default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the noise; default %(default)s")
    options = parser.parse_args()
    runtime = voicehub_aot.load(options.artifact)
    speak(runtime, options.text, options.seed, options.program, options.guidance)  # the first reads weights from disk
    start = time.perf_counter()
    samples, denoising_s = speak(runtime, options.text, options.seed, options.program, options.guidance)
    whole_s = time.perf_counter() - start
    clip = Clip(options.text, samples, SAMPLE_RATE)
    options.output.write_bytes(wav(clip))
    length_s = len(samples) / SAMPLE_RATE
    print(f"asked  {options.text}, {options.program} steps at guidance {options.guidance:g}")
    try:
        print(f"heard  {sphinx.recogniser(WORDS)(clip)}")
    except MissingDependency as error:
        print(f"heard  not known: {error}")
    print(f"RTF    {whole_s / length_s:.3f} whole, {denoising_s / length_s:.3f} denoising, {length_s:.2f} s of speech")
    print(f"file   {options.output.resolve()}")


if __name__ == "__main__":
    try:
        main()
    except AotError as error:
        sys.exit(f"speak.py: {error}")
