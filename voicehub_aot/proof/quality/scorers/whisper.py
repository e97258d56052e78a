"""Words that Whisper hears (package openai-whisper), for texts without a closed grammar.

It was not run by this project's tests: its models are no part of its package, and are downloaded by it.
"""

from __future__ import annotations

from voicehub_aot.proof.quality.clip import Clip
from voicehub_aot.proof.quality.scorers import Hearing, Scored, _words, missing
from voicehub_aot.proof.quality.utterances import UtteranceSet

NAME = "whisper"
EXTRA = "whisper"
ON_REQUEST = "is opened where it is asked for by name: its package may download the model"
MEASURES = _words.measures(NAME)
MODEL = "base.en"
RATE_HZ = 16000


def open_scorer(utterances: UtteranceSet) -> Hearing:
    """Raises MissingDependency."""
    try:
        import jiwer
        import whisper
    except ImportError as error:
        raise missing(NAME, EXTRA, error) from error
    model = whisper.load_model(MODEL, device="cpu")

    def hear(clip: Clip, reference: Clip) -> Scored:
        heard = model.transcribe(clip.at(RATE_HZ).numpy(), language="en", temperature=0.0, fp16=False)["text"]
        return Scored(_words.error_rates(NAME, clip.text, heard, jiwer), heard.strip())

    return hear
