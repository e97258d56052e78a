"""Checkpoints and configurations as people have them, for every model: what `resolve` takes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from voicehub_aot import adapters
from voicehub_aot.compiler.models import resolve
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UsageError
from voicehub_aot.spec.synthetic import synthetic_weights

MODELS = adapters.names()
# What is named for tiny weights beside which no sizes are known: nothing, or what the model cannot do without.
NAMED = {"f5tts": "F5TTS_v1_Base", "styletts2": "tiny", "chatterbox": "tiny"}
FILES = {"chatterbox": "s3gen", "cosyvoice": "flow"}


def tiny(model: str, config: str = "tiny") -> dict[str, Tensor]:
    adapter = adapters.load(model)
    chosen = adapter.CONFIGS[config]
    return synthetic_weights(adapter.checkpoint_shapes(chosen)) | adapter.formula_weights(chosen)


def saved(folder: Path, model: str, weights: dict[str, Any], suffix: str = ".safetensors") -> str:
    path = folder / f"{FILES.get(model, 'model')}{suffix}"
    if suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path)
    return str(path)


def changed(weights: dict[str, Tensor], change: Callable[[Tensor], Tensor]) -> tuple[dict[str, Tensor], str]:
    """One matrix from the middle of the file, changed; and its name."""
    key = [k for k, t in weights.items() if t.dim() >= 2][len(weights) // 5]
    return {**weights, key: change(weights[key].clone())}, key


# --- values


def with_value(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.to(dtype)
        tensor.view(-1)[-1] = value
        return tensor

    return change


VALUES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "nan": (with_value(float("nan")), "not finite in float32, first nan at"),
    "infinity": (with_value(float("inf")), "not finite in float32, first inf at"),
    "minus infinity in bfloat16": (with_value(-float("inf"), torch.bfloat16), "first -inf at"),
    "nan in float16": (with_value(float("nan"), torch.float16), "first nan at"),
    "too large for float32": (with_value(1e39, torch.float64), r"first 1e\+39 at"),
    "int8": (lambda t: t.to(torch.int8), "is int8"),
    "uint8": (lambda t: t.to(torch.uint8), "is uint8"),
    "bool": (lambda t: t > 0, "is bool"),
    "int64": (lambda t: t.long(), "is int64"),
    "fp8": (lambda t: t.to(torch.float8_e4m3fn), "is float8_e4m3fn"),
}
OF_TORCH_FILES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "complex": (lambda t: t.to(torch.complex64), "is complex64"),
    "sparse": (lambda t: t.to_sparse(), "is sparse_coo, not dense"),
    "quantised": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "is quantised"),
    "a parameter": (lambda t: torch.nn.Parameter(with_value(float("nan"))(t)), "first nan at"),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", VALUES)
def test_a_tensor_that_is_not_of_finite_floats_is_named(model: str, kind: str, tmp_path: Path) -> None:
    change, words = VALUES[kind]
    weights, key = changed(tiny(model), change)
    with pytest.raises(CheckpointMismatch, match=words) as caught:
        resolve(model, "tiny", saved(tmp_path, model, weights))
    assert key in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:TypedStorage")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", OF_TORCH_FILES)
def test_a_torch_file_may_hold_further_kinds_of_tensors(model: str, kind: str, tmp_path: Path) -> None:
    change, words = OF_TORCH_FILES[kind]
    weights, key = changed(tiny(model), change)
    with pytest.raises(CheckpointMismatch, match=words) as caught:
        resolve(model, "tiny", saved(tmp_path, model, weights, ".pt"))
    assert key in str(caught.value)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floats_are_cast(model: str, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = {key: tensor.to(dtype) for key, tensor in tiny(model).items()}
    built = resolve(model, "tiny", saved(tmp_path, model, weights))
    assert {t.dtype for t in built.region.module.state_dict().values()} == {torch.float32}


def graph_with(folder: Path, change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> tuple[Path, str]:
    """Supertonic's recorded graph, one of its named weights changed."""
    path = Path(__file__).parents[1] / "golden" / "supertonic" / "region_tiny_cfg" / "model.onnx"
    model = onnx.load(str(path))
    item = next(i for i in model.graph.initializer if i.name.endswith("main_blocks.0.convnext.0.pwconv1.weight"))
    item.CopyFrom(onnx.numpy_helper.from_array(change(onnx.numpy_helper.to_array(item).copy()), item.name))
    onnx.save(model, str(folder / "vector_estimator.onnx"))
    return folder, item.name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: np.where(a == a.max(), np.nan, a).astype(np.float32), "first nan at"),
        (lambda a: np.where(a == a.max(), 1e39, a.astype(np.float64)), r"first 1e\+39 at"),
        (lambda a: a.astype(np.int8), "is int8"),
        (lambda a: a.astype(bool), "is bool"),
    ],
)
def test_values_in_an_onnx_graph_are_looked_at_too(
    change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]], words: str, tmp_path: Path
) -> None:
    folder, key = graph_with(tmp_path, change)
    with pytest.raises(CheckpointMismatch, match=words) as caught:
        resolve("supertonic", None, str(folder))
    assert key in str(caught.value)


