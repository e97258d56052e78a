"""Times of single evaluations, and how busy others kept the machine meanwhile."""

import os
import time

import pytest
import toy

from voicehub_aot.proof import timing
from voicehub_aot.proof.cases import Recording, plan
from voicehub_aot.proof.timing import MIN_ROUNDS, seconds_of_others, time_steps
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.spec.schedule import linear
from voicehub_aot.spec.solver import euler

PROGRAM = euler(linear(2))


def test_every_candidate_is_timed_in_every_round_of_every_bucket():
    eager = eager_runtime(toy.region(), (PROGRAM,), "toy")
    cases = tuple(plan(toy.SPEC, {PROGRAM.name: PROGRAM}, [{"frames": 8}, {"frames": 16}], 1))

    times = time_steps({"first": eager, "second": eager}, Recording(cases), seconds=0.0)

    assert [t.bucket for t in times] == [{"frames": 8}, {"frames": 16}]
    assert [t.rows for t in times] == [2, 2]  # guidance branches
    assert all(len(samples) == MIN_ROUNDS and min(samples) > 0 for t in times for samples in t.samples_ms.values())
    assert [t.elsewhere for t in times] == [None, None]  # over milliseconds it cannot be told


@pytest.mark.parametrize(
    ("before", "seconds", "told"), [(10.0, 0.9, 1.0), (10.9, 2.0, 0.0), (None, 2.0, None), (10.0, 0.1, None)]
)
def test_what_others_used_meanwhile_is_told(monkeypatch, before, seconds, told):
    monkeypatch.setattr(timing, "seconds_of_others", lambda: 10.9)

    assert timing._elsewhere(before, seconds) == (told if told is None else pytest.approx(told))


@pytest.fixture
def stat(tmp_path):
    """/proc/stat where each of our processors has spent 1000 ticks on work and many more idle."""
    mine = [f"cpu{n} 100 200 300 50000 60000 150 50 200 70 80" for n in sorted(os.sched_getaffinity(0))]
    other = f"cpu{max(os.sched_getaffinity(0)) + 1} 9 9 9 9 9 9 9 9 9 9"
    file = tmp_path / "stat"
    file.write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *mine, other, "intr 1 2 3", "ctxt 5"]) + "\n")
    return file


def test_work_of_others_is_all_work_of_our_processors_but_our_own(stat):
    all_work = 1000 * len(os.sched_getaffinity(0)) / os.sysconf("SC_CLK_TCK")

    assert seconds_of_others(stat) == pytest.approx(all_work - time.process_time(), abs=0.5)


@pytest.mark.parametrize("content", [None, "cpu0 what\n", "\n"])
def test_a_system_that_does_not_say_is_not_guessed_at(tmp_path, content):
    if content is not None:
        (tmp_path / "stat").write_text(content)

    assert seconds_of_others(tmp_path / "stat") is None
