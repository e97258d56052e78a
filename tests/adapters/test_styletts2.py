"""StyleTTS2: exact padding; checkpoints and configurations; the program; stages; upstream's call."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from voicehub_aot.adapters import styletts2
from voicehub_aot.adapters.styletts2 import cases
from voicehub_aot.cli.settings import BuildSettings, options
from voicehub_aot.compiler import models
from voicehub_aot.compiler.export import export_region
from voicehub_aot.compiler.split import split
from voicehub_aot.errors import CheckpointMismatch, InputMismatch, OptionUnsupported, UnknownModel, UsageError
from voicehub_aot.runtime.eager import EagerEvaluator
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.golden import Case
from voicehub_aot.spec.program import Evaluate
from voicehub_aot.spec.region import Region
from voicehub_aot.spec.synthetic import synthetic_weights

TINY, SINGLE = styletts2.CONFIGS["tiny"], styletts2.CONFIGS["tiny-single"]
VARIANTS = {"several speakers": TINY, "one speaker": SINGLE}
PREFIX = "diffusion.net."
TOKENS = 11
both = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)


def weights_of(config: Any) -> dict[str, Tensor]:
    """Synthetic, with frequencies of the time that tell times apart."""
    weights = synthetic_weights(styletts2.checkpoint_shapes(config))
    key = f"{PREFIX}to_time.0.0.weights"
    return weights | {key: 10 * weights[key]}


def region_of(config: Any) -> Region:
    return styletts2.region(config, weights_of(config))


def runtime_of(config: Any, steps: int = 5) -> Runtime:
    region, program = region_of(config), styletts2.program(steps, sigma_data=config.sigma_data)
    return Runtime(region.spec, EagerEvaluator(region), {program.name: program}, Buckets(axes={}))


def request(config: Any, tokens: int = TOKENS, rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Region inputs of full rows, nothing dropped."""
    generator = torch.Generator().manual_seed(seed)
    style = {"features": torch.randn(rows, config.context_features or 1, generator=generator)}
    return {
        "x": torch.randn(rows, 1, config.channels, generator=generator),
        "time": torch.tensor([-0.4]),
        "embedding": torch.randn(rows, tokens, config.context_embedding_features, generator=generator),
        **(style if config.context_features else {}),
        "lengths": torch.full((rows,), tokens),
        "drop": torch.zeros(rows, dtype=torch.bool),
    }


