import itertools
import json
import math

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from voicehub_aot.errors import NoBucketFits, UsageError
from voicehub_aot.spec.bucket import (
    Buckets,
    check_buckets,
    choose_buckets,
    parse_buckets,
    powers_of_two,
    read_histogram,
    waste,
)
from voicehub_aot.spec.region import Call, Dim, Input, RegionSpec

AXES = ("frames", "text", "batch")
SPEECH = {95: 3, 120: 10, 130: 7, 400: 2, 1000: 1}
histograms = st.dictionaries(st.integers(1, 14), st.integers(1, 9), min_size=1, max_size=6)
few = st.integers(1, 4)


def parse(*texts):
    return parse_buckets(texts, main_axis="frames", known_axes=AXES).axes


def padded_work(histogram, buckets):
    return sum(weight * min(b for b in buckets if b >= length) for length, weight in histogram.items())


def brute_force(histogram, count, multiple_of, max_size):
    """The best of all sets of admissible sizes: least work, then fewest, then smallest."""
    longest = max(histogram)
    top = -(-longest // multiple_of) * multiple_of
    sizes = [*range(multiple_of, top, multiple_of), min(top, max_size)]
    sizes = [s for s in sizes if s <= max_size]
    sets = itertools.chain.from_iterable(itertools.combinations(sizes, k) for k in range(1, count + 1))
    return min((s for s in sets if s[-1] >= longest), key=lambda s: (padded_work(histogram, s), len(s), s))


@pytest.fixture
def spec():
    return RegionSpec(
        name="tiny",
        inputs=(
            Input(name="x", shape=("B", "frames", 4), binding="STATE", doc="state"),
            Input(name="time", shape=(1,), binding="TIME", doc="time"),
        ),
        dims=(Dim(name="frames", min=8, max=512, doc="frames"), Dim(name="text", max=100, doc="tokens")),
        call=Call(parameters=(), returns="velocity", source="none"),
    )


# Buckets


@pytest.mark.parametrize("sizes", [(), (0, 1), (-4,), (128, 64), (64, 64), (64.0,), ("64",), (True,)])
def test_sizes_must_be_ascending_positive_integers(sizes):
    with pytest.raises(ValidationError, match="frames"):
        Buckets(axes={"frames": sizes})


def test_buckets_survive_json():
    buckets = Buckets(axes={"frames": (64, 128), "batch": (1, 2)})

    restored = Buckets.model_validate_json(buckets.model_dump_json())

    assert restored == buckets


def test_largest_is_none_for_an_axis_without_buckets():
    buckets = Buckets(axes={"frames": (64, 128)})

    assert (buckets.largest("frames"), buckets.largest("text")) == (128, None)


@pytest.mark.parametrize(("size", "expected"), [(1, 64), (64, 64), (65, 128), (128, 128)])
def test_pick_takes_the_smallest_bucket_that_holds_the_size(size, expected):
    buckets = Buckets(axes={"frames": (64, 128)})

    assert buckets.pick("frames", size, "tiny") == expected


def test_one_past_the_largest_bucket_names_the_buckets_and_both_ways_out():
    buckets = Buckets(axes={"frames": (128, 512, 1024)})

    with pytest.raises(NoBucketFits) as caught:
        buckets.pick("frames", 1025, "f5tts")

    assert str(caught.value) == (
        "f5tts: frames=1025 exceeds the largest bucket 1024 of (128, 512, 1024); rebuild with a bucket >= 1025, "
        "e.g. --buckets frames=128,512,1024,1025, or load with overflow='run'"
    )


def test_pick_on_an_axis_without_buckets_says_so():
    with pytest.raises(NoBucketFits, match=r"tiny: text=7 has no bucket on this axis; .*--buckets text=7,"):
        Buckets(axes={"frames": (64,)}).pick("text", 7, "tiny")


def test_combinations_are_the_ascending_product_of_the_promised_axes():
    buckets = Buckets(axes={"frames": (64, 128), "batch": (1, 2), "text": (100,)})

    combinations = buckets.combinations(["batch", "tokens", "frames"])

    assert combinations == [
        {"batch": 1, "frames": 64},
        {"batch": 1, "frames": 128},
        {"batch": 2, "frames": 64},
        {"batch": 2, "frames": 128},
    ]


def test_no_promised_axis_leaves_one_empty_combination():
    assert Buckets(axes={"frames": (64,)}).combinations(["text"]) == [{}]


# --buckets


@pytest.mark.parametrize(
    ("texts", "axes"),
    [
        ([], {}),
        (["64,128,256"], {"frames": (64, 128, 256)}),
        (["256,64"], {"frames": (64, 256)}),
        (["text=100"], {"text": (100,)}),
        (["frames=64,128 batch=1,2,4"], {"frames": (64, 128), "batch": (1, 2, 4)}),
        (["64", "text=100", "batch=1"], {"frames": (64,), "text": (100,), "batch": (1,)}),
    ],
)
def test_every_form_of_the_flag_is_understood(texts, axes):
    assert parse(*texts) == axes


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([""], "'': is empty"),
        (["  "], "'  ': is empty"),
        (["64,"], "'64,': '' is not a positive integer"),
        (["64, 128"], "'64, 128': '' is not a positive integer"),
        (["frames="], "'' is not a positive integer"),
        (["0"], "'0' is not a positive integer"),
        (["-64"], "'-64' is not a positive integer"),
        (["1e3"], "'1e3' is not a positive integer"),
        (["6_4"], "'6_4' is not a positive integer"),
        (["64.0"], "'64.0' is not a positive integer"),
        (["٦٤"], "is not a positive integer"),
        (["9" * 5000], "is not a positive integer"),
        (["64,64"], "a size is given twice"),
        (["frame=64"], "unknown axis 'frame'; this model has batch, frames, text"),
        (["=64"], "unknown axis ''"),
        (["text=1=2"], "unknown axis 'text=1'"),
        (["64", "frames=128"], "axis 'frames' is given twice"),
        (["batch=1 batch=2"], "axis 'batch' is given twice"),
    ],
)
def test_a_bad_flag_says_what_came_and_what_is_wanted(texts, message):
    with pytest.raises(UsageError) as caught:
        parse(*texts)

    assert message in str(caught.value)


