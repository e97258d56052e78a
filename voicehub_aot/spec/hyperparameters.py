"""An adapter's configuration from what a file says: one typed check for all models.

The fields of the adapter's frozen dataclass are the names that are known, their annotations the kinds that are wanted.
Nothing is converted: "64" is not 64, true is not 1, null is a value only where the annotation has None.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from voicehub_aot.errors import OptionUnsupported, UnknownModel, UsageError

Config = TypeVar("Config")

LARGEST = 2**24  # more than any size or vocabulary; torch cannot even count the elements of far larger ones
DEEPEST = 1024  # a million layers are made for minutes before anything can say that they do not fit
REPEATED = ("depth", "layers", "blocks", "convnext")  # how the names of numbers of modules end
WANTED = {
    "int_type": "is not a positive integer",
    "float_type": "is not a number",
    "finite_number": "is not a finite number",
    "bool_type": "is neither true nor false",
    "string_type": "is not text",
    "tuple_type": "is not a list",
}


def config_of(where: str, kind: type[Config], values: Mapping[str, Any], also: Collection[str] = ()) -> Config:
    """`kind`, a dataclass, with these values. UsageError names every field that is unknown, missing or of another kind.

    also: names that the caller has taken out already, to be listed as known. Lists become tuples.
    """
    try:
        checked = _checker(kind).model_validate({name: _tuples(value) for name, value in values.items()})  # type: ignore[arg-type]
    except ValidationError as error:
        raise UsageError(f"{where}: {_faults(error, kind, values, also)}; give upstream's hyperparameters") from error
    given = {name: getattr(checked, name) for name in values}
    for name, value in given.items():
        most = DEEPEST if name.endswith(REPEATED) else LARGEST
        if isinstance(value, int) and not 0 <= value <= most:
            raise UsageError(f"{where}: {name}={value!r}, wanted 0 to {most}; give upstream's hyperparameters")
    return kind(**given)


def named_config(where: str, configs: Mapping[str, Config], config: str | Config | None) -> Config | None:
    """The configuration of this name, or what is given instead of a name. UnknownModel for a name that is not known."""
    if not isinstance(config, str):
        return config
    if config not in configs:
        raise UnknownModel(f"{where}: configuration {config!r} is not known; known are {', '.join(configs)}")
    return configs[config]


def not_positive(values: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """What is wrong with the first of these values that is not a positive integer, if any is not."""
    for name in names:
        value = values[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return f"{name}={value!r} {WANTED['int_type']}"
    return None


def refuse(where: str, fault: str | None) -> None:
    """UsageError if there is a fault: what is wrong with the values of a configuration."""
    if fault:
        raise UsageError(f"{where}: {fault}; give upstream's hyperparameters")


def part_of(where: str, values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The hyperparameters under `name`. UsageError if there is something else."""
    value = values.get(name)
    if not isinstance(value, Mapping):
        raise UsageError(f"{where}: {name}={_short(value)} is a {_kind(value)}, wanted an object of hyperparameters")
    return value


def without_fixed(where: str, values: Mapping[str, Any], fixed: Mapping[str, Any], why: str) -> dict[str, Any]:
    """`values` without those that have one supported value. OptionUnsupported for another, UsageError for its kind.

    why: completes "NAME=VALUE is not supported; …", followed by the supported value.
    """
    for name, wanted in fixed.items():
        value = values.get(name, wanted)
        if wanted is not None and not isinstance(value, type(wanted)):
            raise UsageError(f"{where}: {name}={_short(value)} is a {_kind(value)}; {why} {wanted!r}")
        if value != wanted:
            raise OptionUnsupported(f"{where}: {name}={_short(value)} is not supported; {why} {wanted!r}")
    return {name: value for name, value in values.items() if name not in fixed}


@cache
def _checker(kind: type[Any]) -> type[BaseModel]:
    kinds = get_type_hints(kind)
    known: dict[str, Any] = {f.name: (kinds[f.name], ... if f.default is MISSING else f.default) for f in fields(kind)}
    rules = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    return create_model(kind.__name__, __config__=rules, **known)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _faults(error: ValidationError, kind: type[Any], values: Mapping[str, Any], also: Collection[str]) -> str:
    found = error.errors(include_url=False)
    unknown = sorted(str(e["loc"][0]) for e in found if e["type"] == "extra_forbidden")
    missing = sorted(str(e["loc"][0]) for e in found if e["type"] == "missing")
    faults = []
    if unknown:
        known = sorted({f.name for f in fields(kind)} | set(also))
        faults.append(f"hyperparameter {', '.join(unknown)} is not known; known are {known!r}")
    if missing:
        faults.append(f"hyperparameter {', '.join(missing)} is missing, got {sorted(values)!r}")
    for e in found:
        if e["type"] not in ("extra_forbidden", "missing"):
            place = "".join(f"[{p}]" if isinstance(p, int) else str(p) for p in e["loc"])
            other = f"is not one of {e['ctx']['expected']}" if e["type"] == "literal_error" else f"is wrong: {e['msg']}"
            faults.append(f"{place}={_short(e['input'])} {WANTED.get(e['type'], other)}")
    return "; ".join(faults)


def _short(value: Any) -> str:
    return reprlib.repr(value)


def _kind(value: Any) -> str:
    return type(value).__name__
