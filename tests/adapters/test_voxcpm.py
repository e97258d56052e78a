"""VoxCPM: independent rows, checkpoints and their configurations, the loop's programs, what leaves the step."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from voicehub_aot.adapters import voxcpm
from voicehub_aot.adapters._voxcpm_checkpoint import OTHER_PARTS, PREFIX
from voicehub_aot.adapters._voxcpm_dit import Config, rope_rows
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UnknownModel, UsageError
from voicehub_aot.region import Region
from voicehub_aot.synthetic import synthetic_weights

TINY, TINY_V1 = voxcpm.CONFIGS["tiny"], voxcpm.CONFIGS["tiny-v1"]
VARIANTS = {
    "v2": TINY,
    "v1": TINY_V1,
    "mup": replace(TINY, use_mup=True, rope_scale=1.2, num_key_value_heads=1),
    "one layer": replace(TINY_V1, num_hidden_layers=1),
    "other context": replace(TINY, context_size=2, mu_tokens=1),
}


def weights_of(config: Config) -> dict[str, Tensor]:
    return synthetic_weights(voxcpm.checkpoint_shapes(config))


def region_of(config: Config) -> Region:
    return voxcpm.region(config, weights_of(config))


def inputs_of(config: Config, rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, config.feat_dim, config.patch_size, generator=generator),
        "time": torch.tensor([0.3]),
        "dt": torch.tensor([0.1]),
        "mu": torch.randn(rows, config.mu_tokens * config.hidden_size, generator=generator),
        "cond": torch.randn(rows, config.feat_dim, config.context_size, generator=generator),
        "drop_mu": torch.zeros(rows, dtype=torch.bool),
    }


# --- rows and inputs


@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_gives_what_it_gives_alone_whatever_the_others_hold(name: str) -> None:
    module, inputs = region_of(VARIANTS[name]).module, inputs_of(VARIANTS[name], rows=4)
    inputs["drop_mu"] = torch.tensor([False, True, False, True])
    for item in ("x", "mu", "cond"):
        inputs[item][2] = math.nan
    together = module(**inputs)
    assert together[2].isnan().all()
    for row in (0, 1, 3):
        alone = {key: v if key in ("time", "dt") else v[row : row + 1] for key, v in inputs.items()}
        torch.testing.assert_close(together[row : row + 1], module(**alone), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_each_input_matters(name: str) -> None:
    module, inputs = region_of(VARIANTS[name]).module, inputs_of(VARIANTS[name])
    velocity = module(**inputs)
    assert velocity.std() > 0.3
    for key, value in inputs.items():
        other = module(**inputs | {key: ~value if value.dtype == torch.bool else value + 0.3})
        assert (other - velocity).abs().max() > 1e-2, key


@pytest.mark.parametrize("name", ["v2", "mup"])
def test_every_position_of_mu_cond_and_x_matters(name: str) -> None:
    config = VARIANTS[name]
    module, inputs = region_of(config).module, inputs_of(config)
    velocity = module(**inputs)
    swapped = {
        "mu": inputs["mu"].view(1, config.mu_tokens, -1).roll(1, 1).flatten(1),
        "cond": inputs["cond"].roll(1, 2),
        "x": inputs["x"].roll(1, 2),
    }
    for key, value in swapped.items():
        if config.mu_tokens > 1 or key != "mu":
            assert (module(**inputs | {key: value}) - velocity).abs().max() > 1e-2, key


def test_a_dropped_mu_is_zero() -> None:
    module, inputs = region_of(TINY).module, inputs_of(TINY)
    dropped = module(**inputs | {"drop_mu": torch.tensor([True])})
    torch.testing.assert_close(dropped, module(**inputs | {"mu": inputs["mu"] * 0}), atol=0, rtol=0)


def test_the_width_zero_has_an_embedding_of_its_own() -> None:
    weights = weights_of(TINY)
    module, inputs = voxcpm.region(TINY, weights).module, inputs_of(TINY) | {"dt": torch.zeros(1)}
    for part in ("linear_1", "linear_2"):
        for leaf in ("weight", "bias"):
            weights[f"{PREFIX}delta_time_mlp.{part}.{leaf}"] *= 0
    assert (voxcpm.region(TINY, weights).module(**inputs) - module(**inputs)).abs().max() > 1e-2


def test_rotary_rows_are_those_of_the_positions_and_factors() -> None:
    """v2 keeps the time at the place after mu's tokens, though it is projected first."""
    assert TINY.positions == [2, 0, 1, 3, 4, 5, 6, 7, 8, 9, 10]
    assert TINY_V1.positions == list(range(7))
    cos, sin = rope_rows(replace(TINY, rope_scale=1.5))
    angle = 2 * 10000.0 ** (-2 * 3 / 10) / 2.6  # position 2, frequency 3
    assert cos.shape == sin.shape == (11, 1, 5)
    assert cos[0, 0, 3].item() == pytest.approx(1.5 * math.cos(angle), rel=1e-6)
    assert sin[0, 0, 3].item() == pytest.approx(1.5 * math.sin(angle), rel=1e-6)
    assert sin[1].abs().max() == 0


