"""The utterances that speech is judged on: `cases.toml`, and the Python entry that makes requests and sound.

    entry = "voice.py"                      # a file beside cases.toml, or an installed module: "package.module"
    grammar = ["window", "garden"]          # optional: every word that occurs, for recognisers with a closed grammar
    seeds = [0, 1, 2]                       # optional: of the noise

    [[utterance]]
    text = "window garden"
    name = "first"                          # optional

The entry is the model's text front end and vocoder. It has three names at its top level:

    SAMPLE_RATE: int                                    samples a second
    request(text: str) -> dict[str, Any]                conditioning of one row and its lengths, as `Runtime.sample`
                                                        takes them, without noise, program and guidance
    vocode(latent: Tensor, request: dict) -> Tensor     the final state of that row -> float32 samples [N] in -1 to 1
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from voicehub_aot.artifacts.reading import read_bytes, reason
from voicehub_aot.errors import UsageError

LARGEST_SET = 4 * 2**20  # bytes of a cases.toml
LEAST_RATE, LARGEST_RATE = 4000, 384000  # samples a second
SEEDS = (0, 1, 2)
WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")  # noqa: RUF001  (texts hold the typographic apostrophe, too)


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation: what error rates compare."""
    return [word.lower() for word in WORD.findall(text)]


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Utterance(_Data):
    """text: what is spoken. name: how reports call it; default its position and first words."""

    text: str
    name: str = ""

    @field_validator("text")
    @classmethod
    def _has_words(cls, text: str) -> str:
        if not words(text):
            raise ValueError(f"text {text!r} has no word; wanted a sentence to speak")
        return text


class UtteranceSet(_Data):
    """grammar: the only words that occur, if that is known. seeds: of the noise, at least two for an A/A band."""

    entry: str = Field(min_length=1)
    grammar: tuple[str, ...] = ()
    seeds: tuple[Annotated[int, Field(strict=True, ge=0, lt=2**62)], ...] = SEEDS
    utterances: tuple[Utterance, ...] = Field(alias="utterance", min_length=1)

    @field_validator("grammar")
    @classmethod
    def _plain_words(cls, grammar: tuple[str, ...]) -> tuple[str, ...]:
        wrong = [word for word in grammar if words(word) != [word]]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not one word in lower case")
        return grammar

    @field_validator("seeds")
    @classmethod
    def _enough_seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        return check_seeds(seeds)

    @field_validator("utterances")
    @classmethod
    def _named(cls, utterances: tuple[Utterance, ...]) -> tuple[Utterance, ...]:
        width = len(str(len(utterances)))
        named = [u.name or f"{n:0{width}d} {' '.join(words(u.text)[:4])}" for n, u in enumerate(utterances, 1)]
        if len(set(named)) < len(named):
            twice = next(name for name in named if named.count(name) > 1)
            raise ValueError(f"two utterances are named {twice!r}")
        return tuple(Utterance(text=u.text, name=name) for u, name in zip(utterances, named, strict=True))

    @model_validator(mode="after")
    def _within_grammar(self) -> UtteranceSet:
        for utterance in self.utterances if self.grammar else ():
            outside = set(words(utterance.text)) - set(self.grammar)
            if outside:
                raise ValueError(f"{utterance.text!r} has {sorted(outside)[0]!r}, which the grammar lacks")
        return self


def check_seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Raises ValueError unless there are at least two, all different: one seed shows no band."""
    if len(seeds) < 2 or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds {list(seeds)!r}: wanted at least two different ones, for the A/A band")
    return seeds


def read_utterances(file: Path) -> UtteranceSet:
    """Raises UsageError naming the file and what is wrong in it."""
    try:
        document = tomllib.loads(read_bytes(file, LARGEST_SET).decode("utf-8"))
        return UtteranceSet.model_validate(document)
    except (OSError, ValueError, RecursionError) as error:  # TOML's and pydantic's errors are ValueErrors
        raise UsageError(
            f"{file}: no set of utterances ({reason(error)}); wanted entry, [[utterance]] with text, and optionally "
            "grammar and seeds"
        ) from error


@dataclass(frozen=True)
class Entry:
    """A front end and a vocoder, checked at every call. name: where they come from."""

    name: str
    sample_rate: int
    front_end: Callable[[str], Any]
    vocoder: Callable[[torch.Tensor, dict[str, Any]], Any]

    def request(self, text: str) -> dict[str, Any]:
        """Conditioning and lengths of one row. Raises UsageError if the entry fails or gives something else."""
        request = self._call("request", self.front_end, text)
        if not isinstance(request, dict) or not all(isinstance(name, str) for name in request):
            raise UsageError(f"{self.name}: request({text!r}) gave a {_kind(request)}, wanted a dict of names")
        reserved = sorted({"noise", "step_noise", "seed", "program", "guidance"} & set(request))
        if reserved:
            raise UsageError(f"{self.name}: request({text!r}) holds {reserved}, which the evaluation gives itself")
        return request

    def vocode(self, latent: torch.Tensor, request: dict[str, Any]) -> torch.Tensor:
        """latent: the final state of one row -> float32 [N] in -1 to 1. Raises UsageError likewise."""
        samples = self._call("vocode", self.vocoder, latent, dict(request))
        if not isinstance(samples, torch.Tensor) or samples.dtype != torch.float32 or samples.dim() != 1:
            raise UsageError(f"{self.name}: vocode gave {_kind(samples)}, wanted a tensor, float32 [samples]")
        if samples.numel() == 0:
            raise UsageError(f"{self.name}: vocode gave no samples")
        return samples.detach()

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{self.name}: {name} failed ({type(error).__name__}: {error}); correct it") from error


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def load_entry(entry: str, folder: Path) -> Entry:
    """entry: a file in `folder` ("voice.py"), or an installed module. Runs it. Raises UsageError."""
    try:
        module = _file(folder / entry) if entry.endswith(".py") else importlib.import_module(entry)
    except Exception as error:  # whatever the entry's own code raises
        raise UsageError(
            f"entry {entry!r} of {folder}: cannot be imported ({type(error).__name__}: {error}); wanted a file beside "
            "cases.toml, or an installed module"
        ) from error
    name = f"entry {entry!r}"
    rate, front_end, vocoder = (getattr(module, n, None) for n in ("SAMPLE_RATE", "request", "vocode"))
    if not isinstance(rate, int) or isinstance(rate, bool) or not LEAST_RATE <= rate <= LARGEST_RATE:
        raise UsageError(
            f"{name}: SAMPLE_RATE is {rate!r}, wanted an integer from {LEAST_RATE} to {LARGEST_RATE} samples a second"
        )
    for wanted, function in (("request(text)", front_end), ("vocode(latent, request)", vocoder)):
        if not callable(function):
            raise UsageError(f"{name}: has no function {wanted}; see voicehub_aot.proof.quality.utterances")
    return Entry(name, rate, front_end, vocoder)  # type: ignore[arg-type]  # checked above


def _file(path: Path) -> ModuleType:
    """A Python file, run as a module of its own."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    name = f"voicehub_aot_entry_{abs(hash(path.resolve()))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # of a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles of the entry look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
