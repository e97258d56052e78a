"""Error rates of what a recogniser heard."""

from __future__ import annotations

from typing import Any

from voicehub_aot.proof.quality.measures import Measure, Score
from voicehub_aot.proof.quality.utterances import words

_REASON = "the pooled rate of the same voice lies below its worst seed; 1.8 % more is four of 240 words"


def measures(recogniser: str) -> tuple[Measure, Measure]:
    """The two error rates of a recogniser. Both count insertions, so they may exceed 1."""
    word, character = (
        Measure(
            f"{recogniser}_{short}", f"{unit} error rate of what {recogniser} heard", "clip", _REASON,
            slack=0.018, counts_words=True, validates=True,
        )
        for short, unit in (("wer", "word"), ("cer", "character"))
    )  # fmt: skip
    return word, character


def error_rates(recogniser: str, text: str, heard: str, jiwer: Any) -> dict[str, Score]:
    """jiwer: the module. Rates weigh as many words, or characters, as the text has: their mean is all errors over all.

    WER = (substitutions + deletions + insertions) / words of the text.
    """
    wanted, got = " ".join(words(text)), " ".join(words(heard))
    return {
        f"{recogniser}_wer": Score(jiwer.wer(wanted, got), len(words(text))),
        f"{recogniser}_cer": Score(jiwer.cer(wanted, got), len(wanted)),
    }
