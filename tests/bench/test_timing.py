"""The timer that all benchmarks share, with a clock that only moves when told to."""

import importlib
import json
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def timing(monkeypatch):
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("timing")


class FakeMachine:
    """A clock, and candidates that move it by the seconds they are given, one a call."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.log.append(f"pause {seconds}")
        self.now += seconds

    def candidate(self, name, seconds):
        durations = iter(seconds)

        def run():
            self.log.append(name)
            self.now += next(durations)

        return run


@pytest.fixture
def fake():
    return FakeMachine()


def measure(timing, fake, candidates, rounds, **options):
    options = {"pause_s": 0.0, "warm_up": 0, "clock": fake.clock, "sleep": fake.sleep} | options
    return timing.interleaved(candidates, rounds, **options)


def test_candidates_take_turns_with_a_pause_before_each(timing, fake):
    candidates = {name: fake.candidate(name, [1.0] * 2) for name in "ab"}

    measure(timing, fake, candidates, rounds=2, pause_s=0.06)

    assert fake.log == ["pause 0.06", "a", "pause 0.06", "b"] * 2


def test_all_candidates_warm_up_before_the_first_round_and_uncounted(timing, fake):
    candidates = {"a": fake.candidate("a", [9.0, 9.0, 1.0]), "b": fake.candidate("b", [9.0, 9.0, 2.0])}

    times = measure(timing, fake, candidates, rounds=1, warm_up=2)

    assert fake.log == ["a", "a", "b", "b", "a", "b"]
    assert {name: t.seconds for name, t in times.items()} == {"a": (1.0,), "b": (2.0,)}


def test_pauses_are_not_part_of_a_time(timing, fake):
    times = measure(timing, fake, {"a": fake.candidate("a", [2.0])}, rounds=1, pause_s=0.5)

    assert times["a"].seconds == (2.0,)


def test_a_round_times_the_mean_of_its_calls(timing, fake):
    times = measure(timing, fake, {"a": fake.candidate("a", [1.0, 3.0])}, rounds=1, calls=2)

    assert times["a"].seconds == (2.0,)


def test_rounds_are_told(timing, fake):
    told = []

    measure(timing, fake, {"a": fake.candidate("a", [1.0] * 3)}, rounds=3, on_round=told.append)

    assert told == [1, 2, 3]


def test_one_stall_moves_the_p95_but_not_the_median(timing):
    times = timing.Times((1.0,) * 18 + (2.0, 50.0))

    assert (times.median, times.p95) == (1.0, 2.0)
    assert timing.Times((1.0, 50.0, 1.0)).p95 == 50.0


def test_speedup_is_the_ratio_of_medians(timing):
    slow, fast = timing.Times((4.0, 3.0, 90.0)), timing.Times((2.0,))

    assert fast.speedup_over(slow) == 2.0
    assert slow.speedup_over(slow) == 1.0


def test_json_lines_are_appended_and_stamped(timing, tmp_path):
    path = tmp_path / "new folder/rows.jsonl"

    timing.append_json(path, "step", [{"candidate": "eager", "median_ms": 2.5}])
    timing.append_json(path, "step", [{"candidate": "ours"}, {"candidate": "other"}])

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["candidate"] for row in rows] == ["eager", "ours", "other"]
    assert rows[0]["median_ms"] == 2.5
    for row in rows:
        assert row["benchmark"] == "step"
        assert {"recorded", "command"} <= set(row)
        assert {"cpu", "threads", "isa", "load_1m"} <= set(row["environment"])
        assert {"torch", "python", "voicehub-aot"} <= set(row["versions"])


def test_a_number_that_is_none_never_reaches_the_file(timing, tmp_path):
    with pytest.raises(ValueError, match="Out of range float"):
        timing.append_json(tmp_path / "rows.jsonl", "step", [{"median_ms": float("nan")}])


def test_without_a_file_nothing_is_written(timing):
    timing.append_json(None, "step", [{"candidate": "eager"}])


def test_the_table_shows_what_there_is_none_of(timing, capsys):
    timing.print_table("a title", ["candidate", "ms"], [["eager", "1.5"], ["ours", None]])

    shown = capsys.readouterr().out
    assert "a title" in shown and "1.5" in shown
    assert "-" in next(line for line in shown.splitlines() if "ours" in line)
