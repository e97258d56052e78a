import pytest
import torch

from voicehub_aot.spec.synthetic import synthetic_tensor, synthetic_weights

# Bits drawn from NumPy's PCG64 seeded with crc32(key): recorded cases are rebuilt from them.
PINNED = [
    ("proj.weight", (2, 3), [0.09179601, -0.27327231, 0.47352436, 0.77965540, 0.37339392, -0.39005557]),
    ("conv.weight", (2, 1, 3), [0.27090961, 0.79627728, 0.25299656, 0.38646850, -0.39476040, -0.65980995]),
    ("norm.weight", (3,), [0.76109749, 1.25022173, 1.02646041]),
    ("grn.gamma", (3,), [1.00864661, 0.97806126, 0.80719733]),
    ("attn.scale", (3,), [0.90781772, 1.05387414, 0.98988402]),
    ("act.alpha", (2,), [1.08450758, 0.94436240]),
    ("proj.bias", (3,), [0.00483471, 0.00075433, 0.01235302]),
    ("weight_norm.g", (2,), [0.03629764, -0.03333396]),
    ("gate", (), [-0.01212541]),
    ("block.alpha", (), [0.99852294]),
]


@pytest.mark.parametrize(("key", "shape", "values"), PINNED)
def test_values_are_those_of_the_recorded_cases(key, shape, values):
    tensor = synthetic_tensor(key, shape)

    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float32, shape)
    assert tensor.flatten().tolist() == pytest.approx(values, rel=1e-6, abs=5e-9)


def test_the_same_key_gives_the_same_bits():
    assert torch.equal(synthetic_tensor("proj.weight", (8, 8)), synthetic_tensor("proj.weight", (8, 8)))


def test_another_key_gives_other_values():
    assert not torch.equal(synthetic_tensor("a.weight", (8, 8)), synthetic_tensor("b.weight", (8, 8)))


@pytest.mark.parametrize("shape", [(64, 400), (64, 16, 25), (64, 1, 400)])
def test_matrices_and_kernels_keep_the_variance_of_their_input(shape):
    variance = synthetic_tensor("proj.weight", shape).var().item()

    assert variance * 400 == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("key", ["proj.weight", "norm.weight", "proj.bias", "block.alpha"])
def test_nothing_is_left_at_zero(key):
    assert (synthetic_tensor(key, (1000,)) != 0).all()


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_empty_shapes_are_possible(shape):
    assert tuple(synthetic_tensor("proj.weight", shape).shape) == shape


def test_a_checkpoint_is_built_from_keys_and_shapes():
    weights = synthetic_weights({"proj.weight": (2, 3), "block.alpha": ()})

    assert {key: tuple(value.shape) for key, value in weights.items()} == {"proj.weight": (2, 3), "block.alpha": ()}
    assert torch.equal(weights["proj.weight"], synthetic_tensor("proj.weight", (2, 3)))