# --- checkpoints


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [("VoxCPM2", 123, 212_040_768), ("VoxCPM1.5", 87, 123_952_192), ("VoxCPM-0.5B", 51, 64_175_168)],
)
def test_released_checkpoints_have_the_audited_size(name: str, tensors: int, parameters: int) -> None:
    shapes = voxcpm.checkpoint_shapes(voxcpm.CONFIGS[name])
    assert len(shapes) == tensors
    assert sum(torch.Size(s).numel() for s in shapes.values()) == parameters
    assert all(key.startswith("feat_decoder.estimator.") for key in shapes)


def released(config: Config) -> dict[str, Any]:
    """The config.json that a release with this configuration has."""
    decoder = asdict(config)
    same = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "use_mup", "scale_depth")
    scaling = {
        "type": "longrope",
        "long_factor": [9.0] * len(config.rope_factors),
        "short_factor": list(config.rope_factors),
        "original_max_position_embeddings": 32768,
    }
    return {
        "architecture": "voxcpm2" if config.variant == "v2" else "voxcpm",
        "lm_config": {name: decoder[name] for name in same}
        | {"hidden_size": 999, "intermediate_size": 999, "num_attention_heads": 9, "num_hidden_layers": 9}
        | {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 73448, "scale_emb": 12, "dim_model_base": 256}
        | {"max_position_embeddings": 32768, "kv_channels": 999, "rope_scaling": scaling},
        "patch_size": config.patch_size,
        "feat_dim": config.feat_dim,
        "residual_lm_num_layers": 8,
        "encoder_config": {"hidden_dim": 1024},
        "dit_config": {
            "hidden_dim": config.hidden_size,
            "ffn_dim": config.intermediate_size,
            "num_heads": config.num_attention_heads,
            "num_layers": config.num_hidden_layers,
            "kv_channels": config.kv_channels,
            "mean_mode": True,  # published under this name, which upstream does not read
            "cfm_config": {"sigma_min": 1e-06, "solver": "euler", "t_scheduler": "log-norm"},
        },
        "audio_vae_config": {"latent_dim": 64},
        "max_length": 8192,
        "device": "cuda",
        "dtype": "bfloat16",
    }


def whole_model(config: Config) -> dict[str, Tensor]:
    others = {f"{part}some.weight": torch.zeros(1) for part in OTHER_PARTS}
    return {**{k: v.bfloat16() for k, v in weights_of(config).items()}, **others}


@pytest.mark.parametrize("form", ["safetensors", "bin", "nested bin"])
@pytest.mark.parametrize("name", ["tiny", "tiny-v1"])
def test_every_released_form_gives_the_same_region(name: str, form: str, tmp_path: Path) -> None:
    config = voxcpm.CONFIGS[name]
    weights = whole_model(config)
    (tmp_path / "config.json").write_text(json.dumps(released(config)))
    if form == "safetensors":
        save_file(weights, tmp_path / "model.safetensors")
    else:
        torch.save({"state_dict": weights} if form == "nested bin" else weights, tmp_path / "pytorch_model.bin")
    found, read = voxcpm.read_checkpoint(tmp_path, None)
    assert found == config
    assert set(read) == set(voxcpm.checkpoint_shapes(config))
    state = voxcpm.region(found, read).module.state_dict()
    for key, tensor in state.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, weights[PREFIX + key].float())


def test_without_config_json_the_shapes_tell_the_release(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for name in ("tiny", "tiny-v1"):
        save_file(whole_model(voxcpm.CONFIGS[name]), file)
        assert voxcpm.read_checkpoint(file, None)[0] == voxcpm.CONFIGS[name]
    other = replace(TINY, num_hidden_layers=2)
    save_file(weights_of(other), file)
    with pytest.raises(CheckpointMismatch, match=r"no config\.json beside it"):
        voxcpm.read_checkpoint(file, None)
    assert voxcpm.read_checkpoint(file, other)[0] == other


def test_a_named_configuration_goes_before_config_json(tmp_path: Path) -> None:
    save_file(whole_model(TINY), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(released(replace(TINY, rope_theta=500.0))))
    assert voxcpm.read_checkpoint(tmp_path, None)[0].rope_theta == 500.0
    assert voxcpm.read_checkpoint(tmp_path, "tiny")[0] == TINY
    assert voxcpm.read_checkpoint(tmp_path, replace(TINY, use_cfg_zero_star=False))[0].use_cfg_zero_star is False


def test_everything_wrong_with_a_checkpoint_is_in_one_error(tmp_path: Path) -> None:
    weights = whole_model(TINY)
    del weights[f"{PREFIX}in_proj.bias"]
    weights[f"{PREFIX}decoder.rope.inv_freq"] = torch.zeros(5)
    weights["vocoder.weight"] = torch.zeros(1)
    weights[f"{PREFIX}decoder.layers.1.self_attn.k_proj.weight"] = torch.zeros(3, 40)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatch) as caught:
        voxcpm.read_checkpoint(tmp_path, "tiny")
    for words in ("1 missing: ", "in_proj.bias", "2 unexpected: ", "decoder.rope.inv_freq", "vocoder.weight"):
        assert words in str(caught.value)
    assert "k_proj.weight is [3, 40], wanted [20, 40]" in str(caught.value)


