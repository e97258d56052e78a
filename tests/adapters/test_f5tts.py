"""F5-TTS and E2-TTS against recorded upstream numbers; exact padding; checkpoints; export."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from voicehub_aot.adapters import f5tts
from voicehub_aot.adapters.f5tts import cases
from voicehub_aot.adapters.f5tts.checkpoint import PREFIX
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UnknownModel, UsageError
from voicehub_aot.runtime.eager import EagerEvaluator
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.golden import Case, read_case
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.region import Region
from voicehub_aot.spec.synthetic import synthetic_weights

GOLDEN = Path(os.environ.get("VOICEHUB_AOT_GOLDEN", Path(__file__).parents[1] / "golden"))
TINY = f5tts.CONFIGS["tiny"]
UNETT = f5tts.config_from(
    {"dim": 64, "depth": 4, "heads": 4, "dim_head": 16, "mel_dim": 20, "text_num_embeds": 24, "pe_attn_head": 1}
)


def changed(config: Any, **changes: Any) -> Any:
    return f5tts.config_from({**vars(config), **changes})


VARIANTS = {
    "v1": TINY,
    "v0": changed(TINY, text_mask_padding=False, pe_attn_head=1),
    "masked keys": changed(TINY, attn_mask_enabled=True, qk_norm="rms_norm"),
    "long skip": changed(TINY, long_skip_connection=True, conv_layers=0),
    "unett": UNETT,
    "unett with text convolutions": changed(UNETT, conv_layers=2, text_mask_padding=False, skip_connect_type="add"),
}
FRAMES, TOKENS = 19, 8
ROTARY = f"{PREFIX}rotary_embed.inv_freq"


def weights_of(config: Any) -> dict[str, Tensor]:
    """Synthetic, with UNetT's gains near one: `synthetic_weights` takes them for biases."""
    weights = {**synthetic_weights(f5tts.checkpoint_shapes(config)), **f5tts.formula_weights(config)}
    return {k: 1 + v if k.endswith(".g") else v for k, v in weights.items()}


def region_of(config: Any) -> Region:
    return f5tts.region(config, weights_of(config))


def runtime_of(region: Region, program: Program | None) -> Runtime:
    programs = {program.name: program} if program else {"euler-7": f5tts.program(7)}
    return Runtime(region.spec, EagerEvaluator(region), programs, Buckets(axes={}))


