"""The gather form against replicate padding and conv1d, every row by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from voicehub_aot.compiler.export import export_program
from voicehub_aot.kernels.depthwise import depthwise


def alone(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, extent: torch.Tensor, dilation: int
) -> list[torch.Tensor]:
    """Row b cut to its extent, padded by its own edge, convolved: [extent_b, D] each."""
    pad = weight.shape[-1] // 2 * dilation
    rows = []
    for row, length in zip(x, extent.tolist(), strict=True):
        padded = F.pad(row[None, :length].transpose(1, 2), (pad, pad), mode="replicate")
        rows.append(F.conv1d(padded, weight, bias, dilation=dilation, groups=x.shape[2])[0].t())
    return rows


def tensors(B: int, T: int, D: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(B * 1000 + T * 100 + D * 10 + k)
    x = torch.randn(B, T, D, generator=generator)
    return x, torch.randn(D, 1, k, generator=generator), torch.randn(D, generator=generator)


@pytest.mark.parametrize("dilation", [1, 2, 4, 8])
@pytest.mark.parametrize(("B", "T", "D"), [(1, 1, 3), (2, 2, 1), (3, 7, 5), (2, 33, 17), (1, 40, 64)])
def test_whole_rows_equal_replicate_padding(B: int, T: int, D: int, dilation: int) -> None:
    x, weight, bias = tensors(B, T, D, 5)
    extent = torch.full((B,), T)

    out = depthwise(x, weight, bias, extent, dilation)

    torch.testing.assert_close(out, torch.stack(alone(x, weight, bias, extent, dilation)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dilation", range(1, 9))
def test_a_row_of_a_ragged_batch_equals_the_row_alone(dilation: int) -> None:
    x, weight, bias = tensors(5, 23, 6, 5)
    extent = torch.tensor([23, 1, 2, 10, 22])

    out = depthwise(x, weight, bias, extent, dilation)

    for row, wanted in zip(out, alone(x, weight, bias, extent, dilation), strict=True):
        torch.testing.assert_close(row[: len(wanted)], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_other_odd_kernel_sizes(k: int) -> None:
    x, weight, bias = tensors(2, 11, 4, k)
    extent = torch.tensor([11, 4])

    out = depthwise(x, weight, bias, extent, 2)

    for row, wanted in zip(out, alone(x, weight, bias, extent, 2), strict=True):
        torch.testing.assert_close(row[: len(wanted)], wanted, atol=1e-5, rtol=1e-5)


def test_values_beyond_the_extent_are_never_read() -> None:
    x, weight, bias = tensors(2, 9, 4, 5)
    extent = torch.tensor([9, 5])
    spoiled = x.clone()
    spoiled[1, 5:] = float("nan")

    out, clean = (depthwise(v, weight, bias, extent, 3) for v in (spoiled, x))

    assert torch.equal(out, clean)


def test_float64_stays_float64() -> None:
    x, weight, bias = (t.double() for t in tensors(2, 9, 4, 5))
    extent = torch.tensor([9, 5])

    out = depthwise(x, weight, bias, extent, 2)

    assert out.dtype == torch.float64
    for row, wanted in zip(out, alone(x, weight, bias, extent, 2), strict=True):
        torch.testing.assert_close(row[: len(wanted)], wanted)


def test_exported_it_is_one_operator_of_the_same_value(tmp_path):
    class Layer(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
            return depthwise(*inputs, 2)

    inputs = (*tensors(2, 9, 4, 5), torch.tensor([9, 5]))

    program = export_program(Layer(), inputs, {name: {} for name in "abcd"}, "a layer")
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2")

    assert [n.target for n in loaded.graph.nodes].count(torch.ops.voicehub_aot.depthwise.default) == 1
    torch.testing.assert_close(loaded.module()(*inputs), depthwise(*inputs, 2))
