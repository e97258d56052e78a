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

# What each module, or package, may import from this package; every one may import itself.
LAYERS = {
    "errors": set(),
    "reading": set(),
    "kernels": {"errors"},
    "schedule": {"errors"},
    "guidance": {"errors"},
    "traits": {"errors"},
    "synthetic": {"errors"},
    "checkpoint": {"errors"},
    "hyperparameters": {"errors"},
    "target": {"errors"},
    "toolchain": {"errors"},
    "forks": {"errors"},
    "heap": set(),
    "program": {"errors"},
    "solver": {"program", "schedule", "errors"},
    "region": {"guidance", "errors"},
    "golden": {"synthetic", "errors"},
    "bucket": {"region", "errors"},
    "request": {"region", "errors"},
    "denoiser": {"request", "region", "errors"},
    "adapters": {
        "region",
        "schedule",
        "solver",
        "program",
        "guidance",
        "traits",
        "golden",
        "checkpoint",
        "hyperparameters",
    },
    "export": {"kernels", "bucket", "region", "errors"},
    "stage": {"export", "kernels", "bucket", "region", "errors"},
    "stacked": {"stage", "region"},
    "flops": {"stage"},
    "choice": {"errors"},
    "few_rows": {"engines", "kernels", "stage"},
    "engines": {"toolchain", "kernels", "bucket", "region", "program", "reading", "target", "errors"},
    "sampler": {"program", "guidance", "kernels", "errors"},
    "artifacts": {"program", "bucket", "reading", "region", "target", "errors"},
}
LAYERS["adapters"] |= {"kernels", "errors"}
LAYERS["staged"] = {"artifacts", "engines", "heap", "bucket", "region", "program", "errors"}
LAYERS["runtime"] = {"artifacts", "sampler", "staged", "denoiser", "request", "bucket", "region", "program"}
LAYERS["runtime"] |= {"guidance", "forks", "errors"}
LAYERS["loading"] = {"artifacts", "engines", "runtime", "staged", "region", "program", "target", "forks", "errors"}
LAYERS["loading"] |= {"heap"}
LAYERS["__init__"] = {"adapters", "loading", "runtime", "errors"}
LAYERS["recording"] = {"artifacts", "runtime", "reading", "region", "program", "errors"}
LAYERS["step_times"] = {"recording", "runtime", "region"}
LAYERS["noise"] = {"engines", "runtime", "region"}
LAYERS["parity"] = {"noise", "recording", "runtime", "artifacts", "region", "errors"}
LAYERS["verify"] = {"parity", "recording", "loading", "artifacts", "errors"}
LAYERS["options"] = {"engines", "choice", "bucket", "program", "target", "errors"}
LAYERS["ladder"] = {"stage", "bucket"}
LAYERS["jobs"] = {"options", "few_rows", "engines", "export", "stage", "stacked", "bucket", "region"}
LAYERS["engine_cache"] = {"errors", "jobs", "options", "engines", "artifacts", "target"}
LAYERS["compilation"] = {
    "toolchain",
    "engine_cache",
    "jobs",
    "options",
    "export",
    "engines",
    "artifacts",
    "region",
    "target",
    "errors",
}
LAYERS["assembly"] = {"compilation", "jobs", "options", "engines", "stage", "choice", "artifacts", "__init__"}
LAYERS["assembly"] |= {"flops", "ladder", "bucket", "program", "region"}
LAYERS["build"] = LAYERS["assembly"] | LAYERS["compilation"] | {"assembly", "few_rows", "loading", "runtime", "parity"}
LAYERS["build"] |= {"engines", "toolchain", "noise", "recording", "step_times", "verify"}
LAYERS["models"] = {"assembly", "build", "engine_cache", "adapters", "artifacts", "checkpoint", "golden", "program"}
LAYERS["models"] |= {"synthetic", "errors"}
LAYERS["replay"] = LAYERS["build"] | {"adapters", "build", "golden", "models"}
LAYERS["reweight"] = LAYERS["build"] | {"build", "models", "reading"}
LAYERS["settings"] = LAYERS["build"] | {"adapters", "build", "models"}
LAYERS["triton_model"] = {"__init__", "errors"}
LAYERS["bundle"] = {"artifacts", "engines", "region", "program", "guidance", "errors"}
LAYERS["sampling"] = LAYERS["build"] | {"build", "models"}
LAYERS["console"] = {"options", "errors"}
LAYERS["inspection"] = {"toolchain", "console", "engine_cache", "engines", "artifacts", "target", "bucket", "errors"}
LAYERS["cli"] = set(LAYERS)
LAYERS["__main__"] = {"cli"}

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
}
IMPORTED_WHEN_USED = {"artifacts/charts.py": {"matplotlib"}}  # files that are themselves imported inside a function

# What production never loads.
NOT_AT_RUN_TIME = [
    *("torch._inductor", "torch._dynamo", "typer", "rich", "matplotlib", "jinja2", "onnx"),
    *(f"voicehub_aot.{name}" for name in ("adapters", "export", "stage", "build", "models", "replay", "parity", "cli")),
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
    return part if part in LAYERS else "__init__"


def wrong_imports(path, tree):
    allowed = LAYERS[layer_of(path)] | {layer_of(path)}
    ours = [(line, name) for line, name in imports_of(tree) if name.split(".")[0] == "voicehub_aot"]
    return [f"{path.name}:{line} imports {name}" for line, name in ours if imported_layer(name) not in allowed]


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_imports_go_down_the_layers(path):
    assert layer_of(path) in LAYERS, f"{path.name} is new: say in LAYERS what it may import"
    assert wrong_imports(path, ast.parse(path.read_text())) == []


def test_the_layers_have_no_cycle():
    assert next(iter(TopologicalSorter(LAYERS).static_order())) == "errors"


@pytest.mark.parametrize(
    "line",
    [
        "from voicehub_aot import adapters",
        "from voicehub_aot.build import build",
        "import voicehub_aot.stage",
        "def f():\n    from voicehub_aot.export import export",
    ],
)
def test_an_upward_import_is_found(line):
    assert len(wrong_imports(ROOT / "voicehub_aot/runtime.py", ast.parse(line))) == 1


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
    loaded = python("import sys, voicehub_aot, voicehub_aot.runtime; print(*sys.modules)").split()

    unwanted = {name for name in loaded for root in NOT_AT_RUN_TIME if name == root or name.startswith(f"{root}.")}
    assert unwanted == set()


def test_importing_the_package_loads_nothing_yet():
    loaded = python("import sys, voicehub_aot; print(*sys.modules)").split()

    assert [name for name in loaded if name.startswith("voicehub_aot.") or name == "torch"] == []


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