def request(config: Any, frames: int = FRAMES, rows: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """Region inputs of full rows, nothing dropped."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.full((rows,), frames)
    return {
        "x": torch.randn(rows, frames, config.mel_dim, generator=generator),
        "time": torch.tensor([0.3]),
        "cond": torch.randn(rows, frames, config.mel_dim, generator=generator),
        "text": torch.randint(0, config.text_num_embeds, (rows, TOKENS), generator=generator),
        "lengths": full,
        "extent": full,
        "drop_audio": torch.zeros(rows, dtype=torch.bool),
        "drop_text": torch.zeros(rows, dtype=torch.bool),
    }


def padded(inputs: dict[str, Tensor], frames: int, tokens: int) -> dict[str, Tensor]:
    """The same rows in larger tensors, with garbage behind x and cond."""
    wider = dict(inputs)
    for name in ("x", "cond"):
        wider[name] = torch.full((inputs[name].shape[0], frames, inputs[name].shape[2]), 7.5)
        wider[name][:, : inputs[name].shape[1]] = inputs[name]
    wider["text"] = torch.nn.functional.pad(inputs["text"], (0, tokens - inputs["text"].shape[1]), value=-1)
    return wider


def alter(tensor: Tensor) -> Tensor:
    """Another valid value: a flag flipped, a count or an id one less, a number moved."""
    if tensor.dtype == torch.bool:
        return ~tensor
    return (tensor - 1).clamp(min=0) if tensor.dtype == torch.int64 else tensor + 0.3


# --- recorded cases


def test_what_a_case_holds_beyond_the_known_is_an_error() -> None:
    case = read_case(GOLDEN / "f5tts" / "region_tiny")
    runtime = runtime_of(f5tts.region(f5tts.config_from(case.config), case.checkpoint()), None)
    for change in (
        {"scalars": {**case.scalars, "no_such": 1}},
        {"inputs": {**case.inputs, "no_such": torch.zeros(1)}},
    ):
        with pytest.raises(UsageError, match="no_such"):
            cases.replay(replace(case, **change), runtime)


def test_a_loop_case_extends_durations_over_its_text_and_prompt() -> None:
    """Text of 14 tokens asks for 15 frames: the noise decides nothing, so 12 frames of it are refused."""
    inputs = {
        "noise": torch.zeros(1, 12, 20),
        "cond": torch.zeros(1, 5, 20),
        "text": torch.zeros(1, 14, dtype=torch.int64),
        "lens": torch.tensor([5]),
        "duration": torch.tensor([9]),
    }
    case = Case(Path("made"), "f5tts", "sampler", {}, "none", {}, {}, inputs, {"steps": 2}, {}, {})
    with pytest.raises(UsageError, match=r"noise has 12 frames, but durations are \[15\]"):
        cases.replay(case, runtime_of(region_of(TINY), cases.case_program(case)))


# --- padding


@pytest.mark.parametrize("drop", [False, True], ids=["conditional", "unconditional"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_in_a_larger_tensor_gives_what_it_gives_alone(name: str, drop: bool) -> None:
    config, module = VARIANTS[name], region_of(VARIANTS[name]).module
    inputs = request(config) | {flag: torch.tensor([drop]) for flag in ("drop_audio", "drop_text")}
    velocity, text = module(**inputs)
    assert velocity.std() > 0.3
    for frames in (24, 32, 64):
        got_velocity, got_text = module(**padded(inputs, frames, TOKENS + 5))
        torch.testing.assert_close(got_velocity[:, :FRAMES], velocity, atol=1e-5, rtol=0)
        torch.testing.assert_close(got_text[:, :FRAMES], text, atol=1e-5, rtol=0)
        assert not got_text[:, FRAMES:].any()


@pytest.mark.parametrize("name", VARIANTS)
def test_ragged_rows_do_not_see_each_other(name: str) -> None:
    config, module = VARIANTS[name], region_of(VARIANTS[name]).module
    alone = [request(config, frames, seed=frames) for frames in (23, 9, 1)]
    both = {
        key: value[0] if key == "time" else torch.cat(value)
        for key, value in {k: [padded(a, 23, TOKENS)[k] for a in alone] for k in alone[0]}.items()
    }
    together, _ = module(**both)
    for row, inputs in enumerate(alone):
        frames = inputs["x"].shape[1]
        torch.testing.assert_close(together[row : row + 1, :frames], module(**inputs)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["v1", "v0", "unett"])
def test_upstreams_ragged_batch_differs_from_the_exact_one(name: str) -> None:
    config, module = VARIANTS[name], region_of(VARIANTS[name]).module
    inputs = padded(request(config), 24, TOKENS)
    exact, _ = module(**inputs)
    ragged, _ = module(**inputs | {"extent": torch.tensor([24])})
    assert (exact - ragged)[:, :FRAMES].abs().max() > 0.05


# --- what matters


@pytest.mark.parametrize("name", VARIANTS)
def test_each_input_matters(name: str) -> None:
    config, module = VARIANTS[name], region_of(VARIANTS[name]).module
    inputs = request(config) | {"lengths": torch.tensor([FRAMES - 2])}
    velocity, text = module(**inputs)
    moved = {key: module(**inputs | {key: alter(value)}) for key, value in inputs.items()}
    assert not {key for key, (v, _) in moved.items() if (v - velocity).abs().max() < 1e-3}
    assert {"text", "drop_text"} <= {key for key, (_, t) in moved.items() if (t - text).abs().max() > 1e-3}
    for key in ("x", "time", "cond", "drop_audio"):
        torch.testing.assert_close(moved[key][1], text, atol=0, rtol=0)


def test_text_beyond_the_frames_is_cut() -> None:
    module, inputs = region_of(TINY).module, request(TINY, frames=5)
    cut = inputs | {"text": inputs["text"][:, :5]}
    torch.testing.assert_close(module(**inputs), module(**cut), atol=0, rtol=0)


def test_the_unconditional_text_still_tells_its_length() -> None:
    module, inputs = region_of(TINY).module, request(TINY) | {"drop_text": torch.tensor([True])}
    same_length = module(**inputs | {"text": alter(inputs["text"])})[1]
    shorter = module(**inputs | {"text": inputs["text"][:, :4]})[1]
    torch.testing.assert_close(same_length, module(**inputs)[1], atol=0, rtol=0)
    assert (shorter - same_length).abs().max() > 1e-3


# --- checkpoints


def bare(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(PREFIX): tensor for key, tensor in weights.items()}


def test_released_checkpoints_have_the_audited_size() -> None:
    shapes = f5tts.checkpoint_shapes(f5tts.CONFIGS["F5TTS_v1_Base"])
    assert len(shapes) == 366 - 2  # the file's tensors without `initted` and `step`
    assert sum(torch.Size(s).numel() for s in shapes.values()) == 337_096_804 + 32


@pytest.mark.parametrize("name", ["v1", "v0", "unett"])
@pytest.mark.parametrize("form", ["prefixed", "bare", "ema nest", "model nest"])
def test_every_checkpoint_form_gives_the_same_region(form: str, name: str, tmp_path: Path) -> None:
    config, weights = changed(VARIANTS[name], text_mask_padding=name == "v1"), weights_of(VARIANTS[name])
    mel = {"mel_spec.mel_stft.mel_scale.fb": torch.zeros(3)}
    path = tmp_path / ("model.pt" if "nest" in form else "model.safetensors")
    if form == "prefixed":
        save_file({**weights, "initted": torch.ones(()), "step": torch.ones(())}, path)
    elif form == "bare":
        save_file(bare(weights), path)
    elif form == "ema nest":
        ema = {**weights, **{f"ema_model.{k}": v for k, v in mel.items()}, "initted": torch.ones(())}
        torch.save({"ema_model_state_dict": ema, "model_state_dict": {"transformer.x": torch.ones(1)}}, path)
    else:
        nest = {f"transformer.{k}": v for k, v in bare(weights).items()} | mel
        torch.save({"model_state_dict": nest, "update": 1}, path)
    found, read = f5tts.read_checkpoint(path, {"v1": "tiny", "v0": "F5TTS_Base", "unett": "E2TTS_Base"}[name])
    assert found == config
    region = f5tts.region(found, read)
    state = region.module.state_dict()
    assert set(state) == set(bare(weights))
    assert all(torch.equal(state[key], tensor) for key, tensor in bare(weights).items())


def test_half_precision_weights_become_float32_and_a_missing_rotary_table_is_computed(tmp_path: Path) -> None:
    half = {k: v.half() for k, v in weights_of(TINY).items() if not k.endswith("inv_freq")}
    save_file(half, tmp_path / "model.safetensors")
    found, read = f5tts.read_checkpoint(tmp_path, "tiny")
    module = f5tts.region(found, read).module
    assert found == TINY
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in module.parameters())
    assert torch.equal(module.get_buffer("rotary_embed.inv_freq"), f5tts.formula_weights(TINY)[ROTARY])


def test_everything_wrong_with_a_checkpoint_is_in_one_error() -> None:
    weights = weights_of(TINY)
    del weights[f"{PREFIX}norm_out.linear.bias"]
    weights[f"{PREFIX}surprise"] = torch.zeros(1)
    weights[f"{PREFIX}transformer_blocks.1.attn.to_k.bias"] = torch.zeros(3)
    with pytest.raises(CheckpointMismatch) as caught:
        f5tts.region(TINY, weights)
    for words in (
        "1 missing: ",
        "norm_out.linear.bias",
        "1 unexpected: ",
        "surprise",
        "1 mis-shaped: ",
        "[3], wanted [64]",
    ):
        assert words in str(caught.value)


def test_flags_come_from_the_named_config_or_the_path(tmp_path: Path) -> None:
    """v0 and v1 have the same tensors."""
    for name in ("F5TTS_v1_Base", "F5TTS_Base"):
        (tmp_path / name).mkdir()
        save_file(weights_of(TINY), tmp_path / name / "model_1.safetensors")
    v1, _ = f5tts.read_checkpoint(tmp_path / "F5TTS_v1_Base", None)
    v0, _ = f5tts.read_checkpoint(tmp_path / "F5TTS_Base" / "model_1.safetensors", None)
    assert (v1, v0) == (TINY, VARIANTS["v0"])
    assert f5tts.read_checkpoint(tmp_path, "F5TTS_Base")[0] == v0
    with pytest.raises(
        CheckpointMismatch, match=r"F5TTS_Base/model_1\.safetensors, F5TTS_v1_Base/model_1\.safetensors"
    ):
        f5tts.read_checkpoint(tmp_path, None)


def test_a_file_that_tells_no_version_asks_for_the_config(tmp_path: Path) -> None:
    save_file(weights_of(TINY), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointMismatch, match="--config"):
        f5tts.read_checkpoint(tmp_path, None)
    with pytest.raises(CheckpointMismatch, match="holds a DiT"):
        f5tts.read_checkpoint(tmp_path, "E2TTS_Base")
    with pytest.raises(UnknownModel, match="F5TTS_v1_Base"):
        f5tts.read_checkpoint(tmp_path, "no_such")


def test_a_folder_without_a_checkpoint_and_a_file_without_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match=r"model\*\.safetensors"):
        f5tts.read_checkpoint(tmp_path, None)
    torch.save({"optimizer": {"lr": 1.0}}, tmp_path / "model.pt")
    with pytest.raises(CheckpointMismatch, match="'optimizer' is a dict"):
        f5tts.read_checkpoint(tmp_path, "tiny")


# --- configuration and programs


def test_the_backbone_is_told_by_name_or_by_its_own_hyperparameters() -> None:
    shared = {"dim": 64, "mel_dim": 20}
    assert f5tts.config_from(shared | {"backbone": "DiT"}).text_dim == 20
    assert type(f5tts.config_from(shared | {"conv_layers": 4})) is type(TINY)
    assert type(f5tts.config_from(shared | {"text_dim": 8, "skip_connect_type": "add"})) is type(UNETT)
    assert f5tts.config_from(vars(UNETT)) == UNETT


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"text_embedding_average_upsampling": True}, OptionUnsupported, "average_upsampling"),
        ({"qk_norm": "layer_norm"}, OptionUnsupported, "rms_norm"),
        ({"backbone": "MMDiT"}, UsageError, "known are DiT, UNetT"),
        ({"depht": 3}, UsageError, "depht"),
        ({"dim": 40}, UsageError, "multiple of 16"),
        ({"heads": "4"}, UsageError, "heads='4'"),
        ({"backbone": "UNetT", "depth": 3, "long_skip_connection": None}, UsageError, "long_skip_connection"),
    ],
)
def test_config_errors_say_what_is_known(change: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        f5tts.config_from({**vars(TINY), **change})


def test_the_default_program_is_the_released_inference() -> None:
    program = f5tts.program(32)
    assert (program.name, program.evaluations) == ("euler-32", 32)
    assert program.schedule[1] == pytest.approx(1 - torch.cos(torch.tensor(torch.pi / 64)).item(), abs=1e-7)
    assert f5tts.program(4, solver="midpoint", grid="linear", sway=0.0).schedule == (0, 0.25, 0.5, 0.75, 1)
    for unknown in ({"solver": "heun"}, {"grid": "cosine"}):
        with pytest.raises(OptionUnsupported, match="choose one of"):
            f5tts.program(4, **unknown)  # type: ignore[arg-type]


# --- export


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("name", ["v1", "v0", "unett"])
def test_export_with_dynamic_rows_frames_and_tokens(name: str) -> None:
    config, region = VARIANTS[name], region_of(VARIANTS[name])
    rows = {"B": torch.export.Dim("B", min=1, max=64)}
    dims = rows | {d.name: torch.export.Dim(d.name, min=d.min, max=d.max) for d in region.spec.dims}
    shapes = {i.name: {a: dims[s] for a, s in enumerate(i.shape) if isinstance(s, str)} for i in region.spec.inputs}
    example = padded(request(config, frames=24, rows=2), frames=24, tokens=10)
    exported = torch.export.export(region.module, (), example, dynamic_shapes=shapes, strict=False).module()
    for frames, count in ((1, 1), (37, 1), (37, 3), (5, 2)):
        inputs = request(config, frames, count)
        torch.testing.assert_close(exported(**inputs), region.module(**inputs), atol=5e-6, rtol=0)
