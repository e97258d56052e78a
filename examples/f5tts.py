"""F5-TTS as its authors run it, its transformer replaced by a built one.

    pip install f5-tts voicehub-aot
    voicehub-aot build f5tts --buckets 512,1024,2048 --steps 16 -o f5.aot
    python examples/f5tts.py reference.wav "What the reference says." "What to say." --artifact f5.aot

Text front end, prompt and vocoder are upstream's. They come from the hub, so this script was not run whole where it was
written; `sample` was, against upstream's own transformer (tests/oracle/test_examples.py).
"""

from __future__ import annotations

import argparse
import time
import wave
from pathlib import Path
from typing import Any

import torch

import voicehub_aot


def sample(cfm: Any, runtime: voicehub_aot.Runtime, *arguments: Any, **options: Any) -> torch.Tensor:
    """What `cfm.sample` gives for these arguments, with the built denoiser in its transformer's place.

    cfm: f5_tts.model.CFM. Returns the mel spectrogram, [B, frames, bins].
    """
    with runtime.attach(cfm, "transformer"):
        mel: torch.Tensor = cfm.sample(*arguments, **options)[0]
    return mel


def speak(
    tts: Any, runtime: voicehub_aot.Runtime, reference: Path, said: str, text: str, steps: int
) -> tuple[torch.Tensor, int]:
    """tts: f5_tts.api.F5TTS. Returns samples in -1 to 1, and how many of them are a second."""
    with runtime.attach(tts, "ema_model.transformer"):
        samples, rate, _ = tts.infer(str(reference), said, text, nfe_step=steps)
    return torch.as_tensor(samples), rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path, help="a recording of the voice")
    parser.add_argument("said", help="what the recording says")
    parser.add_argument("text", help="what to say")
    parser.add_argument("--artifact", type=Path, default=Path("f5.aot"), help="default %(default)s")
    parser.add_argument("--steps", type=int, default=16, help="a built step count; default %(default)s")
    parser.add_argument("--output", type=Path, default=Path("hello.wav"), help="default %(default)s")
    options = parser.parse_args()
    from f5_tts.api import F5TTS

    tts, runtime = F5TTS(device="cpu"), voicehub_aot.load(options.artifact, overflow="run")
    start = time.perf_counter()
    samples, rate = speak(tts, runtime, options.reference, options.said, options.text, options.steps)
    seconds = time.perf_counter() - start
    with wave.open(str(options.output), "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(rate)
        wav.writeframes((samples.clamp(-1, 1) * 32767).short().numpy().tobytes())
    print(f"RTF {seconds * rate / len(samples):.3f}, {len(samples) / rate:.2f} s of speech in {options.output}")


if __name__ == "__main__":
    main()
