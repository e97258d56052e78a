"""Recorded reference cases: inputs and outputs of a model's own implementation.

A case is a folder with `case.json` and `tensors.safetensors` (inputs under "input/", outputs under "output/",
stored weights under "weight/"), and `model.onnx` where the weights live in a graph.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from voicehub_aot.errors import UsageError
from voicehub_aot.spec.synthetic import synthetic_weights

KINDS = ("region", "sampler")
FORMAT = 1


@dataclass(frozen=True)
class Case:
    """One recorded case. `weights` is "stored", "synthetic" or "onnx"; tensors are keyed without their prefix."""

    path: Path
    model: str
    kind: str
    config: Mapping[str, Any]
    weights: str
    weight_shapes: Mapping[str, tuple[int, ...]]
    stored_weights: Mapping[str, torch.Tensor]
    inputs: Mapping[str, torch.Tensor]
    scalars: Mapping[str, Any]
    outputs: Mapping[str, torch.Tensor]
    tolerance: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.model}/{self.path.name}"

    @property
    def onnx(self) -> Path:
        return self.path / "model.onnx"

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """The case's weights under released keys (not for "onnx": the adapter reads the graph)."""
        return {**synthetic_weights(self.weight_shapes), **self.stored_weights}

    def check_inputs(self, wanted: Iterable[str], optional: Iterable[str] = ()) -> Mapping[str, torch.Tensor]:
        """The case's inputs; UsageError unless they are the wanted ones and perhaps optional ones."""
        wanted, optional = set(wanted), set(optional)
        if not wanted <= set(self.inputs) <= wanted | optional:
            perhaps = f" and perhaps {sorted(optional)!r}" if optional else ""
            raise UsageError(f"{self.name}: inputs are {sorted(self.inputs)!r}, wanted {sorted(wanted)!r}{perhaps}")
        return self.inputs

    def times(self, name: str) -> list[float]:
        """The distinct values of an input, ascending: the times of a case of single evaluations."""
        return sorted(set(self.inputs[name].reshape(-1).tolist()))

    def check_scalars(self, known: Iterable[str], wanted: Iterable[str] = ()) -> Mapping[str, Any]:
        """The case's scalars; UsageError for one that is neither wanted nor known, or wanted and not there."""
        known = {*known, *wanted}
        if unknown := sorted(set(self.scalars) - known):
            raise UsageError(f"{self.name}: scalars {unknown!r} are not understood; known are {sorted(known)!r}")
        if missing := sorted(set(wanted) - set(self.scalars)):
            raise UsageError(f"{self.name}: scalars {missing!r} are missing, got {dict(self.scalars)!r}")
        return self.scalars

    def check_fixed(self, values: Mapping[str, Any]) -> None:
        """UsageError for a scalar that has another value than the one here; it may be left out."""
        if other := {n: self.scalars[n] for n, value in values.items() if self.scalars.get(n, value) != value}:
            raise UsageError(f"{self.name}: scalars {other!r} are not understood; wanted {dict(values)!r}")

    def scalars_over(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The case's scalars over the defaults of upstream's call, which are all that it takes."""
        return {**defaults, **self.check_scalars(defaults)}

    def recorded(self, results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The result for each recorded output; UsageError for an output that has none."""
        if unknown := sorted(set(self.outputs) - set(results)):
            raise UsageError(f"{self.name}: outputs {unknown!r} are not understood; known are {sorted(results)!r}")
        return {name: results[name] for name in self.outputs}

    def tolerance_of(self, output: str) -> tuple[float, float]:
        """(atol, rtol) of one output; a case may name exceptions per output."""
        own = self.tolerance.get(output, {})
        if not isinstance(own, Mapping):
            raise UsageError(f"{self.path}: tolerance of {output!r} is {own!r}, wanted a mapping of atol and rtol")
        return (float(own.get("atol", self.tolerance["atol"])), float(own.get("rtol", self.tolerance["rtol"])))


def read_case(path: Path) -> Case:
    """Raises UsageError for a folder that is not a case, or a case of another kind or format."""
    try:
        case = json.loads((path / "case.json").read_text(encoding="utf-8"))
        tensors = load_file(path / "tensors.safetensors")
        kind, weights = case["kind"], case["weights"]
        understood = case["format"] == FORMAT and kind in KINDS and weights in ("stored", "synthetic", "onnx")
        if not understood:
            raise UsageError(
                f"{path}: format {case['format']!r}, kind {kind!r}, weights {weights!r} are not understood; "
                f"wanted format {FORMAT}, kind one of {KINDS}, weights stored, synthetic or onnx"
            )

        def under(prefix: str) -> dict[str, torch.Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        return Case(
            path=path,
            model=case["model_type"],
            kind=kind,
            config=case["config"],
            weights=weights,
            weight_shapes={k: tuple(v) for k, v in case.get("weight_shapes", {}).items()},
            stored_weights=under("weight/"),
            inputs=under("input/"),
            scalars=case["scalars"],
            outputs=under("output/"),
            tolerance=case["tolerance"],
        )
    except (OSError, KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        raise UsageError(
            f"{path}: not a recorded case ({error!r}); wanted case.json and tensors.safetensors"
        ) from error


def find_cases(root: Path, model: str | None = None) -> list[Path]:
    """Every case folder below `root` (a case itself, a model's folder, or the folder of all models), sorted."""
    found = sorted(p.parent for p in root.rglob("case.json"))
    return [p for p in found if model is None or p.parent.name == model]
