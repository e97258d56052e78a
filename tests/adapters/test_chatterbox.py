"""Chatterbox: exact padding, what matters and when, guidance, checkpoints, programs. Recorded cases: test_replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from voicehub_aot.adapters import chatterbox
from voicehub_aot.cli.settings import BuildSettings, options
from voicehub_aot.compiler.export import export_region
from voicehub_aot.compiler.models import resolve
from voicehub_aot.compiler.split import split
from voicehub_aot.compiler.stages import Stages
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UnknownModel, UsageError
from voicehub_aot.runtime.eager import EagerEvaluator
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.region import Region
from voicehub_aot.spec.synthetic import synthetic_weights

PREFIX = "flow.decoder.estimator."
TINY, MEANFLOW = chatterbox.CONFIGS["tiny"], chatterbox.CONFIGS["tiny-meanflow"]
VARIANTS = {"guided": TINY, "mean flow": MEANFLOW}
MEL, FRAMES = TINY.out_channels, 23


def weights_of(config: Any) -> dict[str, Tensor]:
    return synthetic_weights(chatterbox.checkpoint_shapes(config))


def region_of(config: Any) -> Region:
    return chatterbox.region(config, weights_of(config))


def runtime_of(config: Any, program: Program) -> Runtime:
    region = region_of(config)
    return Runtime(region.spec, EagerEvaluator(region), {program.name: program}, Buckets(axes={}))


def staged_of(config: Any) -> Stages:
    region = region_of(config)
    graph, symbols = export_region(region)
    return split(graph, region.spec, symbols)


def request(config: Any, frames: int = FRAMES, rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Region inputs of full rows."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "x": torch.randn(rows, MEL, frames, generator=generator),
        "time": torch.tensor([0.3]),
        "mu": torch.randn(rows, MEL, frames, generator=generator),
        "spks": torch.randn(rows, MEL, generator=generator),
        "cond": torch.randn(rows, MEL, frames, generator=generator),
        "lengths": torch.full((rows,), frames),
    }
    return inputs | ({"r": torch.tensor([0.8])} if config.meanflow else {"drop": torch.zeros(rows, dtype=torch.bool)})


def padded(inputs: dict[str, Tensor], frames: int) -> dict[str, Tensor]:
    """The same rows in larger tensors, with garbage behind the frames."""
    more = frames - inputs["x"].shape[2]
    wider = {name: torch.nn.functional.pad(inputs[name], (0, more), value=7.5) for name in ("x", "mu", "cond")}
    return inputs | wider


def alter(tensor: Tensor) -> Tensor:
    """Another valid value: a flag flipped, a count one less, a number moved."""
    if tensor.dtype == torch.bool:
        return ~tensor
    return tensor - 1 if tensor.dtype == torch.int64 else tensor + 0.3


# --- padding, and what matters


@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_in_a_larger_tensor_gives_what_it_gives_alone_and_zero_behind_it(name: str) -> None:
    module, inputs = region_of(VARIANTS[name]).module, request(VARIANTS[name])
    alone = module(**inputs)
    assert alone.std() > 0.2
    for frames in (24, 32, 64):
        got = module(**padded(inputs, frames))
        torch.testing.assert_close(got[..., :FRAMES], alone, atol=1e-5, rtol=0)
        assert not got[..., FRAMES:].any()


@pytest.mark.parametrize("name", VARIANTS)
def test_ragged_rows_do_not_see_each_other(name: str) -> None:
    module = region_of(VARIANTS[name]).module
    alone = [request(VARIANTS[name], frames, seed=frames) for frames in (23, 9, 1)]
    rows = [padded(a, 23) for a in alone]
    together = module(**{k: v if k in ("time", "r") else torch.cat([r[k] for r in rows]) for k, v in rows[0].items()})
    for row, inputs in enumerate(alone):
        frames = inputs["x"].shape[2]
        torch.testing.assert_close(together[row : row + 1, :, :frames], module(**inputs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_each_input_matters(name: str) -> None:
    module, inputs = region_of(VARIANTS[name]).module, request(VARIANTS[name])
    velocity = module(**inputs)
    moved = {key: (module(**inputs | {key: alter(v)}) - velocity).abs().max() for key, v in inputs.items()}
    assert set(moved) == {i.name for i in region_of(VARIANTS[name]).spec.inputs}
    assert not {key for key, by in moved.items() if by < 1e-2}


def test_the_dropped_branch_is_the_released_packing() -> None:
    module, inputs = region_of(TINY).module, request(TINY)
    zeros = {key: torch.zeros_like(inputs[key]) for key in ("mu", "spks", "cond")}
    dropped = module(**inputs | {"drop": torch.tensor([True])})
    torch.testing.assert_close(dropped, module(**inputs | zeros), atol=1e-6, rtol=0)


def test_upstreams_guided_loop_may_say_that_there_is_no_second_time() -> None:
    given = {key: value for key, value in request(TINY).items() if key in ("x", "mu", "spks", "cond")}
    denoiser, mask = runtime_of(TINY, chatterbox.program(2)).denoiser(), torch.ones(1, 1, FRAMES)
    torch.testing.assert_close(denoiser(**given, mask=mask, t=0.0, r=None), denoiser(**given, mask=mask, t=0.0))


# --- when things are computed


@pytest.mark.parametrize("name", VARIANTS)
def test_time_and_conditioning_leave_the_step(name: str) -> None:
    config = chatterbox.config_from({**vars(VARIANTS[name]), "n_blocks": 1, "num_mid_blocks": 1})
    stages = staged_of(config)
    held = set(stages.step.constants)
    assert not {key for key in held if key.startswith("time_") or ".mlp." in key}
    first = "down_blocks.0.0."
    assert f"{first}block1.block.0.bias" not in held  # goes with the conditioning's share of the convolution
    assert f"{first}res_conv.bias" not in held
    assert not {i.name for i in stages.step.inputs} & {"mu", "spks", "cond", "drop", "time", "r"}
    projections = [o for o in stages.table.outputs if o.shape == (1, TINY.channels[0])]
    assert len(projections) == len(stages.table.outputs) == config.num_mid_blocks + 2


# --- sampling


def test_the_default_program_is_the_released_loop() -> None:
    program = chatterbox.program(10)
    assert (program.name, program.evaluations, program.extra_times) == ("euler-10", 10, {})
    grid = (0, 0.012312, 0.048943, 0.108993, 0.190983, 0.292893, 0.412215, 0.546009, 0.690983, 0.843566, 1)
    assert program.schedule == pytest.approx(grid, abs=1e-6)
    assert chatterbox.program(4, grid="linear").schedule == (0, 0.25, 0.5, 0.75, 1)


def test_mean_flow_asks_for_the_velocity_to_the_end_of_the_step() -> None:
    program = chatterbox.program(2, meanflow=True)
    assert (program.times, program.extra_times) == ((0.0, 0.5), {"r": (0.5, 1.0)})
    assert chatterbox.program(2, meanflow=True, grid="linear") == program
    runtime, module, inputs = runtime_of(MEANFLOW, program), region_of(MEANFLOW).module, request(MEANFLOW)
    want = inputs["x"]
    for start, end in ((0.0, 0.5), (0.5, 1.0)):
        step = {"x": want, "time": torch.tensor([start]), "r": torch.tensor([end])}
        want = want + 0.5 * module(**inputs | step)
    got = runtime.sample(noise=inputs["x"], **{key: inputs[key] for key in ("mu", "spks", "cond")})
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert runtime.spec.guidance is None


@pytest.mark.parametrize(("name", "programs"), [("tiny", ["euler-10"]), ("tiny-meanflow", ["euler-2"])])
def test_a_build_takes_the_loop_of_its_configuration(name: str, programs: list[str]) -> None:
    model = resolve("chatterbox-tts", name, "synthetic")
    chosen = options(model, BuildSettings(), None, max_buckets=1, multiple_of=1, parity=True, replace=False)
    assert [p.name for p in chosen.programs] == programs
    assert [set(p.extra_times) for p in chosen.programs] == [{"r"} if name == "tiny-meanflow" else set()]


def test_what_no_loop_of_upstream_does_is_refused() -> None:
    with pytest.raises(OptionUnsupported, match="choose one of cosine, linear"):
        chatterbox.program(4, grid="epss")
    with pytest.raises(OptionUnsupported, match="sway"):
        chatterbox.program(4, sway=-1.0)
    with pytest.raises(OptionUnsupported, match="knows only 'linear'"):
        chatterbox.program(4, grid="cosine", meanflow=True)


def test_guidance_is_one_plus_rate_times_conditional_minus_rate_times_unconditional() -> None:
    program = chatterbox.program(1)
    runtime, inputs = runtime_of(TINY, program), request(TINY)
    module = region_of(TINY).module
    asked = {key: inputs[key] for key in ("mu", "spks", "cond")}
    start = inputs | {"time": torch.tensor([0.0])}
    conditional, unconditional = module(**start), module(**start | {"drop": torch.tensor([True])})
    for rate, given in ((0.7, None), (0.4, 0.4)):
        got = runtime.sample(noise=inputs["x"], guidance=given, **asked)
        want = inputs["x"] + (1 + rate) * conditional - rate * unconditional
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_the_denoiser_takes_upstreams_call() -> None:
    runtime, inputs = runtime_of(TINY, chatterbox.program(10)), request(TINY, rows=2)
    mask = torch.ones(2, 1, FRAMES)
    mask[1, :, 9:] = 0
    lengths = torch.tensor([FRAMES, 9])
    call = (inputs["x"], mask, inputs["mu"], torch.tensor([0.3, 0.6]), inputs["spks"], inputs["cond"])
    got = runtime.denoiser()(*call)
    for row, time in enumerate((0.3, 0.6)):
        want = region_of(TINY).module(**inputs | {"lengths": lengths, "time": torch.tensor([time])})
        torch.testing.assert_close(got[row], want[row], atol=1e-5, rtol=0)


def test_the_mean_flow_denoiser_takes_r_by_name() -> None:
    runtime, inputs = runtime_of(MEANFLOW, chatterbox.program(2, meanflow=True)), request(MEANFLOW)
    call = (inputs["x"], torch.ones(1, 1, FRAMES), inputs["mu"], inputs["time"], inputs["spks"], inputs["cond"])
    got = runtime.denoiser()(*call, r=inputs["r"])
    torch.testing.assert_close(got, region_of(MEANFLOW).module(**inputs), atol=1e-5, rtol=0)


# --- checkpoints

OTHERS = {
    "tokenizer.quantizer.weight": torch.zeros(1),
    "speaker_encoder.head.weight": torch.zeros(1),
    "mel2wav.conv_pre.bias": torch.zeros(1),
    "flow.encoder.embed.weight": torch.zeros(1),
    "flow.encoder_proj.weight": torch.zeros(1),
    "flow.input_embedding.weight": torch.zeros(1),
    "flow.spk_embed_affine_layer.weight": torch.zeros(1),
}


def bare(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(PREFIX): tensor for key, tensor in weights.items()}


def test_released_estimators_have_the_released_size() -> None:
    for name, entries, parameters in (("chatterbox", 910, 71_302_480), ("chatterbox-turbo", 911, 73_399_632)):
        shapes = chatterbox.checkpoint_shapes(chatterbox.CONFIGS[name])
        assert len(shapes) == entries
        assert sum(torch.Size(s).numel() for s in shapes.values()) == parameters
    assert chatterbox.CONFIGS["chatterbox-nano"] == chatterbox.CONFIGS["chatterbox-turbo"]


@pytest.mark.parametrize("form", ["s3gen.safetensors", "s3gen.pt", "flow.pt", "bare.safetensors"])
def test_every_checkpoint_form_gives_the_same_region(form: str, tmp_path: Path) -> None:
    for config in VARIANTS.values():
        weights = weights_of(config)
        content = weights | OTHERS
        if form == "flow.pt":
            content = {k.removeprefix("flow."): v for k, v in content.items()} | {"epoch": 3, "step": 7}
        if form == "bare.safetensors":
            content = bare(weights)
        torch.save(content, tmp_path / form) if form.endswith("pt") else save_file(content, tmp_path / form)
        found, read = chatterbox.read_checkpoint(tmp_path / form, TINY)
        assert found == config  # whether it is of mean flow, the file tells
        state = chatterbox.region(found, read).module.state_dict()
        assert set(state) == set(bare(weights))
        assert all(torch.equal(state[key], tensor) for key, tensor in bare(weights).items())


def test_half_precision_weights_become_float32(tmp_path: Path) -> None:
    save_file({k: v.half() for k, v in weights_of(TINY).items()}, tmp_path / "s3gen.safetensors")
    module = chatterbox.region(*chatterbox.read_checkpoint(tmp_path, "tiny")).module
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in module.parameters())


def test_a_folder_gives_the_file_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match=r"no s3gen\.safetensors or s3gen\.pt"):
        chatterbox.read_checkpoint(tmp_path, "tiny")
    for config in VARIANTS.values():
        save_file(weights_of(config), tmp_path / f"s3gen{'_meanflow' * config.meanflow}.safetensors")
    assert chatterbox.read_checkpoint(tmp_path, "tiny")[0] == TINY
    assert chatterbox.read_checkpoint(tmp_path, "tiny-meanflow")[0] == MEANFLOW
    with pytest.raises(CheckpointMismatch, match=r"s3gen\.safetensors and s3gen_meanflow\.safetensors"):
        chatterbox.read_checkpoint(tmp_path, None)
    with pytest.raises(UnknownModel, match="chatterbox-turbo"):
        chatterbox.read_checkpoint(tmp_path, "no_such")


def test_without_a_configuration_heads_are_as_wide_as_released(tmp_path: Path) -> None:
    config = chatterbox.config_from({**vars(TINY), "attention_head_dim": 64, "num_heads": 2})
    save_file(weights_of(config), tmp_path / "model.safetensors")
    assert chatterbox.read_checkpoint(tmp_path / "model.safetensors", None)[0] == config


def test_everything_wrong_with_a_checkpoint_is_in_one_error(tmp_path: Path) -> None:
    weights = weights_of(TINY) | OTHERS
    del weights[f"{PREFIX}final_proj.bias"]
    weights[f"{PREFIX}mid_blocks.1.1.0.attn1.to_q.lora_A.weight"] = torch.zeros(1)
    weights["vocoder.weight"] = torch.zeros(1)
    weights[f"{PREFIX}mid_blocks.0.0.res_conv.bias"] = torch.zeros(3)
    save_file(weights, tmp_path / "s3gen.safetensors")
    found, read = chatterbox.read_checkpoint(tmp_path, "tiny")
    with pytest.raises(CheckpointMismatch) as caught:
        chatterbox.region(found, read)
    for words in ("1 missing: ", "final_proj.bias", "2 unexpected: ", "lora_A", "vocoder.weight", "[3], wanted [32]"):
        assert words in str(caught.value)


# --- configuration


def test_hyperparameters_are_upstreams() -> None:
    released = {
        **{"in_channels": 320, "out_channels": 80, "causal": True, "channels": [256], "dropout": 0.0},
        **{"attention_head_dim": 64, "n_blocks": 4, "num_mid_blocks": 12, "num_heads": 8, "act_fn": "gelu"},
    }
    assert chatterbox.config_from(released) == chatterbox.CONFIGS["chatterbox"]
    assert chatterbox.config_from({**released, "meanflow": True}) == chatterbox.CONFIGS["chatterbox-turbo"]
    assert chatterbox.config_from({**vars(TINY), "channels": [32]}) == TINY


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"causal": False}, OptionUnsupported, "causal=False"),
        ({"act_fn": "snake"}, OptionUnsupported, "act_fn='snake'"),
        ({"channels": [32, 32]}, OptionUnsupported, "one level"),
        ({"static_chunk_size": 50}, OptionUnsupported, "no chunks"),
        ({"chanels": [32]}, UsageError, "chanels"),
        ({"in_channels": 81}, UsageError, "4 x out_channels"),
        ({"num_heads": 0}, UsageError, "num_heads=0"),
        ({"channels": ["32"]}, UsageError, "not a positive integer"),
    ],
)
def test_config_errors_say_what_is_known(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        chatterbox.config_from({**vars(TINY), **change})