def padded(inputs: Mapping[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """The same rows in larger tensors, with garbage behind the embedding."""
    embedding = inputs["embedding"]
    wider = torch.full((embedding.shape[0], tokens, embedding.shape[2]), 7.5)
    wider[:, : embedding.shape[1]] = embedding
    return {**inputs, "embedding": wider}


def alter(tensor: Tensor) -> Tensor:
    """Another valid value: a flag flipped, a length one less, a number moved."""
    if tensor.dtype == torch.bool:
        return ~tensor
    return tensor - 1 if tensor.dtype == torch.int64 else tensor + 0.3


# --- the network


@pytest.mark.parametrize("drop", [False, True], ids=["conditional", "unconditional"])
@both
def test_a_row_in_a_larger_tensor_gives_what_it_gives_alone(config: Any, drop: bool) -> None:
    module, inputs = region_of(config).module, request(config) | {"drop": torch.tensor([drop])}
    alone = module(**inputs)
    assert alone.std() > 0.3
    for tokens in (TOKENS + 1, 32, config.embedding_max_length):
        torch.testing.assert_close(module(**padded(inputs, tokens)), alone, atol=2e-6, rtol=0)


@both
def test_ragged_rows_do_not_see_each_other(config: Any) -> None:
    module, alone = region_of(config).module, [request(config, n, seed=n) for n in (23, 9, 1)]
    rows = [padded(inputs, 23) for inputs in alone]
    batch = {key: rows[0][key] if key == "time" else torch.cat([row[key] for row in rows]) for key in rows[0]}
    together = module(**batch)
    for row, inputs in enumerate(alone):
        torch.testing.assert_close(together[row : row + 1], module(**inputs), atol=2e-6, rtol=0)


@both
def test_each_input_matters(config: Any) -> None:
    module, inputs = region_of(config).module, request(config)
    out = module(**inputs)
    moved = {key: (module(**inputs | {key: alter(value)}) - out).abs().max() for key, value in inputs.items()}
    assert {key: change for key, change in moved.items() if change < 1e-2} == {}


@both
def test_the_conditional_branch_minds_no_order_of_tokens_the_other_no_token_at_all(config: Any) -> None:
    module, inputs = region_of(config).module, request(config)
    turned = inputs | {"embedding": inputs["embedding"].flip(1)}
    torch.testing.assert_close(module(**turned), module(**inputs), atol=2e-6, rtol=0)
    dropped = {"drop": torch.tensor([True])}
    other = inputs | {"embedding": alter(inputs["embedding"])} | dropped
    torch.testing.assert_close(module(**other), module(**inputs | dropped), atol=0, rtol=0)
    fewer = inputs | {"lengths": torch.tensor([TOKENS - 1])} | dropped
    assert (module(**fewer) - module(**other)).abs().max() > 1e-3


# --- checkpoints


@pytest.mark.parametrize(("name", "size"), [("LibriTTS", 25_326_976), ("LJSpeech", 21_918_080)])
def test_released_checkpoints_have_the_audited_size(name: str, size: int) -> None:
    shapes = styletts2.checkpoint_shapes(styletts2.CONFIGS[name])
    assert sum(torch.Size(s).numel() for s in shapes.values()) == size


def bare(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(PREFIX): tensor for key, tensor in weights.items()}


FORMS = ("released", "several GPUs", "one copy", "prefixed", "bare")


@pytest.mark.parametrize("form", FORMS)
@both
def test_every_checkpoint_form_gives_the_same_region(config: Any, form: str, tmp_path: Path) -> None:
    weights = weights_of(config)
    twice = {name + key: tensor for name in ("unet.", PREFIX) for key, tensor in bare(weights).items()}
    path = tmp_path / ("epochs_2nd_00020.pth" if form in FORMS[:3] else "model.safetensors")
    if form == "prefixed":
        save_file(weights, path)
    elif form == "bare":
        save_file(bare(weights), path)
    else:
        content = {f"module.{k}": v for k, v in twice.items()} if form == "several GPUs" else twice
        content = {f"unet.{k}": v for k, v in bare(weights).items()} if form == "one copy" else content
        net = {"diffusion": content, "decoder": {"module.generator.weight": torch.ones(1)}}
        torch.save({"net": net, "optimizer": {"lr": 1e-4}, "iters": 3, "epoch": 20}, path)
    found, read = styletts2.read_checkpoint(tmp_path, config)
    state = styletts2.region(found, read).module.state_dict()
    assert found == config
    assert set(state) == set(bare(weights))
    assert all(torch.equal(state[key], tensor) for key, tensor in bare(weights).items())


def test_half_precision_weights_become_float32() -> None:
    half = {key: tensor.half() for key, tensor in weights_of(TINY).items()}
    module = styletts2.region(TINY, half).module
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in module.parameters())


def test_everything_wrong_with_a_checkpoint_is_in_one_error() -> None:
    weights = weights_of(TINY)
    del weights[f"{PREFIX}to_out.1.bias"]
    weights[f"{PREFIX}blocks.0.cross_attention.to_q.weight"] = torch.zeros(1)
    weights[f"{PREFIX}to_time.0.0.weights"] = torch.zeros(3)
    with pytest.raises(CheckpointMismatch) as caught:
        styletts2.region(TINY, weights)
    for words in ("1 missing: ", "to_out.1.bias", "1 unexpected: ", "cross_attention", "[3], wanted [8]"):
        assert words in str(caught.value)


def test_the_single_speaker_network_is_told_from_the_other() -> None:
    with pytest.raises(CheckpointMismatch, match=r"missing.*to_features.*unexpected"):
        styletts2.region(TINY, weights_of(SINGLE))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"net": {"decoder": {}}}, "second-stage"),
        ({"net": {"diffusion": {"step": 3}}}, "'step' is a int"),
        ({"net": {"diffusion": {"unet.a": torch.ones(1), f"{PREFIX}a": torch.zeros(1)}}}, "two entries for 'a' differ"),
    ],
)
def test_what_a_file_holds_instead_is_said(content: dict[str, Any], words: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "epoch.pth")
    with pytest.raises(CheckpointMismatch, match=words):
        styletts2.read_checkpoint(tmp_path / "epoch.pth", "tiny")


