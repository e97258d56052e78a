"""One folder a model. Adding a folder here adds a model: the folders are listed, nothing is registered.

An adapter is a package with the names of the `Adapter` protocol below, in four files of one order:

    __init__     what users choose from and the model's traits; the region; the sampling loop
    net          the hyperparameters' dataclass, then the modules, smallest first
    checkpoint   released hyperparameters; keys and shapes of the network; how files are read
    cases        the names of `Cases`: how recorded reference cases are run

A folder or file whose name starts with an underscore holds what several models share. Adapters import `spec`, `kernels`
and each other, never an engine. Those outside this package are found through the entry-point group
`voicehub_aot.adapters`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from voicehub_aot.adapters._excluded import EXCLUDED
from voicehub_aot.errors import ContradictoryTraits, UnknownModel
from voicehub_aot.spec.checkpoint import Reading
from voicehub_aot.spec.golden import Case
from voicehub_aot.spec.program import Program
from voicehub_aot.spec.region import Region
from voicehub_aot.spec.speaker import SpeakerScaling
from voicehub_aot.spec.traits import Traits

ENTRY_POINTS = "voicehub_aot.adapters"


class Sampler(Protocol):
    """What `Cases.replay` drives; a `Runtime` is one. Shapes as the region declares them."""

    def evaluate(
        self,
        state: torch.Tensor,
        time: float | torch.Tensor,
        *,
        extra_times: Mapping[str, float | torch.Tensor] | None = None,
        packed: bool = False,
        flags: Mapping[str, bool] | None = None,
        guidance: float | Mapping[str, float] | None = None,
        **request: Any,
    ) -> torch.Tensor: ...

    def trajectory(
        self,
        *,
        noise: torch.Tensor,
        step_noise: torch.Tensor | None = None,
        program: str | None = None,
        guidance: float | Mapping[str, float] | None = None,
        start: int = 0,
        stop: int | None = None,
        **request: Any,
    ) -> Iterator[torch.Tensor]: ...

    def blocks(
        self,
        *,
        noise: torch.Tensor,
        sizes: Sequence[int] | None = None,
        request: Callable[[torch.Tensor, int], Mapping[str, Any]] | None = None,
        finished: torch.Tensor | None = None,
        speaker: SpeakerScaling | None = None,
        program: str | int | None = None,
        **conditioning: Any,
    ) -> Iterator[torch.Tensor]: ...

    def denoiser(self) -> torch.nn.Module: ...


class Adapter(Protocol):
    """NAME: as typed by users. CONFIGS: hyperparameters by released name, "tiny" among them (for tests and demos).

    DEFAULT_CONFIG: the config built when none is named. DEFAULT_BUCKETS: lengths by dimension.
    DEFAULT_STEPS: step counts built when none are given. PROGRAM_OPTIONS: what else `program` takes, with the released
    defaults; those that are hyperparameters too are taken from the config. HUB_FILES: file patterns of each config in
    its hub repository. TRAITS: what the model supports, whether or not it is built here.

    An adapter may leave out the names in OPTIONAL, which has their defaults. CONFIG_STEPS: step counts by config where
    they differ from DEFAULT_STEPS. RELEASED_DTYPE: dtype of the released checkpoints, which synthetic weights have too.
    HUB_IDS: the hub repository, owner/name, of each released config's checkpoint. BEHAVIOUR_OPTIONS: those of
    PROGRAM_OPTIONS that ask for another result (other guidance, other noise), not for another way to the same one.
    """

    NAME: str
    ALIASES: tuple[str, ...]
    CONFIGS: Mapping[str, Any]
    DEFAULT_CONFIG: str
    DEFAULT_BUCKETS: Mapping[str, tuple[int, ...]]
    DEFAULT_STEPS: tuple[int, ...]
    PROGRAM_OPTIONS: Mapping[str, Any]
    HUB_FILES: Mapping[str, tuple[str, ...]]
    TRAITS: Traits

    def config_from(self, values: Mapping[str, Any]) -> Any:
        """Hyperparameters in upstream's own names -> the adapter's config; unknown names are a UsageError."""

    def checkpoint_shapes(self, config: Any) -> dict[str, tuple[int, ...]]:
        """Every key of the released checkpoint and its shape."""

    def formula_weights(self, config: Any) -> dict[str, torch.Tensor]:
        """Checkpoint entries that are formulas (a rotary table) and not learned; synthetic weights keep them."""

    def read_checkpoint(
        self, path: Path, config: Any | None, reading: Reading | None = None
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """File or folder as released -> (config, weights under released keys).

        config: one of CONFIGS by name, or hyperparameters, for what the tensors cannot tell; None = find out.
        reading: which of a file's weights are wanted; the adapter passes it to `spec.checkpoint.read_weights`.
        """

    def region(self, config: Any, weights: Mapping[str, torch.Tensor]) -> Region:
        """The denoiser with these weights (released keys) loaded; CheckpointMismatch lists all that is wrong."""

    def program(self, steps: int, **options: Any) -> Program:
        """The model's sampling loop. OptionUnsupported for an option or a value that it does not know."""


