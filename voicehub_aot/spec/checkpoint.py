"""Where weights come from, and whether they are the right ones.

Sources: a local path, `hf:owner/name[@revision][:file]` through huggingface_hub, or `synthetic`.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from voicehub_aot.errors import CheckpointMismatch, MissingDependency, UsageError

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
            raise CheckpointMismatch(f"checkpoint {source!r} is not a path ({_first_line(error)})") from error
        if not exists:
            raise CheckpointMismatch(f"checkpoint {source!r} does not exist; give a file, a folder, or hf:owner/name")
        _check_not_adapter(path)
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


def find(path: Path, patterns: Sequence[str], advice: str = "name one file") -> Path:
    """`path` itself if it is a file, else the one file below it that matches the first pattern that any file does.

    Raises CheckpointMismatch, with this advice if several files match one pattern.
    """
    if path.is_file():
        return path
    for pattern in patterns:
        found = sorted(path.glob(pattern))
        if len(found) > 1:
            names = ", ".join(str(file.relative_to(path)) for file in found)
            raise CheckpointMismatch(f"{path}: several checkpoints ({names}); {advice}")
        if found:
            return found[0]
    names = " or ".join(pattern.removeprefix("**/") for pattern in patterns)
    raise CheckpointMismatch(f"{path}: no {names} in it; name the checkpoint file")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


# --- how a checkpoint is read

NESTS = {  # of trainers' files, in the order in which they are looked for
    "ema": ("ema_model_state_dict", "ema_state_dict", "state_dict_ema", "model_ema", "ema_model", "ema"),
    "raw": ("model_state_dict", "state_dict", "model", "module"),
}


@dataclass(frozen=True)
class Reading:
    """How a checkpoint is to be read, and what was decided while it was read.

    kind: "ema" or "raw", where a file holds averaged and last weights; None takes averaged ones if there are any.
    notes: sentences for the build's progress and the manifest.
    """

    kind: str | None = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.kind not in (None, *NESTS):
            raise UsageError(f"--weights-kind {self.kind!r} is not known; choose ema or raw")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


# --- files of tensors

WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # of torch.compile, DDP, FSDP
LORA = re.compile(
    r"(^|[.])(lora_[A-Za-z_]+|hada_[wt]\d_?\w*|lokr_[wt]\d_?\w*|ia3_l|dora_scale|b?oft_\w+|vera_lambda_\w+)([.]|$)"
    r"|^base_model[.]model[.]"
)
NOT_WHOLE = (  # how the files of a LoRA's folder begin
    *("adapter_model.", "adapter_config.", "lora_weights.", "lora_config.", "pytorch_lora_weights."),
)
TYPES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
MERGE = (
    "merge them into the weights first: load the base model and the LoRA with what trained it (peft: "
    "PeftModel.from_pretrained(base, folder).merge_and_unload()), save the whole model, and give that"
)
# Keeps the tensors of a trusted file and drops every other object.
CONVERT = (
    "import sys, numpy, torch; "
    "keep = lambda c: {str(k): keep(v) if isinstance(v, dict) else torch.as_tensor(v) for k, v in c.items() "
    "if isinstance(v, (dict, torch.Tensor, numpy.ndarray))}; "
    "c = torch.load(sys.argv[1], map_location='cpu', weights_only=False); "
    "torch.save(keep(c.state_dict() if hasattr(c, 'state_dict') else c), sys.argv[2])"
)


def read_tensors(path: Path, prefixes: tuple[str, ...] = ("",)) -> dict[str, torch.Tensor]:
    """A .safetensors file, or a .pt/.pth/.ckpt/.bin read with weights_only (nested mappings stay as they are).

    prefixes: keep keys that start with one of them; the other tensors of a .safetensors are not even read. Keys lose
    what torch.compile and data-parallel training put into them. A LoRA is refused.
    """
    content = _content(path, prefixes, Reading())
    return {key: value for key, value in content.items() if key.startswith(prefixes)}


def _content(path: Path, prefixes: tuple[str, ...], reading: Reading) -> dict[str, Any]:
    """What `read_tensors` returns, but everything of a file that may hold nested mappings."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                wanted = [key for key in file.keys() if _bare(key).startswith(prefixes)]  # noqa: SIM118
                _check_whole(path, wanted)
                return _unwrapped(path, {key: file.get_tensor(key) for key in wanted}, reading)
        if path.suffix in TYPES:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(loaded, Mapping):
                return _unwrapped(path, loaded, reading)
            raise CheckpointMismatch(f"{path}: holds a {type(loaded).__name__}, wanted a mapping of tensors")
    except CheckpointMismatch:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointMismatch(f"{path}: unreadable ({_first_line(error)}){_other_objects(path, error)}") from error
    except Exception as error:  # a damaged pickle raises anything: IndexError, struct.error, UnicodeDecodeError, ...
        raise CheckpointMismatch(
            f"{path}: unreadable ({type(error).__name__}: {_first_line(error)}); download it again, "
            "or convert it to .safetensors"
        ) from error
    raise CheckpointMismatch(
        f"{path}: unknown file type {path.suffix!r}; wanted .safetensors, .pt, .pth, .ckpt or .bin"
    )