def test_a_folder_must_hold_one_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match="found none"):
        styletts2.read_checkpoint(tmp_path, "tiny")
    for name in ("a", "b"):
        save_file(weights_of(TINY), tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"found a\.safetensors, b\.safetensors; name the file"):
        styletts2.read_checkpoint(tmp_path, "tiny")


# --- configurations


@pytest.mark.parametrize("config", [None, "LibriTTS", "LJSpeech"])
def test_released_weights_need_the_configuration_that_holds_sigma_data(config: str | None, tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match=r"diffusion\.dist\.sigma_data of the released config\.yml.*--config"):
        styletts2.read_checkpoint(tmp_path, config)


def test_a_json_file_brings_sigma_data_to_a_released_checkpoint(tmp_path: Path) -> None:
    values = {**vars(TINY), "sigma_data": 0.37}
    (tmp_path / "config.json").write_text(json.dumps(values))
    torch.save({"net": {"diffusion": weights_of(TINY)}}, tmp_path / "epoch.pth")
    model = models.resolve("styletts2", str(tmp_path / "config.json"), str(tmp_path / "epoch.pth"))
    assert model.config == values


def test_a_json_file_beside_a_hub_id_fetches_the_models_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(vars(TINY)))
    save_file(weights_of(TINY), tmp_path / "epoch.safetensors")
    asked: list[tuple[str, ...]] = []

    def locate(source: str, files: tuple[str, ...]) -> Path:
        asked.append(files)
        return tmp_path

    monkeypatch.setattr(models, "locate", locate)
    model = models.resolve("styletts2", str(tmp_path / "config.json"), "hf:yl4579/StyleTTS2-LibriTTS")
    assert asked == [("Models/*/epoch*.pth",)]
    assert model.config == vars(TINY)


def test_the_released_configuration_is_taken_as_it_is() -> None:
    model = {
        "multispeaker": True,
        "style_dim": 128,
        "n_token": 178,
        "diffusion": {
            "embedding_mask_proba": 0.1,
            "transformer": {"num_layers": 3, "num_heads": 8, "head_features": 64, "multiplier": 2},
            "dist": {"sigma_data": 0.31, "estimate_sigma_data": True, "mean": -3.0, "std": 1.0},
        },
    }
    libri = replace(styletts2.CONFIGS["LibriTTS"], sigma_data=0.31)
    assert styletts2.config_from({"model_params": model, "batch_size": 2}) == libri
    assert styletts2.config_from({"class": "StyleTransformer1d", "sigma_data": 0.31}) == libri
    single = replace(styletts2.CONFIGS["LJSpeech"], sigma_data=0.31)
    assert styletts2.config_from({"model_params": {**model, "multispeaker": False}}) == single
    assert styletts2.config_from({"class": "Transformer1d", "sigma_data": 0.31}) == single


