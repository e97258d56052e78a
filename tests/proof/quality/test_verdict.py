"""Bounds from the band, and the verdict from the bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from voicehub_aot.artifacts.quality import Judged, SideFacts
from voicehub_aot.errors import UsageError
from voicehub_aot.proof.quality.measures import OWN, Measure, Score
from voicehub_aot.proof.quality.verdict import LEAST_SAVING, OTHER_NOISE, Tally, decide, judge, pairs, parse_bounds

MATCHED = Measure("latent", "distance", "matched", "of the seed", share=0.25)
PAIR = Measure("level_db", "difference", "pair", "not heard", slack=1.0)
OPINION = Measure("dnsmos", "opinion", "clip", "of listeners", slack=0.1, better="higher")
RATE = Measure("sphinx_wer", "rate", "clip", "of chance", slack=0.02, counts_words=True)


def tally(candidate: list[float], **band: float) -> Tally:
    kept = Tally()
    for value in candidate:
        kept.add_candidate(Score(value))
    for seeds, value in band.items():
        kept.add_band([seeds], Score(value))  # type: ignore[list-item]
    return kept


def judged(measure: Measure, kept: Tally, matched: bool = True, words: int = 1000, **bounds: float) -> Judged:
    return judge(measure, kept, matched, words, bounds)


def test_the_bound_is_the_worst_of_the_band_plus_the_slack() -> None:
    result = judged(PAIR, tally([1.2], a=0.2, b=0.3, c=-0.1))
    assert (result.bound, result.passed, result.band["c"]) == (pytest.approx(1.3), True, 0.1)
    assert "worst of the band 0.3 + 1: not heard" in result.rule
    assert not judged(PAIR, tally([1.4], a=0.2, b=0.3)).passed


def test_where_more_is_better_the_worst_is_the_least() -> None:
    assert judged(OPINION, tally([2.95], a=3.0, b=3.2)).bound == pytest.approx(2.9)
    assert judged(OPINION, tally([2.95], a=3.0, b=3.2)).passed
    assert not judged(OPINION, tally([2.85], a=3.0, b=3.2)).passed


def test_the_same_noise_must_lead_to_a_share_of_what_another_seed_changes() -> None:
    result = judged(MATCHED, tally([0.14], a=0.5, b=0.7))
    assert (result.bound, result.passed) == (pytest.approx(0.15), True)
    assert not judged(MATCHED, tally([0.16], a=0.5, b=0.7)).passed


def test_other_noise_is_held_to_the_band() -> None:
    result = judged(MATCHED, tally([0.72], a=0.5, b=0.7), matched=False)
    assert (result.bound, result.passed) == (pytest.approx(0.7 * (1 + OTHER_NOISE)), True)


@pytest.mark.parametrize(("words", "slack"), [(1000, 0.02), (50, 0.02), (10, 0.1)])
def test_an_error_rate_may_always_move_by_one_word(words: int, slack: float) -> None:
    assert judged(RATE, tally([0.0], a=0.01), words=words).bound == pytest.approx(0.01 + slack)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_never_passes(value: float) -> None:
    assert not judged(PAIR, tally([value], a=0.1)).passed
    assert not judged(OPINION, tally([value], a=0.1)).passed
    assert not judged(PAIR, tally([value], a=0.1), level_db=1e300).passed


def test_a_bound_set_by_hand_says_what_it_replaced() -> None:
    result = judged(PAIR, tally([2.0], a=0.2), level_db=3.0)
    assert (result.bound, result.passed) == (3.0, True)
    assert result.rule.startswith("set by hand; without it 1.2: worst of the band")


def test_every_measure_says_why_its_bound_is_where_it_is() -> None:
    assert all(measure.reason for measure in OWN)


def test_pairs_are_every_two_seeds() -> None:
    assert pairs((3, 1, 2)) == [(3, 1), (3, 2), (1, 2)]


# --- the verdict


def facts(**changes: Any) -> SideFacts:
    values: dict[str, Any] = {
        "artifact": "a.aot", "model": "m", "config": "c", "checkpoint": "file", "checkpoint_digest": "1",
        "engine": "aoti", "program": "euler-32", "steps": 32, "evaluations": 64, "guidance": {"text": 2.0},
        "seeds": (0, 1), "rtf_p50": 0.5, "rtf_p95": 0.6, "synthetic": False,
    }  # fmt: skip
    return SideFacts(**{**values, **changes})


GOOD = judged(PAIR, tally([0.1], a=0.2))
BAD = judged(PAIR, tally([9.0], a=0.2))


def test_one_bad_measure_rejects_and_is_the_reason() -> None:
    decided, reasons = decide([GOOD, BAD], facts(evaluations=16), facts())
    assert decided == "rejected"
    assert reasons == (BAD.verdict,)
    assert "level_db is 9, wanted at most 1.2" in reasons[0]


@pytest.mark.parametrize(
    "saved", [{"evaluations": 32}, {"rtf_p50": 0.5 * (1 - LEAST_SAVING) - 1e-9}, {"evaluations": 32, "rtf_p50": 0.9}]
)
@pytest.mark.parametrize("other", [{"program": "euler-16"}, {"guidance": {"text": 1.0}}, {"checkpoint_digest": "2"}])
def test_an_approximation_that_saves_is_accepted(saved: dict[str, Any], other: dict[str, Any]) -> None:
    assert decide([GOOD], facts(**other, **saved), facts())[0] == "accepted"


@pytest.mark.parametrize("other", [{"program": "euler-16"}, {"guidance": {"text": 1.0}}, {"checkpoint_digest": "2"}])
@pytest.mark.parametrize("cost", [{}, {"rtf_p50": 0.49}, {"rtf_p50": 0.9, "evaluations": 128}])
def test_an_approximation_that_saves_nothing_has_no_benefit(cost: dict[str, Any], other: dict[str, Any]) -> None:
    decided, (reason,) = decide([GOOD], facts(**other, **cost), facts())
    assert decided == "no benefit"
    assert "an approximation must save 5%" in reason


@pytest.mark.parametrize("other", [{}, {"engine": "onnxruntime"}, {"seeds": (7, 8)}, {"artifact": "b.aot"}])
def test_what_computes_the_same_need_not_save_anything(other: dict[str, Any]) -> None:
    assert decide([GOOD], facts(**other, rtf_p50=0.9), facts())[0] == "accepted"


# --- bounds by hand


def test_bounds_are_read() -> None:
    assert parse_bounds(["wer=0.1", "level_db=2"], "a trial", ["wer", "level_db"]) == {"wer": 0.1, "level_db": 2.0}
    assert parse_bounds([], None, ["wer"]) == {}


@pytest.mark.parametrize(
    ("texts", "because", "words"),
    [
        (["wer"], "x", "'' is not a finite number"),
        (["wer=high"], "x", "'high' is not a finite number"),
        (["wer=nan"], "x", "'nan' is not a finite number"),
        (["mos=1"], "x", "known are wer"),
        (["wer=1", "wer=2"], "x", "each measure once"),
        (["wer=1"], None, "--bound needs --because TEXT"),
        (["wer=1"], "  ", "--bound needs --because TEXT"),
        ([], "x", "--because explains a --bound"),
    ],
)
def test_a_bound_that_cannot_be_is_refused(texts: list[str], because: str | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_bounds(texts, because, ["wer"])
