"""One exponential gives the same Mish."""

import torch
import torch.nn.functional as F

from voicehub_aot.kernels.mish import mish, mish_by_one_exponential


def test_it_is_mish_over_the_whole_range():
    x = torch.cat([torch.linspace(-120, 120, 4001), torch.tensor([0.0, -0.0, 20.0, 20.001, 88.0, 1e4, -1e4])])

    torch.testing.assert_close(mish_by_one_exponential(x), F.mish(x.double()).float(), rtol=2e-6, atol=1e-9)


def test_eager_uses_torchs_own():
    x = torch.randn(33)

    assert torch.equal(mish(x), F.mish(x))


def test_empty_stays_empty():
    assert mish_by_one_exponential(torch.empty(0, 3)).shape == (0, 3)
