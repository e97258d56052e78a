"""From what a user names (model, configuration, weights) to a `Model` with its weights loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch

from voicehub_aot import adapters
from voicehub_aot.artifacts.manifest import Checkpoint
from voicehub_aot.compiler.cache import weights_digest
from voicehub_aot.errors import CheckpointMismatch, UnknownModel, UsageError
from voicehub_aot.spec.checkpoint import Reading, locate
from voicehub_aot.spec.golden import Case
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.region import Region
from voicehub_aot.spec.synthetic import synthetic_weights

log = logging.getLogger(__name__)

SYNTHETIC = "synthetic"
MAX_STEPS = 4096  # of a program; no schedule of a released model has more


@dataclass(frozen=True)
class Model:
    """What is to be built: a region with its weights, and where they came from.

    released_steps: of the loop that it was released with; None = not known. behaviour_options: the loop's options that
    ask for another result.
    """

    name: str
    config_name: str
    config: Mapping[str, Any]
    region: Region
    checkpoint: Checkpoint
    released_steps: int | None = None
    behaviour_options: tuple[str, ...] = ()


def config_values(config: Any) -> dict[str, Any]:
    """An adapter's config dataclass as JSON values."""
    values = asdict(config) if is_dataclass(config) and not isinstance(config, type) else dict(config)
    return json.loads(json.dumps(values))  # type: ignore[no-any-return]


def resolve(
    model: str,
    config: str | None,
    weights: str,
    values: Mapping[str, Any] | None = None,
    weights_kind: str | None = None,
    tell: Callable[[str], None] = log.info,
) -> Model:
    """weights: "synthetic", a local path, or hf:owner/name[@revision][:file].

    config: a released name (default the adapter's, or what the checkpoint says), or a .json file of hyperparameters
    in upstream's names. The checkpoint's tensors decide over sizes; what they cannot tell is the configuration's.
    values: hyperparameters, already read, that the checkpoint must have to the letter. weights_kind: "ema" or "raw",
    where a file holds both. tell: is given a sentence for each thing that was decided while reading.

    Raises UnknownModel, UsageError or CheckpointMismatch.
    """
    reading = Reading(weights_kind)
    adapter = adapters.load(model)
    named = _named_config(adapter, config) if values is None else adapter.config_from(values)
    if weights == SYNTHETIC:
        if weights_kind is not None:
            raise UsageError(f"--weights-kind {weights_kind!r}: synthetic weights have no kind; leave it out")
        chosen = named if named is not None else adapter.CONFIGS[adapter.DEFAULT_CONFIG]
        released = adapters.optional(adapter, "RELEASED_DTYPE")
        drawn = synthetic_weights(adapter.checkpoint_shapes(chosen)) | adapter.formula_weights(chosen)
        state = {key: tensor.to(released) for key, tensor in drawn.items()}
        return _model(adapter, config or adapter.DEFAULT_CONFIG, chosen, state, SYNTHETIC)
    files = adapter.HUB_FILES.get(config or "", adapter.HUB_FILES[adapter.DEFAULT_CONFIG])
    path = locate(weights, files)
    chosen, state = adapter.read_checkpoint(path, config if config in adapter.CONFIGS else named, reading)
    if values is not None:
        chosen = named
    elif named is not None:
        _compare(str(path), config, named, chosen, reading)
    for note in reading.notes:
        tell(note)
    name = config or _config_name(adapter, chosen)
    return _model(adapter, name, chosen, state, weights, tuple(reading.notes))


def _compare(where: str, name: str | None, named: Any, found: Any, reading: Reading) -> None:
    """Notes the sizes that the checkpoint has otherwise than its configuration. CheckpointMismatch for other flags."""
    said, holds = config_values(named), config_values(found)
    other = {k: holds.get(k) for k, v in said.items() if v is not None and holds.get(k) != v}
    if flags := [k for k, v in other.items() if isinstance(v, bool | str | None)]:
        texts = ", ".join(f"{k} is {other[k]!r}, wanted {said[k]!r}" for k in flags)
        raise CheckpointMismatch(
            f"{where}: its tensors are not those of --config {name}: {texts}; choose another --config"
        )
    if other:
        texts = ", ".join(f"{k}={v!r} ({name}: {said[k]!r})" for k, v in other.items())
        reading.note(f"took sizes from the checkpoint's tensors: {texts}")


def program(model: Model, steps: int, *, name: str | None = None, **options: Any) -> Program:
    """The model's sampling loop; hyperparameters that a loop needs too come from its configuration.

    name: how requests ask for it; default what the adapter calls it. Raises UsageError for too many steps,
    OptionUnsupported for an option or value that the model does not know.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise UsageError(
            f"steps={steps!r}: wanted 1 to {MAX_STEPS}; every evaluation has a row in the artifact's tables"
        )
    adapter = adapters.load(model.name)
    own = {name: value for name, value in model.config.items() if name in adapter.PROGRAM_OPTIONS}
    made = adapter.program(steps, **{**own, **options})
    released = {**adapter.PROGRAM_OPTIONS, **own}
    changed = {key: value for key, value in options.items() if value != released[key]}
    return made.model_copy(update={"name": name or made.name, "options": changed})


def default_steps(model: Model) -> tuple[int, ...]:
    """Step counts that are built when none are named."""
    return _steps(adapters.load(model.name), model.config_name)


def _steps(adapter: adapters.Adapter, config_name: str) -> tuple[int, ...]:
    steps: Mapping[str, tuple[int, ...]] = adapters.optional(adapter, "CONFIG_STEPS")
    return steps.get(config_name, adapter.DEFAULT_STEPS)


def from_case(case: Case) -> Model:
    """The model a recorded case was run with."""
    adapter = adapters.load(case.model)
    config = adapters.case_config(case)
    state = adapter.read_checkpoint(case.onnx, None)[1] if case.weights == "onnx" else case.checkpoint()
    return _model(adapter, case.name, config, state, case.name)


def _named_config(adapter: adapters.Adapter, config: str | None) -> Any:
    if config is None:
        return None
    if config in adapter.CONFIGS:
        return adapter.CONFIGS[config]
    if config.endswith(".json"):
        try:
            values = json.loads(Path(config).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"--config {config!r}: unreadable ({error}); wanted a JSON object") from error
        if not isinstance(values, dict):
            raise UsageError(f"--config {config!r}: holds a {type(values).__name__}, wanted a JSON object")
        return adapter.config_from(values)
    raise UnknownModel(
        f"{adapter.NAME}: config {config!r} is not known; known are {', '.join(adapter.CONFIGS)}, or give a .json file"
    )


def _config_name(adapter: adapters.Adapter, config: Any) -> str:
    return next((name for name, known in adapter.CONFIGS.items() if known == config), "custom")


def _model(
    adapter: adapters.Adapter,
    config_name: str,
    config: Any,
    state: Mapping[str, torch.Tensor],
    source: str,
    notes: tuple[str, ...] = (),
) -> Model:
    return Model(
        name=adapter.NAME,
        config_name=config_name,
        config=config_values(config),
        region=adapter.region(config, state),
        checkpoint=Checkpoint(source=source, digest=weights_digest(state), notes=notes),
        released_steps=_steps(adapter, config_name)[0],
        behaviour_options=adapters.optional(adapter, "BEHAVIOUR_OPTIONS"),
    )
