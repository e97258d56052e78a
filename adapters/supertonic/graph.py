"""Reads Supertonic's released `vector_estimator.onnx`: weights under module paths, and what shapes do not tell.

The release has no other weight file. Convolutions, norms, biases and tokens keep their torch names in it. Weights of
linears lost theirs (`onnx::MatMul_3384`, [in, out], numbered differently in every export): they are found by the
node that consumes them, whose name still holds the module path, or by the bias added behind it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from voicehub_aot.errors import CheckpointMismatch, MissingDependency

STYLE_KEY = "style_key"  # our name for the conditional key bank, which has no torch name in the graph
INPUTS = ("noisy_latent", "text_emb", "style_ttl", "latent_mask", "text_mask", "current_step", "total_step")
SIBLINGS = {
    ("style_dp", "text_ids", "text_mask"): "duration_predictor.onnx",
    ("style_ttl", "text_ids", "text_mask"): "text_encoder.onnx",
    ("latent",): "vocoder.onnx",
}
PREFIXES = {"vector_estimator.tts.ttl.": 3, "tts.ttl.": 2}
FIELD = "vector_field."
STYLE_BLOCK, TEXT_BLOCK = FIELD + "main_blocks.5.attention.", FIELD + "main_blocks.3.attn."
STYLE_KEY_FALLBACKS = ("/vector_estimator/Expand_output_0", "/Expand_output_0")
PASSED_THROUGH = ("Identity", "Cast", "Expand", "Tile", "Unsqueeze", "Concat")  # Concat: the conditional half is first
QUANTISED = {
    *("DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv"),
    *("MatMulNBits", "QGemm"),
}
FORMULAS = ("attn.theta", "attn.increments")
LINEAR_NODE = re.compile(r"/(?:vector_estimator/)?(vector_field/\S+/linear)/(?:MatMul|Gemm)")
DEPTHWISE = re.compile(r"vector_field\.(main_blocks\.\d+|last_convnext)\.convnext\.(\d+)\.dwconv\.weight")


class Graph:
    """A loaded graph with its edges: constants by name, producers and consumers of each value."""

    def __init__(self, path: Path) -> None:
        try:
            import onnx
        except ImportError as error:
            raise MissingDependency(f"{path}: reading it needs onnx; pip install 'voicehub-aot[onnx]'") from error
        try:
            graph = onnx.load(str(path)).graph
        except Exception as error:  # protobuf's, onnx's and plain OS errors
            raise CheckpointMismatch(f"{path}: not a readable ONNX file ({error!r}); download it again") from error
        self.path = path
        self.nodes: list[Any] = list(graph.node)
        self.inputs = [i.name for i in graph.input]
        self.initializers: dict[str, Any] = {i.name: i for i in graph.initializer}
        self.producer: dict[str, Any] = {name: node for node in self.nodes for name in node.output}
        self.consumers: dict[str, list[Any]] = defaultdict(list)
        for node in self.nodes:
            for name in node.input:
                self.consumers[name].append(node)

    def constant(self, name: str) -> np.ndarray[Any, Any] | None:
        """The value of an initializer or Constant, also behind Identity (how an exporter stores equal tensors once)."""
        from onnx import helper, numpy_helper

        if name in self.initializers:
            try:
                return numpy_helper.to_array(self.initializers[name])
            except Exception as error:  # too few bytes, a dtype that numpy lacks
                raise CheckpointMismatch(f"{self.path}: {name} is unreadable ({error}); download it again") from error
        node = self.producer.get(name)
        if node is not None and node.op_type == "Identity":
            return self.constant(node.input[0])
        if node is not None and node.op_type == "Constant":
            value = helper.get_attribute_value(node.attribute[0])
            return numpy_helper.to_array(value) if node.attribute[0].name == "value" else np.asarray(value)
        return None

    def scalar(self, name: str) -> float | None:
        value = self.constant(name)
        return float(value.item()) if value is not None and value.size == 1 else None

    def attribute(self, node: Any, name: str, default: Any) -> Any:
        from onnx import helper

        return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)

    def source(self, name: str) -> np.ndarray[Any, Any] | None:
        """The constant that `name` repeats, casts or begins with; None if it is computed."""
        value, node = self.constant(name), self.producer.get(name)
        if value is None and node is not None and node.op_type in PASSED_THROUGH:
            return self.source(node.input[0])
        return value


def read_graph(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """-> (hyperparameters that shapes do not tell, weights under released names, linears [out, in], `style_key`)."""
    graph = Graph(path)
    if not set(INPUTS) <= set(graph.inputs):
        found = SIBLINGS.get(tuple(sorted(graph.inputs)), "another graph")
        raise CheckpointMismatch(f"{path}: this is {found}, with inputs {graph.inputs!r}; wanted vector_estimator.onnx")
    names = [*graph.initializers, *(n.output[0] for n in graph.nodes if n.op_type == "Identity")]
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in names)), None)
    if prefix is None:
        raise CheckpointMismatch(f"{path}: no weight is named {' or '.join(p + '…' for p in PREFIXES)}")
    if quantised := sorted({n.op_type for n in graph.nodes} & QUANTISED):
        raise CheckpointMismatch(f"{path}: a quantised graph ({', '.join(quantised)}); give the released float one")
    linears = _linears(graph, prefix)
    arrays: dict[str, np.ndarray[Any, Any] | None] = {
        name: graph.constant(name) for name in names if name.startswith(prefix) and not name.endswith(FORMULAS)
    }
    arrays |= {f"{prefix}{module}.weight": weight for module, (_, weight) in linears.items()}
    arrays[STYLE_KEY] = _style_key(graph, linears)
    weights = {name: _tensor(path, name, array) for name, array in arrays.items() if array is not None}
    return _facts(str(path), graph, prefix, linears), weights


def _tensor(path: Path, name: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    """In the graph's own dtype, so that what is not a float is seen; bfloat16, unknown to numpy, becomes float32."""
    if array.dtype.name == "bfloat16":
        array = array.astype(np.float32)
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except TypeError as error:
        raise CheckpointMismatch(
            f"{path}: {name} is {array.dtype.name}; give the graph that was not quantised"
        ) from error


