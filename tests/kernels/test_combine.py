import pytest
import torch
from torch.testing import assert_close

from voicehub_aot.kernels.combine import combine


def random_tensors(count, shape=(3, 5, 7), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("coefficients", [[2.0], [1.0, 0.5], [0.25, -3.0, 1.0], [1.0, 0.0], [-1.0, 1.0, 1e-3, 7.0]])
@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), ()])
def test_the_sum_of_coefficient_times_tensor(coefficients, shape):
    tensors = random_tensors(len(coefficients), shape)

    total = combine(list(zip(tensors, coefficients, strict=True)))

    exact = sum(c * t.double() for t, c in zip(tensors, coefficients, strict=True))
    assert_close(total, exact.float())


def test_terms_are_added_in_their_order():
    large, small = torch.tensor(1e8), torch.tensor(1.0)

    left_to_right = combine([(large, 1.0), (large, -1.0), (small, 1.0)])
    absorbed = combine([(large, 1.0), (small, 1.0), (large, -1.0)])

    assert (left_to_right.item(), absorbed.item()) == (1.0, 0.0)


def test_an_euler_step_is_bit_for_bit_the_plain_arithmetic():
    x, v = random_tensors(2)

    assert torch.equal(combine([(x, 1.0), (v, 0.125)]), x + 0.125 * v)


@pytest.mark.parametrize("coefficients", [[1.0], [2.0], [1.0, 0.5], [2.0, 1.0]])
def test_the_terms_are_left_alone_and_share_no_memory_with_the_result(coefficients):
    tensors = random_tensors(len(coefficients))
    before = [t.clone() for t in tensors]

    combine(list(zip(tensors, coefficients, strict=True))).fill_(9.0)

    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


def test_a_register_may_appear_twice():
    (x,) = random_tensors(1)

    assert_close(combine([(x, 1.0), (x, -0.25)]), 0.75 * x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_the_dtype_is_kept(dtype):
    x, v = random_tensors(2, dtype=dtype)

    assert combine([(x, 0.5), (v, 0.125)]).dtype == dtype


def test_empty_tensors_stay_empty():
    x, v = random_tensors(2, shape=(2, 0, 4))

    assert combine([(x, 1.0), (v, 0.5)]).shape == x.shape
