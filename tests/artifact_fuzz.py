"""Artifacts changed at random, opened, and asked for a short request.

tests/artifacts/test_hostile.py runs it in a child process:

    python artifact_fuzz.py FIRST LAST SCRATCH ARTIFACT...

A seed decides the artifact, the change, and whether the digests are made right again. It may be refused with a
LoadError, or run its request, or refuse that with any error of ours. Everything else is printed: one JSON line each.
Native code is not altered under a right digest: who signs it is trusted with it.
"""

import copy
import hashlib
import json
import random
import resource
import shutil
import signal
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from voicehub_aot.artifacts import store
from voicehub_aot.cli import inspection
from voicehub_aot.errors import AotError, LoadError
from voicehub_aot.proof.verify import verify
from voicehub_aot.runtime.load import load
from voicehub_aot.runtime.runtime import Runtime

MANIFEST, ENGINES, PARITY = store.MANIFEST, store.ENGINES, store.PARITY
CASES, PROGRAMS, WEIGHTS = f"{PARITY}/cases.json", store.PROGRAMS, store.WEIGHTS
SECONDS = 30  # of one seed; more is a hang
MEMORY = 6 * 2**30  # bytes beyond what torch maps at the start
SIZE = 8  # of what varies in the request
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3, 101, 2**31, 2**53, 2**63, 10**30, 0.5, -1.5, 1e-320, 1e39, 1e308),
    *("", "x", "B", "N", "frames", "text", "../../x", "/etc/passwd", "./weights.safetensors", "a\\b", "a\0b", "é"),
    *("aoti", "onnxruntime", "cuda", "float64", "float32", "int64", "bool", "REQUEST", "STATE", "TIME"),
    *([], {}, [[]], [0], ["x"], {"": 0}, {"frames": 0}, {"frames": 16}),
]


def signed(document: dict[str, Any]) -> dict[str, Any]:
    """With the digest that a builder would have written."""
    rest = {name: value for name, value in document.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, "digest": hashlib.sha256(text.encode()).hexdigest()}


class Base:
    """A copy of an artifact that is changed and put right again. Libraries stay where they are while they are open."""

    def __init__(self, artifact: Path, scratch: Path) -> None:
        self.root, self.aside = scratch / artifact.name, scratch / f"{artifact.name}.aside"
        self.moved: Path | None = None  # a library, to `aside`
        shutil.copytree(artifact, self.root)
        files = [p for p in self.root.rglob("*") if p.is_file()]
        self.names = sorted(p.relative_to(self.root).as_posix() for p in files)
        self.kept = {n: (self.root / n).read_bytes() for n in self.names if not n.startswith(f"{ENGINES}/")}
        self.manifest = json.loads(self.kept[MANIFEST])

    def restore(self) -> None:
        if self.moved is not None:
            if self.moved.is_symlink() or self.moved.is_file():
                self.moved.unlink()
            elif self.moved.is_dir():
                self.moved.rmdir()
            self.aside.rename(self.moved)
            self.moved = None
        for path in self.root.rglob("*"):
            name = path.relative_to(self.root).as_posix()
            if path.is_symlink() or (path.is_file() and name not in self.names):
                path.unlink()
            elif path.is_dir() and name in self.names:
                path.rmdir()
        for name, content in self.kept.items():
            if not (self.root / name).is_file() or (self.root / name).read_bytes() != content:
                (self.root / name).parent.mkdir(exist_ok=True)
                (self.root / name).write_bytes(content)

    def sign(self, document: dict[str, Any] | None = None) -> None:
        """Digests of the files as they are, and the manifest's own."""
        document = copy.deepcopy(self.manifest) if document is None else document
        for name in self.names:
            if name in self.kept and name != MANIFEST and name in document["files"]:
                file = self.root / name
                content = file.read_bytes() if file.is_file() else b""
                document["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        (self.root / MANIFEST).write_text(json.dumps(signed(document)))


# --- changes: each returns a description


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, child in children for p in places(child, (*path, key)))]


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def walk(rng: random.Random, document: Any) -> tuple[Any, ...]:
    """A place, rare parts as likely as long lists."""
    path: tuple[Any, ...] = ()
    while True:
        value = at(document, path)
        if not isinstance(value, dict | list) or not value or (path and rng.random() < 0.15):
            return path
        path = (*path, rng.choice(list(value) if isinstance(value, dict) else range(len(value))))


