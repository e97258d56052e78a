"""What a caller may pass, how it is laid out, and what is refused before an engine sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from voicehub_aot.compiler.models import resolve
from voicehub_aot.errors import InputMismatch
from voicehub_aot.runtime.request import Request, RequestReader
from voicehub_aot.spec.bucket import Buckets, Fit, Ladder

ROWS, FRAMES, TOKENS = 2, 9, 5
SPECS = {name: resolve(name, "tiny", "synthetic").region.spec for name in ("supertonic", "f5tts")}


def arguments(name: str) -> dict[str, Tensor]:
    """A valid request of two rows, the state under its own name."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if name == "supertonic":
        return {
            "noisy_latent": normal(ROWS, 12, FRAMES),
            "text_emb": normal(ROWS, 24, TOKENS),
            "style_ttl": normal(ROWS, 7, 24),
        }
    text = torch.randint(0, 24, (ROWS, TOKENS), generator=generator)
    return {"x": normal(ROWS, FRAMES, 20), "cond": normal(ROWS, FRAMES, 20), "text": text}


def read(name: str, given: Mapping[str, Any], **buckets: int) -> Request:
    """buckets: sizes to pad to; what is not named keeps its own size."""
    spec = SPECS[name]
    rest = {k: v for k, v in given.items() if k != spec.state.name}
    fit = Fit(spec.dims, Buckets(axes={axis: (size,) for axis, size in buckets.items()}), name, Ladder(), static=True)
    return RequestReader(spec, fit).read(given[spec.state.name], rest)


def laid_out(request: Request) -> dict[str, Tensor]:
    return {**request.inputs, "the state": request.state}


def same(left: Request, right: Request) -> bool:
    ours, theirs = laid_out(left), laid_out(right)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


# --- what is refused

# model, argument, what is wrong with it, how it becomes so, what the message says
WRONG: list[tuple[str, str, str, Callable[[Tensor], Any], str]] = [
    (
        "supertonic",
        "noisy_latent",
        "transposed",
        lambda x: x.mT,
        r"float32 \[2, 9, 12\] on cpu, wanted .*\[B, 12, frames\]",
    ),
    ("supertonic", "noisy_latent", "a channel less", lambda x: x[:, :11], r"\[2, 11, 9\]"),
    ("supertonic", "noisy_latent", "float64", lambda x: x.double(), "float64 .*; convert it first"),
    ("supertonic", "noisy_latent", "float16", lambda x: x.half(), "float16 .*; convert it first"),
    ("supertonic", "noisy_latent", "bfloat16", lambda x: x.bfloat16(), "bfloat16 .*; convert it first"),
    ("supertonic", "noisy_latent", "complex", lambda x: x.cfloat(), "complex64"),
    ("supertonic", "noisy_latent", "int64", lambda x: x.long(), "int64"),
    ("supertonic", "noisy_latent", "without batch", lambda x: x[0], r"\[12, 9\]"),
    ("supertonic", "noisy_latent", "of rank 4", lambda x: x[None], r"\[1, 2, 12, 9\]"),
    ("supertonic", "noisy_latent", "on another device", lambda x: x.to("meta"), "on meta, wanted .* on the CPU"),
    ("supertonic", "noisy_latent", "a list", lambda x: x.tolist(), "is a list, wanted a tensor"),
    ("supertonic", "noisy_latent", "an array", lambda x: x.numpy(), "is a ndarray, wanted a tensor"),
    ("supertonic", "noisy_latent", "absent", lambda x: None, "is a NoneType, wanted a tensor"),
    ("supertonic", "text_emb", "a row less", lambda x: x[:1], "has B=1, others have B=2"),
    ("supertonic", "text_emb", "transposed", lambda x: x.mT, r"\[2, 5, 24\]"),
    ("supertonic", "text_emb", "float64", lambda x: x.double(), "float64"),
    ("supertonic", "style_ttl", "a vector less", lambda x: x[:, :6], r"\[2, 6, 24\]"),
    ("supertonic", "style_ttl", "expanded", lambda x: x.expand(1, 2, 7, 24), r"\[1, 2, 7, 24\]"),
    ("supertonic", "style_ttl", "absent", lambda x: None, r"missing .*; this model takes \['style_ttl', 'text_emb'\]"),
    ("f5tts", "x", "a channel less", lambda x: x[:, :, :19], r"\[2, 9, 19\]"),
    ("f5tts", "cond", "too long", lambda x: torch.cat([x, x], 1), "has frames=18, others have frames=9"),
    ("f5tts", "cond", "a row less", lambda x: x[:1], "has B=1, others have B=2"),
    ("f5tts", "text", "int32", lambda x: x.int(), "int32 .*; convert it first"),
    ("f5tts", "text", "float32", lambda x: x.float(), "float32"),
    ("f5tts", "text", "bool", lambda x: x.bool(), "bool"),
    ("f5tts", "text", "beyond the vocabulary", lambda x: x + 24, "holds .*, wanted 0 to 23, or -1 for padding"),
    ("f5tts", "text", "negative", lambda x: x - 30, "holds -.*, wanted 0 to 23"),
]