@pytest.mark.parametrize("axes", [{"frames": (8, 512)}, {"text": (1, 100)}, {"batch": (1, 64)}, {}])
def test_sizes_up_to_the_bounds_of_the_model_are_accepted(spec, axes):
    check_buckets(Buckets(axes=axes), spec)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"frames": (7, 64, 513)}, r"tiny: frames buckets \[7, 513\] lie outside 8\.\.512"),
        ({"text": (101,)}, r"tiny: text buckets \[101\] lie outside 1\.\.100"),
        ({"words": (4,)}, "tiny: buckets for the unknown axis 'words'; this model has batch, frames, text"),
    ],
)
def test_sizes_the_model_cannot_have_are_refused(spec, axes, message):
    with pytest.raises(UsageError, match=message):
        check_buckets(Buckets(axes=axes), spec)


# Choosing sizes


@given(histogram=histograms, count=few, multiple_of=few, spare=st.integers(0, 5))
@settings(deadline=None)
def test_chosen_buckets_are_the_best_of_all_sets_of_sizes(histogram, count, multiple_of, spare):
    max_size = max(histogram) + spare

    chosen = choose_buckets(histogram, count, multiple_of, max_size)

    assert chosen == brute_force(histogram, count, multiple_of, max_size)


@given(histogram=st.dictionaries(st.integers(1, 3000), st.integers(1, 99), min_size=1), count=few, multiple_of=few)
@settings(deadline=None)
def test_a_further_bucket_never_adds_work(histogram, count, multiple_of):
    fewer = choose_buckets(histogram, count, multiple_of)
    more = choose_buckets(histogram, count + 1, multiple_of)

    assert padded_work(histogram, more) <= padded_work(histogram, fewer)


@given(
    histogram=st.dictionaries(st.integers(1, 3000), st.floats(1e-6, 1e6), min_size=1),
    count=few,
    multiple_of=st.integers(1, 64),
)
@settings(deadline=None)
def test_chosen_buckets_are_few_ascending_multiples_that_cover_the_longest(histogram, count, multiple_of):
    chosen = choose_buckets(histogram, count, multiple_of)

    assert 1 <= len(chosen) <= count
    assert list(chosen) == sorted(set(chosen))
    assert all(size % multiple_of == 0 for size in chosen)
    assert max(histogram) <= chosen[-1] < max(histogram) + multiple_of


def test_enough_buckets_leave_no_waste():
    assert choose_buckets(SPEECH, count=99) == tuple(SPEECH)


def test_frequent_lengths_get_their_own_bucket():
    assert choose_buckets({10: 1000, 90: 1, 100: 1}, count=2) == (10, 100)


def test_of_equally_good_sets_the_one_with_the_smaller_first_size_is_chosen():
    assert choose_buckets({1: 1, 2: 1, 3: 1}, count=2) == (1, 3)


