"""`voicehub-aot evaluate` on a tiny artifact with synthetic weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from conftest import Ran

from voicehub_aot.artifacts import quality

Command = Callable[..., Ran]
ALONE = ("--threads", 1)
VOICE = """
import torch

SAMPLE_RATE = 16000


def request(text):
    generator = torch.Generator().manual_seed(len(text))
    embedded = torch.randn(1, 24, len(text), generator=generator)
    style = torch.randn(1, 7, 24, generator=torch.Generator().manual_seed(0))
    return {"text_emb": embedded, "style_ttl": style, "lengths": [16]}


def vocode(latent, request):  # latent: [12, frames]
    times = torch.arange(16 * 256) / SAMPLE_RATE
    tones = torch.sin(2 * torch.pi * 200 * torch.arange(1, 13)[:, None] * times)
    return 0.02 * (latent.repeat_interleave(256, 1) * tones).sum(0)
"""
CASES = """
entry = "voice.py"
seeds = [0, 1]

[[utterance]]
text = "a window"

[[utterance]]
text = "the garden"
name = "second"
"""


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    (tmp_path / "voice.py").write_text(VOICE)
    file = tmp_path / "cases.toml"
    file.write_text(CASES)
    return file


def test_the_reference_against_itself_is_accepted_and_reported(
    supertonic_packed: Path, command: Command, cases: Path, tmp_path: Path
) -> None:
    report, page, suite = (tmp_path / name for name in ("quality.json", "quality.html", "quality.xml"))
    ran = command(
        "evaluate", supertonic_packed, "--cases", cases, *ALONE,
        "--report", report, "--html", page, "--junit", suite, "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    document = ran.document
    assert document["verdict"] == "accepted"
    assert document["candidate"]["program"] == document["reference"]["program"] == "euler-3"
    assert document["quality_validated"] is False
    assert {m["name"]: m["value"] for m in document["measures"]}["latent"] == 0.0
    assert json.loads(report.read_text()) == document
    assert quality.read_json(report).names == ["1 a window", "second"]
    assert page.read_text().count("<audio ") == 4
    assert ElementTree.fromstring(suite.read_text()).get("failures") == "0"
    assert "1 of 2  1 a window: log-mel distance 0" in ran.err
    assert "2 of 2  second" in ran.err


def test_fewer_steps_of_random_weights_are_rejected_with_their_own_exit_code(
    supertonic_packed: Path, command: Command, cases: Path
) -> None:
    arguments = ("evaluate", supertonic_packed, "--cases", cases, "--program", 2, "--limit", 1, *ALONE)
    bound = ("--bound", "latent=1e-6", "--because", "a trial")
    ran = command(*arguments, *bound, "--json")
    assert ran.code == 7
    assert ran.document["verdict"] == "rejected"
    assert ran.document["because"] == "a trial"
    assert (ran.document["candidate"]["steps"], ran.document["reference"]["steps"]) == (2, 3)
    assert "latent is " in ran.err
    assert "set by hand; without it" in ran.err
    shown = command(*arguments, *bound)
    assert shown.code == 7
    assert "verdict: rejected" in shown.out
    assert "quality is not validated" in shown.err


def test_an_approximation_that_saves_nothing_has_an_exit_code_of_its_own(
    supertonic_packed: Path, command: Command, cases: Path
) -> None:
    """As many evaluations with other guidance; the bounds let it pass. Time cannot be saved where both do the same."""
    names = ("latent", "log_mel", "level_db")
    bounds = [argument for name in names for argument in ("--bound", f"{name}=1000")]
    ran = command(
        "evaluate", supertonic_packed, "--cases", cases, "--guidance", 2.9, *ALONE, *bounds, "--because", "x", "--json"
    )
    document = ran.document
    saved = 1 - document["candidate"]["rtf_p50"] / document["reference"]["rtf_p50"]
    assert (ran.code, document["verdict"]) == ((0, "accepted") if saved >= 0.05 else (8, "no benefit")), ran.err
    assert document["candidate"]["evaluations"] == document["reference"]["evaluations"]


def test_other_seeds_are_not_matched(supertonic_packed: Path, command: Command, cases: Path) -> None:
    ran = command(
        "evaluate", supertonic_packed, "--cases", cases, "--seeds", "3,4", "--candidate-seeds", "5,6", *ALONE, "--json"
    )
    assert ran.document["matched"] is False
    assert ran.document["reference"]["seeds"] == [3, 4]
    assert [c["candidate_seed"] for c in ran.document["comparisons"]] == [5, 6, 5, 6]


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--program", 7], 2, "program 7 is not built"),
        (["--reference-program", "euler-9"], 2, "program 'euler-9' is not built"),
        (["--engine", "onnxruntime"], 4, "engine 'onnxruntime' was not built"),
        (["--reference", "absent.aot"], 5, "no such artifact folder"),
        (["--guidance", "other=1"], 2, "no branches ['other']"),
        (["--reference-guidance", "x"], 2, "wanted a number"),
        (["--seeds", "1"], 2, "--seeds '1': seeds [1]: wanted at least two"),
        (["--seeds", "a,b"], 2, "--seeds 'a,b': wanted integers from 0"),
        (["--candidate-seeds", "1,2,3"], 2, "wanted as many on both sides"),
        (["--limit", 0], 2, "--limit 0: wanted 1 or more"),
        (["--scorer", "ears"], 4, "--scorer 'ears' is not known"),
        (["--scorer", "sphinx"], 4, "needs a closed grammar"),
        (["--bound", "latent=1"], 2, "--bound needs --because TEXT"),
        (["--bound", "opinion=1", "--because", "x"], 2, "known are latent, log_mel"),
        (["--html", "absent/report.html"], 2, "lies in no folder"),
    ],
    ids=str,
)
def test_what_cannot_be_evaluated_says_so(
    supertonic_packed: Path, command: Command, cases: Path, options: list[object], code: int, words: str
) -> None:
    ran = command("evaluate", supertonic_packed, "--cases", cases, *ALONE, *options, "--json")
    assert (ran.code, words in ran.err) == (code, True), ran.err
    assert set(ran.document) == {"error"}


def test_a_request_that_no_bucket_fits_is_told_and_nothing_is_written(
    supertonic_packed: Path, command: Command, cases: Path, tmp_path: Path
) -> None:
    (tmp_path / "voice.py").write_text(VOICE.replace('"lengths": [16]', '"lengths": [90]'))
    ran = command("evaluate", supertonic_packed, "--cases", cases, *ALONE, "--report", tmp_path / "report.json")
    assert (ran.code, "frames=90 exceeds the largest bucket 24" in ran.err) == (2, True)
    assert not (tmp_path / "report.json").exists()


def test_a_broken_set_or_entry_is_a_usage_error(
    supertonic_packed: Path, command: Command, cases: Path, tmp_path: Path
) -> None:
    assert command("evaluate", supertonic_packed, "--cases", tmp_path / "absent.toml").code == 2
    (tmp_path / "voice.py").write_text("SAMPLE_RATE = 16000")
    ran = command("evaluate", supertonic_packed, "--cases", cases)
    assert (ran.code, "has no function request(text)" in ran.err) == (2, True)


def test_what_the_page_needs_is_asked_before_the_work(
    supertonic_packed: Path, command: Command, cases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr("voicehub_aot.proof.quality.evaluate.evaluate", lambda *_, **__: pytest.fail("begun"))
    ran = command("evaluate", supertonic_packed, "--cases", cases, "--html", tmp_path / "report.html")
    assert (ran.code, "voicehub-aot[report]" in ran.err) == (4, True)
