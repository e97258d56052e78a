"""Split a region's graph by binding time.

    value depends on        computed                                  stage
    nothing                 once, at build                            folded into the weights
    time only               one row per evaluation, at build          table
    request only            once per request                          prepare
    time and request        all evaluations at once, per request      prepare (its "mixed")
    state                   once per evaluation                       step

The split is one walk over the graph: a value is known when all its inputs are. A value that crosses a border is
stored there, unless it costs less to recompute than to read (`is_cheap`); sizes are read off whatever tensor is at
hand. `split` proves itself before it returns: the stages must give what the whole graph gives.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from voicehub_aot.compiler.export import example_sizes
from voicehub_aot.compiler.stages import Stage, Stages, attribute, deviation, run_stages, set_attribute
from voicehub_aot.errors import StageFailed
from voicehub_aot.spec.region import Binding, RegionSpec, TensorSpec

aten = torch.ops.aten
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default,
    aten.chunk.default, aten.unbind.int, aten.narrow.default, aten.alias.default, aten.detach.default,
    aten.lift_fresh_copy.default, aten.flatten.using_ints, aten.unflatten.int, aten.view_as.default,
    aten.expand_as.default, operator.getitem,
}  # fmt: skip
CASTS = {aten._to_copy.default, aten.to.dtype, aten.clone.default, aten.contiguous.default, aten.type_as.default}
FILLS = {aten.zeros_like.default, aten.ones_like.default, aten.full.default, aten.zeros.default, aten.ones.default,
         aten.scalar_tensor.default, aten.full_like.default}  # fmt: skip
SCALAR_ARITHMETIC = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.neg.default, aten.rsub.Scalar,
                     aten.add.Scalar, aten.mul.Scalar}  # fmt: skip
INDEX_ARITHMETIC = {
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor,
    aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.minimum.default, aten.maximum.default,
    aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor, aten.eq.Tensor, aten.lt.Scalar, aten.le.Scalar,
    aten.gt.Scalar, aten.ge.Scalar, aten.eq.Scalar, aten.bitwise_and.Tensor, aten.bitwise_not.default,
    aten.bitwise_or.Tensor, aten.logical_and.default, aten.logical_not.default, aten.logical_or.default,
}  # fmt: skip
MIXED = Binding.TIME | Binding.REQUEST


def is_cheap(node: fx.Node) -> bool:
    """True for what costs less to recompute than to read back: views, casts, fills, index and scalar arithmetic."""
    if node.op != "call_function":
        return False
    target = node.target
    if target in VIEWS or target in CASTS or target in FILLS:
        return True
    if target in SCALAR_ARITHMETIC and len(node.all_input_nodes) == 1:
        return True
    value = node.meta.get("val")
    is_index = isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.bool)
    return is_index and target in INDEX_ARITHMETIC


def value_name(node: fx.Node) -> str:
    """Region inputs keep their name; computed values have the graph's."""
    return str(node.target) if node.op == "placeholder" else node.name


def is_size(node: fx.Node) -> bool:
    """A number that follows from tensor sizes: it is known as soon as any tensor is."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat)


def is_check(node: fx.Node) -> bool:
    """An assertion left by the exporter; it computes nothing."""
    return node.op == "call_function" and not node.users


def bindings(graph: fx.Graph, spec: RegionSpec) -> dict[fx.Node, Binding]:
    """When each node's value is known: the union over its inputs. Sizes are known with the request."""
    known: dict[fx.Node, Binding] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = Binding[spec.input(node.target).binding]
        elif is_size(node):
            known[node] = Binding.REQUEST
        else:
            known[node] = Binding.CONSTANT
            for source in node.all_input_nodes:
                known[node] |= known[source]
    return known


