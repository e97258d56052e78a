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
ESCAPE_CODE = re.compile(r"\x1b\[[0-9;]*m")
PICKLED = re.compile(r"GLOBAL ([\w.]+)")  # the type that torch's safe unpickler names when it refuses one
LORA = re.compile(r"(^|[._])lora_(A|B|down|up|alpha|magnitude_vector)([._]|$)|^base_model\.model\.")
LORA_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")  # of a PEFT folder
MERGE = "merge it into its base model first (peft: merge_and_unload, then save), and give the merged weights"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # what weights are read in; computed in float32
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
        if found := [name for name in LORA_FILES if path.name == name or (path / name).is_file()]:
            raise CheckpointMismatch(f"checkpoint {source!r} is a LoRA adapter ({found[0]}), not a model; {MERGE}")
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
    """Of the error's text, without the escape codes that torch colours it with."""
    return ESCAPE_CODE.sub("", (str(error).strip().splitlines() or [""])[0])


def read_tensors(path: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, torch.Tensor]:
    """A .safetensors file, or a .pt/.pth/.ckpt read with weights_only (nested mappings are left as they are).

    prefixes: keep keys that start with one of them; of a .safetensors, a whole model's say, no others are read. What
    torch.compile and data-parallel training put in front of names is taken off (`unwrapped`).
    """
    try:
        content = _read(path, prefixes)
    except CheckpointMismatch:
        raise
    except Exception as error:  # a damaged pickle raises anything: IndexError, struct.error, UnicodeDecodeError, ...
        if pickled := PICKLED.search(ESCAPE_CODE.sub("", str(error))):
            raise CheckpointMismatch(
                f"{path}: holds a {pickled[1]}, which is not a tensor and is not unpickled; load the file where it was "
                "made, keep the tensors alone, and save them with safetensors.torch.save_file"
            ) from error
        raise CheckpointMismatch(
            f"{path}: unreadable ({type(error).__name__}: {_first_line(error)}); download it again, "
            "or convert it to .safetensors"
        ) from error
    lora = [key for key in content if LORA.search(key)]
    if 2 * len(lora) > len(content):
        raise CheckpointMismatch(f"{path}: holds a LoRA adapter ({lora[0]!r}), not a model; {MERGE}")
    return content


def _read(path: Path, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            names = unwrapped({key: key for key in file.keys()})  # noqa: SIM118
            return {key: file.get_tensor(name) for key, name in names.items() if key.startswith(prefixes)}
    if path.suffix in (".pt", ".pth", ".ckpt", ".bin"):
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise CheckpointMismatch(f"{path}: holds a {type(content).__name__}, wanted a mapping of tensors")
        return {key: value for key, value in unwrapped(content).items() if key.startswith(prefixes)}
    raise CheckpointMismatch(
        f"{path}: unknown file type {path.suffix!r}; wanted .safetensors, .pt, .pth, .ckpt or .bin"
    )


def unwrapped(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Keys as the model's own module has them, in nested mappings too.

    torch.compile puts "_orig_mod." before a compiled module's names, wherever it stands; torch's DataParallel and
    DistributedDataParallel put "module." before all of them.
    """
    plain = {str(key).replace("_orig_mod.", ""): value for key, value in content.items()}
    wrapped = bool(plain) and all(key.startswith("module.") for key in plain)
    return {
        key.removeprefix("module.") if wrapped else key: unwrapped(value) if isinstance(value, Mapping) else value
        for key, value in plain.items()
    }


def loaded(module: nn.Module, weights: Mapping[str, torch.Tensor], prefix: str = "") -> nn.Module:
    """`module`, made without storage, with these weights in float32, ready to evaluate. prefix: of their keys."""
    state = {key.removeprefix(prefix): tensor.float().contiguous() for key, tensor in weights.items()}
    module.load_state_dict(state, assign=True)
    return module.eval().requires_grad_(False)


def _some(keys: list[str]) -> str:
    tail = f", and {len(keys) - LISTED} more" if len(keys) > LISTED else ""
    return ", ".join(keys[:LISTED]) + tail


def check_weights(where: str, weights: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """One CheckpointMismatch that lists every key that is wrong; silent when all is right.

    Wrong are keys that are missing or unexpected, shapes other than the wanted ones, dtypes that are not plain floating
    point (8-bit codes need scales that nothing here applies), and values that are not finite as float32: one NaN in a
    seldom used row of an embedding passes every check of a whole request, until a user needs that row.
    """
    shared = sorted(set(wanted) & set(weights))
    right = [key for key in shared if tuple(weights[key].shape) == tuple(wanted[key])]
    shapes = [f"{key} is {list(weights[key].shape)}, wanted {list(wanted[key])}" for key in shared if key not in right]
    floats = [key for key in right if weights[key].dtype in FLOATS and weights[key].layout == torch.strided]
    others = [f"{key} is {_kind(weights[key])}" for key in right if key not in floats]
    values = [f"{key} {fault}" for key in floats if (fault := _value_fault(weights[key]))]
    kinds = (
        ("missing", sorted(set(wanted) - set(weights))),
        ("unexpected", sorted(set(weights) - set(wanted))),
        ("mis-shaped", shapes),
        ("not of floating point", others),
        ("not finite", values),
    )
    problems = [f"{len(keys)} {kind}: {_some(keys)}" for kind, keys in kinds if keys]
    if not problems:
        return
    advice = "Choose the configuration it was trained with (--config), or another checkpoint"
    if not any(keys for _, keys in kinds[:3]):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        advice = f"Wanted finite values in {names}: give the checkpoint before it was quantised or damaged"
    raise CheckpointMismatch(f"{where}: the checkpoint is not this model's. {'; '.join(problems)}. {advice}")


def _kind(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return dtype if tensor.layout == torch.strided else f"a {str(tensor.layout).removeprefix('torch.')} {dtype} tensor"


def _value_fault(tensor: torch.Tensor) -> str | None:
    """What is wrong with a tensor's values once they are float32. A tensor without storage has none."""
    if tensor.is_meta:
        return None
    finite = torch.isfinite(tensor.float())
    if finite.all():
        return None
    first = (~finite).nonzero()[0].tolist()
    count = int((~finite).sum())
    return f"({count} of {tensor.numel()} values, the first {tensor[tuple(first)].item()!r} at {first})"
