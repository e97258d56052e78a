"""A region small enough to read, with a value of every binding: what tests of the frame compile and run."""

import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from voicehub_aot import engines
from voicehub_aot.artifacts import store
from voicehub_aot.artifacts.manifest import Checkpoint
from voicehub_aot.compiler.cache import cache_dir
from voicehub_aot.compiler.compile import compile_all, install
from voicehub_aot.compiler.export import export_region
from voicehub_aot.compiler.jobs import plan_jobs
from voicehub_aot.compiler.models import Model
from voicehub_aot.compiler.options import Options
from voicehub_aot.compiler.split import split
from voicehub_aot.compiler.stages import ROUNDING
from voicehub_aot.engines import Source
from voicehub_aot.kernels.attention import attention, key_bias
from voicehub_aot.progress import Progress
from voicehub_aot.spec.bucket import Buckets
from voicehub_aot.spec.guidance import Branch, Guidance
from voicehub_aot.spec.region import Call, Dim, Input, Parameter, Region, RegionSpec
from voicehub_aot.spec.schedule import linear
from voicehub_aot.spec.solver import euler
from voicehub_aot.spec.target import default_target, parse_target

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
        branches=(Branch(name="conditional"), Branch(name="unconditional", flags={"drop": True}, scale=2.0)),
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


class Compiled:
    """The toy's two stages compiled by one engine and installed in a folder with their weight file."""

    def __init__(self, engine: str, mode: str, folder: Path, shapes: str = "dynamic") -> None:
        graph, symbols = export_region(region())
        self.engine, self.folder = engines.get(engine), folder
        self.stages = split(graph, SPEC, symbols)
        options = Options(
            Buckets(axes={"frames": (16,)}),
            (euler(linear(2)),),
            parse_target(default_target()),
            engines=(engine,),
            weights_mode=mode,
            shapes=shapes,
        )
        self.prepare, self.step = plan_jobs(self.stages, options, engine)
        compiled = compile_all((self.prepare, self.step), SPEC, options, cache_dir(), Quiet())
        stages = (self.stages.prepare, self.stages.mixed, self.stages.step)
        save_file({n: t for stage in stages for n, t in stage.constants.items()}, folder / store.WEIGHTS)
        self.entries = [install(item, folder, options) for item in compiled]

    def entry(self, job):
        return next(e for e in self.entries if e.stage == job.stage)

    def constants(self, job):
        tensors = store.map_tensors(self.folder / store.WEIGHTS)
        return {c.name: tensors[c.name] for c in self.entry(job).constants}

    def source(self, job, constants=None):
        digests = {name: file.sha256 for name, file in store.list_files(self.folder).items()}
        entry = self.entry(job)
        weights = self.constants(job) if constants is None else constants
        return Source(self.folder, entry.path, digests, entry.inputs, entry.outputs, weights, job.stage)

    def open(self, job, constants=None):
        return self.engine.open_stage(self.source(job, constants), 1)

    def check_sizes(self, opened, *sizes: tuple[int, int]) -> None:
        """The opened step computes what the stage does for each (rows, frames), up to rounding."""
        generator = torch.Generator().manual_seed(0)
        for rows, frames in sizes:
            at = {"B": rows, "frames": frames, "text": 3}
            inputs = [
                torch.full((rows,), frames)
                if v.name == "lengths"
                else torch.randn([at[s] if isinstance(s, str) else s for s in v.shape], generator=generator)
                for v in self.step.inputs
            ]
            (got,) = opened(inputs)
            want = self.step.module(*inputs)[0]
            torch.testing.assert_close(got, want, atol=ROUNDING * want.abs().max().item(), rtol=0)


def check_threads(call: Callable[[int], torch.Tensor], times: int) -> None:
    """Eight threads at once, each with its own argument: every call gives what it gave alone, to the bit."""
    want = [call(number) for number in range(8)]
    got: dict[int, list[torch.Tensor]] = {number: [] for number in range(8)}

    def work(number: int) -> None:
        for _ in range(times):
            got[number].append(call(number))

    threads = [threading.Thread(target=work, args=(number,)) for number in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(got[n]) == times and all(torch.equal(g, want[n]) for g in got[n]) for n in got)
