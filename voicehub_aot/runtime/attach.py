"""Puts a built denoiser into upstream's own object, in the place of its network, and takes it out again."""

from __future__ import annotations

import inspect
from typing import Any

from voicehub_aot.errors import InputMismatch, UsageError
from voicehub_aot.runtime.denoiser import Denoiser
from voicehub_aot.spec.region import Call


class Attached:
    """The denoiser stands at `place` of `owner` until `undo`, or until the end of a `with` block.

    place: the attribute that holds upstream's network, dotted where it lies deeper ("decoder.estimator"). original:
    what stood there; it is kept, so that `undo` can put it back. Attachments at one place are undone in reverse order.

    Raises InputMismatch if nothing is at the place, or something that is not called as this model's network is.
    """

    def __init__(self, owner: Any, place: str, denoiser: Denoiser) -> None:
        holder, self._name = owner, place
        where = type(owner).__name__
        while "." in self._name:
            first, self._name = self._name.split(".", 1)
            holder, where = _attribute(holder, first, where), f"{where}.{first}"
        self.original = _attribute(holder, self._name, where)
        self.denoiser, self._holder, self._where = denoiser, holder, f"{where}.{self._name}"
        _check_call(self.original, denoiser.runtime.spec.call, self._where)
        setattr(holder, self._name, denoiser)

    def undo(self) -> None:
        """Puts the original back. Calling it again does nothing.

        Raises UsageError if something else has been put there meanwhile.
        """
        current = getattr(self._holder, self._name)
        if current is self.original:
            return
        if current is not self.denoiser:
            raise UsageError(
                f"{self._where} holds a {type(current).__name__} that was put there after this attachment; take that "
                "out first"
            )
        setattr(self._holder, self._name, self.original)

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def _attribute(holder: Any, name: str, where: str) -> Any:
    if not hasattr(holder, name):
        found = sorted(n for n, value in _members(holder).items() if callable(value) and not n.startswith("_"))
        raise InputMismatch(
            f"attach: {where} has no {name!r}; its callable attributes are {', '.join(found) or 'none'}"
        )
    return getattr(holder, name)


def _members(holder: Any) -> dict[str, Any]:
    """An object's own attributes; of an nn.Module, its submodules too."""
    return {**getattr(holder, "__dict__", {}), **getattr(holder, "_modules", {})}


def _check_call(original: Any, call: Call, where: str) -> None:
    """Raises InputMismatch if the original cannot be called with what upstream's network of this model takes."""
    if isinstance(original, Denoiser):
        return
    try:
        parameters = inspect.signature(getattr(original, "forward", original)).parameters.values()
    except (TypeError, ValueError) as error:
        raise InputMismatch(f"attach: {where} is a {type(original).__name__}, which cannot be called") from error
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return  # its signature does not tell
    known, needed = {p.name for p in parameters}, {p.name for p in parameters if p.default is p.empty}
    missing = {p.name for p in call.parameters if p.required} - known
    unknown = needed - {p.name for p in call.parameters}
    if missing or unknown:
        raise InputMismatch(
            f"attach: {where} is a {type(original).__name__} that takes {sorted(known)}, and this artifact stands in "
            f"for a network that takes {[p.name for p in call.parameters]}; name the place of that network"
        )
