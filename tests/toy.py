"""A region small enough to read, with a value of every binding: what tests of the frame compile and run."""

import torch
import torch.nn.functional as F
from torch import nn

from voicehub_aot.artifacts.manifest import Checkpoint
from voicehub_aot.build import Model
from voicehub_aot.compilation import Progress
from voicehub_aot.guidance import Branch, Guidance
from voicehub_aot.kernels.attention import attention, key_bias
from voicehub_aot.region import Call, Dim, Input, Parameter, Region, RegionSpec

CHANNELS, WIDTH, COND = 6, 16, 5

SPEC = RegionSpec(
    name="toy",
    inputs=(
        Input(name="x", shape=("B", "frames", CHANNELS), binding="STATE", doc="state"),
        Input(name="time", shape=(1,), binding="TIME", doc="0 = noise"),
        Input(name="cond", shape=("B", "frames", COND), binding="REQUEST", doc="conditioning"),
        Input(name="ids", shape=("B", "text"), dtype="int64", high=9, pad=-1, binding="REQUEST", doc="tokens"),
        Input(name="lengths", shape=("B",), dtype="int64", binding="REQUEST", doc="real frames"),
        Input(name="drop", shape=("B",), dtype="bool", flag=True, binding="REQUEST", doc="unconditional"),
    ),
    dims=(Dim(name="frames", max=512, length="lengths", doc="frames"), Dim(name="text", max=64, doc="tokens")),
    outputs=("velocity", "summary"),
    guidance=Guidance(
        equation="classifier_free",
        branches=(Branch(name="conditional", flags={}), Branch(name="unconditional", flags={"drop": True})),
        scale=2.0,
    ),
    call=Call(
        parameters=(
            Parameter(name="x", kind="tensor", feeds="x"),
            Parameter(name="cond", kind="tensor", feeds="cond"),
            Parameter(name="ids", kind="tensor", feeds="ids"),
            Parameter(name="t", kind="time"),
            Parameter(name="mask", kind="mask", feeds="frames", required=False),
            Parameter(name="packed", kind="packed", required=False, default=False),
        ),
        returns="velocity",
        source="made up",
    ),
)


class Toy(nn.Module):
    """Constant: tanh(bank). Time: modulation. Request: embedded conditioning. Time and request: `mixed`."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(CHANNELS, WIDTH), nn.Linear(WIDTH, CHANNELS)
        self.clock, self.given, self.mixed = nn.Linear(4, 2 * WIDTH), nn.Linear(COND, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(10, WIDTH)
        self.bank = nn.Parameter(torch.empty(1, 1, WIDTH))

    def forward(self, x, time, cond, ids, lengths, drop):
        rows, frames, _ = x.shape
        real = torch.arange(frames) < lengths[:, None]
        scale, shift = self.clock(torch.sin(time[:, None] * torch.arange(1, 5))).chunk(2, -1)
        summary = (self.table(ids + 1) * (ids >= 0)[..., None]).sum(1, keepdim=True)
        context = torch.where(drop[:, None, None], torch.tanh(self.bank), self.given(cond) + summary)
        pooled = (context * real[..., None]).sum(1) / lengths[:, None]
        gate = self.mixed(F.silu(pooled + scale))
        h = (self.into(x) + context) * (1 + scale[:, None]) + shift[:, None]
        heads = (h * gate[:, None]).view(rows, frames, 2, WIDTH // 2).transpose(1, 2)
        h = h + attention(heads, heads, heads, key_bias(real)).transpose(1, 2).reshape(rows, frames, WIDTH)
        return self.out(h) * real[..., None], summary


def region(seed: int = 0) -> Region:
    generator = torch.Generator().manual_seed(seed)
    module = Toy().eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
    return Region(SPEC, module)


def model(seed: int = 0) -> Model:
    """Ready for `build`; it has no adapter, so commands that need one do not know it."""
    return Model("toy", "tiny", {}, region(seed), Checkpoint(source=f"seed {seed}", digest=str(seed)))


class Quiet(Progress):
    """Says nothing."""

    def stage(self, text: str) -> None:
        pass

    def engine(self, name: str, state: str, seconds: float = 0.0) -> None:
        pass