def _other_objects(path: Path, error: Exception) -> str:
    """Says which objects of a pickle are not loaded, and how to drop them; or what to do with a damaged file."""
    try:
        types = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # a file from before torch 1.6: the error names the first type only
        types = sorted(set(re.findall(r"GLOBAL ([\w.]+)", str(error))))
    if not types:
        return "; download it again, or convert it to .safetensors"
    numpy = ", numpy values," if any(name.startswith("numpy.") for name in types) else ""
    target = path.with_name(f"{path.stem}.tensors.pt")
    return (
        f": besides tensors it holds objects of {_some(types)},{numpy} which are not loaded because unpickling them "
        f"runs code. If you trust the file, keep its tensors alone: python -c {shlex.quote(CONVERT)} "
        f"{shlex.quote(str(path))} {shlex.quote(str(target))}"
    )


def _bare(key: str) -> str:
    """The key without the names of wrappers."""
    parts = key.split(".")
    return key if WRAPPERS.isdisjoint(parts) else ".".join(part for part in parts if part not in WRAPPERS)


def _unwrapped(path: Path, content: Mapping[Any, Any], reading: Reading) -> dict[str, Any]:
    """The content with text for keys, and without wrappers in those of tensors; nested mappings alike.

    Refuses a LoRA, and a key that comes twice.
    """
    tensors = [str(key) for key, value in content.items() if isinstance(value, torch.Tensor)]
    _check_whole(path, tensors)
    if wrapped := [key for key in tensors if _bare(key) != key]:
        names = sorted(WRAPPERS & {part for key in wrapped for part in key.split(".")})
        reading.note(f"{path.name}: left {', '.join(names)} out of the names of {len(wrapped)} tensors")
    result: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key) if isinstance(value, Mapping) else _bare(str(key))
        if name in result:
            raise CheckpointMismatch(f"{path}: {key!r} and another entry are both {name!r}; give a file with one")
        result[name] = _unwrapped(path, value, reading) if isinstance(value, Mapping) else value
    return result


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, torch.Tensor) for v in value.values())


def _check_whole(path: Path, keys: Sequence[str]) -> None:
    """Refuses a LoRA without a model. `check_shapes`, or `refuse_lora`, refuses one with other tensors beside it."""
    if keys and all(LORA.search(_bare(key)) for key in keys):
        refuse_lora(path, keys)


def refuse_lora(path: Path, keys: Iterable[str]) -> None:
    """CheckpointMismatch if one of the keys is a LoRA's, of whatever part of the model."""
    if adapted := [key for key in keys if LORA.search(_bare(key))]:
        raise CheckpointMismatch(f"{path}: holds a LoRA or another adapter, {_adapted(adapted)}")


def _adapted(keys: Sequence[str]) -> str:
    return f"{len(keys)} LoRA tensors ({_some(sorted(keys))}); {MERGE}"


def _check_not_adapter(path: Path) -> None:
    """Refuses a folder that holds the files of a LoRA and no whole weights."""
    if not path.is_dir():
        return
    own = sorted(file.name for file in path.iterdir() if file.name.startswith(NOT_WHOLE))
    whole = (f for f in path.rglob("*") if f.suffix in (*TYPES, ".onnx") and not f.name.startswith(NOT_WHOLE))
    if own and next(whole, None) is None:
        raise CheckpointMismatch(f"{path}: holds a LoRA or another adapter ({_some(own)}), no whole weights; {MERGE}")


# --- which weights of a file

OF_EMA_PYTORCH = {"ema": "ema_model.", "raw": "online_model."}  # its module's prefixes
COUNTERS = ("initted", "step")  # ema_pytorch's buffers
SWA_COUNTER = "n_averaged"  # of torch.optim.swa_utils.AveragedModel, whose names have `module.` before them
ASK = {"ema": "raw", "raw": "ema"}