@pytest.mark.parametrize(
    ("model", "name", "change", "words"),
    [pytest.param(model, name, change, words, id=f"{name} {what}") for model, name, what, change, words in WRONG],
)
def test_a_wrong_tensor_is_named_with_what_came_and_what_is_wanted(
    model: str, name: str, change: Callable[[Tensor], Any], words: str
) -> None:
    given = arguments(model)
    with pytest.raises(InputMismatch, match=rf"^{model}: .*{words}") as caught:
        read(model, given | {name: change(given[name])})
    assert name in str(caught.value)


def test_a_state_of_fewer_rows_than_its_conditioning_is_refused() -> None:
    given = arguments("supertonic")
    with pytest.raises(InputMismatch, match="text_emb has B=2, others have B=1"):
        read("supertonic", given | {"noisy_latent": given["noisy_latent"][:1]})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["noisy_latent", "text_emb", "style_ttl"])
def test_what_is_not_finite_inside_a_row_is_refused(name: str, value: float) -> None:
    given = arguments("supertonic")
    given[name][1, 3, 2] = value
    with pytest.raises(InputMismatch, match=f"{name} holds NaN or infinity"):
        read("supertonic", given)


def test_a_batch_of_no_rows_is_refused() -> None:
    with pytest.raises(InputMismatch, match="no rows; wanted B >= 1"):
        read("supertonic", {k: v[:0] for k, v in arguments("supertonic").items()})


def test_every_unknown_and_missing_name_is_in_one_error() -> None:
    given = arguments("f5tts")
    del given["cond"], given["text"]
    with pytest.raises(
        InputMismatch, match=r"unknown \['condition', 'drop_text'\], missing \['cond', 'text'\]"
    ) as caught:
        read("f5tts", given | {"condition": torch.zeros(1), "drop_text": torch.ones(2, dtype=torch.bool)})
    assert "optionally ['extent', 'lengths']" in str(caught.value)


@pytest.mark.parametrize(
    "lengths",
    [
        [0, 9],
        [9, 10],
        [9, -1],
        [9],
        [9, 9, 9],
        [],
        7,
        "99",
        [9, 8.0],
        [9, None],
        [9, True],
        [[9, 8]],
        {9: 8},
        torch.tensor([9.0, 8.0]),
        torch.tensor([True, True]),
        torch.tensor([[9, 8]]),
        torch.tensor([9, 0]),
        torch.tensor(9),
        np.array([9.0, 8.0]),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["lengths", "extent"])
def test_lengths_that_no_row_can_have_are_refused(name: str, lengths: Any) -> None:
    with pytest.raises(InputMismatch, match=name):
        read("supertonic", arguments("supertonic") | {name: lengths})


def test_a_text_longer_than_its_tensor_is_refused() -> None:
    with pytest.raises(InputMismatch, match=r"text_lengths holds 6, wanted 1 to 5 \(text given\)"):
        read("supertonic", arguments("supertonic") | {"text_lengths": [5, 6]})


def test_an_extent_inside_the_row_is_refused() -> None:
    with pytest.raises(InputMismatch, match="extent 7 is less than the length 8"):
        read("supertonic", arguments("supertonic") | {"lengths": [9, 8], "extent": [9, 7]})


# --- what is equal


@pytest.mark.parametrize(
    "lengths",
    [(9, 4), torch.tensor([9, 4]), torch.tensor([9, 4], dtype=torch.int32), torch.tensor([9, 4], dtype=torch.uint8)],
    ids=repr,
)
def test_lengths_may_be_a_list_a_tuple_or_any_integer_tensor(lengths: Any) -> None:
    given = arguments("supertonic")
    assert same(read("supertonic", given | {"lengths": lengths}), read("supertonic", given | {"lengths": [9, 4]}))


def test_without_lengths_every_row_is_full() -> None:
    request = read("supertonic", arguments("supertonic"))
    assert request.inputs["lengths"].tolist() == request.inputs["extent"].tolist() == [FRAMES, FRAMES]
    assert request.inputs["text_lengths"].tolist() == [TOKENS, TOKENS]


@pytest.mark.parametrize("model", SPECS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e4])
def test_what_lies_behind_a_row_never_matters(model: str, garbage: float) -> None:
    given = arguments(model) | {"lengths": [FRAMES, 4]}
    spoiled = {k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()}
    for item in SPECS[model].inputs:
        if item.name in spoiled and "frames" in item.shape and item.dtype == "float32":
            spoiled[item.name][1].narrow(item.shape.index("frames") - 1, 4, FRAMES - 4).fill_(garbage)
    if model == "supertonic":
        given["text_lengths"] = spoiled["text_lengths"] = [2, TOKENS]
        spoiled["text_emb"][0, :, 2:] = garbage
    assert same(read(model, spoiled), read(model, given))


