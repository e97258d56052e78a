"""The demo voice: its files agree, its front end and vocoder do what they say, and it says what it is asked to say."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jiwer
import pytest
import torch
from conftest import Ran
from safetensors.torch import load_file

from voicehub_aot.compiler import models
from voicehub_aot.errors import UsageError
from voicehub_aot.proof.quality.clip import Clip
from voicehub_aot.proof.quality.scorers import sphinx
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.load import load

FOLDER = Path(__file__).parents[2] / "examples/demo_voice"
LARGEST = 8_000_000  # bytes of the checkpoint
LONGEST = 256  # frames that the demo builds
SENTENCE = "yellow elephant garden music"
MODULES = ("voice", "speak", "corpus", "train")


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the folder by name."""
    monkeypatch.syspath_prepend(FOLDER)

    def named(name: str) -> ModuleType:
        assert name in MODULES
        return importlib.import_module(name)

    return named


@pytest.fixture
def cases() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "cases.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model() -> models.Model:
    return models.resolve("f5tts", str(FOLDER / "config.json"), str(FOLDER / "model.safetensors"))


# --- the files


def test_the_checkpoint_is_small_and_read_by_the_ordinary_adapter(model: models.Model) -> None:
    said = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))

    assert (FOLDER / "model.safetensors").stat().st_size <= LARGEST
    assert said.items() <= model.config.items()
    assert [note for note in model.checkpoint.notes if "sizes" in note] == []  # they are those of config.json


def test_the_weights_are_bfloat16_under_released_keys() -> None:
    weights = load_file(FOLDER / "model.safetensors")
    tables = {key for key in weights if key.endswith("inv_freq")}

    assert all(key.startswith("ema_model.transformer.") for key in weights)
    assert {weights[key].dtype for key in weights.keys() - tables} == {torch.bfloat16}
    assert all(weights[key].any() for key in weights)


def test_vocabulary_durations_statistics_and_config_agree(demo: Any, model: models.Model) -> None:
    voice = demo("voice")
    phones, words = voice.vocabulary()
    mean, deviation = voice.statistics()

    assert sorted(phones.values()) == list(range(model.config["text_num_embeds"]))
    assert tuple(words) == voice.WORDS
    assert {word: len(names) for word, names in words.items()} | {voice.PAUSE: 3} == {
        word: len(frames) for word, frames in voice.durations().items()
    }
    assert {phone for names in words.values() for phone in names} <= set(phones)
    assert mean.shape == deviation.shape == (voice.BINS,) == (model.config["mel_dim"],)
    assert (deviation > 0).all()


def test_the_gate_has_sixty_sentences_of_known_words(demo: Any, cases: dict[str, Any]) -> None:
    voice = demo("voice")
    texts = [utterance["text"] for utterance in cases["utterance"]]

    assert len(set(texts)) == 60
    assert all(3 <= len(text.split()) <= 5 for text in texts)
    assert tuple(cases["grammar"]) == voice.WORDS
    assert Counter(word for text in texts for word in text.split()).keys() == set(voice.WORDS)


