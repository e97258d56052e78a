"""CosyVoice 3 and 2: exact padding, chunks, rotary, what matters and when, guidance, checkpoints, programs.

Recorded cases: test_replay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from voicehub_aot.adapters import cosyvoice
from voicehub_aot.compiler.export import export_region
from voicehub_aot.compiler.split import split
from voicehub_aot.compiler.stages import Stages
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UnknownModel, UsageError
from voicehub_aot.runtime.eager import EagerEvaluator
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.region import Region
from voicehub_aot.spec.synthetic import synthetic_weights

PREFIX = "decoder.estimator."
DIT, CV2 = cosyvoice.CONFIGS["tiny"], cosyvoice.CONFIGS["tiny-cv2"]
VARIANTS = {"dit": DIT, "cv2": CV2}
MEL, FRAMES, CHUNK = 20, 23, 8
ROTARY = f"{PREFIX}rotary_embed.inv_freq"


def weights_of(config: Any) -> dict[str, Tensor]:
    return {**synthetic_weights(cosyvoice.checkpoint_shapes(config)), **cosyvoice.formula_weights(config)}


def region_of(config: Any) -> Region:
    return cosyvoice.region(config, weights_of(config))


def runtime_of(config: Any, program: Program) -> Runtime:
    region = region_of(config)
    return Runtime(region.spec, EagerEvaluator(region), {program.name: program}, Buckets(axes={}))


def staged_of(config: Any) -> Stages:
    region = region_of(config)
    graph, symbols = export_region(region)
    return split(graph, region.spec, symbols)


def request(config: Any, frames: int = FRAMES, rows: int = 1, seed: int = 0, streaming: bool = False) -> Any:
    """Region inputs of full rows, nothing dropped."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "x": torch.randn(rows, MEL, frames, generator=generator),
        "time": torch.tensor([0.3]),
        "mu": torch.randn(rows, MEL, frames, generator=generator),
        "spks": torch.randn(rows, 12 if config is DIT else MEL, generator=generator),
        "cond": torch.randn(rows, MEL, frames, generator=generator),
        "lengths": torch.full((rows,), frames),
        "streaming": torch.full((rows,), streaming),
        "drop": torch.zeros(rows, dtype=torch.bool),
    }
    return inputs | ({"extent": torch.full((rows,), frames)} if config is DIT else {})


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


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_row_in_a_larger_tensor_gives_what_it_gives_alone_and_zero_behind_it(name: str, streaming: bool) -> None:
    module, inputs = region_of(VARIANTS[name]).module, request(VARIANTS[name], streaming=streaming)
    alone = module(**inputs)
    assert alone.std() > 0.2
    for frames in (24, 32, 64):
        got = module(**padded(inputs, frames))
        torch.testing.assert_close(got[..., :FRAMES], alone, atol=1e-5, rtol=0)
        assert not got[..., FRAMES:].any()


@pytest.mark.parametrize("name", VARIANTS)
def test_ragged_rows_do_not_see_each_other(name: str) -> None:
    """Nor does one row's streaming reach another."""
    module = region_of(VARIANTS[name]).module
    alone = [
        request(VARIANTS[name], n, seed=n, streaming=s) for n, s in ((23, True), (9, False), (17, True), (1, False))
    ]
    rows = [padded(a, 23) for a in alone]
    together = module(**{k: v if k == "time" else torch.cat([r[k] for r in rows]) for k, v in rows[0].items()})
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


def test_beyond_its_length_a_row_has_velocities_up_to_its_extent() -> None:
    """As upstream, which does not mask the DiT's output; attention adds nothing there."""
    module, inputs = region_of(DIT).module, request(DIT)
    exact = module(**inputs | {"lengths": torch.tensor([9]), "extent": torch.tensor([9])})
    reaching = module(**inputs | {"lengths": torch.tensor([9]), "extent": torch.tensor([15])})
    torch.testing.assert_close(reaching[..., :9], exact[..., :9], atol=0, rtol=0)
    assert reaching[..., 9:15].abs().amax(dim=1).min() > 0.1
    assert not reaching[..., 15:].any()
    assert not exact[..., 9:].any()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_dropped_branch_is_the_released_packing(name: str) -> None:
    module, inputs = region_of(VARIANTS[name]).module, request(VARIANTS[name])
    zeros = {key: torch.zeros_like(inputs[key]) for key in ("mu", "spks", "cond")}
    dropped = module(**inputs | {"drop": torch.tensor([True])})
    torch.testing.assert_close(dropped, module(**inputs | zeros), atol=1e-6, rtol=0)


