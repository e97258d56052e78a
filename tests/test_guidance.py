import pytest
import torch
from pydantic import ValidationError
from torch.testing import assert_close

from voicehub_aot.guidance import EQUATIONS, NO_OP, Branch, Guidance, classifier_free, is_off


@pytest.fixture
def guidance():
    branches = (Branch(name="conditional", flags={}), Branch(name="unconditional", flags={"drop_text": True}))
    return Guidance(equation="classifier_free", branches=branches, scale=2.0)


@pytest.fixture
def pair():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 5, 2, generator=generator), torch.randn(3, 5, 2, generator=generator)


@pytest.mark.parametrize("scale", [-1.0, 0.3, 1.0, 2.0, 7.5])
def test_guided_value_is_conditional_plus_scaled_difference(pair, scale):
    conditional, unconditional = pair

    guided = classifier_free(torch.cat(pair), scale)

    assert_close(guided, conditional + scale * (conditional - unconditional))


def test_scale_three_is_four_conditional_minus_three_unconditional(pair):
    conditional, unconditional = pair

    assert_close(classifier_free(torch.cat(pair), 3.0), 4 * conditional - 3 * unconditional)


def test_scale_zero_is_exactly_the_conditional_prediction(pair):
    assert torch.equal(classifier_free(torch.cat(pair), 0.0), pair[0])


def test_rows_do_not_mix(pair):
    conditional, unconditional = pair
    alone = classifier_free(torch.cat([conditional[1:2], unconditional[1:2]]), 2.0)

    assert torch.equal(classifier_free(torch.cat(pair), 2.0)[1:2], alone)


def test_the_packed_predictions_are_left_alone(pair):
    packed = torch.cat(pair)
    before = packed.clone()

    classifier_free(packed, 2.0)

    assert torch.equal(packed, before)


@pytest.mark.parametrize(("scale", "off"), [(0.0, True), (NO_OP / 2, True), (-NO_OP / 2, True), (NO_OP, False)])
def test_guidance_is_off_below_the_threshold(guidance, scale, off):
    assert is_off(guidance, scale) is off


@pytest.mark.parametrize("scale", [2.0, -1.0])
def test_guidance_is_on_for_other_scales(guidance, scale):
    assert not is_off(guidance, scale)


def test_a_model_without_guidance_has_it_off():
    assert is_off(None, 2.0)


def test_equations_are_found_by_name(guidance):
    assert EQUATIONS[guidance.equation] is classifier_free


def test_guidance_survives_json(guidance):
    assert Guidance.model_validate_json(guidance.model_dump_json()) == guidance


def test_guidance_cannot_be_changed_in_place(guidance):
    with pytest.raises(ValidationError, match="frozen"):
        guidance.scale = 3.0
