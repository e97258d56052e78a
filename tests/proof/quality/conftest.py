"""The voice of tones.py, as a side, and what goes with it."""

from __future__ import annotations

import pytest
import tones
import toy
from speech_faults import remembered

from voicehub_aot.proof.quality.scorers import OpenScorer
from voicehub_aot.proof.quality.side import Side
from voicehub_aot.proof.quality.utterances import Utterance
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.spec.schedule import linear
from voicehub_aot.spec.solver import euler

STEPS = (32, 16, 8, 4, 2, 1)


@pytest.fixture(scope="session")
def recogniser() -> OpenScorer:
    """Reads the words from the tones."""
    return OpenScorer("tone", (tones.TONE_WER,), tones.score)


@pytest.fixture(scope="session")
def utterances() -> list[Utterance]:
    texts = [" ".join(tones.WORDS[(n + 2 * k) % len(tones.WORDS)] for k in range(4)) for n in range(2)]
    return [Utterance(text=text, name=f"utterance {n}") for n, text in enumerate(texts)]


@pytest.fixture(scope="session")
def reference() -> Side:
    """32 steps, the model's own guidance, three seeds."""
    programs = [euler(linear(steps)) for steps in STEPS]
    runtime = eager_runtime(toy.region(), programs, "toy")
    return remembered(Side(runtime, runtime.program(32), tones.ENTRY, (0, 1, 2), name="toy.aot"))