# --- chunks and positions


@pytest.mark.parametrize("name", VARIANTS)
def test_a_stream_cut_at_whole_chunks_is_the_start_of_the_whole(name: str) -> None:
    module = region_of(VARIANTS[name]).module
    for streaming, same in ((True, True), (False, False)):
        inputs = request(VARIANTS[name], 3 * CHUNK, streaming=streaming)
        cut = {k: v[..., : 2 * CHUNK] if k in ("x", "mu", "cond") else v for k, v in inputs.items()}
        reach = {k: torch.tensor([2 * CHUNK]) for k in ("lengths", "extent") if k in inputs}
        apart = (module(**cut | reach) - module(**inputs)[..., : 2 * CHUNK]).abs().max()
        assert (apart < 1e-5) == same


@pytest.mark.parametrize("name", VARIANTS)
def test_a_frame_sees_its_own_chunk_whole(name: str) -> None:
    """The last frame of a chunk reaches the first one, but not the chunk before."""
    module, inputs = region_of(VARIANTS[name]).module, request(VARIANTS[name], 3 * CHUNK, streaming=True)
    moved = inputs | {"mu": inputs["mu"].clone()}
    moved["mu"][..., 2 * CHUNK - 1] += 1
    apart = (module(**moved) - module(**inputs)).abs().amax(dim=1)[0]
    assert apart[:CHUNK].max() < 1e-6
    assert apart[CHUNK : 2 * CHUNK].min() > 1e-4


def test_rotary_turns_the_first_head_of_the_flat_projection() -> None:
    """Upstream rotates as many channels of the flat queries and keys as its table has: those of head 0."""
    dit = region_of(DIT).module
    attention, rope = dit.transformer_blocks[0].attn, dit.rotary_embed(FRAMES)
    x = torch.randn(1, FRAMES, DIT.dim, generator=torch.Generator().manual_seed(0))

    def rotated(flat: Tensor) -> Tensor:
        cos, sin = (v.repeat_interleave(2, dim=-1).squeeze(1) for v in rope)
        first = flat[..., : DIT.dim_head]
        turned = torch.stack((-first[..., 1::2], first[..., ::2]), dim=-1).flatten(-2)
        return torch.cat((first * cos + turned * sin, flat[..., DIT.dim_head :]), dim=-1)

    def heads(flat: Tensor) -> Tensor:
        return flat.view(1, FRAMES, DIT.heads, DIT.dim_head).transpose(1, 2)

    query, key = heads(rotated(attention.to_q(x))), heads(rotated(attention.to_k(x)))
    weights = (query @ key.transpose(2, 3) / DIT.dim_head**0.5).softmax(dim=-1)
    want = attention.to_out[0]((weights @ heads(attention.to_v(x))).transpose(1, 2).flatten(2))
    got = attention(x, rope, torch.zeros(1, 1, 1, FRAMES), torch.ones(1, FRAMES, 1))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


# --- when things are computed


@pytest.mark.parametrize("name", VARIANTS)
def test_time_and_conditioning_leave_the_step(name: str) -> None:
    fewer = {"dit": {"depth": 1}, "cv2": {"n_blocks": 1, "num_mid_blocks": 1}}[name]
    stages = staged_of(cosyvoice.config_from({**vars(VARIANTS[name]), **fewer}))
    held, given = set(stages.step.constants), {i.name for i in stages.step.inputs}
    of_time = ("time_", "norm_out.") if name == "dit" else ("time_",)
    assert not {key for key in held if key.startswith(of_time) or ".mlp." in key or ".attn_norm." in key}
    assert not given & {"mu", "spks", "cond", "drop", "time", "streaming"}
    first = {"dit": "input_embed.proj.bias", "cv2": "down_blocks.0.0.res_conv.bias"}[name]
    assert first not in held  # goes with the conditioning's share of the projection
    biases = [o for o in stages.prepare.outputs if o.shape == ("B", "frames", "frames")]
    assert len(biases) == 1  # chunks and keys, once per request


# --- sampling


def test_the_default_program_is_the_released_loop() -> None:
    program = cosyvoice.program(10)
    assert (program.name, program.evaluations) == ("euler-10", 10)
    grid = (0, 0.012312, 0.048943, 0.108993, 0.190983, 0.292893, 0.412215, 0.546009, 0.690983, 0.843566, 1)
    assert program.schedule == pytest.approx(grid, abs=1e-6)
    assert cosyvoice.program(4, grid="linear").schedule == (0, 0.25, 0.5, 0.75, 1)


