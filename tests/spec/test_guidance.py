import math

import pytest
import torch
from pydantic import ValidationError
from torch.testing import assert_close

from voicehub_aot.errors import UsageError
from voicehub_aot.spec.guidance import EQUATIONS, NO_OP, Branch, Guidance, classifier_free, zero_star


@pytest.fixture
def guidance():
    unconditional = Branch(name="unconditional", flags={"drop_text": True}, scale=2.0)
    return Guidance(equation="classifier_free", branches=(Branch(name="conditional"), unconditional))


@pytest.fixture
def three():
    text, speaker = Branch(name="text", scale=3.0), Branch(name="speaker", scale=8.0)
    return Guidance(equation="classifier_free", branches=(Branch(name="conditional"), text, speaker))


@pytest.fixture
def pair():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 5, 2, generator=generator), torch.randn(3, 5, 2, generator=generator)


@pytest.mark.parametrize("scale", [-1.0, 0.3, 1.0, 2.0, 7.5])
def test_guided_value_is_conditional_plus_scaled_difference(pair, scale):
    conditional, unconditional = pair

    guided = classifier_free(torch.cat(pair), [scale])

    assert_close(guided, conditional + scale * (conditional - unconditional))


def test_scale_three_is_four_conditional_minus_three_unconditional(pair):
    conditional, unconditional = pair

    assert_close(classifier_free(torch.cat(pair), [3.0]), 4 * conditional - 3 * unconditional)


def test_scale_zero_is_exactly_the_conditional_prediction(pair):
    assert torch.equal(classifier_free(torch.cat(pair), [0.0]), pair[0])


def test_rows_do_not_mix(pair):
    conditional, unconditional = pair
    alone = classifier_free(torch.cat([conditional[1:2], unconditional[1:2]]), [2.0])

    assert torch.equal(classifier_free(torch.cat(pair), [2.0])[1:2], alone)


def test_the_packed_predictions_are_left_alone(pair):
    packed = torch.cat(pair)
    before = packed.clone()

    classifier_free(packed, [2.0])

    assert torch.equal(packed, before)


def test_each_branch_has_its_own_scale():
    c, t, s = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(1))

    assert_close(classifier_free(torch.cat([c, t, s]), [3.0, 8.0]), c + 3 * (c - t) + 8 * (c - s))


def test_zero_star_projects_the_unconditional_velocity_row_by_row(pair):
    c, u = pair
    rows = [(c[b] * u[b]).sum() / ((u[b] ** 2).sum() + 1e-8) for b in range(3)]
    wanted = torch.stack([p * u[b] + 2.5 * (c[b] - p * u[b]) for b, p in enumerate(rows)])

    assert_close(zero_star(torch.cat(pair), [1.5]), wanted)


def test_zero_star_of_a_zero_unconditional_velocity_is_finite(pair):
    assert_close(zero_star(torch.cat([pair[0], torch.zeros_like(pair[1])]), [1.0]), 2 * pair[0])


@pytest.mark.parametrize(
    ("scale", "part"), [(0.0, (0,)), (NO_OP / 2, (0,)), (-NO_OP / 2, (0,)), (NO_OP, (0, 1)), (-1.0, (0, 1))]
)
def test_a_branch_takes_part_from_the_threshold_on(guidance, scale, part):
    assert guidance.taking_part(None, guidance.scales(scale)) == part


@pytest.mark.parametrize(
    ("against", "part"),
    [
        (None, (0, 1, 2)),
        ((), (0,)),
        (("speaker",), (0, 2)),
        (("speaker", "text"), (0, 2, 1)),
        (("text", "caption"), (0, 1)),  # a model without captions
    ],
)
def test_an_evaluation_says_which_branches_take_part(three, against, part):
    assert three.taking_part(against, three.scales(None)) == part


def test_scales_are_one_for_all_or_by_branch(three):
    assert three.scales(None) == {"text": 3.0, "speaker": 8.0}
    assert three.scales(1.5) == {"text": 1.5, "speaker": 1.5}
    assert three.scales({"speaker": 0.0}) == {"text": 3.0, "speaker": 0.0}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"voice": 1.0}, r"no branches \['voice'\]; this model has \['speaker', 'text'\]"),
        (math.nan, "guidance=nan, wanted a finite number"),
        ({"text": "much"}, "wanted a finite number, or one by branch"),
    ],
)
def test_scales_that_cannot_be_are_refused(three, wanted, message):
    with pytest.raises(UsageError, match=message):
        three.scales(wanted)


def test_equations_are_found_by_name(guidance):
    assert EQUATIONS[guidance.equation] is classifier_free


def test_guidance_survives_json(guidance):
    assert Guidance.model_validate_json(guidance.model_dump_json()) == guidance


def test_guidance_cannot_be_changed_in_place(guidance):
    with pytest.raises(ValidationError, match="frozen"):
        guidance.equation = "zero_star"
