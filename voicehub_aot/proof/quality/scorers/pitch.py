"""The fundamental frequency, by librosa's pYIN: how far the medians of two clips lie apart.

Source: Mauch and Dixon, pYIN (ICASSP 2014). An own estimator would be one more thing to doubt: without librosa the
measure is left out.
"""

from __future__ import annotations

import math
from typing import Any

from voicehub_aot.proof.quality.clip import Clip
from voicehub_aot.proof.quality.measures import Measure, Score
from voicehub_aot.proof.quality.scorers import Hearing, Scored, missing
from voicehub_aot.proof.quality.utterances import UtteranceSet

NAME = "pitch"
EXTRA = "pitch"
ON_REQUEST = ""
MEASURES = (
    Measure(
        NAME, "difference of the median fundamental frequencies, semitones", "pair",
        "half a semitone in the median of a short sentence is intonation", slack=0.5,
    ),
)  # fmt: skip
LOWEST_HZ, HIGHEST_HZ = 60.0, 500.0
RATE_HZ = 16000


def open_scorer(utterances: UtteranceSet) -> Hearing:
    """Raises MissingDependency."""
    try:
        import librosa
    except ImportError as error:
        raise missing(NAME, EXTRA, error) from error

    def hear(clip: Clip, reference: Clip) -> Scored:
        return Scored({NAME: _semitones(_median_hz(clip, librosa), _median_hz(reference, librosa))})

    return hear


def _median_hz(clip: Clip, librosa: Any) -> float | None:
    """Over the voiced frames; None where there are none."""
    import numpy as np

    samples = clip.at(RATE_HZ).nan_to_num(0.0).numpy()
    hertz, voiced, _ = librosa.pyin(samples, fmin=LOWEST_HZ, fmax=HIGHEST_HZ, sr=RATE_HZ)
    return float(np.median(hertz[voiced])) if voiced.any() else None


def _semitones(got: float | None, want: float | None) -> Score:
    """Without a voiced reference there is nothing to compare; a voice that is lost is infinitely far."""
    if want is None:
        return Score(0.0, 0.0)
    return Score(12 * math.log2(got / want) if got is not None else math.inf)