def test_what_no_loop_of_upstream_does_is_refused() -> None:
    with pytest.raises(OptionUnsupported, match="choose one of cosine, linear"):
        cosyvoice.program(4, grid="epss")
    with pytest.raises(OptionUnsupported, match="sway"):
        cosyvoice.program(4, sway=-1.0)


@pytest.mark.parametrize("name", VARIANTS)
def test_guidance_is_one_plus_rate_times_conditional_minus_rate_times_unconditional(name: str) -> None:
    program = cosyvoice.program(1)
    runtime, module = runtime_of(VARIANTS[name], program), region_of(VARIANTS[name]).module
    for streaming, rate, given in ((False, 0.7, None), (True, 0.3, 0.3)):
        inputs = request(VARIANTS[name], streaming=streaming)
        asked = {key: inputs[key] for key in ("mu", "spks", "cond")} | (
            {"streaming": inputs["streaming"]} if streaming else {}  # may be left out
        )
        start = inputs | {"time": torch.tensor([0.0])}
        conditional, unconditional = module(**start), module(**start | {"drop": torch.tensor([True])})
        want = inputs["x"] + (1 + rate) * conditional - rate * unconditional
        got = runtime.sample(noise=inputs["x"], guidance=given, **asked)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("streaming", [None, False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_denoiser_takes_upstreams_call(name: str, streaming: bool | None) -> None:
    runtime, inputs = runtime_of(VARIANTS[name], cosyvoice.program(10)), request(VARIANTS[name], rows=2)
    mask = torch.ones(2, 1, FRAMES)
    mask[1, :, 9:] = 0
    call = (inputs["x"], mask, inputs["mu"], torch.tensor([0.3, 0.6]), inputs["spks"], inputs["cond"])
    got = runtime.denoiser()(*call, **({} if streaming is None else {"streaming": streaming}))
    ragged = {"lengths": torch.tensor([FRAMES, 9]), "streaming": torch.full((2,), bool(streaming))}
    for row, time in enumerate((0.3, 0.6)):
        want = region_of(VARIANTS[name]).module(**inputs | ragged | {"time": torch.tensor([time])})
        torch.testing.assert_close(got[row], want[row], atol=1e-5, rtol=0)


# --- checkpoints

OTHERS = {
    "input_embedding.weight": torch.zeros(1),
    "spk_embed_affine_layer.bias": torch.zeros(1),
    "pre_lookahead_layer.conv1.weight": torch.zeros(1),
    "encoder.embed.weight": torch.zeros(1),
    "encoder_proj.weight": torch.zeros(1),
}


def bare(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(PREFIX): tensor for key, tensor in weights.items()}


def test_released_estimators_have_the_released_size() -> None:
    sizes = {"Fun-CosyVoice3-0.5B-2512": (323, 331_142_224 + 32), "CosyVoice2-0.5B": (910, 71_302_480)}
    for name, (entries, numbers) in sizes.items():
        shapes = cosyvoice.checkpoint_shapes(cosyvoice.CONFIGS[name])
        assert len(shapes) == entries
        assert sum(torch.Size(s).numel() for s in shapes.values()) == numbers


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("form", ["flow.pt", "trained.pt", "flow.safetensors", "bare.pt"])
def test_every_checkpoint_form_gives_the_same_region(form: str, name: str, tmp_path: Path) -> None:
    config, weights = VARIANTS[name], weights_of(VARIANTS[name])
    content: dict[str, Any] = bare(weights) if form == "bare.pt" else weights | OTHERS
    if form == "trained.pt":
        content = content | {"epoch": 3, "step": 7}
    torch.save(content, tmp_path / form) if form.endswith("pt") else save_file(content, tmp_path / form)
    path = tmp_path if form.startswith("flow") else tmp_path / form
    found, read = cosyvoice.read_checkpoint(path, {"dit": "tiny", "cv2": "tiny-cv2"}[name])
    assert found == config
    state = cosyvoice.region(found, read).module.state_dict()
    assert set(state) == set(bare(weights))
    assert all(torch.equal(state[key], tensor) for key, tensor in bare(weights).items())


def test_the_file_tells_its_network_and_its_sizes(tmp_path: Path) -> None:
    """Not the frames of a chunk, nor the width of CosyVoice2's heads: those are as released."""
    torch.save(weights_of(DIT), tmp_path / "dit.pt")
    found, _ = cosyvoice.read_checkpoint(tmp_path / "dit.pt", None)
    assert found == cosyvoice.config_from({**vars(DIT), "static_chunk_size": 50})
    wide = cosyvoice.config_from({**vars(CV2), "attention_head_dim": 64, "static_chunk_size": 50})
    torch.save(weights_of(wide), tmp_path / "cv2.pt")
    assert cosyvoice.read_checkpoint(tmp_path / "cv2.pt", None)[0] == wide
    for file, other in (("dit.pt", "tiny-cv2"), ("cv2.pt", "tiny")):
        with pytest.raises(CheckpointMismatch, match=f"--config {other} is the other network"):
            cosyvoice.read_checkpoint(tmp_path / file, other)


def test_half_precision_weights_become_float32_and_a_missing_rotary_table_is_computed(tmp_path: Path) -> None:
    torch.save({k: v.half() for k, v in weights_of(DIT).items() if k != ROTARY}, tmp_path / "flow.pt")
    found, read = cosyvoice.read_checkpoint(tmp_path, "tiny")
    module = cosyvoice.region(found, read).module
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in module.parameters())
    assert torch.equal(module.get_buffer("rotary_embed.inv_freq"), cosyvoice.formula_weights(DIT)[ROTARY])


def test_everything_wrong_with_a_checkpoint_is_in_one_error(tmp_path: Path) -> None:
    weights = weights_of(DIT) | OTHERS
    del weights[f"{PREFIX}norm_out.linear.bias"]
    weights[f"{PREFIX}transformer_blocks.0.attn.to_q.lora_A.weight"] = torch.zeros(1)
    weights["llm.lm_head.weight"] = torch.zeros(1)
    weights[f"{PREFIX}transformer_blocks.1.attn.to_k.bias"] = torch.zeros(3)
    torch.save(weights, tmp_path / "flow.pt")
    found, read = cosyvoice.read_checkpoint(tmp_path, "tiny")
    with pytest.raises(CheckpointMismatch) as caught:
        cosyvoice.region(found, read)
    for words in ("1 missing: ", "norm_out.linear.bias", "2 unexpected: ", "lora_A", "llm.lm_head", "[3], wanted [64]"):
        assert words in str(caught.value)


def test_a_folder_without_a_flow_and_an_unknown_configuration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match=r"flow\.pt"):
        cosyvoice.read_checkpoint(tmp_path, None)
    with pytest.raises(UnknownModel, match=r"CosyVoice2-0\.5B"):
        cosyvoice.read_checkpoint(tmp_path, "no_such")
    torch.save({f"{PREFIX}proj_out.weight": "text"}, tmp_path / "flow.pt")
    with pytest.raises(CheckpointMismatch, match="is a str, wanted a tensor"):
        cosyvoice.read_checkpoint(tmp_path, None)