@both
def test_a_config_survives_its_own_names(config: Any) -> None:
    assert styletts2.config_from(vars(config)) == config


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"sigma_data": None}, UsageError, "config.yml"),
        ({"sigma_data": -0.2}, UsageError, "sigma_data=-0.2"),
        ({"sigma_data": "0.2"}, UsageError, "sigma_data='0.2'"),
        ({"num_layer": 3}, UsageError, "num_layer"),
        ({"num_heads": 0}, UsageError, "num_heads=0"),
        ({"channels": 15}, UsageError, "channels=15"),
        ({"class": "UNet1d"}, UsageError, "known are"),
        ({"class": "Transformer1d"}, OptionUnsupported, "no release"),
        ({"use_rel_pos": True}, OptionUnsupported, "use_rel_pos=True"),
        ({"model_params": {"style_dim": 128}}, UsageError, "KeyError"),
    ],
)
def test_config_errors_say_what_is_known(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        styletts2.config_from({**vars(TINY), **change})


def test_a_config_without_its_network_and_an_unknown_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="which network"):
        styletts2.config_from({"sigma_data": 0.2})
    with pytest.raises(UnknownModel, match="LibriTTS, LJSpeech"):
        styletts2.read_checkpoint(tmp_path, "VCTK")


# --- the program


def test_the_default_program_is_the_released_inference() -> None:
    program = styletts2.program(5, sigma_data=0.2)
    assert (program.name, program.evaluations, len(program.noises)) == ("adpm2-5", 8, 4)
    levels = (3.0, 0.557915, 0.0703622, 0.00475782, 0.0001, 0.0)
    assert program.schedule == pytest.approx(levels, rel=1e-5)
    assert program.times[::2] == pytest.approx([torch.tensor(s).log().item() / 4 for s in levels[:4]], abs=1e-6)


def test_program_options_are_checked() -> None:
    for given in ({}, {"sigma_data": 0.0}, {"sigma_data": "x"}):
        with pytest.raises(OptionUnsupported, match=r"config\.yml"):
            styletts2.program(5, **given)
    with pytest.raises(OptionUnsupported, match="solver"):
        styletts2.program(5, sigma_data=0.2, solver="euler")
    with pytest.raises(UsageError, match="at least 2"):
        styletts2.program(1, sigma_data=0.2)


def test_every_draw_of_noise_and_sigma_data_reach_the_style() -> None:
    runtime, inputs = runtime_of(TINY), request(TINY)
    conditioning = {name: inputs[name] for name in ("embedding", "features")}
    noise = inputs["x"]
    drawn = torch.randn(4, *noise.shape, generator=torch.Generator().manual_seed(1))

    def style(step_noise: Tensor, run: Runtime = runtime) -> Tensor:
        *_, last = run.trajectory(noise=noise, step_noise=step_noise, **conditioning)
        return last

    base = style(drawn)
    for draw in range(4):
        moved = drawn.clone()
        moved[draw] += 1
        assert (style(moved) - base).abs().max() > 5e-5  # the last draw enters times 1e-4
    other = runtime_of(replace(TINY, sigma_data=0.4))
    assert (style(drawn, other) - base).abs().max() > 0.01
    with pytest.raises(InputMismatch, match="step_noise holds 0 draws"):
        list(runtime.trajectory(noise=noise, **conditioning))


def test_the_build_takes_sigma_data_from_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**vars(SINGLE), "sigma_data": 0.37}))
    model = models.resolve("styletts2", str(tmp_path / "config.json"), "synthetic")
    chosen = options(model, BuildSettings(), None, 6, 8, True, False)
    assert chosen.programs == tuple(styletts2.program(n, sigma_data=0.37) for n in styletts2.DEFAULT_STEPS)


# --- guidance and upstream's call


@both
def test_the_denoiser_takes_upstreams_call(config: Any) -> None:
    inputs, denoiser = request(config, rows=2), runtime_of(config).denoiser()
    conditioning = {name: inputs[name] for name in ("embedding", "features") if name in inputs}
    module = region_of(config).module
    conditional, dropped = module(**inputs), module(**inputs | {"drop": torch.tensor([True, True])})
    x, time = inputs["x"], inputs["time"].expand(2)
    torch.testing.assert_close(denoiser(x, time, **conditioning), conditional, atol=1e-6, rtol=0)
    torch.testing.assert_close(denoiser(x, time, 0.0, *conditioning.values()), conditional, atol=1e-6, rtol=0)
    guided = denoiser(x, time, **conditioning, embedding_scale=2.5)
    wanted = dropped + 2.5 * (conditional - dropped)
    torch.testing.assert_close(guided, wanted, atol=2e-6 * wanted.abs().max().item(), rtol=0)  # of values up to 10


