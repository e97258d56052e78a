"""Imports upstream's own code, which `make oracle` installs without what it needs only to train and to serve."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

Modules = Mapping[str, Mapping[str, Any]]  # a module's name -> what of it must work

# What an upstream's modules import beside its models, by its package; calling a model uses none of it.
UNUSED = {
    "chatterbox": ("conformer",),
    "cosyvoice": ("conformer",),
    "echo_tts": ("torchaudio",),
    "f5_tts": (
        "accelerate",
        "accelerate.utils",
        "datasets",
        "ema_pytorch",
        "librosa",
        "librosa.filters",
        "torchaudio",
        "wandb",
    ),
}
# Packages whose __init__ imports the whole application: its modules are imported without running it.
BARE = ("chatterbox", "chatterbox.models", "chatterbox.models.s3gen", "echo_tts", "matcha.utils", "voxcpm")


class StandIn(types.ModuleType):
    """A module whose every name, but those it is given, is a class that cannot be made."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(name)
        vars(self).update(given)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{self.__name__}.{name} is a stand-in of the oracle tests")

        return type(name, (), {"__init__": refuse})


@contextmanager
def standing_in(modules: Modules) -> Iterator[None]:
    """For the time of an import, a stand-in for each of `modules` that is not installed."""
    absent = [name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is None]
    sys.modules.update({name: StandIn(name, modules[name]) for name in absent})
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def lay_bare(name: str) -> None:
    """An empty package `name` in which the modules of the installed one are found; nothing if none is installed."""
    spec = importlib.util.find_spec(name) if name not in sys.modules else None
    if spec is not None and spec.submodule_search_locations is not None:
        package = types.ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = package


def load(name: str, needed: Modules | None = None) -> Any:
    """Upstream's module `name`; without it the test fails, for a skipped oracle would look like agreement.

    needed: stand-ins beside UNUSED, of which something must work.
    """
    package = name.partition(".")[0]
    stand_ins = {**{unused: {} for unused in UNUSED.get(package, ())}, **(needed or {})}
    try:
        for bare in BARE:
            if f"{name}.".startswith(f"{bare}."):
                lay_bare(bare)
        with standing_in(stand_ins), warnings.catch_warnings():
            # x_transformers compiles helpers with torch.jit.script when it is imported
            warnings.filterwarnings("ignore", ".*torch.jit.script.* is deprecated", DeprecationWarning)
            return importlib.import_module(name)
    except ImportError as error:
        pytest.fail(f"{name} cannot be imported ({error}): run these tests with `make oracle`", pytrace=False)
