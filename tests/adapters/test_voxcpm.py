"""VoxCPM: independent rows, checkpoints and their configurations, the loop's programs, what leaves the step."""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from voicehub_aot.adapters import voxcpm
from voicehub_aot.adapters.voxcpm import cases
from voicehub_aot.adapters.voxcpm.checkpoint import OUTSIDE, PREFIX
from voicehub_aot.adapters.voxcpm.net import Config, rope_rows
from voicehub_aot.compiler.export import export_region
from voicehub_aot.compiler.split import split
from voicehub_aot.compiler.stages import Stages
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UnknownModel, UsageError
from voicehub_aot.runtime.eager import EagerEvaluator
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.golden import read_case
from voicehub_aot.spec.program import Combine, Program
from voicehub_aot.spec.region import Region
from voicehub_aot.spec.synthetic import synthetic_weights

GOLDEN = Path(os.environ.get("VOICEHUB_AOT_GOLDEN", Path(__file__).parents[1] / "golden")) / "voxcpm"
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


def runtime_of(config: Config, program: Program) -> Runtime:
    region = region_of(config)
    return Runtime(region.spec, EagerEvaluator(region), {program.name: program}, Buckets(axes={}))


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
    weights, inputs = weights_of(TINY), inputs_of(TINY) | {"dt": torch.zeros(1)}
    without = {k: torch.zeros_like(v) if "delta_time_mlp" in k else v for k, v in weights.items()}
    difference = voxcpm.region(TINY, weights).module(**inputs) - voxcpm.region(TINY, without).module(**inputs)
    assert difference.abs().max() > 1e-2


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
    others = {f"{part}some.weight": torch.zeros(1) for part in OUTSIDE}
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
        ({"num_hidden_layers": 0}, UsageError, "num_hidden_layers=0 is not a positive integer"),
        ({"num_attention_heads": 5}, UsageError, "not a multiple of num_key_value_heads=2"),
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


# --- the loop


def test_the_released_loop_has_ten_steps_of_which_the_first_costs_nothing() -> None:
    program = voxcpm.program(10)
    grid = [1, 0.9564, 0.9090, 0.8540, 0.7878, 0.7071, 0.6090, 0.4910, 0.3511, 0.1877, 0]
    assert program.schedule == pytest.approx(grid, abs=6e-5)
    assert (program.schedule[0], program.schedule[-1]) == (1.0, 0.0)
    assert (program.name, program.evaluations) == ("euler-10", 9)
    assert program.times == pytest.approx(grid[1:-1], abs=6e-5)
    assert program.extra_times == {"dt": (0.0,) * 9}
    moves = [dict(i.terms)["v"] for i in program.instructions if isinstance(i, Combine)]
    assert moves == pytest.approx([b - a for a, b in itertools.pairwise(grid[1:])], abs=2e-4)


@pytest.mark.parametrize(("steps", "skipped"), [(2, 1), (10, 1), (48, 1), (49, 2), (50, 2), (74, 3)])
def test_four_percent_of_the_grid_start_with_zero_velocity(steps: int, skipped: int) -> None:
    assert voxcpm.program(steps).evaluations == steps - skipped
    assert voxcpm.program(steps, use_cfg_zero_star=False).evaluations == steps
    assert voxcpm.program(steps, zero_init_steps=0).evaluations == steps


def test_the_time_told_is_accumulated_and_so_may_miss_the_grid_by_an_ulp() -> None:
    program = voxcpm.program(6, sway=-0.5, use_cfg_zero_star=False)
    assert program.schedule[5] == 0.10037042945623398
    assert program.times[5] == 0.10037042200565338
    assert program.times[:5] == program.schedule[:5]


def test_in_mean_mode_the_denoiser_is_told_the_width_of_its_step() -> None:
    program = voxcpm.program(5, mean_mode=True)
    times = (*program.times, 0.0)
    assert program.extra_times["dt"] == pytest.approx([a - b for a, b in itertools.pairwise(times)], abs=1e-7)
    assert program.extra_times["dt"][0] == pytest.approx(0.1212317, abs=1e-7)


@pytest.mark.parametrize(
    ("steps", "options", "words"),
    [
        (4, {"solver": "midpoint"}, "'solver'.*known are sway, use_cfg_zero_star, zero_init_steps, mean_mode"),
        (4, {"sway": "much"}, "sway='much', wanted a finite number"),
        (4, {"mean_mode": 1}, "mean_mode=1, wanted true or false"),
        (4, {"zero_init_steps": 4}, "4 of 4 steps have zero velocity, wanted 0 to 3"),
        (4, {"zero_init_steps": -1}, "-1 of 4 steps"),
        (4, {"zero_init_steps": 1.0}, "1.0 of 4 steps"),
        (1, {}, "1 of 1 steps have zero velocity"),
    ],
)
def test_options_of_the_loop_are_checked(steps: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionUnsupported, match=words):
        voxcpm.program(steps, **options)
    assert voxcpm.program(1, use_cfg_zero_star=False).evaluations == 1


