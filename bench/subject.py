"""What is measured: a model with synthetic weights, its artifact, a random request, and the shared arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from voicehub_aot.artifacts.manifest import Manifest
    from voicehub_aot.compiler.models import Model
    from voicehub_aot.runtime.runtime import Runtime
    from voicehub_aot.spec.program import Program
    from voicehub_aot.spec.region import RegionSpec

DEFAULT_LENGTHS = {"f5tts": (128, 512), "supertonic": (64, 128, 250)}
DEFAULT_STEPS = {"f5tts": 7, "supertonic": 8}
TEXT_PER_FRAME = {"f5tts": 0.16, "supertonic": 1.0}  # 15 characters a second over 93.75 and 14.36 frames a second


def parser(doc: str | None, rounds: int) -> argparse.ArgumentParser:
    """The arguments that every benchmark of a model has."""
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--model", default="supertonic", choices=sorted(DEFAULT_LENGTHS))
    result.add_argument("--config", help="released size, or tiny (default: the adapter's)")
    result.add_argument("--threads", type=int, help="compute threads (default: what this process may use)")
    result.add_argument("--rounds", type=int, default=rounds, help=f"timed rounds (default {rounds})")
    result.add_argument("--pause-ms", type=float, default=60.0, help="before each timed call (default 60)")
    result.add_argument("--json", type=Path, metavar="FILE", help="append one JSON object per row")
    result.add_argument("--gate", action="store_true", help="exit with 6 if a target is missed")
    return result


def sweep_parser(
    doc: str | None, rounds: int, lengths: Mapping[str, tuple[int, ...]] = DEFAULT_LENGTHS, holds: str = "what is timed"
) -> argparse.ArgumentParser:
    """Of a benchmark of an artifact at several lengths. holds: what an artifact that is given must."""
    result = parser(doc, rounds)
    defaults = "; ".join(f"{','.join(map(str, frames))} for {model}" for model, frames in lengths.items())
    result.add_argument("--lengths", type=numbers, help=f"frames, e.g. 64,128 (default: {defaults})")
    result.add_argument("--artifact", type=Path, help=f"holds {holds} (default: one is built)")
    return result


def numbers(text: str) -> tuple[int, ...]:
    """argparse type: "64,128"."""
    return tuple(int(part) for part in text.split(","))


def use_threads(wanted: int | None) -> int:
    """For torch, hence for every candidate; returns the count."""
    from voicehub_aot.spec.target import usable_threads

    torch.set_num_threads(wanted or usable_threads())
    return torch.get_num_threads()


@dataclass(frozen=True)
class Subject:
    model: Model
    adapter: Any
    programs: tuple[Program, ...]

    @property
    def spec(self) -> RegionSpec:
        return self.model.region.spec

    @property
    def guidance(self) -> float:
        return self.spec.guidance.others[0].scale if self.spec.guidance else 0.0

    @property
    def rows(self) -> int:
        """Of one packed evaluation of one request."""
        return len(self.spec.guidance.branches) if self.spec.guidance else 1

    @property
    def title(self) -> str:
        return f"{self.model.name} {self.model.config_name}, synthetic weights"

    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self.model.region.module.state_dict())

    def plain(self) -> Any:
        """Upstream's step in plain torch, on the same weight tensors."""
        import reference

        return reference.plain(self.model.name, self.model.config, self.guidance, self.weights)

    def upstream(self) -> tuple[str, Any]:
        """The eager candidate and what it is: upstream's own module where its package is installed, else `plain`."""
        import reference

        own = reference.own(self.model.name, self.model.config, self.guidance, self.weights)
        return ("upstream's own module", own) if own else ("upstream's computation in plain torch", self.plain())

    def program(self, steps: int) -> Program:
        """A built one."""
        return next(p for p in self.programs if p.steps == steps)


def resolve(name: str, config: str | None, steps: Sequence[int] = ()) -> Subject:
    """Synthetic weights of a released size. steps: step counts to build beside the adapter's own."""
    import reference

    from voicehub_aot import adapters
    from voicehub_aot.compiler import models
    from voicehub_aot.errors import UsageError

    adapter = adapters.load(name)
    model = models.resolve(name, config, models.SYNTHETIC)
    if not reference.supports(model.name, model.config):
        raise UsageError(f"{model.name} {model.config_name}: there is no reference to measure against, choose another")
    counts = tuple(dict.fromkeys((*steps, *models.default_steps(model))))
    return Subject(model, adapter, tuple(models.program(model, count) for count in counts))


