"""Where weights come from, and whether they are the right ones.

Sources: a local path, `hf:owner/name[@revision][:file]` through huggingface_hub, or `synthetic`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from voicehub_aot.errors import CheckpointMismatch, MissingDependency

HUB_ID = re.compile(r"hf:(?P<repo>[^@:\s]+/[^@:\s]+)(@(?P<revision>[^:\s]+))?(:(?P<file>\S+))?")
LISTED = 12  # keys named per kind of mismatch before "and N more"


def locate(source: str, hub_files: Iterable[str]) -> Path:
    """The local path of `source`, downloaded into the hub cache if it is a hub id.

    hub_files: patterns fetched when the id names no file; the snapshot folder is returned then.
    """
    match = HUB_ID.fullmatch(source)
    if match is None:
        if source.startswith("hf:"):
            raise CheckpointMismatch(f"{source!r} is no hub id; wanted hf:owner/name[@revision][:file]")
        try:
            path = Path(source).expanduser()
            exists = source != "" and path.exists()  # "" would be the current folder
        except (OSError, RuntimeError) as error:  # an endless name, an unknown ~user
            raise CheckpointMismatch(f"checkpoint {source!r} is no path ({_first_line(error)})") from error
        if not exists:
            raise CheckpointMismatch(f"checkpoint {source!r} does not exist; give a file, a folder, or hf:owner/name")
        return path
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingDependency(f"{source}: needs huggingface_hub; pip install 'voicehub-aot[hub]'") from error
    repo, file = match["repo"], match["file"]
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")  # the hub reads it only once
    options: dict[str, Any] = {"revision": match["revision"], "local_files_only": offline}
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(repo, file, **options))
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=list(hub_files), **options))
    except Exception as error:  # the hub's client raises requests', httpx's, its own and plain OS errors
        why = "; HF_HUB_OFFLINE is set" if offline else ""
        raise CheckpointMismatch(
            f"{source}: could not be fetched ({type(error).__name__}: {_first_line(error)}){why}; check the id and "
            "the network, or download it and give the local path"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def read_tensors(path: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, torch.Tensor]:
    """A .safetensors file, or a .pt/.pth/.ckpt read with weights_only (nested mappings are left as they are).

    prefixes: keep keys that start with one of them; of a .safetensors, a whole model's say, no others are read.
    """
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {key: file.get_tensor(key) for key in file.keys() if key.startswith(prefixes)}  # noqa: SIM118
        if path.suffix in (".pt", ".pth", ".ckpt", ".bin"):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(loaded, dict):
                return {key: value for key, value in loaded.items() if str(key).startswith(prefixes)}
            raise CheckpointMismatch(f"{path}: holds a {type(loaded).__name__}, wanted a mapping of tensors")
    except CheckpointMismatch:
        raise
    except Exception as error:  # a damaged pickle raises anything: IndexError, struct.error, UnicodeDecodeError, ...
        raise CheckpointMismatch(
            f"{path}: unreadable ({type(error).__name__}: {_first_line(error)}); download it again, "
            "or convert it to .safetensors"
        ) from error
    raise CheckpointMismatch(
        f"{path}: unknown file type {path.suffix!r}; wanted .safetensors, .pt, .pth, .ckpt or .bin"
    )


def loaded(module: nn.Module, weights: Mapping[str, torch.Tensor], prefix: str = "") -> nn.Module:
    """`module`, made without storage, with these weights in float32, ready to evaluate. prefix: of their keys."""
    state = {key.removeprefix(prefix): tensor.float().contiguous() for key, tensor in weights.items()}
    module.load_state_dict(state, assign=True)
    return module.eval().requires_grad_(False)


def _some(keys: list[str]) -> str:
    tail = f", and {len(keys) - LISTED} more" if len(keys) > LISTED else ""
    return ", ".join(keys[:LISTED]) + tail


def check_shapes(where: str, weights: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """One CheckpointMismatch that lists missing, unexpected and mis-shaped keys; silent when all is right."""
    missing = sorted(set(wanted) - set(weights))
    unexpected = sorted(set(weights) - set(wanted))
    shapes = [
        f"{key} is {list(weights[key].shape)}, wanted {list(wanted[key])}"
        for key in sorted(set(wanted) & set(weights))
        if tuple(weights[key].shape) != tuple(wanted[key])
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("mis-shaped", shapes))
    problems = [f"{len(keys)} {kind}: {_some(keys)}" for kind, keys in kinds if keys]
    if problems:
        raise CheckpointMismatch(
            f"{where}: the checkpoint is not this model's. {'; '.join(problems)}. "
            "Choose the configuration it was trained with (--config), or another checkpoint"
        )
