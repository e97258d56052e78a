"""Ahead-of-time compiler for text-to-speech denoisers.

runtime = voicehub_aot.load("supertonic.aot")
latent = runtime.sample(seed=0, lengths=[96], text_emb=…, style_ttl=…)

voicehub_aot.inventory()  # what each model supports, by name
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from voicehub_aot.adapters import inventory
    from voicehub_aot.errors import AotError
    from voicehub_aot.runtime.load import load
    from voicehub_aot.runtime.runtime import Runtime

__version__ = "0.1.0"
__all__ = ["AotError", "Runtime", "__version__", "inventory", "load"]


_HOMES = {"AotError": "errors", "Runtime": "runtime.runtime", "inventory": "adapters", "load": "runtime.load"}


def __getattr__(name: str) -> Any:
    """Imported when first used, so that `import voicehub_aot` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
