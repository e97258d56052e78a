"""Who may import whom: downwards only. And what an import may do: nothing but define names."""

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAPPED = ("adapters", "kernels", "artifacts")  # folders beside voicehub_aot that install inside it

# The floors, lowest first: a folder, or file, may import itself and what lies on lower floors.
FLOORS = (
    {"errors", "progress"},
    {"spec", "kernels"},
    {"artifacts"},
    {"engines"},
    {"runtime"},
    {"proof"},
    {"compiler"},
    {"deploy"},
    {"cli"},
)
LAW = {name: set().union(*FLOORS[:height]) for height, floor in enumerate(FLOORS) for name in floor}
LAW["adapters"] = {"spec", "kernels", "errors"}
LAW["__init__"] = {"adapters", "runtime", "errors"}
for above in ("compiler", "deploy", "cli"):
    LAW[above] |= {"adapters", "__init__"}

# Absent from a plain installation, or too slow to load for those who do not use it.
OPTIONAL = {
    "onnx",
    "onnxruntime",
    "openvino",
    "onnxscript",
    "triton",
    "tensorrt",
    "jinja2",
    "matplotlib",
    "huggingface_hub",
    *("pocketsphinx", "jiwer", "whisper", "speechmos", "distillmos", "resemblyzer", "librosa"),
}
IMPORTED_WHEN_USED = {"artifacts/charts.py": {"matplotlib"}}  # files that are themselves imported inside a function

# What production never loads.
NOT_AT_RUN_TIME = [
    *("torch._inductor", "torch._dynamo", "typer", "rich", "matplotlib", "jinja2", "onnx"),
    *(f"voicehub_aot.{folder}" for folder in ("adapters", "proof", "compiler", "deploy", "cli")),
]


def sources():
    return sorted(path for folder in ("voicehub_aot", *MAPPED) for path in (ROOT / folder).rglob("*.py"))


def layer_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] in MAPPED else parts[1]


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "voicehub_aot" else ("voicehub_aot", *parts)
    return ".".join(parts).removesuffix(".__init__")


def imports_of(tree):
    """(line, dotted name) of every import, those inside functions too. A relative one starts with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{origin}.{alias.name}") for alias in node.names)


def imported_layer(name):
    """ "voicehub_aot.kernels.attention.attention" -> "kernels"; names of the package itself -> "__init__"."""
    part = name.split(".")[1] if "." in name else "__init__"
    return part if part in LAW else "__init__"


def wrong_imports(path, tree):
    allowed = LAW[layer_of(path)] | {layer_of(path)}
    ours = [(line, name) for line, name in imports_of(tree) if name.split(".")[0] == "voicehub_aot"]
    return [f"{path.name}:{line} imports {name}" for line, name in ours if imported_layer(name) not in allowed]


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_go_down_the_layers(path):
    assert layer_of(path) in LAW, f"{path.name} lies in a new folder: say in LAW what that may import"
    assert wrong_imports(path, ast.parse(path.read_text())) == []


def test_the_layers_have_no_cycle():
    assert next(iter(TopologicalSorter(LAW).static_order())) in FLOORS[0]


@pytest.mark.parametrize(
    "line",
    [
        "from voicehub_aot import adapters",
        "from voicehub_aot.compiler.build import build",
        "import voicehub_aot.compiler.split",
        "def f():\n    from voicehub_aot.compiler.export import export",
    ],
)
def test_an_upward_import_is_found(line):
    assert len(wrong_imports(ROOT / "voicehub_aot/runtime/load.py", ast.parse(line))) == 1


def all_sources():
    return [
        *sources(),
        *(path for folder in ("tests", "bench", "examples") for path in sorted(ROOT.glob(f"{folder}/**/*.py"))),
    ]


@pytest.mark.parametrize("path", all_sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_are_absolute_and_full(path):
    short = [
        name for _, name in imports_of(ast.parse(path.read_text())) if name.split(".")[0] in (*MAPPED, "engines", "")
    ]

    assert short == [], "write voicehub_aot.… in full"


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_optional_packages_are_imported_where_they_are_used(path):
    tree = ast.parse(path.read_text())
    at_import = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
    packages = {name.split(".")[0] for _, name in imports_of(at_import)}

    assert packages & OPTIONAL == IMPORTED_WHEN_USED.get(path.relative_to(ROOT).as_posix(), set())


def python(script, *arguments):
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_runtime_loads_no_model_code_no_compiler_and_no_report_tools():
    loaded = python("import sys, voicehub_aot, voicehub_aot.runtime.runtime; print(*sys.modules)").split()

    unwanted = {name for name in loaded for root in NOT_AT_RUN_TIME if name == root or name.startswith(f"{root}.")}
    assert unwanted == set()


def test_importing_the_package_loads_nothing_yet():
    loaded = python("import sys, voicehub_aot; print(*sys.modules)").split()

    assert [name for name in loaded if name.startswith("voicehub_aot.") or name == "torch"] == []


def test_help_loads_no_torch():
    code = "import sys; sys.argv[1:] = ['build', '--help']; from voicehub_aot.cli.commands import app; "
    loaded = python(code + "app(standalone_mode=False); print(*sys.modules)").split()

    assert "typer" in loaded
    assert {"torch", "numpy"} & set(loaded) == set()


# Each module is imported first in a fork of a process that has only third-party packages loaded.
IMPORT_EACH = """
import json, logging, os, random, sys
import jinja2, matplotlib.figure, numpy, onnx, pydantic, rich.console, rich.status, rich.table
import safetensors.torch, torch, typer

def state():
    return dict(
        threads=(torch.get_num_threads(), torch.get_num_interop_threads()),
        dtype=str(torch.get_default_dtype()),
        device=str(torch.get_default_device()),
        grad=torch.is_grad_enabled(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        precision=torch.get_float32_matmul_precision(),
        cudnn=(torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        mkldnn=torch.backends.mkldnn.enabled,
        random=(hash(random.getstate()), torch.get_rng_state().sum().item(), int(numpy.random.get_state()[1].sum())),
        handlers=len(logging.getLogger().handlers),
        environment=dict(os.environ),
        folder=os.getcwd(),
    )

for module in sys.argv[1:]:
    child = os.fork()
    if child:
        if os.waitpid(child, 0)[1]:
            print(json.dumps([module, "cannot be imported first"]), flush=True)
        continue
    before = state()
    __import__(module)
    after = state()
    for key in before:
        if before[key] != after[key]:
            print(json.dumps([module, key]), flush=True)
    sys.stdout.flush()
    os._exit(0)
"""


def test_importing_a_module_changes_nothing_and_prints_nothing():
    modules = [module_of(path) for path in sources() if path.stem != "__main__"]

    output = python(IMPORT_EACH, *modules)

    assert [json.loads(line) if line.startswith("[") else line for line in output.splitlines()] == []
