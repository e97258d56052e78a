"""Naturalness as DistillMOS predicts it: the mean opinion score, 1 to 5. Its weights lie in the wheel.

Source: Stahl and Gamper, Distillation and pruning for scalable self-supervised representation-based speech quality
assessment (arXiv 2502.05356). The package loads its weights, and nothing else, from the file. It normalises the level.
"""

from __future__ import annotations

import contextlib
import io

import torch

from voicehub_aot.proof.quality.clip import Clip
from voicehub_aot.proof.quality.measures import Measure, Score
from voicehub_aot.proof.quality.scorers import Hearing, Scored, missing
from voicehub_aot.proof.quality.utterances import UtteranceSet

NAME = "distillmos"
EXTRA = "distillmos"
ON_REQUEST = ""
MEASURES = (
    Measure(
        NAME, "predicted mean opinion score, 1 to 5", "clip",
        "a predicted score differs from listeners' by more than 0.1", slack=0.1, better="higher",
        validates=True,
    ),
)  # fmt: skip
RATE_HZ = 16000


def open_scorer(utterances: UtteranceSet) -> Hearing:
    """Raises MissingDependency, too for a torchaudio that does not belong to this torch."""
    try:
        import distillmos

        with contextlib.redirect_stdout(io.StringIO()):  # it prints where its weights lie
            model = distillmos.ConvTransformerSQAModel().eval()
    except (ImportError, OSError) as error:
        raise missing(NAME, EXTRA, error) from error

    def hear(clip: Clip, reference: Clip) -> Scored:
        with torch.no_grad():
            return Scored({NAME: Score(model(clip.at(RATE_HZ).nan_to_num(0.0)[None]).item())})

    return hear