class _Split:
    """The state of one split: the source graph, what is known when, and what has been folded so far."""

    def __init__(self, source: fx.GraphModule, spec: RegionSpec, symbols: Mapping[str, str]) -> None:
        self.source, self.spec, self.symbols = source, spec, symbols
        self.known = bindings(source.graph, spec)
        self.folded: dict[str, torch.Tensor] = {}
        self._folded_values: dict[fx.Node, torch.Tensor] = {}

    def needs(self, targets: Iterable[fx.Node], own: Callable[[fx.Node], bool]) -> tuple[set[fx.Node], set[fx.Node]]:
        """(nodes to compute here, values to bring in) so that `targets` can be computed in a stage.

        own: whether a node is this stage's work. Everything else is recomputed if cheap, and brought in if not.
        """
        compute: set[fx.Node] = set()
        bring: set[fx.Node] = set()
        stack = list(targets)
        while stack:
            node = stack.pop()
            if node in compute or node in bring or is_size(node) or node.op == "get_attr":
                continue
            if node.op == "placeholder" or not (own(node) or is_cheap(node)):
                bring.add(node)
            else:
                compute.add(node)
                stack.extend(node.all_input_nodes)
        return compute, bring

    def constant(self, node: fx.Node) -> torch.Tensor:
        """The value of a node that depends on weights alone."""
        if node not in self._folded_values:
            if node.op == "get_attr":
                value = attribute(self.source, str(node.target))
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), self.constant)
                value = node.target(*args, **kwargs)  # type: ignore[operator]
            self._folded_values[node] = value
        return self._folded_values[node]

    def build(self, name: str, targets: list[fx.Node], own: Callable[[fx.Node], bool], names: list[str]) -> Stage:
        """The stage that computes `targets`, its outputs called `names`."""
        compute, bring = self.needs(targets, own)
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        attributes: dict[str, torch.Tensor] = {}
        inputs: list[fx.Node] = []
        for node in self.source.graph.nodes:  # source order, so the state comes first and weights keep their order
            if node in bring and self.known[node] != Binding.CONSTANT:
                inputs.append(node)
        for node in sorted(inputs, key=lambda n: self.known[n] != Binding.STATE):
            made[node] = graph.placeholder(value_name(node))
            made[node].meta["val"] = node.meta["val"]
        sizes = _Sizes(graph, list(made.values()), name)

        def use(node: fx.Node) -> Any:
            if node in made:
                return made[node]
            if is_size(node):
                return sizes.read(node.meta["val"])
            target = str(node.target) if node.op == "get_attr" else f"folded_{node.name}"
            if node.op != "get_attr":
                self.folded[target] = self.constant(node)
            attributes[target] = self.folded[target] if target in self.folded else attribute(self.source, target)
            made[node] = graph.get_attr(target)
            made[node].meta["val"] = node.meta["val"]
            return made[node]

        for node in self.source.graph.nodes:
            if node in compute and not is_check(node):
                args, kwargs = fx.map_arg((node.args, node.kwargs), use)
                made[node] = graph.call_function(node.target, args, kwargs)
                made[node].meta["val"] = node.meta["val"]
        graph.output(tuple(use(n) for n in targets))
        root = nn.Module()
        for target, tensor in attributes.items():
            set_attribute(root, target, tensor)
        module = fx.GraphModule(root, graph, class_name=name)
        return Stage(
            name,
            module,
            tuple(self.value(n) for n in made if made[n].op == "placeholder"),
            tuple(self.value(n, called) for n, called in zip(targets, names, strict=True)),
        )

    def value(self, node: fx.Node, name: str | None = None) -> TensorSpec:
        tensor = node.meta["val"]
        shape = tuple(s if isinstance(s, int) else self.expression(s) for s in tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return TensorSpec(name=name or value_name(node), shape=shape, dtype=dtype)

    def expression(self, size: torch.SymInt) -> str:
        expression = size.node.expr
        names = {s: self.symbols[str(s)] for s in expression.free_symbols}
        return str(expression.subs(names))


class _Sizes:
    """Reads sizes off a stage's own inputs, once each."""

    def __init__(self, graph: fx.Graph, inputs: list[fx.Node], stage: str) -> None:
        self.graph, self.stage = graph, stage
        self.where: dict[Any, tuple[fx.Node, int]] = {}
        for node in inputs:
            for position, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt):
                    self.where.setdefault(size.node.expr, (node, position))
        self.made: dict[Any, Any] = {}

    def read(self, size: torch.SymInt) -> Any:
        expression = size.node.expr
        if expression not in self.made:
            self.made[expression] = self._emit(expression)
        return self.made[expression]

    def _emit(self, expression: Any) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression in self.where:
            return self.graph.call_function(aten.sym_size.int, self.where[expression])
        combine = {"Add": operator.add, "Mul": operator.mul}.get(expression.func.__name__)
        if combine is None or not expression.args:
            raise StageFailed(f"{self.stage}: no input has size {expression}; give the region one that does")
        terms = [self.read_expression(a) for a in expression.args]
        result = terms[0]
        for term in terms[1:]:
            result = self.graph.call_function(combine, (result, term))
        return result

    def read_expression(self, expression: Any) -> Any:
        if expression not in self.made:
            self.made[expression] = self._emit(expression)
        return self.made[expression]