def read_weights(
    file: Path, reading: Reading, prefixes: tuple[str, ...] = ("",)
) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """-> (the entries of one set of weights, whatever their kind; what stands beside it in a trainer's file).

    prefixes: as of `read_tensors`, of the keys within the set.
    """
    inside = tuple(outer + prefix for outer in ("", *OF_EMA_PYTORCH.values()) for prefix in prefixes)
    content = _content(file, inside, reading)
    sets = _sets(content)
    if not sets:
        if reading.kind:
            raise CheckpointMismatch(
                f"{file}: holds one set of weights and does not say whether they are {reading.kind}; "
                "leave --weights-kind out"
            )
        weights, beside = content, {}
    else:
        kind = reading.kind or next(iter(sets))
        if kind not in sets:
            held = " and ".join(f"{k} ({where!r})" for k, (where, _) in sets.items())
            raise CheckpointMismatch(f"{file}: holds no {kind} weights, only {held}; leave --weights-kind out")
        where, weights = sets[kind]
        beside = {key: value for key, value in content.items() if not isinstance(value, torch.Tensor)}
        other = f"--weights-kind {ASK[kind]} takes {sets[ASK[kind]][0]!r}" if len(sets) > 1 else "the only ones there"
        reading.note(f"{file.name}: took the {kind} weights, {where!r}; {other}")
    return {k: v for k, v in weights.items() if k.startswith(prefixes) and k != SWA_COUNTER}, beside


def _sets(content: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Kind -> (where in the file, entries), "ema" first; empty for a file with one unmarked set."""
    nests = {
        kind: next(((name, content[name]) for name in names if _holds_tensors(content.get(name))), None)
        for kind, names in NESTS.items()
    }
    found = {kind: nest for kind, nest in nests.items() if nest is not None}
    where, entries = found.get("ema", ("", content))
    prefixes = {k: p for k, p in OF_EMA_PYTORCH.items() if any(key.startswith(p) for key in entries)}
    if where and "ema" not in prefixes:
        return found
    rest = {k: v for k, v in entries.items() if not k.startswith(tuple(OF_EMA_PYTORCH.values())) and k not in COUNTERS}
    for kind, prefix in prefixes.items():
        inner = {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}
        if kind == "ema" or "raw" not in found:
            found[kind] = (where or prefix, rest | inner)
    return {kind: found[kind] for kind in NESTS if kind in found}


# --- the weights of a model


def check_sizes(file: Path, fault: str | None, wanted: str) -> None:
    """CheckpointMismatch if there is a fault: what is wrong with the sizes that the file's tensors have."""
    if fault:
        raise CheckpointMismatch(f"{file}: its tensors have impossible shapes: {fault}; give {wanted}")


def only_tensors(file: Path, content: Mapping[str, Any], wanted: str = "a tensor") -> dict[str, torch.Tensor]:
    """`content`, if it holds nothing but tensors; CheckpointMismatch for the first thing that is not what is wanted."""
    for key, value in content.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointMismatch(f"{file}: {key!r} is a {type(value).__name__}, wanted {wanted}")
    return dict(content)


def _some(keys: list[str]) -> str:
    tail = f", and {len(keys) - LISTED} more" if len(keys) > LISTED else ""
    return ", ".join(keys[:LISTED]) + tail


def check_shapes(where: str, weights: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """One CheckpointMismatch that lists missing, unexpected and mis-shaped keys, or those whose values cannot be used.

    Values must be floats that are finite in float32, in which every model is built. Silent when all is right.
    """
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
        adapted = [key for key in unexpected if LORA.search(key)]
        advice = "Choose the configuration it was trained with (--config), or another checkpoint"
        raise CheckpointMismatch(
            f"{where}: the checkpoint is not this model's. {'; '.join(problems)}. "
            f"{'It holds ' + _adapted(adapted) if adapted else advice}"
        )
    faults = [f"{key} {fault}" for key in sorted(weights) if (fault := _fault_of_values(weights[key]))]
    if faults:
        raise CheckpointMismatch(
            f"{where}: {len(faults)} tensors hold values that cannot be used: {_some(faults)}. Wanted finite float32, "
            "float64, float16 or bfloat16; download the checkpoint again, take an earlier one of the training, or the "
            "one that was not quantised"
        )


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _fault_of_values(tensor: torch.Tensor) -> str | None:
    """What is wrong with a tensor's kind or values, if anything."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantised" if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout
        return f"is {str(kind).removeprefix('torch.')}, not dense"
    if tensor.dtype not in FLOATS:
        return f"is {str(tensor.dtype).removeprefix('torch.')}"
    values = tensor.detach()
    if tensor.is_meta or not values.numel() or all(math.isfinite(end.float().item()) for end in torch.aminmax(values)):
        return None  # a NaN is both its own least and greatest value
    bad = ~torch.isfinite(values.float())
    place = bad.nonzero()[0].tolist()
    first = values[tuple(place)].item()
    return f"has {int(bad.sum())} of {bad.numel()} not finite in float32, first {first!r} at {place}"