def test_without_a_scale_nothing_is_guided() -> None:
    runtime, inputs = runtime_of(TINY), request(TINY)
    conditioning = {name: inputs[name] for name in ("embedding", "features")}
    results = {g: runtime.sample(seed=3, guidance=g, **conditioning) for g in (None, 0.0, 1.0)}
    assert torch.equal(results[None], results[0.0])
    assert (results[1.0] - results[None]).abs().max() > 1e-2


# --- stages


@both
def test_time_features_and_norm_modulations_leave_the_step(config: Any) -> None:
    region = region_of(config)
    graph, symbols = export_region(region)
    stages = split(graph, region.spec, symbols)
    several = config.context_features is not None
    names = {name for name in region.module.state_dict() if not name.endswith("fixed_embedding.embedding.weight")}
    step = {n for n in names if n.startswith(("blocks", "to_out")) and ".fc." not in n}
    time = {n for n in names if n.startswith("to_time")}
    mapping = {n for n in names if n.startswith("to_mapping")}
    assert set(stages.step.constants) == step
    assert set(stages.table.constants) == (time if several else time | mapping)
    assert (set(stages.mixed.constants) if stages.mixed else set()) == (mapping if several else set())
    assert set(stages.prepare.constants) - {"fixed_embedding.embedding.weight"} == names - step - time - mapping
    last = stages.mixed or stages.table
    assert [o.shape for o in last.outputs] == [("B" if several else 1, config.width)]


def test_the_last_linear_of_the_last_block_sees_one_row_whatever_the_tokens() -> None:
    region = region_of(TINY)
    graph, symbols = export_region(region)
    step = split(graph, region.spec, symbols).step
    inner = TINY.width * TINY.multiplier
    read = [
        n.args[0].meta["val"].shape[1]
        for n in step.module.graph.nodes
        if n.target == torch.ops.aten.linear.default and n.args[1].meta["val"].shape == (TINY.width, inner)
    ]
    assert len(read) == TINY.num_layers
    assert read[-1] == 1
    assert all(size != 1 for size in read[:-1])


# --- recorded cases


def made(**changes: Any) -> Case:
    inputs = {name: value for name, value in request(TINY).items() if name in ("x", "time", "embedding", "features")}
    fields: dict[str, Any] = {"inputs": inputs, "scalars": {"embedding_scale": 1.0}} | changes
    tail = (fields["inputs"], fields["scalars"], {}, {})
    return Case(Path("made"), "styletts2", fields.get("kind", "region"), vars(TINY), "none", {}, {}, *tail)


@pytest.mark.parametrize(
    "change",
    [
        {"inputs": {"x": torch.zeros(1), "no_such": torch.zeros(1)}},
        {"scalars": {"embedding_scale": 1.0, "no_such": 1}},
    ],
)
def test_what_a_case_holds_beyond_the_known_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no_such"):
        cases.replay(made(**change), runtime_of(TINY))


def test_a_recorded_loop_that_clamps_is_refused() -> None:
    inputs = {"noise": torch.zeros(1), "step_noise": torch.zeros(1), "embedding": torch.zeros(1)}
    loop = dict.fromkeys(("sigma_min", "sigma_max", "rho", "adpm2_rho", "embedding_scale"), 1.0) | {"num_steps": 5}
    with pytest.raises(UsageError, match="clamp"):
        cases.case_program(made(kind="sampler", inputs=inputs, scalars=loop | {"clamp": True}))


def test_every_evaluation_of_a_transition_is_guided() -> None:
    program = styletts2.program(3, sigma_data=0.2)
    assert [i.against for i in program.instructions if isinstance(i, Evaluate)] == [None] * 4
