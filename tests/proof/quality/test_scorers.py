"""The scorers: which are opened, what is said of the others, and that the recogniser recognises nothing in noise."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from voicehub_aot.errors import MissingDependency, OptionUnsupported
from voicehub_aot.proof.quality import scorers
from voicehub_aot.proof.quality.clip import Clip
from voicehub_aot.proof.quality.scorers import _words, dnsmos, pitch, speaker, whisper
from voicehub_aot.proof.quality.utterances import UtteranceSet

PACKAGES = {
    "sphinx": "pocketsphinx", "whisper": "whisper", "dnsmos": "speechmos", "distillmos": "distillmos",
    "speaker": "resemblyzer", "pitch": "librosa",
}  # fmt: skip
WORDS = ("window", "garden")


def utterances(grammar: tuple[str, ...] = WORDS) -> UtteranceSet:
    return UtteranceSet.model_validate(
        {"entry": "voice.py", "grammar": grammar, "utterance": [{"text": "window garden"}]}
    )


def noise(seed: int = 0) -> Clip:
    samples = 0.1 * torch.randn(16000, generator=torch.Generator().manual_seed(seed))
    return Clip("window garden", samples, 16000)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES.values():
        monkeypatch.setitem(sys.modules, package, None)


def test_every_scorer_has_what_is_asked_of_one() -> None:
    assert sorted(PACKAGES) == scorers.names()
    for name in scorers.names():
        scorer = scorers.get(name)
        assert name == scorer.NAME
        assert scorer.MEASURES
        assert len({measure.kind for measure in scorer.MEASURES}) == 1
        assert all(measure.reason and measure.slack > 0 for measure in scorer.MEASURES)


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("name", PACKAGES)
def test_a_scorer_that_was_asked_for_and_is_missing_names_its_extra(name: str) -> None:
    with pytest.raises(MissingDependency, match=rf"the scorer {name} lacks .* pip install 'voicehub-aot\[\w+\]'"):
        scorers.open_scorers([name], utterances())


@pytest.mark.usefixtures("nothing_installed")
def test_without_any_package_every_scorer_is_left_out_with_a_reason() -> None:
    opened, left_out = scorers.open_scorers(None, utterances())
    assert opened == ()
    assert sorted(left_out) == scorers.names()
    assert "asked for by name" in left_out["whisper"]
    assert "voicehub-aot[hear]" in left_out["sphinx"]


def test_a_scorer_that_is_not_known_lists_the_known_ones() -> None:
    with pytest.raises(OptionUnsupported, match=r"'ears' is not known; known are distillmos, dnsmos"):
        scorers.open_scorers(["ears"], utterances())


def test_others_than_those_asked_for_are_left_out() -> None:
    opened, left_out = scorers.open_scorers(["sphinx", "sphinx"], utterances())
    assert [scorer.name for scorer in opened] == ["sphinx"]
    assert left_out == dict.fromkeys((n for n in scorers.names() if n != "sphinx"), "was not asked for")


def test_the_recogniser_needs_a_grammar_of_words_that_it_knows() -> None:
    with pytest.raises(OptionUnsupported, match="needs a closed grammar"):
        scorers.open_scorers(["sphinx"], utterances(()))
    with pytest.raises(OptionUnsupported, match=r"no pronunciation of \['xyzzyq'\]"):
        scorers.open_scorers(["sphinx"], utterances((*WORDS, "xyzzyq")))
    assert "closed grammar" in scorers.open_scorers(None, utterances(()))[1]["sphinx"]


def test_the_recogniser_hears_no_words_in_noise_and_repeats_itself() -> None:
    (opened,), _ = scorers.open_scorers(["sphinx"], utterances())
    first, again = (opened.hear(noise(), noise()) for _ in range(2))
    assert first == again
    assert first.values["sphinx_wer"].value > 0.5
    assert set(first.heard.split()) <= set(WORDS)


def test_insertions_count() -> None:
    import jiwer

    rates = _words.error_rates("sphinx", "Window, garden!", "window garden garden garden", jiwer)
    assert rates["sphinx_wer"] == (1.0, 2)
    assert rates["sphinx_cer"].value > 1
    swapped = _words.error_rates("sphinx", "window garden river", "river garden window", jiwer)
    assert swapped["sphinx_wer"].value == pytest.approx(2 / 3)
    assert _words.error_rates("sphinx", "window garden", "", jiwer)["sphinx_wer"].value == 1.0


# --- scorers whose packages the tests do not install, over stand-ins for them


def test_dnsmos_reads_the_overall_score(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(samples: object, rate: int) -> dict[str, float]:
        seen.append((samples, rate))
        return {"ovrl_mos": 2.5, "sig_mos": 3.0}

    monkeypatch.setitem(sys.modules, "speechmos", SimpleNamespace(dnsmos=SimpleNamespace(run=run)))
    scored = dnsmos.open_scorer(utterances())(Clip("", torch.full((8000,), 3.0), 8000), noise())
    assert scored.values["dnsmos"].value == 2.5
    assert (len(seen[0][0]), max(seen[0][0]), seen[0][1]) == (16000, 1.0, 16000)  # type: ignore[arg-type, call-overload]


def test_the_speaker_is_compared_by_the_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = SimpleNamespace(embed_utterance=lambda samples: torch.tensor([0.6, 0.8]).numpy())
    package = SimpleNamespace(VoiceEncoder=lambda device, verbose: encoder)
    monkeypatch.setitem(sys.modules, "resemblyzer", package)
    assert speaker.open_scorer(utterances())(noise(), noise(1)).values["speaker"].value == pytest.approx(1.0)


def test_whisper_is_held_to_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(transcribe=lambda samples, **_: {"text": " Window, garden."})
    monkeypatch.setitem(sys.modules, "whisper", SimpleNamespace(load_model=lambda name, device: model))
    scored = whisper.open_scorer(utterances())(noise(), noise())
    assert (scored.heard, scored.values["whisper_wer"].value) == ("Window, garden.", 0.0)


def test_an_octave_is_twelve_semitones_and_a_lost_voice_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def pyin(samples: torch.Tensor, **_: object) -> tuple[object, object, None]:
        hertz = torch.full((9,), 1000 * float(max(samples))).numpy()
        return hertz, hertz > 0, None

    monkeypatch.setitem(sys.modules, "librosa", SimpleNamespace(pyin=pyin))
    hear = pitch.open_scorer(utterances())
    low, high, mute = (Clip("", torch.full((100,), level), 16000) for level in (0.1, 0.2, 0.0))
    assert hear(high, low).values["pitch"].value == pytest.approx(12)
    assert hear(mute, low).values["pitch"].value == float("inf")
    assert hear(high, mute).values["pitch"].weight == 0
