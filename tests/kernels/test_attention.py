import pytest
import torch
from torch.testing import assert_close

from voicehub_aot.kernels.attention import attention, key_bias


def reference(query, key, value, valid=None, scale=None):
    """Plain softmax attention in float64; valid: [B, L]."""
    query, key, value = (t.double() for t in (query, key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None, None, :], float("-inf"))
    return scores.softmax(-1) @ value


def random_inputs(*, batch=2, heads=3, queries=5, keys=7, width=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, size, width) for size in (queries, keys, keys)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def prefix(lengths, keys):
    return torch.arange(keys)[None] < torch.tensor(lengths)[:, None]


def test_bias_is_zero_for_real_keys_and_minus_infinity_for_others():
    bias = key_bias(torch.tensor([[True, True, False], [True, False, False]]))

    inf = float("inf")
    assert (bias.dtype, tuple(bias.shape)) == (torch.float32, (2, 1, 1, 3))
    assert bias[:, 0, 0].tolist() == [[0.0, 0.0, -inf], [0.0, -inf, -inf]]


@pytest.mark.parametrize("sizes", [{}, {"queries": 1}, {"batch": 1}, {"heads": 1, "width": 33}, {"queries": 17}])
def test_every_key_counts_without_a_bias(sizes):
    inputs = random_inputs(**sizes)

    assert_close(attention(*inputs), reference(*inputs).float())


@pytest.mark.parametrize("lengths", [[7, 3], [1, 7], [7, 7], [1, 1]])
def test_each_row_sees_only_its_valid_keys(lengths):
    inputs, valid = random_inputs(), prefix(lengths, 7)

    assert_close(attention(*inputs, key_bias(valid)), reference(*inputs, valid).float())


def test_a_masked_row_equals_the_row_cut_to_its_length():
    query, key, value = random_inputs(batch=1)

    padded = attention(query, key, value, key_bias(prefix([4], 7)))

    assert_close(padded, attention(query, key[:, :, :4], value[:, :, :4]))


def test_finite_values_in_the_padding_do_not_matter():
    query, key, value = random_inputs()
    bias = key_bias(prefix([4, 4], 7))
    before = attention(query, key, value, bias)
    key[:, :, 4:], value[:, :, 4:] = 1e4, -1e4

    assert torch.equal(attention(query, key, value, bias), before)


def test_one_bias_row_serves_the_whole_batch():
    inputs = random_inputs()

    one, both = (attention(*inputs, key_bias(prefix(lengths, 7))) for lengths in ([4], [4, 4]))

    assert_close(one, both)


def test_the_bias_gives_what_a_bool_mask_gives():
    inputs, valid = random_inputs(), prefix([7, 3], 7)

    masked = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=valid[:, None, None])

    assert_close(attention(*inputs, key_bias(valid)), masked)


def test_a_scale_replaces_the_default():
    inputs = random_inputs()

    assert_close(attention(*inputs, scale=0.3), reference(*inputs, scale=0.3).float())


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float64, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_the_float32_bias_serves_every_dtype(dtype, atol):
    inputs, valid = random_inputs(dtype=dtype), prefix([7, 3], 7)

    output = attention(*inputs, key_bias(valid))

    assert output.dtype == dtype
    assert_close(output.double(), reference(*inputs, valid), atol=atol, rtol=0)


@pytest.mark.parametrize("sizes", [{"queries": 0}, {"batch": 0}])
def test_no_queries_give_no_output(sizes):
    query, key, value = random_inputs(**sizes)

    assert attention(query, key, value).shape == query.shape


def test_the_exported_graph_holds_one_attention_node():
    class Module(torch.nn.Module):
        def forward(self, query, key, value, valid):
            return attention(query, key, value, key_bias(valid))

    exported = torch.export.export(Module(), (*random_inputs(), prefix([7, 3], 7)))

    targets = [str(node.target) for node in exported.graph.nodes]
    assert targets.count("aten.scaled_dot_product_attention.default") == 1
