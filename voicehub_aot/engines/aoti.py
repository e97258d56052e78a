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

import itertools
import os
import shutil
import struct
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._pytree import treespec_loads

from voicehub_aot.engines import Source, StageCode, Weights, _memory as memory, code_digest, toolchain
from voicehub_aot.errors import ArtifactCorrupt, CompileFailed, EngineUnavailable, OptionUnsupported
from voicehub_aot.kernels import depthwise
from voicehub_aot.spec.target import VECTOR_BITS, Target, host_features

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

STANDARD = "-std=c++20"  # of Inductor's commands
HEADERS = ("torch/headeronly/macros/Macros.h",)  # the smallest of torch's that generated code includes
NOMINAL_THREADS = 16  # how deep loops are made parallel for; the number that runs them is known at run time


def check() -> None:
    """Part of torch itself."""
    if not hasattr(torch._C, "_aoti"):
        raise EngineUnavailable(f"this torch ({torch.__version__}) has no AOTInductor runtime; install another build")


def check_build(cache: Path, target: Target) -> None:
    """It compiles C++ against torch's headers."""
    installed = Path(torch.__file__).parent
    toolchain.check_paths([installed])
    toolchain.check_cache(cache)
    headers = installed / "include"
    flags = (STANDARD, f"-march={target.isa}", f"-I{headers}", f"-I{headers}/torch/csrc/api/include")
    toolchain.check_compiler(cache, toolchain.Needs(flags, HEADERS))


def reads_weight_file(weights: Weights) -> bool:
    return weights == "shared"


def settings(code: StageCode, weights: Weights, target: Target) -> dict[str, Any]:
    packed = weights == "packed"
    return {
        "code": code_digest(__file__, depthwise.__file__),  # whose composition Inductor compiles
        "options": options(weights, target),
        "compiler": toolchain.compiler_version(),
        "matrix_isa": torch.backends.cpu.get_cpu_capability() if packed else "",
        "features": sorted(host_features()) if target.isa == "native" else [],
    }


def versions() -> dict[str, str]:
    return {}


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
    """Raises CompileFailed with the back end's reason chained, or if packing was asked for and did not happen.

    EngineUnavailable if the system killed the compiler.
    """
    with (
        toolchain.inductor_cache(code.cache or folder.parent) as cache,
        TemporaryDirectory(prefix="stage-", dir=cache) as place,
    ):
        _compile(code, weights, target, folder, place)


def _compile(code: StageCode, weights: Weights, target: Target, folder: Path, place: str) -> None:
    """place: for Inductor's files. It would share them with every other process that compiles the same code."""
    from torch._inductor import aot_compile

    module, where = code.graph, code.name
    here = {
        "cpp.cxx": (toolchain.compiler(),),  # Inductor would take what CXX was when it was imported
        "aot_inductor.output_path": place,
        "aot_inductor.precompile_headers": shutil.which("openssl") is not None,  # which it compares headers with
    }
    try:
        with torch.no_grad(), _quiet_compiler(), _weights_stay_outside(weights):
            files = cast(list[Any], aot_compile(module, code.examples, options=options(weights, target) | here))
    except Exception as error:  # Inductor raises its own, the compiler's and plain runtime errors
        if toolchain.was_killed(error):
            raise EngineUnavailable(f"{where}: the C++ compiler was killed, {toolchain.MORE_MEMORY}") from error
        raise CompileFailed(f"{where}: AOTInductor failed ({type(error).__name__}): {error}") from error
    library = _only(files, ".wrapper.so", where)
    metadata = _only(files, ".wrapper_metadata.json", where)
    if weights == "packed" and _linears(module):
        source = Path(_only(files, ".wrapper.cpp", where)).read_text(encoding="utf-8")
        if PACKED_MARK not in source:
            raise CompileFailed(f"{where}: weights were not packed ({PACKED_MARK} is absent from the generated code)")
    (folder / FOLDER).mkdir(parents=True)
    shutil.copyfile(library, folder / LIBRARY)
    shutil.copyfile(metadata, folder / METADATA)
    if weights == "shared":
        _check_outside(module, folder, Path(library).parent, where)


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