@pytest.mark.parametrize(("zero_star", "equation"), [(True, "zero_star"), (False, "classifier_free")])
def test_the_configuration_chooses_the_guidance_equation(zero_star: bool, equation: str) -> None:
    guidance = region_of(replace(TINY, use_cfg_zero_star=zero_star)).spec.guidance
    assert guidance is not None
    assert guidance.equation == equation
    assert guidance.scales(None) == {"unconditional": 1.0}  # upstream's cfg_value 2
    assert guidance.branches[1].flags == {"drop_mu": True}


def upstream_patch(denoiser: Any, noise: Tensor, mu: Tensor, cond: Tensor, steps: int, scale: float) -> Tensor:
    """One patch as upstream's host computes it: packed rows, mu zeroed by hand, CFG-Zero*, time accumulated."""
    rows, grid = len(noise), torch.linspace(1, 0, steps + 1)
    grid = grid + (torch.cos(torch.pi / 2 * grid) - 1 + grid)
    x, t = noise, grid[0]
    for step, point in enumerate(grid[1:], start=1):
        dt = t - point
        if step > max(1, int(len(grid) * 0.04)):
            both = {"x": x.repeat(2, 1, 1), "cond": cond.repeat(2, 1, 1), "mu": torch.cat((mu, mu * 0))}
            v = denoiser(both["x"], both["mu"], t.repeat(2 * rows), both["cond"], torch.zeros(2 * rows))
            c, u = v.flatten(1).chunk(2)
            u = u * ((c * u).sum(1, keepdim=True) / ((u * u).sum(1, keepdim=True) + 1e-8))
            x = x - dt * (u + scale * (c - u)).view_as(x)
        t = t - dt
    return x


@pytest.mark.parametrize("name", ["tiny", "tiny-v1"])
def test_sampling_is_upstreams_loop_around_the_denoiser(name: str) -> None:
    config = voxcpm.CONFIGS[name]
    runtime, given = runtime_of(config, voxcpm.program(10)), inputs_of(config, rows=3)
    mu, cond = given["mu"], given["cond"]
    want = upstream_patch(runtime.denoiser(), given["x"], mu, cond, steps=10, scale=2.5)
    patch = runtime.sample(noise=given["x"], mu=mu, cond=cond, guidance=1.5)
    assert patch.std() > 0.3
    torch.testing.assert_close(patch, want, atol=2e-5, rtol=1e-4)
    plain = runtime_of(replace(config, use_cfg_zero_star=False), voxcpm.program(10))
    assert (plain.sample(noise=given["x"], mu=mu, cond=cond, guidance=1.5) - patch).abs().max() > 1e-2
    alone = runtime.sample(noise=given["x"][1:2], mu=mu[1:2], cond=cond[1:2], guidance=1.5)
    torch.testing.assert_close(alone, patch[1:2], atol=2e-5, rtol=1e-4)


def test_a_seed_needs_no_length() -> None:
    runtime, given = runtime_of(TINY, voxcpm.program(4)), inputs_of(TINY, rows=2)
    request = {"mu": given["mu"], "cond": given["cond"]}
    patch = runtime.sample(seed=[7, 9], **request)
    assert patch.shape == given["x"].shape
    swapped = {key: value.flip(0) for key, value in request.items()}
    torch.testing.assert_close(runtime.sample(seed=[9, 7], **swapped), patch.flip(0), atol=1e-5, rtol=1e-4)


# --- what leaves the step


@pytest.fixture(scope="module", params=["tiny", "tiny-v1"])
def stages(request: pytest.FixtureRequest) -> Stages:
    region = region_of(voxcpm.CONFIGS[request.param])
    graph, symbols = export_region(region)
    return split(graph, region.spec, symbols)


def test_the_step_reads_no_weight_of_times_and_previous_patch(stages: Stages) -> None:
    elsewhere = ("time_mlp", "delta_time_mlp", "cond_proj")
    assert not [name for name in stages.step.constants if name.startswith(elsewhere)]
    assert any(name.startswith("cond_proj") for name in stages.prepare.constants)
    assert not [name for name in stages.prepare.constants if name.startswith(("time_mlp", "delta_time_mlp"))]
    if stages.mixed is not None:
        assert not [name for name in stages.mixed.constants if name.startswith(elsewhere)]