Linears = Mapping[str, tuple[Any, np.ndarray[Any, Any]]]


def _linears(graph: Graph, prefix: str) -> Linears:
    """Module path -> (node, weight [out, in])."""
    found = {}
    for node in graph.nodes:
        weight = graph.constant(node.input[1]) if node.op_type in ("MatMul", "Gemm") else None
        if weight is None or weight.ndim != 2:
            continue
        match = LINEAR_NODE.fullmatch(node.name)
        biases = [name for user in graph.consumers[node.output[0]] if user.op_type == "Add" for name in user.input]
        biases += node.input[2:]
        named = [b.removeprefix(prefix).removesuffix(".bias") for b in biases if b.endswith(".linear.bias")]
        module = match[1].replace("/", ".") if match else next(iter(named), None)
        if module is not None:
            found[module] = (node, weight if graph.attribute(node, "transB", 0) else weight.T)
    return found


def _style_key(graph: Graph, linears: Linears) -> np.ndarray[Any, Any] | None:
    """[1, n, width]: what feeds the key projection of the first style attention."""
    consumer = linears.get(STYLE_BLOCK + "W_key.linear")
    candidates = [graph.source(consumer[0].input[0])] if consumer else []
    candidates += [graph.constant(name) for name in STYLE_KEY_FALLBACKS]
    value = next((c for c in candidates if c is not None and c.ndim >= 2), None)
    return None if value is None else value.reshape(-1, *value.shape[-2:])[:1]


def _facts(where: str, graph: Graph, prefix: str, linears: Linears) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    theta, increments = (graph.constant(f"{prefix}{TEXT_BLOCK}{name}") for name in ("theta", "increments"))
    if increments is not None:
        facts["max_positions"] = int(increments.size)
    if theta is not None:
        facts |= _rotary(where, theta.reshape(-1), linears)
    epsilons = {graph.attribute(n, "epsilon", 1e-5) for n in graph.nodes if n.op_type == "LayerNormalization"}
    if len(epsilons) == 1:
        facts["layer_norm_eps"] = float(f"{epsilons.pop():.6g}")  # float32 in the file
    heads = _heads(graph, linears.get(STYLE_BLOCK + "W_query.linear"))
    if heads is not None:
        facts["style_n_heads"] = heads
    facts |= _dilations(where, graph, prefix)
    _check_score_scale(where, graph, linears)
    if any("uncond_masker" in name for name in graph.initializers):
        facts["guidance_cond"], facts["guidance_uncond"] = _guidance(where, graph)
    return facts


