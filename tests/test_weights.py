"""Checkpoints and configurations as people have them: what is wrong is named before anything is exported."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from voicehub_aot import adapters, models
from voicehub_aot.checkpoint import check_weights, locate, read_tensors, unwrapped
from voicehub_aot.errors import AotError, CheckpointMismatch, UsageError
from voicehub_aot.synthetic import synthetic_weights

NAMES = adapters.names()


def weights_of(name):
    adapter = adapters.load(name)
    config = adapter.CONFIGS["tiny"]
    state = synthetic_weights(adapter.checkpoint_shapes(config)) | adapter.formula_weights(config)
    return adapter, config, state


def infinite(tensor):
    tensor = tensor.clone()
    tensor.reshape(-1)[-1] = float("inf")
    return tensor


def one_nan(tensor):
    tensor = tensor.clone()
    tensor.reshape(-1)[0] = float("nan")
    return tensor


def too_large(tensor):
    tensor = tensor.double()
    tensor.reshape(-1)[0] = 1e300
    return tensor


FAULTS = {
    "NaN": one_nan,
    "infinity": infinite,
    "overflow": too_large,
    **{
        str(dtype): lambda tensor, dtype=dtype: torch.zeros(tensor.shape).to(dtype)
        for dtype in (
            torch.int8,
            torch.uint8,
            torch.bool,
            torch.int64,
            torch.int32,
            torch.complex64,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        )
    },
    "sparse": lambda tensor: tensor.to_sparse(),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", NAMES)
def test_a_weight_of_a_wrong_kind_or_value_is_named(name, fault):
    adapter, config, state = weights_of(name)
    formulas = adapter.formula_weights(config)
    key = next(k for k in sorted(state) if k not in formulas and state[k].numel() > 1)
    state[key] = FAULTS[fault](state[key])

    with pytest.raises(CheckpointMismatch) as caught:
        adapter.region(config, state)

    assert key in str(caught.value)
    assert caught.value.exit_code == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_point_is_read(dtype):
    check_weights("here", {"a": torch.ones(2, dtype=dtype)}, {"a": (2,)})


def test_the_value_and_its_place_are_told():
    weights = torch.zeros(3, 4)
    weights[2, 1] = float("nan")

    with pytest.raises(CheckpointMismatch, match=r"a \(1 of 12 values, the first nan at \[2, 1\]\)"):
        check_weights("here", {"a": weights}, {"a": (3, 4)})


@pytest.mark.parametrize(
    ("keys", "plain"),
    [
        (["_orig_mod.a", "_orig_mod.b.c"], ["a", "b.c"]),
        (["net._orig_mod.a", "b"], ["net.a", "b"]),
        (["module.a", "module.b"], ["a", "b"]),
        (["module._orig_mod.a", "module.b"], ["a", "b"]),
        (["_orig_mod.module.a", "_orig_mod.module.b"], ["a", "b"]),
        (["module.a", "b"], ["module.a", "b"]),
    ],
)
def test_names_lose_what_wrappers_put_before_them(keys, plain):
    assert list(unwrapped(dict.fromkeys(keys, 0))) == plain
    assert list(unwrapped({"state": dict.fromkeys(keys, 0)})["state"]) == plain


def test_a_wrapped_safetensors_file_is_read(tmp_path):
    save_file({"_orig_mod.part.a": torch.ones(2), "_orig_mod.other.b": torch.zeros(1)}, tmp_path / "w.safetensors")

    assert list(read_tensors(tmp_path / "w.safetensors", ("part.",))) == ["part.a"]


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_lora_folder_is_refused(tmp_path, name):
    (tmp_path / name).touch()

    for source in (tmp_path, tmp_path / name):
        with pytest.raises(CheckpointMismatch, match=r"LoRA adapter .* merge it into its base model"):
            locate(str(source), [])


@pytest.mark.parametrize("key", ["base_model.model.a.lora_A.weight", "blocks.0.lora_down.weight", "a.lora_B.default"])
def test_a_lora_file_is_refused(tmp_path, key):
    save_file({key: torch.ones(2)}, tmp_path / "w.safetensors")

    with pytest.raises(CheckpointMismatch, match="holds a LoRA adapter"):
        read_tensors(tmp_path / "w.safetensors")


@pytest.mark.parametrize("value", [np.float64(3.0), np.ones(2), torch.nn.Linear(1, 1), object()])
def test_a_pickled_object_is_named_without_escape_codes(tmp_path, value):
    torch.save({"a": torch.ones(2), "step": value}, tmp_path / "w.pt")

    with pytest.raises(CheckpointMismatch, match=r"holds a [\w.]+, which is not a tensor .*save_file") as caught:
        read_tensors(tmp_path / "w.pt")

    assert "\x1b" not in str(caught.value)


def upstream_values(name):
    """The tiny configuration's hyperparameters, as `config_from` takes them."""
    return models.config_values(adapters.load(name).CONFIGS["tiny"])


