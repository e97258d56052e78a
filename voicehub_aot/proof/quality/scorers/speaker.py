"""Is it the same speaker? Cosine similarity of Resemblyzer's embeddings; its weights lie in the wheel.

Source: Wan et al., Generalized end-to-end loss for speaker verification (arXiv 1710.10467). The package loads its file
with torch's default, which since torch 2.6 takes weights and nothing else.
"""

from __future__ import annotations

from voicehub_aot.proof.quality.clip import Clip
from voicehub_aot.proof.quality.measures import Measure, Score
from voicehub_aot.proof.quality.scorers import Hearing, Scored, missing
from voicehub_aot.proof.quality.utterances import UtteranceSet

NAME = "speaker"
EXTRA = "speaker"
ON_REQUEST = ""
MEASURES = (
    Measure(
        NAME, "cosine similarity of the speaker embeddings", "pair",
        "a twentieth of the way from the same recording to an unrelated one", slack=0.05, better="higher",
    ),
)  # fmt: skip
RATE_HZ = 16000


def open_scorer(utterances: UtteranceSet) -> Hearing:
    """Raises MissingDependency."""
    try:
        import resemblyzer
    except ImportError as error:
        raise missing(NAME, EXTRA, error) from error
    encoder = resemblyzer.VoiceEncoder("cpu", verbose=False)

    def hear(clip: Clip, reference: Clip) -> Scored:
        one, other = (encoder.embed_utterance(c.at(RATE_HZ).nan_to_num(0.0).numpy()) for c in (clip, reference))
        return Scored({NAME: Score(float(one @ other))})

    return hear
