"""From what a user names (model, configuration, weights) to a `Model` with its weights loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError

from voicehub_aot import adapters
from voicehub_aot.artifacts.manifest import Checkpoint
from voicehub_aot.assembly import Model
from voicehub_aot.build import config_values
from voicehub_aot.checkpoint import locate
from voicehub_aot.engine_cache import weights_digest
from voicehub_aot.errors import AotError, UnknownModel, UsageError
from voicehub_aot.golden import Case
from voicehub_aot.program import Program
from voicehub_aot.synthetic import synthetic_weights

SYNTHETIC = "synthetic"
MAX_STEPS = 4096  # of a program; no schedule of a released model has more
LARGEST_SIZE = 2**22  # of a hyperparameter: beyond any vocabulary, width or position table


def resolve(model: str, config: str | None, weights: str, values: Mapping[str, Any] | None = None) -> Model:
    """weights: "synthetic", a local path, or hf:owner/name[@revision][:file].

    config: a released name (default the adapter's, or what the checkpoint says), or a .json file of hyperparameters
    in upstream's names. values: such hyperparameters, already read. A checkpoint's tensors decide on sizes (a
    fine-tune may have another vocabulary or depth) unless hyperparameters are given, which it then has to match.
    Raises UnknownModel, UsageError or CheckpointMismatch.
    """
    adapter = adapters.load(model)
    named = _named_config(adapter, config) if values is None else _config_from(adapter, values, "its configuration")
    if weights == SYNTHETIC:
        chosen = named if named is not None else adapter.CONFIGS[adapter.DEFAULT_CONFIG]
        released = getattr(adapter, "RELEASED_DTYPE", torch.float32)
        drawn = synthetic_weights(adapter.checkpoint_shapes(chosen)) | adapter.formula_weights(chosen)
        state = {key: tensor.to(released) for key, tensor in drawn.items()}
        return _model(adapter, config or adapter.DEFAULT_CONFIG, chosen, state, SYNTHETIC)
    files = adapter.HUB_FILES.get(config or "", adapter.HUB_FILES[adapter.DEFAULT_CONFIG])
    path = locate(weights, files)
    by_name = values is None and config in adapter.CONFIGS
    found, state = adapter.read_checkpoint(path, config if config in adapter.CONFIGS else named)
    chosen = found if named is None or by_name else named
    return _model(adapter, config or _config_name(adapter, chosen), chosen, state, weights)


def program(model: Model, steps: int, **options: Any) -> Program:
    """The model's sampling loop; hyperparameters that a loop needs too come from its configuration.

    Raises UsageError for too many steps, OptionUnsupported for an option or value that the model does not know.
    """
    if not 1 <= steps <= MAX_STEPS:
        raise UsageError(
            f"steps={steps!r}: wanted 1 to {MAX_STEPS}; every evaluation has a row in the artifact's tables"
        )
    adapter = adapters.load(model.name)
    own = {name: value for name, value in model.config.items() if name in adapter.PROGRAM_OPTIONS}
    return adapter.program(steps, **{**own, **options})


def default_steps(model: Model) -> tuple[int, ...]:
    """Step counts that are built when none are named."""
    adapter = adapters.load(model.name)
    steps: Mapping[str, tuple[int, ...]] = getattr(adapter, "CONFIG_STEPS", {})
    return steps.get(model.config_name, adapter.DEFAULT_STEPS)


def from_case(case: Case) -> Model:
    """The model a recorded case was run with."""
    adapter = adapters.load(case.model)
    config = getattr(adapter, "case_config", lambda c: adapter.config_from(c.config))(case)
    state = adapter.read_checkpoint(case.onnx, None)[1] if case.weights == "onnx" else case.checkpoint()
    return _model(adapter, case.name, config, state, case.name)


def _named_config(adapter: adapters.Adapter, config: str | None) -> Any:
    if config is None:
        return None
    if config in adapter.CONFIGS:
        return adapter.CONFIGS[config]
    if config.endswith(".json"):
        try:
            values = json.loads(Path(config).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"--config {config!r}: unreadable ({error}); wanted a JSON object") from error
        return _config_from(adapter, values, f"--config {config!r}")
    raise UnknownModel(
        f"{adapter.NAME}: config {config!r} is not known; known are {', '.join(adapter.CONFIGS)}, or give a .json file"
    )


def _config_from(adapter: adapters.Adapter, values: Any, where: str) -> Any:
    """Hyperparameters that a user gave -> the adapter's config, every field of the declared kind and usable.

    Adapters check what only they know; this checks the rest for all of them. Raises UsageError.
    """
    if not isinstance(values, Mapping):
        raise UsageError(f"{where}: holds {values!r:.60}, wanted a JSON object of hyperparameters")
    try:
        config = adapter.config_from(values)
        _check_fields(config, where)
        adapter.checkpoint_shapes(config)
    except AotError:
        raise
    except Exception as error:  # whatever a null, a list or an impossible size meets first
        raise UsageError(
            f"{where}: no {adapter.NAME} can be made of these hyperparameters ({type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}); compare them with a released configuration"
        ) from error
    return config


def _check_fields(config: Any, where: str) -> None:
    """UsageError for a field of a config dataclass whose value is not of its declared type."""
    if not is_dataclass(config) or isinstance(config, type):
        return
    hints = get_type_hints(type(config))
    for field in fields(config):
        value = getattr(config, field.name)
        try:
            TypeAdapter(hints[field.name]).validate_python(value, strict=True)
        except ValidationError as error:
            raise UsageError(f"{where}: {field.name} is {value!r:.60}; {error.errors()[0]['msg']}") from error
        if isinstance(value, int) and abs(value) > LARGEST_SIZE:
            raise UsageError(f"{where}: {field.name} is {value!r:.60}; sizes are at most {LARGEST_SIZE}")


def _config_name(adapter: adapters.Adapter, config: Any) -> str:
    return next((name for name, known in adapter.CONFIGS.items() if known == config), "custom")


def _model(
    adapter: adapters.Adapter, config_name: str, config: Any, state: Mapping[str, torch.Tensor], source: str
) -> Model:
    return Model(
        name=adapter.NAME,
        config_name=config_name,
        config=config_values(config),
        region=adapter.region(config, state),
        checkpoint=Checkpoint(source=source, digest=weights_digest(state)),
    )
