"""What the sampling loops of Echo-TTS and Irodori-TTS share: times and the guidance window.

Facts from jordandare/echo-tts 230202af252e30a692a6f6310789ad212f83e2bb, inference.py, and Aratako/Irodori-TTS
eaf74d6a19138f743acb5b71a445fd25a57db987, irodori_tts/rf.py. Grids are float32 and run from 0.999 to 0.
"""

from __future__ import annotations

from voicehub_aot.errors import OptionUnsupported

FIRST_TIME = 0.999  # so that the temporal score rescale is defined at the first step


def rescale(name: str, k: float | None, sigma: float | None) -> tuple[float, float] | None:
    """(k, sigma), or None: upstream takes both or neither."""
    if k is None or sigma is None:
        return None
    if not k > 0:
        raise OptionUnsupported(f"{name}: rescale_k={k!r}, wanted a positive number")
    return float(k), float(sigma)