def _rotary(where: str, theta: np.ndarray[Any, Any], linears: Linears) -> dict[str, Any]:
    """theta_j = scale * base ** (-j / half), one for each pair of a head's channels."""
    half, scale = theta.size, float(theta[0]) if theta.size else 0.0
    if not (np.isfinite(theta).all() and (theta > 0).all() and half):
        raise CheckpointMismatch(f"{where}: theta {theta!r} is not a row of positive numbers; download it again")
    base = round(float(theta[0] / theta[-1]) ** (half / (half - 1))) if half > 1 else 10000
    if not np.allclose(theta, scale * base ** (-np.arange(half) / half), rtol=1e-4):
        raise CheckpointMismatch(f"{where}: theta {theta!r} is not {scale!r} * {base!r} ** (-j / {half})")
    facts = {"rotary_scale": scale, "rotary_base": float(base)}
    query = linears.get(TEXT_BLOCK + "W_query.linear")
    return facts | ({"text_n_heads": len(query[1]) // (2 * half)} if query else {})


def _heads(graph: Graph, query: tuple[Any, Any] | None) -> int | None:
    """From the Reshape or Split that follows a query projection and its bias; None if there is neither."""
    if query is None:
        return None
    after = [n for add in graph.consumers[query[0].output[0]] for n in graph.consumers[add.output[0]]]
    for node in after:
        if node.op_type == "Split":
            return len(node.output)
        if node.op_type == "Reshape":
            shape, concat = graph.constant(node.input[1]), graph.producer.get(node.input[1])
            if shape is not None and shape.size == 4:
                return int(shape[2])
            if concat is not None and concat.op_type == "Concat" and len(concat.input) == 4:
                heads = graph.scalar(concat.input[2])
                return None if heads is None else int(heads)
    return None


def _dilations(where: str, graph: Graph, prefix: str) -> dict[str, Any]:
    """dilations_0 of the first stack; every stack must be as upstream's configuration says."""
    stacks: dict[str, dict[int, int]] = defaultdict(dict)
    for node in graph.nodes:
        match = DEPTHWISE.fullmatch(node.input[1].removeprefix(prefix)) if node.op_type == "Conv" else None
        if match:
            stacks[match[1]][int(match[2])] = graph.attribute(node, "dilations", [1])[0]
    first = tuple(d for _, d in sorted(stacks["main_blocks.0"].items()))
    for name, stack in stacks.items():
        repeated = name.startswith("main_blocks.") and int(name.rpartition(".")[2]) % 6 == 0
        wanted = first if repeated else (1,) * len(stack)
        if tuple(d for _, d in sorted(stack.items())) != wanted:
            raise CheckpointMismatch(f"{where}: dilations of {name} are {stack!r}, wanted {wanted!r}")
    return {"dilations_0": first} if first else {}


def _check_score_scale(where: str, graph: Graph, linears: Linears) -> None:
    """Scores are divided by the root of the condition's width; a graph that says otherwise is not this model."""
    keys = [linears[block + "W_key.linear"] for block in (TEXT_BLOCK, STYLE_BLOCK) if block + "W_key.linear" in linears]
    wanted = [weight.shape[1] ** 0.5 for _, weight in keys]
    for node in graph.nodes:
        producer = graph.producer.get(node.input[0]) if node.op_type == "Div" else None
        if producer is None or producer.op_type != "MatMul":
            continue
        divisor = graph.scalar(node.input[1])
        if divisor is not None and not any(abs(divisor - w) < 1e-3 for w in wanted):
            raise CheckpointMismatch(f"{where}: {node.name} divides scores by {divisor!r}, wanted one of {wanted!r}")


def _guidance(where: str, graph: Graph) -> tuple[float, float]:
    """The two factors of `4 * conditional - 3 * unconditional`."""
    for node in graph.nodes:
        if node.op_type == "Sub":
            sides = [graph.producer.get(name) for name in node.input]
            factors = [_factor(graph, side) for side in sides if side is not None and side.op_type == "Mul"]
            if len(factors) == 2 and factors[0] is not None and factors[1] is not None:
                return factors[0], factors[1]
    raise CheckpointMismatch(f"{where}: has unconditional tokens, but no `a * conditional - b * unconditional`")


def _factor(graph: Graph, product: Any) -> float | None:
    return next((s for s in map(graph.scalar, product.input) if s is not None), None)