def _check_outside(module: fx.GraphModule, folder: Path, place: Path, where: str) -> None:
    """Every weight the graph reads must be one the engine asks for.

    Asked of a copy in `place`, which may hold code: the linker never unloads a library, and a process ends in a
    segmentation fault if the file under one is overwritten, which may happen to a file in the cache.
    """
    wanted = {str(n.target) for n in module.graph.nodes if n.op == "get_attr" and n.users}
    with TemporaryDirectory(prefix="voicehub-aot-", dir=place) as scratch:
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


@dataclass(frozen=True)
class _Bound:
    """A loader with the tensors it reads its weights from.

    torch keeps a handle of every tensor that it binds, for ever; so these are bound again and again over other memory.
    """

    loader: Any
    tensors: dict[str, torch.Tensor]

    def read(self, constants: Mapping[str, torch.Tensor], where: str) -> None:
        missing = sorted(set(self.tensors) - set(constants))
        if missing:
            raise ArtifactCorrupt(f"{where}: the weight file lacks {', '.join(missing[:6])}; rebuild the artifact")
        for name, tensor in self.tensors.items():
            tensor.data = constants[name]
        if self.tensors:
            self.loader.load_constants(self.tensors, False, True, user_managed=True)

    def let_go(self) -> None:
        with torch.inference_mode(False):  # whoever drops a runtime may be in it
            for tensor in self.tensors.values():
                tensor.data = torch.empty(0, device="cpu")


class AotiStage:
    """One opened stage. Its constants are kept alive here because the library holds bare pointers to them."""

    def __init__(self, bound: _Bound, idle: list[_Bound]) -> None:
        """idle: where the next one to open this library finds the loader when this stage is gone."""
        self._run = bound.loader.run
        self._bound, self._idle = bound, idle

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """~4 us on top of the stage's own work. Thread-safe; calls beyond `runners` queue inside."""
        if torch._C._get_fp32_precision_getter("mkldnn", "matmul") == "bf16":
            raise OptionUnsupported(
                f"{NAME}: this process computes float32 products in bfloat16, which is not what parity was proven for; "
                "torch.set_float32_matmul_precision('high') or 'highest' keeps float32 on the CPU"
            )
        return self._run(inputs)  # type: ignore[no-any-return]

    def __del__(self) -> None:
        if self._bound.tensors and not sys.is_finalizing():
            self._bound.let_go()
            self._idle.append(self._bound)


def open_stage(source: Source, runners: int) -> AotiStage:
    """Raises ArtifactCorrupt if the library or a weight of it is missing or cannot be read."""
    check()
    where, library = source.where, f"{source.path}/{LIBRARY.as_posix()}"
    if library not in source.digests:
        raise ArtifactCorrupt(f"{where}: {LIBRARY} is missing; rebuild the artifact")
    with _opening:
        folder = pinned(source.root, source.path, source.digests[library])
        idle = _idle.setdefault((folder, runners), [])
        reads = bool(source.constants or source.outside)
        if idle:
            bound = idle.pop()
        else:
            before = memory.mappings(source.root / library)
            try:
                loader = torch._C._aoti.AOTIModelPackageLoader(folder, "model", False, runners, -1)
                names = loader.get_constant_fqns() if reads else []
                _check_counts(loader, source)
            except (RuntimeError, ValueError) as error:  # ValueError: a library that does not describe its arguments
                if toolchain.noexec(source.root):
                    raise EngineUnavailable(f"{where}: {source.root} is mounted noexec; move the artifact") from error
                raise ArtifactCorrupt(f"{where}: the library cannot be opened ({_first_line(error)})") from error
            if not reads:
                unmap_packed_weights(source.root / library, before)
            bound = _Bound(loader, {name: torch.empty(0, device="cpu") for name in names})
    bound.read(source.constants, where)
    return AotiStage(bound, idle)


def _check_counts(loader: Any, source: Source) -> None:
    """A library called with fewer tensors than it was made for reads beyond them. Raises ArtifactCorrupt."""
    made_for = [treespec_loads(spec).num_leaves for spec in loader.get_call_spec()]
    wanted = [len(source.inputs), len(source.outputs)]
    if source.outputs and made_for != wanted:
        raise ArtifactCorrupt(
            f"{source.where}: the library takes {made_for[0]} tensors and gives {made_for[1]}, the manifest says "
            f"{wanted[0]} and {wanted[1]}; rebuild the artifact"
        )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