def test_garbage_between_length_and_extent_is_read_and_so_must_be_finite() -> None:
    given = arguments("supertonic") | {"lengths": [FRAMES, 4], "extent": [FRAMES, 6]}
    given["noisy_latent"][1, :, 6:] = float("nan")
    assert read("supertonic", given).state.isfinite().all()
    given["noisy_latent"][1, :, 5:] = float("nan")
    with pytest.raises(InputMismatch, match="noisy_latent holds NaN"):
        read("supertonic", given)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def strided(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, torch.full_like(tensor, 3)], dim=-1)[..., 0]


def sliced(tensor: Tensor) -> Tensor:
    return torch.cat([torch.full_like(tensor, 3), tensor])[len(tensor) :]


def with_gradient(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_(tensor.is_floating_point())


@pytest.mark.parametrize("model", SPECS)
@pytest.mark.parametrize("form", [transposed, strided, sliced, with_gradient])
def test_the_memory_layout_of_the_callers_tensors_does_not_matter(model: str, form: Callable[[Tensor], Tensor]) -> None:
    given = arguments(model)
    request = read(model, {k: form(v) for k, v in given.items()})
    assert same(request, read(model, given))
    assert all(t.is_contiguous() and not t.requires_grad for t in laid_out(request).values())


def test_one_row_expanded_is_that_row_repeated() -> None:
    one = {k: v[:1] for k, v in arguments("f5tts").items()}
    expanded = {k: v.expand(3, *v.shape[1:]) for k, v in one.items()}
    assert same(
        read("f5tts", expanded), read("f5tts", {k: v.repeat(3, 1, *[1] * (v.dim() - 2)) for k, v in one.items()})
    )


@pytest.mark.parametrize("model", SPECS)
def test_the_callers_tensors_are_neither_written_nor_kept(model: str) -> None:
    given = arguments(model)
    before = {k: v.clone() for k, v in given.items()}
    request = read(model, given | {"lengths": [FRAMES, 1]}, frames=16)
    assert all(torch.equal(given[k], v) for k, v in before.items())
    for tensor in laid_out(request).values():
        tensor.zero_()
    assert all(torch.equal(given[k], v) for k, v in before.items())


# --- layout


@pytest.mark.parametrize("model", SPECS)
def test_a_bucket_is_filled_with_the_runtimes_own_padding(model: str) -> None:
    spec = SPECS[model]
    given = arguments(model) | {"lengths": [FRAMES, 4]}
    request = read(model, given, frames=16, text=8)
    state, axis = spec.state.name, spec.state.shape.index("frames")
    assert request.state.shape[axis] == 16
    assert torch.equal(request.state[0].narrow(axis - 1, 0, FRAMES), given[state][0])
    assert not request.state[0].narrow(axis - 1, FRAMES, 16 - FRAMES).any()
    assert not request.state[1].narrow(axis - 1, 4, 12).any()
    text = request.inputs["text" if model == "f5tts" else "text_emb"]
    assert text.shape[-1] == 8
    assert (text[..., TOKENS:] == (-1 if model == "f5tts" else 0)).all()


def test_a_prompt_may_be_shorter_than_the_frames() -> None:
    given = arguments("f5tts")
    short = given | {"cond": given["cond"][:, :3]}
    padded = given | {"cond": torch.nn.functional.pad(given["cond"][:, :3], (0, 0, 0, FRAMES - 3))}
    assert same(read("f5tts", short), read("f5tts", padded))


def test_packed_rows_are_the_branches_one_after_the_other() -> None:
    given = arguments("f5tts")
    packed = read("f5tts", given).packed(range(2))
    assert torch.equal(packed["cond"], torch.cat([given["cond"], given["cond"]]))
    assert packed["drop_text"].tolist() == packed["drop_audio"].tolist() == [False, False, True, True]
    assert read("f5tts", given).packed([0])["drop_text"].tolist() == [False, False]


def test_a_result_is_cropped_to_the_callers_size_and_zero_behind_each_row() -> None:
    given = arguments("supertonic") | {"lengths": [FRAMES, 4]}
    request = read("supertonic", given, frames=16)
    whole = torch.ones(ROWS, 12, 16)
    cropped = request.crop(whole)
    assert cropped.shape == given["noisy_latent"].shape
    assert cropped[0].all()
    assert cropped[1, :, :4].all()
    assert not cropped[1, :, 4:].any()
    assert whole.all(), "the state is still in use by the sampler"
