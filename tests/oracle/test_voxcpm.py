"""VoxCPM against the package voxcpm itself: both local DiTs, the released sizes, its sampling loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from oracle.upstream import load
from torch import Tensor, nn

from voicehub_aot.adapters import voxcpm
from voicehub_aot.adapters.voxcpm.net import Config, rope_rows
from voicehub_aot.runtime.eager import eager_runtime
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.synthetic import synthetic_weights

pytestmark = pytest.mark.oracle

FACTORS = {5: [1.0, 1.2, 1.7, 2.6, 4.1], 4: [1.0, 1.2, 1.7, 2.6]}


def decoder(half: int = 5, longest: int = 32, **changes: Any) -> dict[str, Any]:
    """Upstream's MiniCPM4Config: heads of 2 * half, contexts of 32 tokens and of more with `longest`."""
    scaling = {
        "type": "longrope",
        "short_factor": FACTORS[half],
        "long_factor": [2 * factor for factor in FACTORS[half]],
        "original_max_position_embeddings": 32,
    }
    sizes = {"hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 6}
    rest = {"num_key_value_heads": 2, "kv_channels": 2 * half, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    inert = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 0, "scale_emb": 12.0, "dim_model_base": 256}
    depth = {"use_mup": False, "scale_depth": 1.4}
    return {**sizes, **rest, **inert, **depth, "rope_scaling": scaling, "max_position_embeddings": longest} | changes


V1: dict[str, Any] = {"variant": "v1", "decoder": decoder(half=4), "feat_dim": 7, "patch_size": 3}
V2: dict[str, Any] = {"variant": "v2", "decoder": decoder(), "feat_dim": 7, "patch_size": 4}
VARIANTS: Mapping[str, dict[str, Any]] = {
    "v1": V1,
    "v2": V2,
    "v1 without kv_channels": V1 | {"decoder": decoder(half=4, num_attention_heads=5, num_key_value_heads=1)},
    "v1 in mean mode": V1 | {"mean_mode": True},
    "v2 in mean mode": V2 | {"mean_mode": True},
    "v2 with muP and long contexts": V2 | {"decoder": decoder(longest=64, use_mup=True, rope_theta=5000.0)},
    "v2 with three mu tokens and a long prefix": V2 | {"mu_tokens": 3, "patch_size": 2, "context_size": 5},
}
del VARIANTS["v1 without kv_channels"]["decoder"]["kv_channels"]  # 40 / 5


@pytest.fixture(scope="module")
def locdit() -> Any:
    return load("voxcpm.modules.locdit")


def weights_of(config: Config) -> dict[str, Tensor]:
    return synthetic_weights(voxcpm.checkpoint_shapes(config))


def empty_network(locdit: Any, values: Mapping[str, Any]) -> nn.Module:
    minicpm = load("voxcpm.modules.minicpm4").MiniCPM4Config(**values["decoder"])
    network: nn.Module = {"v1": locdit.VoxCPMLocDiT, "v2": locdit.VoxCPMLocDiTV2}[values["variant"]](
        minicpm, in_channels=values.get("feat_dim", 64)
    )
    return network


def upstream_network(locdit: Any, values: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    """Upstream's class with exactly these weights, shared and not copied."""
    network = empty_network(locdit, values)
    network.load_state_dict({k.removeprefix(voxcpm.PREFIX): v for k, v in weights.items()}, assign=True)
    return network.eval().requires_grad_(False)


def eager(config: Config, weights: Mapping[str, Tensor], *programs: Program) -> Runtime:
    return eager_runtime(voxcpm.region(config, weights), programs or (voxcpm.program(10),), "voxcpm")


def conditions(config: Config, rows: int, seed: int = 0) -> dict[str, Tensor]:
    """What the language models and the previous patch say; the last row has no previous patch."""
    generator = torch.Generator().manual_seed(seed)
    cond = torch.randn(rows, config.feat_dim, config.context_size, generator=generator)
    if rows > 1:
        cond[-1] = 0
    return {"mu": torch.randn(rows, config.mu_tokens * config.hidden_size, generator=generator), "cond": cond}


def call_of(config: Config, rows: int, time: float | list[float], width: float = 0.0) -> dict[str, Tensor]:
    """Random arguments of upstream's forward, the last row unconditional."""
    given = conditions(config, rows)
    if rows > 1:
        given["mu"][-1] = 0
    x = torch.randn(rows, config.feat_dim, config.patch_size, generator=torch.Generator().manual_seed(1))
    return {"x": x, **given, "t": torch.tensor(time).expand(rows), "dt": torch.full((rows,), width)}


# --- one evaluation


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("name", VARIANTS)
def test_an_evaluation_is_upstreams(locdit: Any, name: str, rows: int) -> None:
    values, config = VARIANTS[name], voxcpm.config_from(VARIANTS[name])
    weights = weights_of(config)
    theirs, ours = upstream_network(locdit, values, weights), eager(config, weights).denoiser()
    for time, width in ((1.0, 0.0), (0.707, 0.0), (0.351, 0.16), (0.02, 0.02)):
        arguments = call_of(config, rows, time, width)
        wanted = theirs(**arguments)
        assert wanted.std() > 0.3
        torch.testing.assert_close(ours(**arguments), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_rows_at_different_times_are_upstreams(locdit: Any, name: str) -> None:
    config = voxcpm.config_from(VARIANTS[name])
    weights, arguments = weights_of(config), call_of(config, 3, [1.0, 0.91, 0.19])
    theirs, ours = upstream_network(locdit, VARIANTS[name], weights), eager(config, weights).denoiser()
    torch.testing.assert_close(ours(**arguments), theirs(**arguments), atol=1e-5, rtol=0)


RELEASED = [name for name in voxcpm.CONFIGS if not name.startswith("tiny")]


def released_values(name: str) -> dict[str, Any]:
    """A released configuration under upstream's names."""
    config = voxcpm.CONFIGS[name]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {field: getattr(config, field) for field in (*names, "kv_channels")}
    factors = list(config.rope_factors)
    scaling = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    scaling["original_max_position_embeddings"] = 32768
    minicpm = decoder(longest=32768, rope_scaling=scaling, **sizes)
    return {"variant": config.variant, "decoder": minicpm, "patch_size": config.patch_size}


@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes_have_upstreams_tensors_and_rotary_rows(locdit: Any, name: str) -> None:
    values, config = released_values(name), voxcpm.CONFIGS[name]
    assert voxcpm.config_from(values) == config
    with torch.device("meta"):
        state = empty_network(locdit, values).state_dict()
    assert voxcpm.checkpoint_shapes(config) == {voxcpm.PREFIX + k: tuple(v.shape) for k, v in state.items()}
    minicpm = load("voxcpm.modules.minicpm4.model")
    rope = minicpm.MiniCPMLongRoPE(minicpm.MiniCPM4Config(**values["decoder"]))
    for ours, theirs in zip(rope_rows(config), rope(torch.tensor(config.positions)), strict=True):
        torch.testing.assert_close(torch.cat((ours, ours), dim=-1)[:, 0], theirs, atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["VoxCPM-0.5B"])
def test_an_evaluation_at_released_size_is_upstreams(locdit: Any, name: str) -> None:
    config = voxcpm.CONFIGS[name]
    weights, arguments = weights_of(config), call_of(config, 2, 0.707)
    wanted = upstream_network(locdit, released_values(name), weights)(**arguments)
    assert wanted.std() > 0.3
    torch.testing.assert_close(eager(config, weights).denoiser()(**arguments), wanted, atol=1e-5, rtol=0)


# --- the sampling loop

SETTINGS: Mapping[str, dict[str, Any]] = {
    "released": {"n_timesteps": 10, "cfg_value": 2.0},
    "two steps of zero velocity": {"n_timesteps": 50, "cfg_value": 2.0},
    "plain guidance": {"n_timesteps": 5, "cfg_value": 1.7, "use_cfg_zero_star": False},
    "less sway": {"n_timesteps": 6, "cfg_value": 3.0, "sway_sampling_coef": 0.4},
}


def program_of(config: Config, setting: str) -> Program:
    s = SETTINGS[setting]
    options = {"use_cfg_zero_star": s.get("use_cfg_zero_star", True), "mean_mode": config.mean_mode}
    return voxcpm.program(s["n_timesteps"], sway=s.get("sway_sampling_coef", 1.0), **options)


def sample_with(locdit: Any, estimator: nn.Module, config: Config, setting: str, **given: Tensor) -> Tensor:
    """UnifiedCFM.forward's patch, with this estimator."""
    loop = locdit.UnifiedCFM(config.feat_dim, locdit.CfmConfig(), estimator, mean_mode=config.mean_mode)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        patch: Tensor = loop(patch_size=config.patch_size, **given, **SETTINGS[setting])
    return patch.clone()


def case_of(locdit: Any, name: str, setting: str) -> tuple[Config, Tensor, Runtime, dict[str, Tensor]]:
    """Configuration, upstream's patch with upstream's network, our runtime over the same weights, conditioning."""
    zero_star = SETTINGS[setting].get("use_cfg_zero_star", True)
    config = voxcpm.config_from(VARIANTS[name] | {"use_cfg_zero_star": zero_star})
    weights, given = weights_of(config), conditions(config, 3)
    wanted = sample_with(locdit, upstream_network(locdit, VARIANTS[name], weights), config, setting, **given)
    assert wanted.std() > 0.3
    return config, wanted, eager(config, weights, program_of(config, setting)), given


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_eager_runtime_samples_in_upstreams_loop(locdit: Any, name: str, setting: str) -> None:
    config, wanted, runtime, given = case_of(locdit, name, setting)
    ours = sample_with(locdit, runtime.denoiser(), config, setting, **given)
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["v1", "v2", "v2 in mean mode"])
def test_our_loop_gives_upstreams_result(locdit: Any, name: str, setting: str) -> None:
    """`Runtime.sample` from upstream's noise on, without upstream's loop."""
    config, wanted, runtime, given = case_of(locdit, name, setting)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        noise = torch.randn(wanted.shape)
    guidance = SETTINGS[setting]["cfg_value"] - 1.0
    ours = runtime.sample(noise=noise, program=program_of(config, setting).name, guidance=guidance, **given)
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mean_mode", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
def test_evaluation_times_are_upstreams(locdit: Any, setting: str, mean_mode: bool) -> None:
    class Clock(nn.Module):
        """Stands in for an estimator, and writes down what the loop tells it."""

        def forward(self, x: Tensor, mu: Tensor, t: Tensor, cond: Tensor, dt: Tensor) -> Tensor:
            told.append((float(t[0]), float(dt[0])))
            return torch.zeros_like(x)

    told: list[tuple[float, float]] = []
    config = voxcpm.config_from(V1 | {"mean_mode": mean_mode})
    sample_with(locdit, Clock(), config, setting, **conditions(config, 1))
    program = program_of(config, setting)
    assert list(zip(program.times, program.extra_times["dt"], strict=True)) == told