def test_no_sentence_of_the_gate_is_trained_on(
    demo: Any, cases: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, texts = demo("corpus"), {utterance["text"] for utterance in cases["utterance"]}
    settings = demo("train").Settings()

    trained_on = list(corpus.sentences(settings.utterances, random.Random(settings.seed)))
    many = set(corpus.sentences(20_000, random.Random(settings.seed)))
    monkeypatch.setattr(corpus, "gate_sentences", set)
    unfiltered = set(corpus.sentences(20_000, random.Random(settings.seed)))

    assert len(trained_on) == settings.utterances
    assert texts & {*trained_on, *many} == set()
    assert texts & unfiltered  # so many are drawn that some of the gate's would be among them


# --- the front end


def test_requests_are_deterministic_and_frame_aligned(demo: Any) -> None:
    voice = demo("voice")
    first, second = voice.request(SENTENCE), voice.request(SENTENCE.upper())

    assert first["lengths"] == [first["text"].shape[1]] == [first["cond"].shape[1]]
    assert torch.equal(first["text"], second["text"])
    assert not first["cond"].any()


def test_the_longest_sentence_of_five_words_fits_the_demo(demo: Any) -> None:
    voice = demo("voice")
    assert max(len(voice.tokens(" ".join([word] * 5))) for word in voice.WORDS) <= LONGEST


@pytest.mark.parametrize(("text", "named"), [("yellow submarine", "'submarine'"), ("", "no words"), ("  ", "no words")])
def test_what_the_voice_cannot_say_is_refused(demo: Any, text: str, named: str) -> None:
    with pytest.raises(UsageError, match=f"{named}.*it speaks window, garden"):
        demo("voice").request(text)


# --- the vocoder


def harmonics(rate: int, pitch_hz: float = 200.0) -> torch.Tensor:
    """A second of a vowel-like tone, root mean square 0.1."""
    seconds = torch.arange(rate) / rate
    tone = torch.stack([torch.sin(2 * torch.pi * n * pitch_hz * seconds) / n for n in range(1, 20)]).sum(0)
    return 0.1 * tone / tone.square().mean().sqrt()


def test_the_vocoder_keeps_length_level_and_spectrum(demo: Any) -> None:
    voice = demo("voice")
    audio = harmonics(voice.SAMPLE_RATE)
    mean, deviation = voice.statistics()
    latent = (voice.log_mel(audio) - mean) / deviation

    rebuilt = voice.vocode(latent, {})

    assert rebuilt.shape == ((len(latent) - 1) * voice.HOP,)
    assert rebuilt.dtype == torch.float32
    assert rebuilt.isfinite().all()
    assert rebuilt.square().mean().sqrt().item() == pytest.approx(0.1, rel=0.15)
    loud = voice.log_mel(audio) > 0  # the harmonics; between them Griffin-Lim leaves noise
    assert (voice.log_mel(rebuilt) - voice.log_mel(audio))[loud].abs().mean() < 0.2


def test_what_is_far_out_stays_a_waveform(demo: Any) -> None:
    voice = demo("voice")
    samples = voice.vocode(torch.full((20, voice.BINS), 9.0), {})
    assert samples.isfinite().all()
    assert samples.abs().max() <= 1


# --- speaking


def heard(demo: Any, samples: torch.Tensor) -> str:
    voice = demo("voice")
    return sphinx.recogniser(voice.WORDS)(Clip(SENTENCE, samples, voice.SAMPLE_RATE))


def test_the_recogniser_hears_the_words(demo: Any, model: models.Model) -> None:
    voice, speak = demo("voice"), demo("speak")
    runtime = eager_runtime(model.region, [models.program(model, voice.STEPS)], "demo voice")

    samples, _ = speak.speak(runtime, SENTENCE, 0, voice.STEPS, voice.GUIDANCE)

    assert len(samples) == (voice.request(SENTENCE)["lengths"][0] - 1) * voice.HOP
    assert jiwer.wer(SENTENCE, heard(demo, samples)) <= 0.25


@pytest.mark.slow
def test_the_artifact_speaks(command: Any, demo: Any, tmp_path: Path) -> None:
    artifact = tmp_path / "voice.aot"
    built: Ran = command(
        "build", "f5tts", "--config", FOLDER / "config.json", "--checkpoint", FOLDER / "model.safetensors",
        "--buckets", "frames=128,256", "--buckets", "text=256", "--steps", "8", "-o", artifact,
    )  # fmt: skip
    assert built.code == 0, built.err

    samples, _ = demo("speak").speak(load(artifact), SENTENCE, 0, 8, demo("voice").GUIDANCE)

    assert jiwer.wer(SENTENCE, heard(demo, samples)) <= 0.25


# --- training

TINY = {"dim": 32, "depth": 1, "heads": 1, "dim_head": 16, "text_dim": 16, "conv_layers": 1}


def test_training_runs_end_to_end_and_resumes_to_the_same_result(
    demo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("espeakng_loader", reason="training needs espeak-ng: pip install espeakng-loader")
    train = demo("train")
    settings = train.Settings(utterances=2, steps=2, batch=1, every=1)
    for name in ("whole", "resumed", "other"):
        (tmp_path / name).mkdir()
    train.train(settings, tmp_path / "work", tmp_path / "whole", TINY)
    shutil.copy(tmp_path / "work/corpus.safetensors", tmp_path / "other")  # espeak-ng goes on where it stopped

    with monkeypatch.context() as patch:
        step = train.Trainer.step
        patch.setattr(train.Trainer, "step", lambda self, data: 1 / 0 if self.done else step(self, data))
        with pytest.raises(ZeroDivisionError):
            train.train(settings, tmp_path / "other", tmp_path / "resumed", TINY)
    assert list((tmp_path / "resumed").iterdir()) == []
    train.train(settings, tmp_path / "other", tmp_path / "resumed", TINY)

    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == ["config.json", "durations.json", "mel.safetensors", "model.safetensors", "vocabulary.json"]
    for name in files:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes(), name
    with pytest.raises(SystemExit, match="give another --work"):
        train.train(replace(settings, steps=3), tmp_path / "work", tmp_path / "whole", TINY)