# --- configuration


def test_hyperparameters_are_upstreams() -> None:
    dit = {
        **{"dim": 1024, "depth": 22, "heads": 16, "dim_head": 64, "ff_mult": 2, "mel_dim": 80, "mu_dim": 80},
        **{"spk_dim": 80, "out_channels": 80, "static_chunk_size": 50, "num_decoding_left_chunks": -1},
    }
    cv2 = {
        **{"in_channels": 320, "out_channels": 80, "channels": [256], "dropout": 0.0, "attention_head_dim": 64},
        **{"n_blocks": 4, "num_mid_blocks": 12, "num_heads": 8, "act_fn": "gelu", "static_chunk_size": 50},
    }
    assert cosyvoice.config_from(dit) == cosyvoice.CONFIGS["Fun-CosyVoice3-0.5B-2512"]
    assert cosyvoice.config_from(cv2) == cosyvoice.CONFIGS["CosyVoice2-0.5B"]
    for config in (DIT, CV2):
        assert cosyvoice.config_from(vars(config)) == config


@pytest.mark.parametrize(
    ("config", "change", "error", "words"),
    [
        (DIT, {"depht": 3}, UsageError, "depht"),
        (DIT, {"dim": 40}, UsageError, "multiple of 16"),
        (DIT, {"heads": "4"}, UsageError, "heads='4'"),
        (DIT, {"dim_head": 15}, UsageError, "odd"),
        (DIT, {"out_channels": 19}, UsageError, "out_channels=19"),
        (DIT, {"backbone": "UNetT"}, UsageError, "known are DiT, CausalConditionalDecoder"),
        (CV2, {"static_chunk_size": 0}, OptionUnsupported, "static_chunk_size=0"),
        (CV2, {"meanflow": True}, OptionUnsupported, "meanflow=True"),
        (CV2, {"act_fn": "snake"}, OptionUnsupported, "act_fn='snake'"),
    ],
)
def test_config_errors_say_what_is_known(
    config: Any, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        cosyvoice.config_from({**vars(config), **change})
