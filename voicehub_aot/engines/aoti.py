"""AOTInductor on CPU: compile a stage to a shared library, open it without a compiler.

packed  weights inside, laid out for the matrix library (freezing); one engine for every size
shared  weights left out and bound to tensors of ours, so any number of engines reads one copy

torch's private names are used here and nowhere else. Facts about them, torch 2.13:
- freezing acts only under no_grad, and silently does nothing otherwise; hence `PACKED_MARK`.
- the raw loader accepts an unpacked folder, maps the library in place and writes no temporary file.
- vectors of up to 8 elements are written into the code as numbers: a shared engine would keep them through a change
  of weights; hence `_weights_stay_outside`.
- running an engine before its constants are bound is a segmentation fault, and a constant of the wrong shape is
  taken as it is; hence the runtime checks both against the manifest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import torch

from voicehub_aot.engines import Source, StageCode, Weights, code_digest
from voicehub_aot.engines._memory import release_heap, release_pages
from voicehub_aot.errors import ArtifactCorrupt, CompileFailed, EngineUnavailable
from voicehub_aot.kernels import depthwise
from voicehub_aot.target import VECTOR_BITS, Target, host_features

if TYPE_CHECKING:
    from torch import fx

NAME = "aoti"
FUSES = True
NATIVE = True
STATIC = True
FORMAT = NAME
KERNEL_BYTES = 2 * 252 * 1024  # two descriptors of oneDNN's packed product; no call gives them back

FOLDER = Path("data/aotinductor/model")  # where the raw loader looks inside an unpacked package
LIBRARY = FOLDER / "model.wrapper.so"
METADATA = FOLDER / "model.wrapper_metadata.json"
PACKED_MARK = "_linear_pointwise"  # the packed matrix product in generated code

NOMINAL_THREADS = 16  # how deep loops are made parallel for; the number that runs them is known at run time

_WORTH_RELEASING = 2**20  # bytes; a library's own writable segment is smaller, and must never be given back


def check() -> None:
    """Part of torch itself."""
    if not hasattr(torch._C, "_aoti"):
        raise EngineUnavailable(f"this torch ({torch.__version__}) has no AOTInductor runtime; install another build")


def reads_weight_file(weights: Weights) -> bool:
    return weights == "shared"


def settings(code: StageCode, weights: Weights, target: Target) -> dict[str, Any]:
    packed = weights == "packed"
    return {
        "code": code_digest(__file__, depthwise.__file__),  # whose composition Inductor compiles
        "options": options(weights, target),
        "compiler": compiler_version(),
        "matrix_isa": torch.backends.cpu.get_cpu_capability() if packed else "",
        "features": sorted(host_features()) if target.isa == "native" else [],
    }


def versions() -> dict[str, str]:
    return {}


@cache
def compiler_version() -> str:
    compiler = os.environ.get("CXX", "g++")
    try:
        text = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return text.splitlines()[0]


def options(weights: Weights, target: Target) -> dict[str, Any]:
    """Inductor's settings."""
    settings: dict[str, Any] = {
        "aot_inductor.package": True,
        "aot_inductor.enable_line_tables": False,
        "cpp.dynamic_threads": True,  # else the build machine's thread count is burnt in
        "cpp.threads": NOMINAL_THREADS,
        "cpp.march": target.isa,
        "assert_indirect_indexing": False,  # indices are clamped in the graph or checked with the request
    }
    if target.isa in VECTOR_BITS:
        settings["cpp.simdlen"] = VECTOR_BITS[target.isa]
    if weights == "packed":
        return {**settings, "freezing": True, "aot_inductor.force_mmap_weights": True}
    return {**settings, "aot_inductor.package_constants_in_so": False}


def compile_stage(code: StageCode, weights: Weights, target: Target, folder: Path) -> None:
    """Raises CompileFailed with the back end's reason chained, or if packing was asked for and did not happen."""
    from torch._inductor import aot_compile

    module, where = code.graph, code.name
    try:
        with torch.no_grad(), _quiet_compiler(), _weights_stay_outside(weights):
            files = cast(list[Any], aot_compile(module, code.examples, options=options(weights, target)))
    except Exception as error:  # Inductor raises its own, the compiler's and plain runtime errors
        raise CompileFailed(f"{where}: AOTInductor failed ({type(error).__name__}): {error}") from error
    library = _only(files, ".wrapper.so", where)
    metadata = _only(files, ".wrapper_metadata.json", where)
    if weights == "packed" and _linears(module):
        source = Path(_only(files, ".wrapper.cpp", where)).read_text()
        if PACKED_MARK not in source:
            raise CompileFailed(f"{where}: weights were not packed ({PACKED_MARK} is absent from the generated code)")
    (folder / FOLDER).mkdir(parents=True)
    shutil.copyfile(library, folder / LIBRARY)
    shutil.copyfile(metadata, folder / METADATA)
    if weights == "shared":
        _check_outside(module, folder, where)
    for file in files:
        if isinstance(file, str):  # a packed library is as large as the model: leave no second copy behind
            Path(file).unlink(missing_ok=True)


@contextmanager
def _quiet_compiler() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _weights_stay_outside(weights: Weights) -> Iterator[None]:
    """In shared mode, no weight becomes a number in the code."""
    from torch._inductor.graph import GraphLowering

    inlines = GraphLowering.__dict__["can_inline_constant"]
    if weights == "shared":
        GraphLowering.can_inline_constant = staticmethod(lambda _: False)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GraphLowering.can_inline_constant = inlines  # type: ignore[method-assign]


