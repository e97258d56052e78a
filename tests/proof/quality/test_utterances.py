"""cases.toml and its entry: what is read, and what is said about everything that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from voicehub_aot.errors import UsageError
from voicehub_aot.proof.quality.utterances import UtteranceSet, load_entry, read_utterances, words

SET = 'entry = "voice.py"\n[[utterance]]\ntext = "window garden"\n'
VOICE = """
import torch
SAMPLE_RATE = 16000
def request(text): return {"text": torch.tensor([[len(text)]]), "lengths": [4]}
def vocode(latent, request): return torch.zeros(8)
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "cases.toml"
    file.write_text(text)
    return file


def test_a_set_is_read_with_its_defaults(tmp_path: Path) -> None:
    read = read_utterances(written(tmp_path, SET))
    assert (read.entry, read.grammar, read.seeds) == ("voice.py", (), (0, 1, 2))
    assert [(u.name, u.text) for u in read.utterances] == [("1 window garden", "window garden")]


def test_a_set_may_say_everything(tmp_path: Path) -> None:
    text = 'grammar = ["garden", "window"]\nseeds = [5, 7]\n' + SET + 'name = "first"\n'
    read = read_utterances(written(tmp_path, text))
    assert (read.grammar, read.seeds, read.utterances[0].name) == (("garden", "window"), (5, 7), "first")


def test_words_are_in_lower_case_without_punctuation() -> None:
    assert words("Don't stop, it's 5 o’clock!") == ["don't", "stop", "it's", "5", "o’clock"]  # noqa: RUF001
    assert words("ça va — bien_sûr") == ["ça", "va", "bien", "sûr"]
    assert words("… !") == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "entry: Field required"),
        ('entry = "voice.py"\n', "utterance: Field required"),
        ('entry = "voice.py"\nutterance = []\n', "utterance"),
        (SET + "text = 1\n", "Cannot overwrite"),
        ('entry = "voice.py"\n[[utterance]]\ntext = "..."\n', "has no word"),
        ('entry = "voice.py"\n[[utterance]]\nname = "x"\n', "utterance.0.text: Field required"),
        ("colour = 1\n" + SET, "colour"),
        ("seeds = [1]\n" + SET, "at least two different ones"),
        ("seeds = [1, 1]\n" + SET, "at least two different ones"),
        ("seeds = [1, -1]\n" + SET, "seeds.1"),
        ('grammar = ["window"]\n' + SET, "'garden', which the grammar lacks"),
        ('grammar = ["Window", "garden"]\n' + SET, "'Window' is not one word in lower case"),
        (SET + '[[utterance]]\ntext = "a"\nname = "x"\n' * 2, "two utterances are named 'x'"),
        ("\x00", "Invalid statement"),
    ],
)
def test_a_set_that_is_wrong_says_where(tmp_path: Path, text: str, problem: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(UsageError, match=r"cases\.toml: no set of utterances") as caught:
        read_utterances(file)
    assert problem in str(caught.value)


def test_a_set_that_is_absent_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_utterances(tmp_path / "cases.toml")


def test_a_set_cannot_be_changed() -> None:
    one = UtteranceSet.model_validate({"entry": "voice.py", "utterance": [{"text": "a"}]})
    with pytest.raises(ValueError, match="frozen"):
        one.entry = "other.py"


# --- the entry


def test_a_file_beside_the_set_is_the_entry(tmp_path: Path) -> None:
    (tmp_path / "voice.py").write_text(VOICE)
    entry = load_entry("voice.py", tmp_path)
    request = entry.request("abc")
    assert (entry.sample_rate, request["lengths"], request["text"].tolist()) == (16000, [4], [[3]])
    assert entry.vocode(torch.zeros(4, 2), request).shape == (8,)


def test_two_entries_of_one_file_name_are_two(tmp_path: Path) -> None:
    for rate in (8000, 16000):
        (tmp_path / str(rate)).mkdir()
        (tmp_path / str(rate) / "voice.py").write_text(VOICE.replace("16000", str(rate)))
    entries = [load_entry("voice.py", tmp_path / str(rate)) for rate in (8000, 16000)]
    assert [entry.sample_rate for entry in entries] == [8000, 16000]


def test_a_module_may_be_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_front_end.py").write_text(VOICE)
    monkeypatch.syspath_prepend(tmp_path)
    assert load_entry("some_front_end", Path("elsewhere")).sample_rate == 16000


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("raise RuntimeError('no weights')", "cannot be imported (RuntimeError: no weights)"),
        ("def request(:", "cannot be imported (SyntaxError"),
        (VOICE.replace("SAMPLE_RATE = 16000", ""), "SAMPLE_RATE is None, wanted an integer"),
        (VOICE.replace("16000", "16e3"), "SAMPLE_RATE is 16000.0, wanted an integer"),
        (VOICE.replace("16000", "True"), "SAMPLE_RATE is True, wanted an integer"),
        (VOICE.replace("16000", "7"), "SAMPLE_RATE is 7, wanted an integer"),
        (VOICE.replace("def request", "def requests"), "has no function request(text)"),
        (VOICE + "\nvocode = 3\n", "has no function vocode(latent, request)"),
    ],
)
def test_an_entry_that_is_wrong_says_what(tmp_path: Path, source: str, problem: str) -> None:
    (tmp_path / "voice.py").write_text(source)
    with pytest.raises(UsageError, match=r"voice\.py") as caught:
        load_entry("voice.py", tmp_path)
    assert problem in str(caught.value)


@pytest.mark.parametrize("name", ["absent.py", "absent_module"])
def test_an_entry_that_is_absent_says_so(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="wanted a file beside"):
        load_entry(name, tmp_path)


def entry_of(folder: Path, line: str) -> Any:
    (folder / "voice.py").write_text(f"{VOICE}\n{line}\n")
    return load_entry("voice.py", folder)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("def request(text): return 3", "gave a int, wanted a dict"),
        ("def request(text): return {1: 2}", "gave a dict, wanted a dict of names"),
        ("def request(text): return {'seed': 2}", "holds ['seed']"),
        ("def request(text): raise KeyError('x')", "request failed (KeyError: 'x')"),
    ],
)
def test_a_front_end_that_fails_is_named(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(UsageError, match=r"entry 'voice\.py'") as caught:
        entry_of(tmp_path, line).request("abc")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("def vocode(latent, request): return [0.0]", "gave list, wanted a tensor"),
        ("def vocode(latent, request): return torch.zeros(1, 8)", "gave float32 [1, 8]"),
        ("def vocode(latent, request): return torch.zeros(8).double()", "gave float64 [8]"),
        ("def vocode(latent, request): return torch.zeros(0)", "gave no samples"),
        ("def vocode(latent): pass", "vocode failed (TypeError"),
    ],
)
def test_a_vocoder_that_fails_is_named(tmp_path: Path, line: str, problem: str) -> None:
    with pytest.raises(UsageError, match=r"entry 'voice\.py'") as caught:
        entry_of(tmp_path, line).vocode(torch.zeros(1, 1), {})
    assert problem in str(caught.value)


def test_a_front_ends_own_words_are_kept(tmp_path: Path) -> None:
    line = "def request(text):\n    from voicehub_aot.errors import UsageError\n    raise UsageError('no such word')"
    with pytest.raises(UsageError, match=r"^no such word$"):
        entry_of(tmp_path, line).request("abc")
