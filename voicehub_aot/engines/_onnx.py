"""Stage -> ONNX graph, for every engine that reads ONNX.

The graph has the stage's own names for inputs, outputs and sizes, standard operators only, and its weights by
reference: each initializer points to its tensor in the artifact's one weight file. ONNX forbids paths that leave the
graph's folder, so graphs lie beside that file, at the artifact's root.

Engines that run such a graph take FORMAT and the functions of `Engine` from here, so that they find each other's
graphs in the cache.

torch's exporter is used with translations of ours. A linear layer becomes Gemm with the weight as it is stored; by
default it becomes Transpose and MatMul, and folding the transpose would make a second copy of every weight. Attention
stays one operator.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from voicehub_aot.artifacts import store
from voicehub_aot.engines import Source, StageCode, Weights, code_digest
from voicehub_aot.errors import ArtifactCorrupt, CompileFailed, MissingDependency
from voicehub_aot.spec.target import Target

if TYPE_CHECKING:
    import onnx_ir as ir

FORMAT = "onnx"
OPSET = 23  # the first one with attention as an operator
MODEL = "stage.onnx"
FOLD_AT_MOST = 8192  # elements of a computed constant: shapes and index tables, no weights

TENSOR_NAMES = {"float32": 1, "int64": 7, "bool": 9}  # onnx.TensorProto.DataType


def require() -> None:
    """Raises MissingDependency unless graphs can be written."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            f"exporting ONNX needs onnx and onnxscript: pip install 'voicehub-aot[onnx]' ({error})"
        ) from error


def versions() -> dict[str, str]:
    """Of everything that shapes a graph."""
    from importlib.metadata import version

    return {name: version(name) for name in ("onnx", "onnx-ir", "onnxscript")} | {"opset": str(OPSET)}


def reads_weight_file(weights: Weights) -> bool:
    return True


def settings(code: StageCode, weights: Weights, target: Target) -> dict[str, Any]:
    """Everything but the stage that shapes a graph."""
    require()
    return {"code": code_digest(__file__), **versions()}


def compile_stage(code: StageCode, weights: Weights, target: Target, folder: Path) -> None:
    write(code, folder)


def install(compiled: Path, root: Path, name: str, target: Target) -> str:
    return place(compiled, root, name)


def write(code: StageCode, folder: Path, composed: Collection[torch._ops.OpOverload] = ()) -> None:
    """folder/stage.onnx, its weights named but not yet placed. Raises CompileFailed or MissingDependency.

    composed: operators to be written as the operations they are composed of.
    """
    require()
    import onnx
    import onnx_ir

    try:
        with _quiet("torch.onnx", "onnx_ir", "onnxscript"):
            model = _export(code, composed)
            _simplify(model, code.weights)
        _name_sizes(model, code)
        _leave_weights_outside(model, code)
        proto = onnx_ir.serde.serialize_model(model)
        onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True)
    except Exception as error:  # the exporter and the checker raise a dozen unrelated types
        raise CompileFailed(f"{code.name}: ONNX export failed ({type(error).__name__}): {error}") from error
    foreign = sorted({f"{n.domain}.{n.op_type}" for n in proto.graph.node if n.domain not in ("", "ai.onnx")})
    if foreign or proto.functions:
        raise CompileFailed(f"{code.name}: ONNX export left operators outside the standard: {', '.join(foreign)}")
    folder.mkdir(parents=True)
    onnx.save(proto, folder / MODEL)


