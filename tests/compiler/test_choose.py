"""Choosing engines by measured times."""

import pytest

from voicehub_aot.compiler.choose import EAGER, choose, faster, noise
from voicehub_aot.errors import BuildError
from voicehub_aot.proof.timing import StepTime

ORDER = ("aoti", "onnxruntime")


def timed(frames, *, eager=100.0, spread=1.0, **medians):
    """Five rounds around each median."""
    wobble = (-spread, -spread / 2, 0.0, spread / 2, spread)
    named = {EAGER: eager, **medians}
    return StepTime({"frames": frames}, 2, {name: tuple(m + w for w in wobble) for name, m in named.items()})


def test_the_fastest_engine_serves_every_bucket():
    choice = choose([timed(64, aoti=60, onnxruntime=50), timed(128, aoti=70, onnxruntime=60)], ORDER)

    assert choice.steps == {"onnxruntime": ({"frames": 64}, {"frames": 128})}
    assert choice.prepare == "onnxruntime"
    assert choice.engines == ("onnxruntime",)


def test_buckets_may_have_different_engines_and_the_better_one_overall_prepares():
    choice = choose([timed(64, aoti=60, onnxruntime=40), timed(128, aoti=50, onnxruntime=55)], ORDER)

    assert choice.steps == {"aoti": ({"frames": 128},), "onnxruntime": ({"frames": 64},)}
    assert choice.prepare == "onnxruntime"
    assert "frames=64: 40 ms, eager 100 (2.50x), aoti 60" in choice.reasons["onnxruntime"]


def test_a_lead_within_the_noise_does_not_add_an_engine():
    close = timed(128, aoti=55, onnxruntime=54)
    close.samples_ms["aoti"] = (40.0, 58.0, 55.0, 53.0, 60.0)
    close.samples_ms["onnxruntime"] = (50.0, 54.0, 56.0, 54.0, 52.0)

    choice = choose([timed(64, aoti=30, onnxruntime=60), close], ORDER)

    assert choice.steps == {"aoti": ({"frames": 64}, {"frames": 128})}


def test_an_engine_that_failed_parity_is_passed_over():
    times = [timed(64, aoti=60, onnxruntime=50), timed(128, aoti=60, onnxruntime=50)]

    choice = choose(times, ORDER, refused={("onnxruntime", "frames=64")})

    assert choice.steps == {"aoti": ({"frames": 64}, {"frames": 128})} or choice.steps["aoti"] == ({"frames": 64},)
    assert {"frames": 64} not in choice.steps.get("onnxruntime", ())


@pytest.mark.parametrize(("refused", "kept"), [((), "onnxruntime"), ([("onnxruntime", "frames=64")], "aoti")])
def test_where_nothing_is_faster_than_eager_the_fastest_is_kept_and_marked(refused, kept):
    choice = choose([timed(64, eager=40, aoti=60, onnxruntime=50)], ORDER, refused)

    assert choice.engines == (kept,)
    assert "not faster" in choice.reasons[kept]


def test_a_bucket_without_any_engine_is_an_error():
    with pytest.raises(BuildError, match="frames=64: no engine passed parity"):
        choose([timed(64, aoti=60)], ORDER, refused=[("aoti", "frames=64")])


def test_a_choice_knows_what_a_fixed_engine_serves():
    choice = choose([timed(64, aoti=40), timed(128, aoti=50)], ("aoti",))

    assert choice.served("aoti", {"frames": 128}) == ({"frames": 128},)
    assert choice.served("aoti", {}) == ({"frames": 64}, {"frames": 128})
    assert choice.served("onnxruntime", {}) == ()


def test_faster_means_in_three_rounds_of_four():
    assert faster((1, 1, 1, 9), (2, 2, 2, 2))
    assert not faster((1, 1, 9, 9), (2, 2, 2, 2))


def test_noise_is_half_the_quartile_distance_over_the_median():
    assert noise((8.0, 9.0, 10.0, 11.0, 12.0)) == pytest.approx(0.1)