def test_the_largest_size_of_the_model_stands_in_for_a_multiple_beyond_it():
    assert choose_buckets({60: 1, 100: 1}, count=2, multiple_of=64, max_size=100) == (64, 100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count=0"),
        ({"count": 1, "multiple_of": 0}, "multiple_of=0"),
        ({"count": 1, "max_size": 999}, "length 1000 exceeds 999"),
    ],
)
def test_impossible_requests_for_buckets_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        choose_buckets(SPEECH, **arguments)


@pytest.mark.parametrize("histogram", [{}, {0: 1}, {-3: 1}, {2.5: 1}, {4: 0}, {4: -1}, {4: math.nan}, {4: math.inf}])
def test_histograms_without_meaning_are_refused(histogram):
    for use in (lambda h: choose_buckets(h, 2), lambda h: waste(h, [8]), powers_of_two):
        with pytest.raises(UsageError, match="histogram"):
            use(histogram)


def test_waste_is_the_share_of_padding_per_useful_work():
    histogram = {50: 2, 100: 1}

    assert (waste(histogram, (50, 100)), waste(histogram, (100,))) == (0.0, 0.5)


def test_waste_refuses_buckets_that_do_not_cover_the_lengths():
    with pytest.raises(NoBucketFits, match=r"length 1000 fits none of the buckets \(64, 128\)"):
        waste(SPEECH, (128, 64))


def test_powers_of_two_are_those_the_lengths_round_up_to():
    assert powers_of_two({1: 1, 64: 1, 65: 1, 1000: 1}) == (1, 64, 128, 1024)


def test_fewer_powers_of_two_are_the_largest_ones():
    assert powers_of_two({1: 1, 64: 1, 65: 1, 1000: 1}, count=2) == (128, 1024)


def test_fewer_than_one_power_of_two_is_refused():
    with pytest.raises(UsageError, match="count=0"):
        powers_of_two(SPEECH, count=0)


def test_chosen_buckets_waste_no_more_than_powers_of_two():
    powers = powers_of_two(SPEECH)

    chosen = choose_buckets(SPEECH, count=len(powers))

    assert waste(SPEECH, chosen) < waste(SPEECH, powers)


# Histogram files


@pytest.mark.parametrize("content", ["[120, 95, 120]", '{"120": 2, "95": 1}', '{"95": 1.0, "120": 2.0}'])
def test_lengths_and_their_counts_read_the_same(tmp_path, content):
    file = tmp_path / "lengths.json"
    file.write_text(content)

    assert read_histogram(file) == {95: 1.0, 120: 2.0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "unreadable"),
        ("[1, 2", "unreadable"),
        ("[" * 100_000, "unreadable"),
        ("[]", "holds no lengths"),
        ("{}", "holds no lengths"),
        ("120", "holds 120"),
        ('"120"', "holds '120'"),
        ("[0]", "length 0 is not a positive integer"),
        ("[-5]", "length -5 is not a positive integer"),
        ("[1.5]", "length 1.5 is not a positive integer"),
        ("[NaN]", "length nan is not a positive integer"),
        ("[true]", "length True is not a positive integer"),
        ("[[1]]", "length [1] is not a positive integer"),
        ("[1000000000]", "length 1000000000 is not a positive integer"),
        ('{"0": 1}', "length '0' is not a positive integer"),
        ('{"1.5": 1}', "length '1.5' is not a positive integer"),
        ('{"frames": [1]}', "length 'frames' is not a positive integer"),
        ('{"95": 0}', "length 95 has weight 0"),
        ('{"95": -1}', "length 95 has weight -1"),
        ('{"95": NaN}', "length 95 has weight nan"),
        ('{"95": Infinity}', "length 95 has weight inf"),
        ('{"95": "1"}', "length 95 has weight '1'"),
        ('{"95": true}', "length 95 has weight True"),
        (json.dumps({"95": 10**400}), "length 95 has weight 1000"),
    ],
)
def test_a_bad_histogram_file_is_named_with_what_came_and_what_is_wanted(tmp_path, content, message):
    file = tmp_path / "lengths.json"
    file.write_text(content)

    with pytest.raises(UsageError) as caught:
        read_histogram(file)

    assert str(caught.value).startswith(f"{file}: {message}")
    assert "wanted a JSON list of lengths" in str(caught.value)


def test_bytes_that_are_no_text_are_unreadable(tmp_path):
    file = tmp_path / "lengths.json"
    file.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(UsageError, match="unreadable"):
        read_histogram(file)


def test_a_missing_histogram_file_is_unreadable(tmp_path):
    with pytest.raises(UsageError, match=r"absent\.json: unreadable"):
        read_histogram(tmp_path / "absent.json")
