"""Scorers: measures of speech that need a package. A new one is one file here with the names of `Scorer`, and a test.

Files whose names begin with an underscore are not scorers.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol, cast

from voicehub_aot.errors import MissingDependency, OptionUnsupported
from voicehub_aot.proof.quality.clip import Clip
from voicehub_aot.proof.quality.measures import Measure, Score
from voicehub_aot.proof.quality.utterances import UtteranceSet


@dataclass(frozen=True)
class Scored:
    """values: by measure. heard: what a recogniser heard, "" for other scorers."""

    values: dict[str, Score] = field(default_factory=dict)
    heard: str = ""


# (clip, reference) -> its scores. Measures of kind "clip" do not look at the reference.
Hearing = Callable[[Clip, Clip], Scored]


class Scorer(Protocol):
    """A file of this folder.

    NAME: how --scorer calls it. EXTRA: of this package, that installs what it needs. ON_REQUEST: why it is opened only
    where it is asked for by name; "" = it is always wanted. MEASURES: what it gives, all of one kind.
    """

    NAME: str
    EXTRA: str
    ON_REQUEST: str
    MEASURES: tuple[Measure, ...]

    def open_scorer(self, utterances: UtteranceSet) -> Hearing:
        """Raises MissingDependency, or OptionUnsupported if it cannot judge these utterances."""


@dataclass(frozen=True)
class OpenScorer:
    """A scorer that is ready: its models are loaded."""

    name: str
    measures: tuple[Measure, ...]
    hear: Hearing


def names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def get(name: str) -> Scorer:
    if name not in names():
        raise OptionUnsupported(f"--scorer {name!r} is not known; known are {', '.join(names())}")
    return cast(Scorer, import_module(f"{__name__}.{name}"))


def open_scorers(
    asked: Sequence[str] | None, utterances: UtteranceSet
) -> tuple[tuple[OpenScorer, ...], dict[str, str]]:
    """The scorers asked for; None = those that are installed. And by name, why another is left out.

    Raises MissingDependency or OptionUnsupported for one that was asked for.
    """
    opened: list[OpenScorer] = []
    left_out: dict[str, str] = {}
    for name in names() if asked is None else dict.fromkeys(asked):
        scorer = get(name)
        if asked is None and scorer.ON_REQUEST:
            left_out[name] = scorer.ON_REQUEST
            continue
        try:
            opened.append(OpenScorer(name, scorer.MEASURES, scorer.open_scorer(utterances)))
        except (MissingDependency, OptionUnsupported) as error:
            if asked is not None:
                raise
            left_out[name] = str(error)
    for name in names():
        if asked is not None and name not in asked:
            left_out[name] = "was not asked for"
    return tuple(opened), left_out


def missing(scorer: str, extra: str, error: Exception) -> MissingDependency:
    """The error of a scorer whose package cannot be imported."""
    return MissingDependency(f"the scorer {scorer} lacks a package ({error}); pip install 'voicehub-aot[{extra}]'")