def test_a_half_precision_graph_is_read(tmp_path: Path) -> None:
    folder, _ = graph_with(tmp_path, lambda a: a.astype(np.float16))
    assert resolve("supertonic", None, str(folder)).config_name == "tiny"


# --- a tensor is missing


@pytest.mark.parametrize("model", MODELS)
def test_whichever_tensor_is_missing_it_alone_is_named(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes and depth are read from the tensors: the absence of one must not look like another size."""
    adapter, weights = adapters.load(model), tiny(model)
    optional = set(adapter.formula_weights(adapter.CONFIGS["tiny"]))  # computed where they are missing
    source, wrong = saved(tmp_path, model, {}, ".pt"), []
    for key in weights.keys() - optional:
        rest = {k: t for k, t in weights.items() if k != key}
        monkeypatch.setattr("voicehub_aot.spec.checkpoint._content", lambda *_, rest=rest: rest)  # a file each is slow
        found = refusal(model, source)
        if not (found.startswith("1 missing: ") and found.split(": ", 1)[1].startswith(f"{key}. ")):
            wrong.append(f"{key}: {found[:200]}")
    assert not wrong, f"{len(wrong)} of {len(weights)}: {wrong[:8]}"


def refusal(model: str, source: str) -> str:
    """What follows "not this model's." in the error."""
    with pytest.raises(CheckpointMismatch) as caught:
        resolve(model, NAMED.get(model), source)
    return str(caught.value).split("not this model's. ")[-1]


@pytest.mark.parametrize("model", MODELS)
def test_a_number_far_beyond_the_others_is_not_a_depth(model: str, tmp_path: Path) -> None:
    weights = tiny(model)
    beyond = {key.replace(".1.", ".99999999.", 1): tensor.clone() for key, tensor in weights.items()}
    with pytest.raises(CheckpointMismatch, match=r"unexpected: \S*\.99999999\."):
        resolve(model, "tiny", saved(tmp_path, model, {**weights, **beyond}))


# --- sizes


DEEPER: dict[str, dict[str, Any]] = {
    "chatterbox": {"num_mid_blocks": 3},
    "cosyvoice": {"depth": 3},
    "echo": {"num_layers": 4, "latent_size": 24},
    "f5tts": {"depth": 3, "text_num_embeds": 31},
    "irodoritts": {"num_layers": 4, "text_dim": 44},
    "styletts2": {"num_layers": 3, "embedding_max_length": 80},
    "supertonic": {"n_blocks": 3, "n_last_convnext": 1},
    "vibevoice": {"head_layers": 3, "latent_size": 8},
    "voxcpm": {"num_hidden_layers": 4, "feat_dim": 9},
}


@pytest.mark.parametrize("model", MODELS)
def test_a_fine_tune_of_other_sizes_builds_and_says_so(model: str, tmp_path: Path) -> None:
    adapter, told = adapters.load(model), []
    config = replace(adapter.CONFIGS["tiny"], **DEEPER[model])
    weights = synthetic_weights(adapter.checkpoint_shapes(config)) | adapter.formula_weights(config)
    source = saved(tmp_path, model, weights)
    built = resolve(model, "tiny", source, tell=told.append)
    assert {name: built.config[name] for name in DEEPER[model]} == DEEPER[model]
    assert built.config_name == "tiny"
    assert all(f"{name}={value}" in told[-1] for name, value in DEEPER[model].items())
    assert built.checkpoint.notes == tuple(told)
    again = resolve(model, "tiny", source, built.config)  # as bench and reweight do, from the manifest
    assert again.checkpoint.digest == built.checkpoint.digest
    with pytest.raises(CheckpointMismatch, match="not this model's"):  # an artifact's sizes are fixed
        resolve(model, "tiny", saved(tmp_path, model, tiny(model)), built.config)


def test_another_network_than_the_named_one_is_refused(tmp_path: Path) -> None:
    source = saved(tmp_path, "chatterbox", tiny("chatterbox", "tiny-meanflow"))
    with pytest.raises(CheckpointMismatch, match=r"--config tiny: meanflow is True, wanted False"):
        resolve("chatterbox", "tiny", source)


# --- names


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_fsdp_wrapped_module."])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_names_of_wrappers_are_left_out(model: str, prefix: str, suffix: str, tmp_path: Path) -> None:
    weights, told = tiny(model), []
    wrapped = {prefix + key: tensor for key, tensor in weights.items()}
    built = resolve(model, "tiny", saved(tmp_path, model, wrapped, suffix), tell=told.append)
    plain = resolve(model, "tiny", saved(tmp_path, model, weights, suffix))
    assert built.checkpoint.digest == plain.checkpoint.digest
    assert any(prefix.split(".", maxsplit=1)[0] in text and f"{len(weights)} tensors" in text for text in told)


def test_a_wrapper_in_the_middle_of_a_name_is_left_out(tmp_path: Path) -> None:
    wrapped = {key.replace("transformer.", "transformer._orig_mod."): t for key, t in tiny("f5tts").items()}
    assert resolve("f5tts", "tiny", saved(tmp_path, "f5tts", wrapped)).config_name == "tiny"


def test_the_counter_of_averaged_models_is_left_out(tmp_path: Path) -> None:
    wrapped = {f"module.{key}": tensor for key, tensor in tiny("vibevoice").items()}
    source = saved(tmp_path, "vibevoice", {**wrapped, "n_averaged": torch.tensor(7)}, ".pt")
    assert resolve("vibevoice", "tiny", source).config_name == "tiny"


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_two_tensors_of_one_name_are_refused(suffix: str, tmp_path: Path) -> None:
    weights = tiny("f5tts")
    key = next(iter(weights))
    source = saved(tmp_path, "f5tts", {**weights, f"module.{key}": weights[key].clone()}, suffix)
    with pytest.raises(CheckpointMismatch, match="another entry are both"):
        resolve("f5tts", "tiny", source)


# --- averaged and raw weights


def both(model: str, form: str) -> dict[str, Any]:
    """Averaged weights as they are, raw ones twice as large."""
    ema = tiny(model)
    raw = {key: tensor * 2 for key, tensor in ema.items()}
    if form == "prefixes":  # of ema_pytorch, with its own counters
        bare = {key.removeprefix("ema_model."): key for key in ema}
        both = {f"ema_model.{k}": ema[v] for k, v in bare.items()} | {
            f"online_model.{k}": raw[v] for k, v in bare.items()
        }
        return {**both, "initted": torch.ones(()), "step": torch.ones((), dtype=torch.int64)}
    return {"model_state_dict": raw, form: ema, "update": 3}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", ["prefixes", "ema_model_state_dict", "ema"])
def test_averaged_weights_are_taken_unless_raw_ones_are_asked_for(model: str, form: str, tmp_path: Path) -> None:
    source = saved(tmp_path, model, both(model, form), ".pt")
    plain = saved(tmp_path, model, tiny(model), ".safetensors")
    ema, raw, told = [], [], []
    averaged = resolve(model, "tiny", source, tell=ema.append)
    last = resolve(model, "tiny", source, weights_kind="raw", tell=raw.append)
    assert averaged.checkpoint.digest == resolve(model, "tiny", plain, tell=told.append).checkpoint.digest
    assert averaged.checkpoint.digest != last.checkpoint.digest
    assert any("took the ema weights" in text and "--weights-kind raw takes" in text for text in ema)
    assert any("took the raw weights" in text and "--weights-kind ema takes" in text for text in raw)
    assert averaged.checkpoint.notes == tuple(ema)


def test_a_kind_that_is_not_there_is_refused(tmp_path: Path) -> None:
    plain = saved(tmp_path, "vibevoice", tiny("vibevoice"))
    with pytest.raises(CheckpointMismatch, match="leave --weights-kind out"):
        resolve("vibevoice", "tiny", plain, weights_kind="ema")
    source = saved(tmp_path, "f5tts", {"model_state_dict": tiny("f5tts")}, ".pt")
    with pytest.raises(CheckpointMismatch, match=r"holds no ema weights, only raw \('model_state_dict'\)"):
        resolve("f5tts", "tiny", source, weights_kind="ema")
    graph = Path(__file__).parents[1] / "golden" / "supertonic" / "region_tiny_cfg" / "model.onnx"
    with pytest.raises(CheckpointMismatch, match="leave --weights-kind out"):
        resolve("supertonic", None, str(graph), weights_kind="raw")
    with pytest.raises(UsageError, match="choose ema or raw"):
        resolve("f5tts", "tiny", source, weights_kind="best")
    with pytest.raises(UsageError, match="synthetic weights have no kind"):
        resolve("f5tts", "tiny", "synthetic", weights_kind="raw")


# --- what is not a checkpoint


@pytest.mark.parametrize("model", MODELS)
def test_a_lora_is_told_to_be_merged(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    lora = {f"base_model.model.{k}.lora_{ab}.weight": torch.ones(2, 2) for k in ("a.to_q", "a.to_v") for ab in "AB"}
    save_file(lora, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    for source in (folder, folder / "adapter_model.safetensors"):
        with pytest.raises(CheckpointMismatch, match=r"LoRA.*merge them into the weights first"):
            resolve(model, "tiny", str(source))
    whole = {f"{key.removesuffix('.weight')}.lora_down.weight": torch.ones(1) for key in list(tiny(model))[:1]}
    with pytest.raises(CheckpointMismatch, match=r"LoRA.*merge them into the weights first"):
        resolve(model, "tiny", saved(tmp_path, model, {**tiny(model), **whole}))


@pytest.mark.parametrize("model", MODELS)
def test_other_objects_in_a_torch_file_are_named_with_how_to_drop_them(model: str, tmp_path: Path) -> None:
    weights = tiny(model)
    source = saved(tmp_path, model, {**weights, "best_loss": np.float64(0.5)}, ".pt")
    with pytest.raises(CheckpointMismatch, match=r"numpy.*scalar.*python -c") as caught:
        resolve(model, "tiny", source)
    assert str(caught.value).isprintable()


# --- configurations


def wrong_values(kind: str) -> list[Any]:
    common: list[Any] = [None, [], {}, [1, 2], {"a": 1}]
    if "bool" in kind:
        return [value for value in [*common, 1, "true", 0.0] if value is not None or "None" not in kind]
    if "int" in kind and "tuple" not in kind:
        return [v for v in [*common, "64", 1.5, True, -1, 2_000_000_000, 10**30] if v is not None or "None" not in kind]
    if "float" in kind and "tuple" not in kind:
        return [*common, "0.1", True, float("nan"), float("inf")]
    if "tuple" in kind:
        return [None, {}, "1", 3, ["x"], [None], [[1]]]
    return [value for value in [[], {}, 3, True] if value is not None]


def configurations() -> list[tuple[str, str]]:
    return [(name, config) for name in MODELS for config in adapters.load(name).CONFIGS if config.startswith("tiny")]


@pytest.mark.parametrize(("model", "name"), configurations())
def test_every_field_of_a_configuration_is_checked(model: str, name: str, tmp_path: Path) -> None:
    adapter, file = adapters.load(model), tmp_path / "config.json"
    config = adapter.CONFIGS[name]
    wrong = []
    for field in fields(config):
        for value in wrong_values(str(field.type)):
            if (field.name, value) == ("text_dim", None):  # upstream's default, the mel's width
                continue
            file.write_text(json.dumps({**vars(config), field.name: value}))
            try:
                resolve(model, str(file), "synthetic")
                wrong.append(f"{field.name}={value!r} was taken")
            except (UsageError, OptionUnsupported) as error:
                if field.name not in str(error):
                    wrong.append(f"{field.name}={value!r}: {error}")
    assert not wrong, wrong


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text", ["null", "[]", "3", '"tiny"', "", "{", "[" * 100_000, '{"no_such_field": 1}'])
def test_a_configuration_file_is_an_object_of_known_fields(model: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"JSON object|no_such_field"):
        resolve(model, str(file), "synthetic")


@pytest.mark.parametrize("name", ["lm_config", "dit_config"])
@pytest.mark.parametrize("value", [None, [], 3, "text"])
def test_the_parts_of_a_released_configuration_are_objects(name: str, value: Any, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"architecture": "voxcpm2", "lm_config": {}, "dit_config": {}, name: value}))
    with pytest.raises(UsageError, match=r"wanted an object|missing"):
        resolve("voxcpm", str(file), "synthetic")