@dataclass(frozen=True)
class _Pin:
    """A library that the dynamic linker knows. alone: the file had one name only when it was opened."""

    digest: str
    name: str
    root: int  # descriptor of the artifact's folder
    alone: bool


_opening = threading.Lock()  # over the tables below and the list of this process's mappings
_pins: dict[tuple[int, int], _Pin] = {}  # by the library's device and inode
_spellings = itertools.count(1)
_idle: dict[tuple[str, int], list[_Bound]] = {}  # by the pinned name and the number of runners


def pinned(root: Path, path: str, digest: str) -> str:
    """A name of the folder `root`/`path` that stays right when it is moved, and that no other folder ever gets.

    digest: sha256 of the library inside. The dynamic linker never unloads an engine (its C++ has unique symbols, and
    thread-local ones of every thread that called it) and knows it by the path it was opened by, where the engine also
    looks for its packed weights. Under its plain name, an artifact that was moved would not open again, and one that
    was replaced would run the code of its predecessor. So the name starts at a descriptor of the artifact's folder,
    one an artifact, which is never closed, and is spelled as no earlier one was. Raises ArtifactCorrupt if the very
    file in use was overwritten. Linux only; elsewhere the plain name has to do.
    """
    if not Path("/proc/self/fd").is_dir():
        return str(root / path)
    library = root / path / LIBRARY
    status = library.stat()
    key = (status.st_dev, status.st_ino)
    if key not in _pins:
        _forget_deleted()
        folder = _descriptor(root)
        name = f"/proc/self/fd/{folder}{_spelling(next(_spellings))}/{path}"
        _pins[key] = _Pin(digest, name, folder, status.st_nlink == 1)
    if _pins[key].digest != digest:
        raise ArtifactCorrupt(f"{library}: was overwritten while this process had it open; restart the process")
    return _pins[key].name


def _spelling(number: int) -> str:
    """Slashes and dots that lead nowhere, different for every number, and few: paths are at most 4095 bytes."""
    return "".join("/." if bit == "1" else "/" for bit in f"{number:b}")


def _descriptor(root: Path) -> int:
    """The one that is open already, or a new one."""
    status = root.stat()
    for folder in {pin.root for pin in _pins.values()}:
        known = os.fstat(folder)
        if (known.st_dev, known.st_ino) == (status.st_dev, status.st_ino):
            return folder
    return os.open(root, os.O_RDONLY)


def _forget_deleted() -> None:
    """Let go of artifacts that nobody can open again: their folder is gone, and so are its files.

    The descriptor stays open, one an artifact: its number is part of the names by which the linker knows libraries that
    it never unloads, and under a number given anew their code would be run for another artifact's.
    """
    for folder in {pin.root for pin in _pins.values()}:
        mine = [key for key, pin in _pins.items() if pin.root == folder]
        if os.fstat(folder).st_nlink == 0 and all(_pins[key].alone for key in mine):
            for key in mine:
                name = _pins.pop(key).name
                for opened in [opened for opened in _idle if opened[0] == name]:
                    del _idle[opened]


def unmap_packed_weights(library: Path, before: Collection[memory.Mapping]) -> None:
    """Take out the mapping of a packed library's weights: the engine has copied them, and would keep it for ever.

    before: the library's mappings before it was opened once more. The weights lie behind the ELF image, to the end of
    the file; the library's own segments lie inside, and must stay.
    """
    size, image = library.stat().st_size, _image_end(library)
    for mapping in memory.mappings(library) - set(before):
        behind = mapping.offset >= image and mapping.offset + mapping.length >= size
        if mapping.permissions == "rw-p" and behind:
            memory.unmap(mapping)


def _image_end(library: Path) -> int:
    """Where the section headers end, which are an ELF file's last part."""
    with library.open("rb") as file:
        header = file.read(64)
    (table,) = struct.unpack_from("<Q", header, 0x28)
    size, count = struct.unpack_from("<HH", header, 0x3A)
    return int(table + size * count)
