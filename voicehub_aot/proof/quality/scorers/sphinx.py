"""Words that PocketSphinx hears with a closed grammar: any number of the set's words, in any order. Works offline.

A closed grammar fits every sound to one of its words, which hides part of the errors: use sentences of a few words,
and count insertions, as the rates here do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from voicehub_aot.errors import OptionUnsupported
from voicehub_aot.proof.quality.clip import Clip, pcm16
from voicehub_aot.proof.quality.scorers import Hearing, Scored, _words, missing
from voicehub_aot.proof.quality.utterances import UtteranceSet

NAME = "sphinx"
EXTRA = "hear"
ON_REQUEST = ""
MEASURES = _words.measures(NAME)
RATE_HZ = 16000  # of its acoustic model


def open_scorer(utterances: UtteranceSet) -> Hearing:
    """Raises MissingDependency, or OptionUnsupported without a grammar of words that its dictionary has."""
    try:
        import jiwer
    except ImportError as error:
        raise missing(NAME, EXTRA, error) from error
    hear_words = recogniser(utterances.grammar)

    def hear(clip: Clip, reference: Clip) -> Scored:
        heard = hear_words(clip)
        return Scored(_words.error_rates(NAME, clip.text, heard, jiwer), heard)

    return hear


def recogniser(grammar: Sequence[str]) -> Callable[[Clip], str]:
    """A function that hears the words of a clip, all of them in the grammar. Raises as `open_scorer` does."""
    try:
        import pocketsphinx
    except ImportError as error:
        raise missing(NAME, EXTRA, error) from error
    if not grammar:
        raise OptionUnsupported(f"the scorer {NAME} needs a closed grammar; give the set its words: grammar = [...]")
    decoder = pocketsphinx.Decoder(lm=None, samprate=RATE_HZ, cmn="batch", loglevel="FATAL")
    unknown = [word for word in grammar if decoder.lookup_word(word) is None]
    if unknown:
        raise OptionUnsupported(f"the scorer {NAME} has no pronunciation of {unknown}; take them out of the grammar")
    decoder.add_jsgf_string(NAME, f"#JSGF V1.0; grammar words; public <words> = ({' | '.join(grammar)})+;")
    decoder.activate_search(NAME)

    def hear(clip: Clip) -> str:
        decoder.reinit_feat()  # or what it heard before changes what it hears
        decoder.start_utt()
        decoder.process_raw(pcm16(clip.at(RATE_HZ)), full_utt=True)
        decoder.end_utt()
        hypothesis = decoder.hyp()
        return hypothesis.hypstr if hypothesis is not None else ""

    return hear