@pytest.mark.parametrize("key", [f"{PREFIX}decoder.layers.0.self_attn.q_proj.lora_A", "base_lm.layers.0.x.lora_B"])
def test_lora_must_be_merged_first(key: str, tmp_path: Path) -> None:
    save_file({**whole_model(TINY), key: torch.zeros(8, 40)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"1 LoRA tensors \(.*merge them into the weights first"):
        voxcpm.read_checkpoint(tmp_path, "tiny")


def test_folders_and_files_that_hold_no_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match=r"no model\.safetensors or pytorch_model\.bin"):
        voxcpm.read_checkpoint(tmp_path, None)
    with pytest.raises(UnknownModel, match=r"known are VoxCPM2, VoxCPM1\.5, VoxCPM-0\.5B, tiny"):
        voxcpm.read_checkpoint(tmp_path, "no_such")
    torch.save({"step": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointMismatch, match="'step' is a int"):
        voxcpm.read_checkpoint(tmp_path, None)


@pytest.mark.parametrize("text", ["{", "[]", '{"architecture": "voxcpm2"}', '{"architecture": "x", "dit_config": {}}'])
def test_a_config_json_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    save_file(whole_model(TINY), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointMismatch, match=r"config\.json: .*; wanted the config\.json of a VoxCPM release"):
        voxcpm.read_checkpoint(tmp_path, None)


# --- configuration


@pytest.mark.parametrize("name", voxcpm.CONFIGS)
def test_every_configuration_survives_its_own_names_and_the_released_ones(name: str) -> None:
    config = voxcpm.CONFIGS[name]
    assert voxcpm.config_from(json.loads(json.dumps(asdict(config)))) == config
    assert voxcpm.config_from(released(config)) == config


@pytest.mark.parametrize(("longest", "scale"), [(64, 1.0), (256, math.sqrt(1 + math.log(4) / math.log(64)))])
def test_the_context_length_chooses_the_rotary_factors_once(longest: int, scale: float) -> None:
    values = released(TINY)
    values["lm_config"]["max_position_embeddings"] = longest
    values["lm_config"]["rope_scaling"]["original_max_position_embeddings"] = 64
    config = voxcpm.config_from(values)
    assert config.rope_factors == (TINY.rope_factors if longest == 64 else (9.0,) * 5)
    assert config.rope_scale == pytest.approx(scale)


def test_mean_mode_is_read_where_upstream_reads_it() -> None:
    v1, v2 = released(TINY_V1), released(TINY)
    assert not voxcpm.config_from(v1).mean_mode
    assert not voxcpm.config_from(v2).mean_mode
    assert voxcpm.config_from(v1 | {"dit_mean_mode": True}).mean_mode
    v2["dit_config"]["dit_mean_mode"] = True
    assert voxcpm.config_from(v2).mean_mode


def test_heads_divide_the_width_where_their_size_is_not_given() -> None:
    values = released(replace(TINY_V1, hidden_size=48))
    del values["dit_config"]["kv_channels"]
    assert voxcpm.config_from(values).kv_channels == 8
    del values["lm_config"]["use_mup"]
    assert voxcpm.config_from(values).use_mup  # upstream's default


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"hidden_sizes": 3}, UsageError, "hidden_sizes"),
        ({"variant": "v3"}, UsageError, "variant='v3' is not one of"),
        ({"num_hidden_layers": 0}, UsageError, "num_hidden_layers=0 is no positive integer"),
        ({"num_attention_heads": 5}, UsageError, "no multiple of num_key_value_heads=2"),
        ({"kv_channels": 12}, UsageError, "5 rotary factors for heads of 12; wanted 6"),
        ({"variant": "v1"}, UsageError, "mu_tokens=2, but v1 has 1"),
        ({"hidden_size": 41}, UsageError, "hidden_size=41 is odd"),
    ],
)
def test_config_errors_say_what_is_wrong(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        voxcpm.config_from(asdict(TINY) | change)


@pytest.mark.parametrize(
    ("path", "value", "error", "words"),
    [
        (("architecture",), "voxcpm3", OptionUnsupported, "known are voxcpm, voxcpm2"),
        (("dit_config", "cfm_config"), {"solver": "midpoint"}, OptionUnsupported, "'midpoint'"),
        (("dit_config", "num_heads"), None, UsageError, r"\['num_heads'\] are missing"),
        (("lm_config", "rope_scaling", "type"), "yarn", OptionUnsupported, "'yarn'"),
        (("lm_config", "rope_theta"), None, UsageError, r"\['rope_theta'\] are missing"),
    ],
)
def test_config_json_errors_say_what_is_wrong(
    path: tuple[str, ...], value: Any, error: type[Exception], words: str
) -> None:
    values = released(TINY)
    *inner, last = path
    place = values
    for name in inner:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    with pytest.raises(error, match=words):
        voxcpm.config_from(values)