def change(rng: random.Random, document: Any) -> str:
    """One node of a document is removed, doubled, swapped or replaced, in place."""
    path = walk(rng, document)
    if not path:
        return "nothing"
    parent, key = at(document, path[:-1]), path[-1]
    value = parent[key]
    how = rng.choice(["remove", "double", "swap", "other", "other", "near", "near", "near", "value", "value", "value"])
    if how == "remove":
        del parent[key]
    elif how == "double":
        parent.insert(key, copy.deepcopy(value)) if isinstance(parent, list) else parent.update({f"{key}x": value})
    elif how == "swap":
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    elif how == "other":  # what stands elsewhere, of the same kind
        same = [p for p in places(document) if type(at(document, p)) is type(value) and p]
        parent[key] = copy.deepcopy(at(document, rng.choice(same)))
    elif how == "near":
        parent[key] = near(rng, value)
    else:
        parent[key] = copy.deepcopy(rng.choice(VALUES))
    return f"{how} at {'/'.join(map(str, path))}: {str(value)[:60]!r}"


def near(rng: random.Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return rng.choice([value + 1, value - 1, -value, value * 2, value * 1000, value + 0.5, 0 * value])
    if isinstance(value, str):
        return rng.choice([value + "x", value[:-1], value.upper(), f"../{value}", f"./{value}", f"{value}/../x"])
    return value[::-1] if isinstance(value, list) else value


def change_manifest(rng: random.Random, base: Base) -> str:
    document = copy.deepcopy(base.manifest)
    told = [change(rng, document) for _ in range(rng.choice([1, 1, 1, 1, 2, 3]))]
    document = signed(document) if rng.random() < 0.9 else document
    (base.root / MANIFEST).write_text(json.dumps(document))
    return f"manifest: {'; '.join(told)}"


def change_document(rng: random.Random, base: Base) -> str:
    """A program or the recorded cases."""
    name = rng.choice([n for n in base.kept if n.startswith(f"{PROGRAMS}/")] * 2 + [CASES])
    document = json.loads(base.kept[name])
    told = [change(rng, document) for _ in range(rng.choice([1, 1, 2]))]
    (base.root / name).write_text(json.dumps(document))
    base.sign()
    return f"{name}: {'; '.join(told)}"


def change_text(rng: random.Random, base: Base) -> str:
    """Bytes of a document that are not what JSON writers write."""
    name = rng.choice([MANIFEST, *(n for n in base.kept if n.startswith(f"{PROGRAMS}/")), CASES])
    content = base.kept[name]
    middle = rng.randrange(len(content))
    changes = {
        "byte": content[:middle] + bytes([rng.randrange(256)]) + content[middle + 1 :],
        "cut": content[:middle],
        "empty": b"",
        "nested": b"[" * rng.choice([40, 1000, 200_000]),
        "not UTF-8": content[:middle] + b"\xff\xfe" + content[middle:],
        "UTF-16": content.decode().encode("utf-16"),
        "twice": content.replace(b"{", b'{"name": "x", "op": 1, "out": "x", ', 1),
        "NaN": content.replace(b"0.0", rng.choice([b"NaN", b"Infinity", b"-Infinity", b"1e999"]), 1),
        "long": content.replace(b"0", b"9" * rng.choice([20, 400, 5000]), 1),
        "surrogate": content.replace(b"euler", b"\\ud800"),
        "NUL": content.replace(b"euler", b"\\u0000"),
    }
    how = rng.choice(list(changes))
    (base.root / name).write_bytes(changes[how])
    if name != MANIFEST and rng.random() < 0.9:
        base.sign()
    return f"{name}: {how} at {middle}"


def change_tensors(rng: random.Random, base: Base) -> str:
    """The weight file or the recorded results: header, sizes, dtypes, values."""
    name = rng.choice([WEIGHTS, WEIGHTS, f"{PARITY}/references.safetensors"])
    content = base.kept[name]
    length = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    how = rng.choice(["header", "header", "header", "length", "bytes", "cut", "prose"])
    if how == "header":
        told = change(rng, header)
        text = json.dumps(header).encode()
        content = struct.pack("<Q", len(text)) + text + data
    elif how == "length":
        told = str(wrong := rng.choice([0, 1, length - 1, length + 1, 2**31, 2**40, 2**63, 2**64 - 1]))
        content = struct.pack("<Q", wrong) + content[8:]
    elif how == "bytes":
        told, start = "256 of the data", rng.randrange(len(data))
        data = data[:start] + rng.randbytes(256) + data[start + 256 :]
        content = content[: 8 + length] + data[: len(content) - 8 - length]
    else:
        told, content = how, content[: rng.randrange(len(content))] if how == "cut" else b"prose"
    (base.root / name).write_bytes(content)
    base.sign()
    return f"{name}: {how}: {told}"


def change_files(rng: random.Random, base: Base) -> str:
    """A file removed, replaced by a link or folder, or added; digests of what is there."""
    name = rng.choice([n for n in base.names if n != MANIFEST] + [MANIFEST])
    file = base.root / name
    how = rng.choice(["removed", "linked", "folder", "added", "unlisted", "altered"])
    if how == "added":
        (file.parent / rng.choice([".hidden", "model.so", "x.json", "manifest.json"])).write_text("x")
    elif how == "unlisted":
        document = copy.deepcopy(base.manifest)
        document["files"].pop(name, None)
        base.sign(document)
    else:
        content = file.read_bytes()
        if name in base.kept:
            file.unlink()
        else:
            base.moved = file.rename(base.aside) and file
        if how == "linked":
            target = base.aside if name not in base.kept else base.root.parent / "outside"
            if name in base.kept:
                target.write_bytes(content)
            file.symlink_to(target)
        elif how == "folder":
            file.mkdir()
        elif how == "altered":
            spot = rng.randrange(max(1, len(content)))
            file.write_bytes(content[:spot] + b"?!" + content[spot + 2 :])
    return f"{name}: {how}"


CHANGES = [*[change_manifest] * 12, *[change_document] * 3, change_text, change_tensors, change_files]


# --- what a process does with it


def sample(runtime: Runtime) -> None:
    """Two rows, the second one shorter."""
    spec = runtime.spec
    sizes = {dim.name: min(max(SIZE, dim.min), dim.max) for dim in spec.dims}
    generator = torch.Generator().manual_seed(1)
    given: dict[str, torch.Tensor] = {}
    for item in spec.conditioning:
        shape = [2, *(sizes[s] if isinstance(s, str) else s for s in item.shape[1:])]
        if item.dtype == "int64":
            given[item.name] = torch.randint(item.low, item.high, shape, generator=generator)
        else:
            given[item.name] = torch.ones(shape, dtype=item.torch_dtype)
    length = sizes[spec.main_dim or ""]
    runtime.sample(seed=1, lengths=[length, max(1, length // 2)], **given)


def outcome(base: Base, told: str) -> str:
    """ "refused", "ran" or "declined"; anything else is raised."""
    try:
        runtime = load(base.root, threads=1)
        json.dumps(inspection.summary(base.root, store.read_manifest(base.root)))
        if PARITY in told.partition(":")[0]:
            verify(base.root, threads=1)
    except LoadError:
        return "refused"
    try:
        sample(runtime)
    except AotError:
        return "declined"
    return "ran"


def main() -> None:
    first, last, scratch = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    bases = [Base(Path(artifact), scratch) for artifact in sys.argv[4:]]
    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for base in bases:
        if outcome(base, PARITY) != "ran":
            raise AssertionError(f"{base.root}: the artifact itself does not run")
    for seed in range(first, last):
        rng = random.Random(seed)
        base = bases[seed % len(bases)]
        told = rng.choice(CHANGES)(rng, base)
        print(json.dumps({"seed": seed, "change": told}), flush=True)
        signal.alarm(SECONDS)
        try:
            result, trace = outcome(base, told), ""
        except Exception as error:
            result, trace = f"{type(error).__name__}: {str(error)[:300]}", traceback.format_exc()[-1500:]
        signal.alarm(0)
        print(json.dumps({"seed": seed, "result": result, "trace": trace}), flush=True)
        base.restore()


if __name__ == "__main__":
    main()