OPTIONAL: Mapping[str, Any] = {
    "CONFIG_STEPS": {},
    "HUB_IDS": {},
    "BEHAVIOUR_OPTIONS": (),
    "RELEASED_DTYPE": torch.float32,
    "case_config": None,
}


class Cases(Protocol):
    """Runs recorded reference cases of one model. `case_config` is in OPTIONAL: `config_from` is its default."""

    def case_config(self, case: Case) -> Any:
        """The config of a case whose own config leaves sizes to its tensors."""

    def case_program(self, case: Case) -> Program:
        """The program that a sampler case ran; for a case of single evaluations, `probe` of their times."""

    def replay(self, case: Case, sampler: Sampler) -> dict[str, torch.Tensor]:
        """All outputs that cases of this kind (region or sampler) may record; `sampler` evaluates the region."""


@cache
def _modules() -> dict[str, str]:
    """Name -> module path, of the files in this folder and of the entry points."""
    found = {m.name: f"{__name__}.{m.name}" for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        found[point.name] = point.value
    return found


def names() -> list[str]:
    """Every model that can be built."""
    return sorted(_modules())


def load(name: str) -> Adapter:
    """The adapter called `name`, an alias of it, or UnknownModel with the names there are, and why one is not there."""
    key = name.strip().lower()
    if key not in _modules():
        for candidate in names():
            if key in importlib.import_module(_modules()[candidate]).ALIASES:
                key = candidate
                break
        else:
            known = f"known are {', '.join(names())}"
            if key in EXCLUDED:
                raise UnknownModel(f"model {name!r} cannot be built: {EXCLUDED[key]}; {known}")
            raise UnknownModel(f"model {name!r} is not known; {known}")
    adapter: Adapter = importlib.import_module(_modules()[key])
    return adapter


def optional(adapter: Adapter | Cases, name: str) -> Any:
    """What an adapter, or its cases, has under a name of OPTIONAL, or the default."""
    return getattr(adapter, name, OPTIONAL[name])


def cases(name: str) -> Cases:
    """The module that runs recorded reference cases of the adapter `name`. Production never imports it."""
    own: Cases = importlib.import_module(f"{_modules()[load(name).NAME]}.cases")
    return own


def case_config(case: Case) -> Any:
    """The config of a recorded case."""
    own = optional(cases(case.model), "case_config")
    return own(case) if own else load(case.model).config_from(case.config)


def inventory() -> dict[str, Traits]:
    """What each model supports, by name. Imports every adapter; ContradictoryTraits if one declares nothing."""
    declared = {name: vars(load(name)).get("TRAITS") for name in names()}
    silent = [f"{name} ({_modules()[name]})" for name, traits in declared.items() if not isinstance(traits, Traits)]
    if silent:
        raise ContradictoryTraits(f"{', '.join(silent)}: wanted TRAITS = Traits(...), of voicehub_aot.spec.traits")
    return {name: traits for name, traits in declared.items() if traits is not None}
