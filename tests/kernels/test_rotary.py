"""Both rotations are one rotation, and attention cannot tell which was used."""

import pytest
import torch

from voicehub_aot.kernels.rotary import halves_order, in_halves_order, rotate_halves, rotate_pairs


def angles(frames, width):
    grid = torch.arange(frames)[:, None] * 10000.0 ** (-torch.arange(width // 2) / (width // 2))
    return grid[:, None].cos(), grid[:, None].sin()


@pytest.mark.parametrize(("frames", "heads", "width"), [(1, 1, 2), (5, 3, 8), (37, 2, 64)])
def test_pairs_turn_like_complex_numbers(frames, heads, width):
    x = torch.randn(2, frames, heads, width)
    cos, sin = angles(frames, width)

    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)

    torch.testing.assert_close(rotate_pairs(x, cos, sin), torch.view_as_real(turned).flatten(-2))


@pytest.mark.parametrize("width", [2, 8, 64])
def test_halves_are_pairs_in_another_order(width):
    x = torch.randn(2, 7, 3, width)
    cos, sin = angles(7, width)
    order = halves_order(width)

    torch.testing.assert_close(rotate_halves(x[..., order], cos, sin), rotate_pairs(x, cos, sin)[..., order])


def test_scores_are_the_same_with_reordered_projections():
    width, heads, dim = 8, 3, 12
    x, cos_sin = torch.randn(2, 5, dim), angles(5, width)
    query, key = torch.randn(heads * width, dim), torch.randn(heads * width, dim)

    def scores(rotate, of):
        turned = [rotate((x @ of(w).t()).unflatten(-1, (heads, width)), *cos_sin) for w in (query, key)]
        return torch.einsum("bqhe,bkhe->bhqk", *turned)

    torch.testing.assert_close(
        scores(rotate_halves, lambda w: in_halves_order(w, width)), scores(rotate_pairs, lambda w: w)
    )


def test_every_channel_keeps_its_place_exactly_once():
    assert sorted(halves_order(10).tolist()) == list(range(10))
    assert halves_order(6).tolist() == [0, 2, 4, 1, 3, 5]
