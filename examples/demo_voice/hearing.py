"""What a recogniser hears in the demo voice: pocketsphinx with a closed grammar, offline.

The grammar fits every sound to one of the voice's words, which hides part of the errors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from voicehub_aot.errors import MissingDependency

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves a script's own folder out
from voice import SAMPLE_RATE, WORDS


def recogniser() -> Callable[[Tensor], str]:
    """-> a function from samples in -1..1 to the words heard. Raises MissingDependency."""
    try:
        import pocketsphinx
    except ImportError as error:
        raise MissingDependency("hearing needs pocketsphinx; pip install 'voicehub-aot[hear]'") from error
    decoder = pocketsphinx.Decoder(lm=None, samprate=SAMPLE_RATE, cmn="batch", loglevel="FATAL")
    decoder.add_jsgf_string("words", f"#JSGF V1.0; grammar words; public <words> = ({' | '.join(WORDS)})+;")
    decoder.activate_search("words")

    def hear(samples: Tensor) -> str:
        decoder.start_utt()
        decoder.process_raw((samples * 32767).short().numpy().tobytes(), full_utt=True)
        decoder.end_utt()
        hypothesis = decoder.hyp()
        return hypothesis.hypstr if hypothesis is not None else ""

    return hear
