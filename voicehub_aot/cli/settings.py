"""A build's options: from flags and a TOML file, flags winning, to `compiler.options.RequestedOptions`."""

from __future__ import annotations

import json
import logging
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from voicehub_aot import adapters, engines
from voicehub_aot.adapters import Adapter
from voicehub_aot.compiler import models
from voicehub_aot.compiler.export import MAX_ROWS
from voicehub_aot.compiler.jobs import MAX_EVALUATIONS
from voicehub_aot.compiler.models import Model
from voicehub_aot.compiler.options import RequestedOptions
from voicehub_aot.errors import EngineUnavailable, MissingDependency, OptionUnsupported, UsageError
from voicehub_aot.spec import bucket
from voicehub_aot.spec.program import FILE_NAME, Program
from voicehub_aot.spec.target import default_target, parse_target, usable_threads

log = logging.getLogger(__name__)

NULL = "null"  # TOML has no null; --option NAME=null gives it
AUTO = "auto"  # every engine is a candidate, the fastest in each bucket is kept


class ProgramSettings(BaseModel):
    """One sampling loop with a name of its own: a table of [[program]] in the TOML file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str = Field(pattern=FILE_NAME)
    steps: int = Field(strict=True, ge=1)
    options: dict[str, Any] = {}

    @field_validator("name")
    @classmethod
    def _no_number(cls, name: str) -> str:
        if name.isdecimal():
            raise ValueError("a name of digits alone would be taken for a step count")
        return name

    @field_validator("options")
    @classmethod
    def _null(cls, options: dict[str, Any]) -> dict[str, Any]:
        return without_null(options)


def without_null(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if value == NULL else value for name, value in options.items()}


class BuildSettings(BaseModel):
    """Keys of the TOML file, named like the flags with underscores. None = the default."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    config: str | None = None
    checkpoint: str | None = None
    weights_kind: str | None = None
    buckets: list[str] | str | None = None
    steps: str | None = None
    options: dict[str, bool | int | float | str | None] = {}
    program: list[ProgramSettings] = []
    engine: str | None = None
    engine_budget: float | None = None
    min_speedup: float | None = None
    weights_mode: str | None = None
    shapes: str | None = None
    target: str | None = None
    jobs: int | None = None

    @field_validator("options")
    @classmethod
    def _null(cls, options: dict[str, Any]) -> dict[str, Any]:
        return without_null(options)

    @classmethod
    def merge(cls, file: Path | None, flags: Mapping[str, Any]) -> BuildSettings:
        """Raises UsageError for an unreadable file, an unknown key or a value of the wrong kind."""
        values: dict[str, Any] = {}
        if file is not None:
            try:
                values = tomllib.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise UsageError(f"--from {str(file)!r}: unreadable ({error}); wanted a TOML file") from error
        values.update({name: value for name, value in flags.items() if value is not None})
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise UsageError(f"options: {problems}; known are {', '.join(cls.model_fields)}") from error

    def checkpoint_of(self, adapter: Adapter) -> str:
        """Where the weights come from: as asked for, else the hub repository of the configuration, if it has one."""
        ids = adapters.optional(adapter, "HUB_IDS")
        if self.checkpoint is None and (self.config or adapter.DEFAULT_CONFIG) not in ids:
            raise UsageError(
                f"build {adapter.NAME}: {self.config!r} has no released checkpoint; give --checkpoint PATH, "
                "--checkpoint hf:owner/name, or --weights synthetic for a trial"
            )
        return self.checkpoint or f"hf:{ids[self.config or adapter.DEFAULT_CONFIG]}"


