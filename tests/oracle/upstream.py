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

# F5-TTS imports these beside its models; calling a model uses none of them.
UNUSED: Modules = {
    "accelerate": {},
    "accelerate.utils": {},
    "datasets": {},
    "ema_pytorch": {},
    "librosa": {},
    "librosa.filters": {},
    "torchaudio": {},
    "wandb": {},
}


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
    """For the time of an import, a stand-in for each of the modules that is not installed."""
    absent = [name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is None]
    sys.modules.update({name: StandIn(name, modules[name]) for name in absent})
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def load(name: str, stand_ins: Modules = UNUSED) -> Any:
    """Upstream's module `name`; without it the test fails, for a skipped oracle would look like agreement."""
    try:
        with standing_in(stand_ins), warnings.catch_warnings():
            # x_transformers compiles helpers with torch.jit.script when it is imported
            warnings.filterwarnings("ignore", ".*torch.jit.script.* is deprecated", DeprecationWarning)
            return importlib.import_module(name)
    except ImportError as error:
        pytest.fail(f"{name} cannot be imported ({error}): run these tests with `make oracle`", pytrace=False)