def test_the_first_layer_projects_time_and_context_before_the_step(stages: Stages) -> None:
    """v2's time token depends on the time alone; v1's holds mu as well."""
    query = "decoder.layers.0.self_attn.q_proj.weight"
    assert query in stages.prepare.constants
    is_v1 = stages.mixed is not None
    assert (query in stages.table.constants) == (not is_v1)
    assert is_v1 == (stages.spec.input("x").shape[2] == TINY_V1.patch_size)
    if stages.mixed is not None:
        assert query in stages.mixed.constants


def tokens_of(stages: Stages, weight: str) -> int:
    """How many tokens the step multiplies with a weight."""
    for node in stages.step.module.graph.nodes:
        if node.target == torch.ops.aten.linear.default and node.args[1].target == weight:
            return int(node.meta["val"].shape[1])
    raise AssertionError(f"no linear with {weight}")


def test_the_first_projections_and_the_last_layer_cost_the_patch_alone(stages: Stages) -> None:
    patch = stages.spec.input("x").shape[2]
    every = 11 if stages.mixed is None else 7
    assert tokens_of(stages, "decoder.layers.0.self_attn.k_proj.weight") == patch
    assert tokens_of(stages, "decoder.layers.0.mlp.up_proj.weight") == every
    assert tokens_of(stages, "decoder.layers.1.self_attn.q_proj.weight") == every
    assert tokens_of(stages, "decoder.layers.2.self_attn.k_proj.weight") == every
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
        assert tokens_of(stages, f"decoder.layers.2.{part}.weight") == patch


# --- recorded cases: what is not understood is refused (their numbers: tests/compiler/test_replay.py)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("region_tiny_cfg", {"scalars": {"cfg_value": 2.0, "rescale": 0.7}}, "'rescale'.*not understood"),
        ("sampler_tiny", {"estimator_calls": 10}, "'estimator_calls': 9"),
        ("sampler_tiny", {"zero_init_steps": 2}, "'zero_init_steps': 1"),
        ("sampler_tiny", {"patch_size": 2}, "'patch_size': 4"),
    ],
)
def test_what_a_case_holds_beyond_the_known_is_an_error(name: str, change: dict[str, Any], words: str) -> None:
    case = read_case(GOLDEN / name)
    case = replace(case, **change) if "scalars" in change else replace(case, scalars={**case.scalars, **change})
    with pytest.raises(UsageError, match=words):
        cases.replay(case, runtime_of(cases.case_config(case), cases.case_program(case)))


def test_a_case_tells_the_sizes_that_its_configuration_leaves_open() -> None:
    case = read_case(GOLDEN / "region_tiny_mup")
    config = cases.case_config(case)
    assert (config.context_size, config.patch_size, config.mu_tokens) == (3, 4, 2)
    assert config.rope_factors[0] == 2.0
    assert config.rope_scale > 1.1
    assert not cases.case_config(read_case(GOLDEN / "sampler_tiny_b")).use_cfg_zero_star


@pytest.mark.parametrize(("case", "name"), [("region_real", "VoxCPM2"), ("region_real_v1", "VoxCPM1.5")])
def test_the_cases_of_released_size_have_the_released_configuration(case: str, name: str) -> None:
    assert cases.case_config(read_case(GOLDEN / case)) == voxcpm.CONFIGS[name]


# OpenBMB/VoxCPM 616d3d3e, src/voxcpm/modules/locdit/unified_cfm.py: what 10 steps in bfloat16 integrate over.
BFLOAT16_TEN_STEPS = [1, 0.9531, 0.9102, 0.8516, 0.7891, 0.7070, 0.6094, 0.4922, 0.3496, 0.1885, 0]


def test_a_bfloat16_run_has_its_own_grid() -> None:
    program = voxcpm.program(10, time_dtype="bfloat16")

    assert program.schedule == pytest.approx(BFLOAT16_TEN_STEPS, abs=5e-5)
    assert program.times == pytest.approx(BFLOAT16_TEN_STEPS[1:-1], abs=5e-5)
    assert voxcpm.program(10).times[0] == pytest.approx(0.9564, abs=5e-5)


def test_a_grid_too_fine_for_bfloat16_is_refused() -> None:
    with pytest.raises(OptionUnsupported, match=r"coincide in torch\.bfloat16; ask for fewer steps"):
        voxcpm.program(600, time_dtype="bfloat16")