def place(compiled: Path, root: Path, name: str) -> str:
    """The graph at the artifact's root, its weights placed in the weight file there; checked. Returns its name."""
    import onnx

    source = compiled / MODEL if compiled.is_dir() else compiled
    proto = onnx.load(source, load_external_data=False)
    places = store.tensor_places(root / store.WEIGHTS)
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            offset, length = places[tensor.name]
            del tensor.external_data[:]
            for key, value in (("location", store.WEIGHTS), ("offset", offset), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
    path = f"{name}.onnx"
    onnx.save(proto, root / path)
    onnx.checker.check_model(root / path)
    return path


def check_border(source: Source, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> None:
    """Raises ArtifactCorrupt unless the opened graph's inputs and outputs, rank by name, are those of the stage."""
    for what, have, wanted in (("inputs", inputs, source.inputs), ("outputs", outputs, source.outputs)):
        ranks = {value.name: len(value.shape) for value in wanted}
        if dict(have) != ranks:
            raise ArtifactCorrupt(
                f"{source.where}: the graph's {what} are {dict(have)!r} (rank by name), the manifest says {ranks!r}; "
                "rebuild the artifact"
            )


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """These loggers tell of optional packages they do without, and of every constant they leave alone."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _translations() -> dict[Any, Any]:
    """Operations that are translated our way."""
    from onnxscript import opset23

    op: Any = opset23

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        """Gemm over flattened rows, weight and bias as they are stored."""
        rank = len(x.shape)
        if rank == 2:
            return op.Gemm(x, weight, bias, transB=1)
        rows = op.Gemm(op.Flatten(x, axis=rank - 1), weight, bias, transB=1)
        width = op.Constant(value_ints=[weight.shape[0]])
        return op.Reshape(rows, op.Concat(op.Shape(x, start=0, end=-1), width, axis=0))

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        """One operator. onnxruntime 1.32 takes no mask that leaves the queries to broadcasting."""
        if attn_mask is not None:
            ones = op.Constant(value_ints=[1, 1])
            one = op.Constant(value_ints=[1])
            attn_mask = op.Expand(attn_mask, op.Concat(ones, op.Shape(query, start=2, end=3), one, axis=0))
        result, *_ = op.Attention(query, key, value, attn_mask, is_causal=int(is_causal), scale=scale)
        return result

    def depthwise(x: Any, taps: Any, bias: Any, extent: Any, dilation: int) -> Any:
        """Frames gathered once, edges replicated at each row's own end, then a convolution.

        In two dimensions: onnxruntime 1.32 has a depthwise kernel for these alone. One index into flat frames: its
        GatherND copies slower.
        """
        k, D = (int(n) for n in taps.shape)
        reach = k // 2 * dilation
        zero, one, axis_1, axis_2 = (op.Constant(value_int=0), op.Constant(value_int=1),
                                     op.Constant(value_ints=[1]), op.Constant(value_ints=[2]))  # fmt: skip
        T = op.Squeeze(op.Shape(x, start=1, end=2))
        frames = op.Range(op.Constant(value_int=-reach), op.Add(T, op.Constant(value_int=reach)), one)
        source = op.Min(op.Max(frames, zero), op.Unsqueeze(op.Sub(extent, one), axis_1))
        rows = op.Range(zero, op.Squeeze(op.Shape(x, start=0, end=1)), one)
        flat = op.Add(op.Unsqueeze(op.Mul(rows, T), axis_1), source)
        padded = op.Gather(op.Reshape(x, op.Constant(value_ints=[-1, D])), flat, axis=0)
        image = op.Unsqueeze(op.Transpose(padded, perm=[0, 2, 1]), axis_2)
        weight = op.Reshape(op.Transpose(taps, perm=[1, 0]), op.Constant(value_ints=[D, 1, 1, k]))
        out = op.Conv(image, weight, bias, group=D, dilations=[1, dilation], kernel_shape=[1, k])
        return op.Transpose(op.Squeeze(out, axis_2), perm=[0, 2, 1])

    return {
        torch.ops.aten.linear.default: linear,
        torch.ops.aten.scaled_dot_product_attention.default: attention,
        torch.ops.voicehub_aot.depthwise.default: depthwise,
    }


def _export(code: StageCode, composed: Collection[torch._ops.OpOverload]) -> ir.Model:
    with torch.no_grad():
        program = torch.onnx.export(
            code.program,
            dynamo=True,
            opset_version=OPSET,
            input_names=[v.name for v in code.inputs],
            output_names=[v.name for v in code.outputs],
            custom_translation_table={o: t for o, t in _translations().items() if o not in composed},
            optimize=False,
            verbose=False,
        )
    assert program is not None
    return program.model


def _simplify(model: ir.Model, weights: Collection[str]) -> None:
    """Inline, fold what follows from constants, drop the unused.

    Weights are hidden meanwhile: nothing folded may follow from one, which a reweight would change.
    """
    from onnx_ir import passes
    from onnxscript.optimizer import fold_constants, inline

    common: Any = passes.common
    hidden = {value: value.const_value for name, value in model.graph.initializers.items() if name in weights}
    for value in hidden:
        value.const_value = None
    unused = passes.Sequential(
        common.RemoveUnusedNodesPass(), common.RemoveUnusedFunctionsPass(), common.RemoveUnusedOpsetsPass()
    )
    inline(model)
    for _ in range(2):
        fold_constants(model, onnx_shape_inference=True, input_size_limit=FOLD_AT_MOST, output_size_limit=FOLD_AT_MOST)
        unused(model)
    _read_sizes_once(model)
    passes.Sequential(
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),  # of constants: weights that are equal today need not stay so
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)
    for value, tensor in hidden.items():
        value.const_value = tensor


def _read_sizes_once(model: ir.Model) -> None:
    """Sizes that are equal by torch's symbols are read off one value, so that what follows from them is equal too."""
    import onnx_ir

    dims = (dim for value in model.graph.inputs for dim in value.shape or ())
    known = {str(dim.value) for dim in dims if isinstance(dim, onnx_ir.SymbolicDim)}
    first: dict[tuple[str, ...], ir.Value] = {}
    for node in model.graph:
        value = node.inputs[0] if node.op_type == "Shape" else None
        if value is None or value.shape is None:
            continue
        given = {name: node.attributes[name].as_int() for name in ("start", "end") if name in node.attributes}
        sizes = tuple(str(size) for size in list(value.shape)[given.get("start", 0) : given.get("end")])
        if all(size in known or size.isdecimal() for size in sizes):
            old = node.outputs[0]
            kept = first.setdefault(sizes, old)
            if kept is not old:
                old.replace_all_uses_with(kept)


def _name_sizes(model: ir.Model, code: StageCode) -> None:
    """Sizes that vary get the names the stage gives them, in place of torch's symbols."""
    import onnx_ir

    names: dict[str, str] = {}
    for value, spec in zip(model.graph.inputs, code.inputs, strict=True):
        assert value.shape is not None
        for size, called in zip(value.shape, spec.shape, strict=True):
            if isinstance(size, onnx_ir.SymbolicDim) and isinstance(called, str) and called.isidentifier():
                names[str(size.value)] = called

    def renamed(size: int | ir.SymbolicDim) -> int | str | None:
        if isinstance(size, int) or size.value is None:
            return size if isinstance(size, int) else None
        return re.sub(r"[A-Za-z_]\w*", lambda word: names.get(word[0], word[0]), str(size.value))

    for value in (*model.graph.inputs, *(v for node in model.graph.all_nodes() for v in node.outputs)):
        if value.shape is not None:
            value.shape = onnx_ir.Shape([renamed(size) for size in value.shape])


def _leave_weights_outside(model: ir.Model, code: StageCode) -> None:
    """Every weight becomes a reference by name into the weight file."""
    import onnx_ir

    for value in model.graph.initializers.values():
        tensor = value.const_value
        if value.name in code.weights and tensor is not None:
            value.const_value = onnx_ir.ExternalTensor(
                store.WEIGHTS,
                0,
                tensor.nbytes,
                tensor.dtype,
                shape=onnx_ir.Shape(tensor.shape.numpy()),
                name=str(value.name),
            )
