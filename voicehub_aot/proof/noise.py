"""The rounding noise of a module: float32 runs that differ in nothing but rounding.

One float32 run's distance from float64 is one draw of a random variable: another processor, thread count or batch draws
again. Several runs tell how far a correct float32 run may lie. Each moves every weight, every time and every float of
the request to a neighbouring float32 at random; some also repeat the rows of the batch or use one thread, which makes
the matrix library add in another order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from voicehub_aot.runtime.eager import EagerEvaluator
from voicehub_aot.runtime.runtime import Runtime
from voicehub_aot.spec.region import Region


def moved(eager: Runtime, seed: int) -> Runtime:
    """The runtime of an eager module, over a copy whose weights are moved by at most one unit in the last place."""
    evaluator, spec = eager.evaluator, eager.spec
    assert isinstance(evaluator, EagerEvaluator)
    region = Region(spec, _Moved(evaluator.region, torch.Generator().manual_seed(seed)))
    return Runtime(spec, EagerEvaluator(region), eager.programs, eager.buckets, name=eager.name)


class _Moved(nn.Module):
    """A copy of a region's module with its weights moved, which moves its times whenever it is called."""

    def __init__(self, region: Region, generator: torch.Generator) -> None:
        super().__init__()
        self.module, self.generator = copy.deepcopy(region.module), generator
        self.times = [item.name for item in region.spec.inputs if item.binding == "TIME"]
        with torch.no_grad():
            for tensor in [*self.module.parameters(), *self.module.buffers()]:
                if tensor.is_floating_point():
                    tensor.copy_(neighbour(tensor, generator))

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.module(**{**inputs, **{name: neighbour(inputs[name], self.generator) for name in self.times}})


def moved_request(request: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The request with every float tensor moved likewise; NaN, which marks padding, stays."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: neighbour(value, generator) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in request.items()
    }


def neighbour(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Each element, or the next float32 above (one in four) or below (one in four). Zeros stay zero."""
    draw = torch.rand(tensor.shape, generator=generator)
    up, down = (torch.nextafter(tensor, torch.full_like(tensor, end)) for end in (math.inf, -math.inf))
    result = torch.where(draw < 0.25, up, torch.where(draw > 0.75, down, tensor))
    return torch.where(tensor == 0, tensor, result)


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def beside_itself(
    request: Mapping[str, Any], rows: int, call: Callable[[dict[str, Any]], torch.Tensor]
) -> torch.Tensor:
    """What `call` gives for a request of `rows` rows when every row stands twice in the batch: the first of each.

    The result may hold several guidance branches, packed [branches * rows, ...].
    """
    twice = {
        name: torch.cat([value, value]) if isinstance(value, torch.Tensor) else [*value, *value]
        for name, value in request.items()
    }
    result = call(twice)
    return result.reshape(-1, 2 * rows, *result.shape[1:])[:, :rows].flatten(0, 1)