def as_toml(model: Model, settings: BuildSettings, options: RequestedOptions) -> str:
    """The options as they were resolved, ready for `build --from`."""
    resolved = {
        "config": settings.config or model.config_name,
        "checkpoint": settings.checkpoint,
        "weights_kind": settings.weights_kind,
        "buckets": [f"{axis}={','.join(map(str, sizes))}" for axis, sizes in options.buckets.axes.items()],
        "steps": ",".join(str(n) for n in _step_counts(settings, model)) or None,
        "engine": AUTO if options.auto else ",".join(options.engines),
        "engine_budget": options.engine_budget if options.engine_budget < math.inf else None,
        "min_speedup": options.min_speedup,
        "weights_mode": options.weights_mode if options.weights_mode != "auto" else None,
        "shapes": options.shapes,
        "target": options.target.name,
        "jobs": options.jobs,
    }
    document: dict[str, Any] = {name: value for name, value in resolved.items() if value is not None}
    if settings.options:
        document["options"] = _with_null(settings.options)
    if settings.program:
        document["program"] = [
            {"name": p.name, "steps": p.steps, **({"options": _with_null(p.options)} if p.options else {})}
            for p in settings.program
        ]
    return f"# voicehub-aot build {model.name} --from config.toml\n{tomli_w.dumps(document)}"


def _with_null(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: NULL if value is None else value for name, value in options.items()}


def parse_programs(texts: Sequence[str] | None) -> list[dict[str, Any]] | None:
    """--program NAME:steps=N,OPTION=VALUE,…, repeated."""
    if not texts:
        return None
    parsed = []
    for text in texts:
        name, colon, rest = text.partition(":")
        given = parse_options(rest.split(","), f"--program {text!r}") if colon and rest else {}
        steps = given.pop("steps", None)
        if not name or steps is None:
            raise UsageError(f"--program {text!r}: wanted NAME:steps=N,OPTION=VALUE,…")
        parsed.append({"name": name, "steps": steps, "options": given})
    return parsed


def parse_options(texts: Sequence[str], where: str | None = None) -> dict[str, Any]:
    """NAME=VALUE each, of --option or of `where`: values are JSON where they can be (true, 0.5, null), else text."""
    parsed: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or name in parsed:
            raise UsageError(f"{where or f'--option {text!r}'}: wanted NAME=VALUE, each name once")
        try:
            parsed[name] = json.loads(value)
        except ValueError:
            parsed[name] = value
    return parsed


