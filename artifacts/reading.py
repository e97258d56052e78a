"""Files that others wrote, read with care: regular files of a bounded size, and JSON that means one thing only."""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

DEEPEST = 32  # levels of a document; the deepest of ours has 7
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe would block the one who opens it


def read_bytes(file: Path, most: int) -> bytes:
    """All bytes of a regular file. Raises OSError, or ValueError if it is something else or has more than `most`."""
    with os.fdopen(os.open(file, os.O_RDONLY | _NO_LINK), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        data = b"" if status.st_size > most else stream.read(most + 1)
    if status.st_size > most or len(data) > most:
        raise ValueError(f"it has {max(status.st_size, len(data))} bytes, wanted at most {most}")
    return data


def parse_json(data: bytes) -> Any:
    """The document. Raises ValueError unless it is UTF-8 JSON with distinct keys, finite numbers and few levels."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_distinct, parse_constant=_not_finite, parse_float=_finite
        )
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} levels") from None
    _check_depth(value)
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:60]!r} stands twice in one object")
    return found


def _not_finite(text: str) -> NoReturn:
    raise ValueError(f"the number {text} is not finite")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_finite(text[:20])


def _check_depth(value: Any) -> None:
    """Level by level, without recursion."""
    level = [value]
    for _ in range(DEEPEST):
        children = [list(v.values()) if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level = [child for values in children for child in values]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {DEEPEST} levels")


def reason(error: BaseException) -> str:
    """One line for an error of reading: a model's first complaint with its place, or the error's own first line."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ")
        return f"{place}: {message}" if place else message
    return (str(error).splitlines() or [type(error).__name__])[0]