def draw(spec: RegionSpec, frames: int, characters: int, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """A random request of one row and full length: its noise, and its conditioning by name."""
    generator = torch.Generator().manual_seed(seed)
    from voicehub_aot.spec.region import example_mask

    sizes = {"B": 1, **{d.name: min(d.max, characters) for d in spec.dims}}
    if spec.main is not None:
        sizes[spec.main.name] = frames
    drawn = {}
    for item in (spec.state, *spec.conditioning):
        shape = [sizes[s] if isinstance(s, str) else s for s in item.shape]
        if item.dtype == "bool":
            drawn[item.name] = example_mask(shape, generator)
        elif item.dtype == "int64":
            drawn[item.name] = torch.randint(item.low, item.high, shape, generator=generator)
        else:
            drawn[item.name] = torch.randn(shape, generator=generator)
    return drawn.pop(spec.state.name), drawn


def characters(model: str, frames: int) -> int:
    return max(1, round(TEXT_PER_FRAME[model] * frames))


def build_artifact(
    subject: Subject,
    lengths: Sequence[int],
    mode: Literal["packed", "shared"] = "packed",
    *,
    engines: tuple[str, ...] = ("aoti",),
    auto: bool = False,
    output: Path | None = None,
    cache: Path | None = None,
) -> tuple[Path, Manifest]:
    """Build without parity: one dynamic engine when packed, one engine per length when shared.

    auto: choose an engine for each length by measurement.
    output: default a folder beside the engine cache, where finished engines are found again.
    """
    from timing import note

    from voicehub_aot.cli.console import ConsoleProgress
    from voicehub_aot.compiler import build
    from voicehub_aot.compiler.cache import cache_dir
    from voicehub_aot.compiler.options import Options
    from voicehub_aot.spec.bucket import Buckets
    from voicehub_aot.spec.target import default_target, parse_target

    kind = [mode, *(engines if engines != ("aoti",) else ()), *(["auto"] if auto else [])]
    name = "-".join([subject.model.name, subject.model.config_name, *kind])
    output = output or cache_dir() / "bench" / f"{name}.aot"
    output.parent.mkdir(parents=True, exist_ok=True)
    note(f"building {output} ({', '.join(kind)}, lengths {','.join(map(str, lengths))}, parity off)")
    axes = {**subject.adapter.DEFAULT_BUCKETS, subject.spec.main_dim: tuple(sorted(set(lengths)))}
    options = Options(
        buckets=Buckets(axes=axes),
        programs=subject.programs,
        target=parse_target(default_target()),
        weights_mode=mode,
        shapes="dynamic" if mode == "packed" else "static",
        engines=engines,
        parity=False,
        cache=cache,
        replace=True,
        auto=auto,
    )
    progress = ConsoleProgress()
    try:
        return output, build.build(subject.model, options, output, progress)
    finally:
        progress.close()


def open_artifact(path: Path, threads: int | None = None, engine: str | None = None) -> Runtime:
    """Lengths beyond the promised ones run too, where the engine can. engine: this one, not the artifact's choice."""
    import voicehub_aot
    from voicehub_aot.artifacts import store

    dynamic = store.read_manifest(path).shapes == "dynamic"
    return voicehub_aot.load(path, threads=threads, engine=engine, overflow="run" if dynamic else "error")


def check_artifact(subject: Subject, runtime: Runtime) -> None:
    """An artifact given by path must hold the same model and weights."""
    from voicehub_aot.errors import UsageError

    manifest = runtime.manifest
    if manifest is None or manifest.checkpoint.digest != subject.model.checkpoint.digest:
        built = f"{manifest.model} {manifest.config_name}" if manifest else "unknown"
        raise UsageError(f"the artifact holds {built} with other weights than {subject.title}; build it anew")


def difference(got: Tensor, want: Tensor, start: Tensor) -> float:
    """Largest difference of two states, relative to the largest way either went from `start`."""
    return float((got - want).abs().max() / (want - start).abs().max())