@pytest.mark.parametrize("wrong", [None, [], {}, "many", -3, 1.5, True, 10**30])
@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_with_a_wrong_value_is_a_usage_error(tmp_path, name, wrong):
    values = upstream_values(name)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    assert models.resolve(name, str(file), "synthetic").config == values
    for field in values:
        file.write_text(json.dumps({**values, field: wrong}), encoding="utf-8")
        try:
            models.resolve(name, str(file), "synthetic")
        except AotError as error:
            assert isinstance(error, UsageError) or error.exit_code in (2, 4, 5), f"{field}: {error!r}"


@pytest.mark.parametrize("content", ["null", "[]", "3", '"text"', "{", "[" * 100_000, '{"unknown": 1}', "\udcff"])
@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_that_is_no_object_is_a_usage_error(tmp_path, name, content):
    file = tmp_path / "config.json"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))

    with pytest.raises(UsageError):
        models.resolve(name, str(file), "synthetic")


@pytest.mark.parametrize("name", NAMES)
def test_one_missing_tensor_is_named_whichever_it_is(tmp_path, name):
    adapter, config, state = weights_of(name)
    file = tmp_path / "model.safetensors"
    formulas = adapter.formula_weights(config)  # these need not be in the file
    for key in sorted(set(state) - set(formulas)):
        rest = {k: v.contiguous() for k, v in state.items() if k != key}
        save_file(rest, file)
        with pytest.raises(CheckpointMismatch) as caught:
            adapter.region(*adapter.read_checkpoint(file, config))
        assert key in str(caught.value) or key.removeprefix("model.") in str(caught.value), key


# Of the others, sizes do not follow from the tensors alone: Supertonic's head counts, VoxCPM's and StyleTTS 2's
# statistics, Chatterbox's two kinds of network. Their tiny checkpoint under a released name is refused.
FOLLOWS = ("cosyvoice", "echo", "f5tts", "irodoritts", "vibevoice")


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(FOLLOWS)))
def test_a_fine_tune_of_other_sizes_is_refused_where_the_tensors_do_not_tell_all(tmp_path, name):
    adapter, _, state = weights_of(name)
    file = tmp_path / "model.safetensors"
    save_file({k: v.contiguous() for k, v in state.items()}, file)

    with pytest.raises(CheckpointMismatch):
        models.resolve(name, adapter.DEFAULT_CONFIG, str(file))


@pytest.mark.parametrize("name", FOLLOWS)
def test_a_fine_tune_of_other_sizes_keeps_them_with_a_released_configuration_named(tmp_path, name):
    """The tiny model's file under a released name whose sizes differ: sizes are the tensors', flags the name's."""
    adapter, config, state = weights_of(name)
    file = tmp_path / "model.safetensors"
    save_file({k: v.contiguous() for k, v in state.items()}, file)
    other = next((n for n, c in adapter.CONFIGS.items() if n != "tiny" and type(c) is type(config)), None)
    assert other is not None
    found, _ = adapter.read_checkpoint(file, other)

    model = models.resolve(name, other, str(file))

    assert model.config == models.config_values(found)
    assert model.config_name == other