def options(
    model: Model,
    settings: BuildSettings,
    histogram: Path | None,
    max_buckets: int,
    multiple_of: int,
    parity: bool,
    replace: bool,
) -> RequestedOptions:
    """Checked options for this model. Raises UsageError, OptionUnsupported or NoBucketFits."""
    adapter = adapters.load(model.name)
    spec = model.region.spec
    lengths = bucket.read_histogram(histogram) if histogram else None
    if lengths is not None:
        if settings.buckets:
            raise UsageError("give either --buckets or --histogram")
        if spec.main is None:
            raise UsageError(
                f"--histogram: rows of {model.name} have no length; promise numbers of rows: --buckets 1,2"
            )
        sizes = bucket.choose_buckets(lengths, max_buckets, multiple_of, spec.main.max)
        promised = bucket.Buckets(axes={spec.main.name: sizes})
    elif settings.buckets:
        texts = [settings.buckets] if isinstance(settings.buckets, str) else settings.buckets
        axes = [*(d.name for d in spec.dims), bucket.BATCH_AXIS]
        promised = bucket.parse_buckets(texts, spec.main_dim or bucket.BATCH_AXIS, axes)
    else:
        limits = {bucket.BATCH_AXIS: MAX_ROWS, **{d.name: d.max for d in spec.dims}}
        within = {a: tuple(s for s in sizes if s <= limits[a]) for a, sizes in adapter.DEFAULT_BUCKETS.items()}
        promised = bucket.Buckets(axes={a: sizes for a, sizes in within.items() if sizes})
    bucket.check_buckets(promised, spec)
    programs = _programs(settings, model)
    longest = max(programs, key=lambda p: len(p.times))
    if len(longest.times) > MAX_EVALUATIONS:
        raise UsageError(f"--steps: {longest.name} has {len(longest.times)} evaluations, at most {MAX_EVALUATIONS}")
    names, auto = _engines(settings.engine), settings.engine == AUTO
    if auto and not parity:
        raise UsageError("--no-parity with --engine auto: auto keeps what passes parity; name an engine instead")
    _check_numbers(settings, auto, parity)
    packs = any(not engines.get(name).reads_weight_file("packed") for name in names)
    mode = settings.weights_mode or ("auto" if packs else "shared")
    per_bucket = mode == "shared" and any(engines.get(name).STATIC for name in names)
    shapes = settings.shapes or ("static" if per_bucket else "dynamic")
    if mode not in ("packed", "shared", "auto") or shapes not in ("dynamic", "static"):
        raise OptionUnsupported(
            f"--weights-mode {mode!r} --shapes {shapes!r}: choose packed or shared, dynamic or static"
        )
    if mode == "packed" and not packs:
        raise OptionUnsupported(f"--weights-mode packed: {', '.join(names)} always reads the weight file; leave it out")
    if mode != "shared" and shapes == "static":
        raise OptionUnsupported(
            "--shapes static needs --weights-mode shared: packed engines each hold all weights, and one dynamic "
            "engine is as fast on CPU"
        )
    return RequestedOptions(
        buckets=promised,
        programs=programs,
        target=parse_target(settings.target or default_target()),
        weights_mode=mode,  # type: ignore[arg-type]  # checked above
        shapes="dynamic" if shapes == "dynamic" else "static",
        engines=names,
        auto=auto,
        engine_budget=math.inf if settings.engine_budget is None else settings.engine_budget,
        min_speedup=settings.min_speedup,
        jobs=settings.jobs or max(1, usable_threads() // 2),
        parity=parity,
        replace=replace,
        histogram=lengths,
    )


def _check_numbers(settings: BuildSettings, auto: bool, parity: bool) -> None:
    if settings.engine_budget is not None and not (auto and settings.engine_budget > 0):
        raise UsageError(f"--engine-budget {settings.engine_budget!r}: wanted seconds, with --engine auto")
    if settings.min_speedup is not None and not (parity and 0 < settings.min_speedup < math.inf):
        raise UsageError(f"--min-speedup {settings.min_speedup!r}: wanted a positive number, e.g. 1.1, with parity")
    if settings.jobs is not None and settings.jobs < 1:
        raise UsageError(f"--jobs {settings.jobs}: wanted 1 or more")


def _engines(text: str | None) -> tuple[str, ...]:
    """The engines named. Raises EngineUnavailable or MissingDependency for one that cannot be built here."""
    if text == AUTO:
        return _available()
    names = tuple(part.strip() for part in (text or engines.ENGINES[0]).split(","))
    if len(set(names)) != len(names) or AUTO in names:
        raise UsageError(f"--engine {text!r}: name each engine once, or {AUTO} alone")
    for name in names:
        engines.get(name).check()
    return names


def _available() -> tuple[str, ...]:
    """Every engine that this machine can build; the log says why another is not a candidate."""
    names = []
    for name in engines.ENGINES:
        try:
            engines.get(name).check()
            names.append(name)
        except (EngineUnavailable, MissingDependency) as error:
            log.warning("engine %s is not a candidate: %s", name, error)
    return tuple(names)


def _programs(settings: BuildSettings, model: Model) -> tuple[Program, ...]:
    """Those of --steps, then those with names of their own."""
    programs = [models.program(model, n, **dict[str, Any](settings.options)) for n in _step_counts(settings, model)]
    programs += [models.program(model, p.steps, name=p.name, **p.options) for p in settings.program]
    names = [p.name for p in programs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"--program: {', '.join(twice)} is given more than once; give each program a name of its own")
    return tuple(programs)


def _step_counts(settings: BuildSettings, model: Model) -> tuple[int, ...]:
    """Of the programs without names of their own: as asked for, or the model's, unless others are named."""
    text = settings.steps
    if text is None:
        return () if settings.program else models.default_steps(model)
    parts = [p.strip() for p in str(text).split(",")]
    if not all(p.isdecimal() and int(p) >= 1 for p in parts) or len(set(parts)) != len(parts):
        raise UsageError(f"--steps {text!r}: wanted different step counts of at least 1, e.g. 32,16,7")
    return tuple(int(p) for p in parts)