def split(source: fx.GraphModule, spec: RegionSpec, symbols: Mapping[str, str]) -> Stages:
    """The region's graph (from `export.export_region`) in stages, checked against the whole. Raises StageFailed."""
    work = _Split(source, spec, symbols)
    known = work.known
    output = next(iter(source.graph.find_nodes(op="output")))
    results: list[fx.Node] = list(output.args[0])
    if len(results) != len(spec.outputs) or known[results[0]] & Binding.STATE == Binding.CONSTANT:
        raise StageFailed(f"region {spec.name}: outputs are {spec.outputs}, the first must depend on the state")
    for node, name in zip(results[1:], spec.outputs[1:], strict=True):
        if known[node] != Binding.REQUEST:
            raise StageFailed(f"region {spec.name}: output {name!r} must depend on the request alone")

    def is_state(node: fx.Node) -> bool:
        return bool(known[node] & Binding.STATE)

    def is_mixed(node: fx.Node) -> bool:
        return known[node] == MIXED

    def is_request(node: fx.Node) -> bool:
        return known[node] == Binding.REQUEST

    def is_time(node: fx.Node) -> bool:
        return known[node] == Binding.TIME

    def stored(nodes: Iterable[fx.Node], kind: Callable[[fx.Node], bool]) -> list[fx.Node]:
        """Those of `nodes` that must come from a stage of `kind`, in graph order.

        Raw inputs are a request's own, but for times: a request brings none, so the table hands them on.
        """
        wanted = {n for n in nodes if (n.op != "placeholder" or is_time(n)) and kind(n)}
        return [n for n in source.graph.nodes if n in wanted]

    _, into_step = work.needs(results[:1], is_state)
    crossing_mixed = stored(into_step, is_mixed)
    _, into_mixed = work.needs(crossing_mixed, is_mixed)
    crossing = into_step | into_mixed
    request, time = stored(crossing, is_request), stored(crossing, is_time)

    step = work.build("step", results[:1], is_state, [spec.outputs[0]])
    mixed = work.build("mixed", crossing_mixed, is_mixed, [n.name for n in crossing_mixed]) if crossing_mixed else None
    prepare = work.build(
        "prepare", request + results[1:], is_request, [n.name for n in request] + list(spec.outputs[1:])
    )
    table = work.build("table", time, is_time, [value_name(n) for n in time])
    stages = Stages(spec, table, prepare, mixed, step, work.folded)
    return checked(stages, source)


def checked(stages: Stages, source: fx.GraphModule) -> Stages:
    """The stages with how far they are from the whole graph on random inputs. StageFailed if that is too far."""

    def whole(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        results = source(**inputs)
        return dict(zip(stages.spec.outputs, results if isinstance(results, tuple) else (results,), strict=True))

    sizes, what = example_sizes(stages.spec), f"region {stages.spec.name}: in stages,"
    found = deviation(what, stages.spec, sizes, whole, lambda inputs: run_stages(stages, inputs))
    return replace(stages, deviations={"split": found})
