"""Naturalness as DNSMOS predicts it: the overall opinion score, 1 to 5. Its weights lie in the wheel `speechmos`.

Source: Reddy et al., DNSMOS P.835 (arXiv 2110.01763). It was made for noisy recordings: it hears hiss better than a
lost word.
"""

from __future__ import annotations

from voicehub_aot.proof.quality.clip import Clip
from voicehub_aot.proof.quality.measures import Measure, Score
from voicehub_aot.proof.quality.scorers import Hearing, Scored, missing
from voicehub_aot.proof.quality.utterances import UtteranceSet

NAME = "dnsmos"
EXTRA = "dnsmos"
ON_REQUEST = ""
MEASURES = (
    Measure(
        NAME, "predicted opinion score of the whole, 1 to 5", "clip",
        "a predicted score differs from listeners' by more than 0.1", slack=0.1, better="higher",
        validates=True,
    ),
)  # fmt: skip
RATE_HZ = 16000


def open_scorer(utterances: UtteranceSet) -> Hearing:
    """Raises MissingDependency."""
    try:
        from speechmos import dnsmos
    except ImportError as error:
        raise missing(NAME, EXTRA, error) from error

    def hear(clip: Clip, reference: Clip) -> Scored:
        samples = clip.at(RATE_HZ).nan_to_num(0.0).clamp(-1.0, 1.0).numpy()
        return Scored({NAME: Score(float(dnsmos.run(samples, RATE_HZ)["ovrl_mos"]))})

    return hear