def _check_outside(module: fx.GraphModule, folder: Path, where: str) -> None:
    """Every weight the graph reads must be one the engine asks for.

    Asked of a copy: the linker never unloads a library, and a process ends in a segmentation fault if the file under
    one is overwritten, which may happen to a file in the cache.
    """
    wanted = {str(n.target) for n in module.graph.nodes if n.op == "get_attr" and n.users}
    with TemporaryDirectory(prefix="voicehub-aot-") as scratch:
        copy = shutil.copytree(folder, Path(scratch) / "engine")
        loader = torch._C._aoti.AOTIModelPackageLoader(str(copy), "model", False, 1, -1)
        inside = sorted(wanted - set(loader.get_constant_fqns()))
    if inside:
        raise CompileFailed(f"{where}: the engine kept weights inside: {', '.join(inside[:6])}; a scalar weight?")


def _only(files: list[Any], suffix: str, where: str) -> str:
    matching = [f for f in files if isinstance(f, str) and f.endswith(suffix)]
    if len(matching) != 1:
        raise CompileFailed(f"{where}: AOTInductor wrote {len(matching)} files ending in {suffix}, wanted one")
    return matching[0]


def _linears(module: fx.GraphModule) -> bool:
    return any(n.target == torch.ops.aten.linear.default for n in module.graph.nodes)


def install(compiled: Path, root: Path, name: str, target: Target) -> str:
    path = Path("engines") / NAME / target.folder / name
    shutil.copytree(compiled / FOLDER.parts[0], root / path / FOLDER.parts[0])
    return path.as_posix()


class AotiStage:
    """One opened stage. `constants` are kept alive here because the library holds bare pointers to them.

    packed: kernels stay in the heap after the first call at each size, strewn among what that call has freed; so the
    free pages are given back then. Else the next size would add to them.
    """

    def __init__(self, loader: Any, constants: dict[str, torch.Tensor], packed: bool = False) -> None:
        self._run = loader.run
        self._loader, self._constants = loader, constants
        self._seen: set[tuple[torch.Size, ...]] | None = set() if packed else None

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """~4 us on top of the stage's own work. Thread-safe; calls beyond `runners` queue inside."""
        outputs: list[torch.Tensor] = self._run(inputs)
        if self._seen is not None and (sizes := tuple(t.shape for t in inputs)) not in self._seen:
            self._seen.add(sizes)
            release_heap()
        return outputs


def open_stage(source: Source, runners: int) -> AotiStage:
    check()
    where, library = source.where, f"{source.path}/{LIBRARY.as_posix()}"
    if library not in source.digests:
        raise ArtifactCorrupt(f"{where}: {LIBRARY} is missing; rebuild the artifact")
    folder = pinned(source.root / source.path, source.root / library, source.digests[library])
    try:
        loader = torch._C._aoti.AOTIModelPackageLoader(str(folder), "model", False, runners, -1)
        names = loader.get_constant_fqns()
    except RuntimeError as error:
        raise ArtifactCorrupt(f"{where}: the library cannot be opened ({_first_line(error)})") from error
    bound: dict[str, torch.Tensor] = {}
    if source.constants:
        missing = sorted(set(names) - set(source.constants))
        if missing:
            raise ArtifactCorrupt(f"{where}: the weight file lacks {', '.join(missing[:6])}; rebuild the artifact")
        bound = {name: source.constants[name] for name in names}
        loader.load_constants(bound, False, True, user_managed=True)
    else:
        release_mapped_weights(folder / LIBRARY)
    return AotiStage(loader, bound, packed=not source.constants)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


_pins: dict[tuple[int, int], tuple[str, int, int]] = {}  # (device, inode) -> digest, descriptors of folder and file


def pinned(folder: Path, library: Path, digest: str) -> Path:
    """A name of `folder` that stays right when it is moved, and that no other folder gets while this process lives.

    library: the shared library inside; digest: its sha256. The dynamic linker never unloads an engine (its C++ has
    unique symbols) and knows it by the path it was opened by, where the engine also looks for its packed weights.
    Under its plain name, an artifact that was moved would not open again, and one that was replaced would run the
    code of its predecessor. Raises ArtifactCorrupt if the very file in use was overwritten. Linux only; elsewhere
    the plain name has to do.
    """
    if not Path("/proc/self/fd").is_dir():
        return folder
    status = library.stat()
    key = (status.st_dev, status.st_ino)
    if key not in _pins:
        _pins[key] = (digest, os.open(folder, os.O_RDONLY), os.open(library, os.O_RDONLY))
    known, descriptor, _ = _pins[key]
    if known != digest:
        raise ArtifactCorrupt(f"{library}: was overwritten while this process had it open; restart the process")
    return Path(f"/proc/self/fd/{descriptor}")


def release_mapped_weights(library: Path) -> None:
    """Give back the file pages of a packed library's weights: the engine has copied them and reads its copy.

    The weights lie behind the code, at an offset of 16 KiB's multiple, to the end of the file.
    """
    size = library.stat().st_size

    def holds_weights(permissions: str, start: int, end: int, offset: int) -> bool:
        large = end - start >= _WORTH_RELEASING
        return permissions == "rw-p" and large and offset % 16384 == 0 and offset + (end - start) >= size

    release_pages(library, holds_weights)
