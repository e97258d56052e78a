"""Supertonic v1, v2 and v3: the vector estimator (flow matching in a latent space) as a torch module.

Upstream   supertone-inc/supertonic 9015bd0 and supertonic-py 5851a87, MIT; arXiv 2503.23108, LARoPE arXiv 2509.11084
Weights    Supertone/supertonic, supertonic-2, supertonic-3 on the hub, OpenRAIL-M. They exist only inside ONNX graphs;
           `_supertonic_onnx` reads them, this module restates `onnx/vector_estimator.onnx`
Compiled   one region: the velocity. Upstream's graph returns the next latent, latent + velocity / steps, and v3 runs
           two branches inside, 4 conditional - 3 unconditional; here step and guidance belong to the sampling loop
Time       0 = noise, 1 = data

| tensor                   | v1, v2         | v3             |
|---|---|---|
| noisy_latent, velocity   | [B, 144, T]    | [B, 144, T]    |
| text_emb                 | [B, 256, L]    | [B, 256, L]    |
| style_ttl                | [B, 50, 256]   | [B, 50, 256]   |
| hidden D, inner, units U | 512, 1024, 256 | 512, 2048, 512 |
| heads: text, style       | 4, 2           | 8, 2           |

Inside all is channels-last, so that every 1x1 convolution is a linear. Upstream masks before, within and after each
sub-block; only frames next to each other mix (the depthwise convolution), so one mask after it gives the same frames.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from voicehub_aot.adapters._supertonic_onnx import STYLE_KEY, read_graph, sizes
from voicehub_aot.checkpoint import check_shapes, read_tensors
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UnknownModel, UsageError
from voicehub_aot.guidance import EQUATIONS, Branch, Guidance
from voicehub_aot.kernels.attention import attention, key_bias
from voicehub_aot.kernels.depthwise import depthwise
from voicehub_aot.program import Program, euler, probe
from voicehub_aot.region import Call, Dim, Input, Parameter, Region, RegionSpec
from voicehub_aot.schedule import Schedule

if TYPE_CHECKING:
    from voicehub_aot.adapters import Sampler
    from voicehub_aot.golden import Case

NAME = "supertonic"
ALIASES: tuple[str, ...] = ()
GRAPH = "vector_estimator.onnx"


@dataclass(frozen=True)
class Config:
    """version: 3, or 2 for the layout that v1 and v2 share. max_positions: the longest latent, and the longest text."""

    version: int = 3
    latent_channels: int = 144
    hidden: int = 512
    intermediate_dim: int = 2048
    ksz: int = 5
    dilations_0: tuple[int, ...] = (1, 2, 4, 8)
    n_blocks: int = 4
    n_last_convnext: int = 4
    time_dim: int = 64
    time_hdim: int = 256
    text_dim: int = 256
    text_attn_units: int = 512
    text_n_heads: int = 8
    style_dim: int = 256
    style_n_heads: int = 2
    n_style: int = 50
    rotary_base: float = 10000.0
    rotary_scale: float = 10.0
    max_positions: int = 1000
    layer_norm_eps: float = 1e-6
    guidance_in_graph: bool = True
    guidance_cond: float = 4.0
    guidance_uncond: float = 3.0

    def __post_init__(self) -> None:
        def divides(part: int, whole: int) -> bool:
            return part > 0 and whole % part == 0

        rules = {
            "text_n_heads must divide text_attn_units, to even widths": divides(
                2 * self.text_n_heads, self.text_attn_units
            ),
            "style_n_heads must divide style_dim": divides(self.style_n_heads, self.style_dim),
            "ksz must be odd and time_dim even": self.ksz % 2 == 1 and self.time_dim % 2 == 0,
            "guidance_cond - guidance_uncond must be 1": math.isclose(self.guidance_cond - self.guidance_uncond, 1.0),
        }
        broken = [rule for rule, kept in rules.items() if not kept]
        if broken:
            raise UsageError(f"{self!r}: {'; '.join(broken)}")

    @property
    def prefix(self) -> str:
        return "vector_estimator.tts.ttl." if self.version >= 3 else "tts.ttl."


_V2 = Config(
    version=2,
    intermediate_dim=1024,
    text_attn_units=256,
    text_n_heads=4,
    guidance_in_graph=False,
    guidance_cond=1.0,
    guidance_uncond=0.0,
)
_TINY: dict[str, Any] = {
    "latent_channels": 12,
    "hidden": 32,
    "n_blocks": 2,
    "n_last_convnext": 2,
    "time_dim": 16,
    "time_hdim": 24,
    "text_dim": 24,
    "style_dim": 24,
    "n_style": 7,
    "max_positions": 100,
}
CONFIGS: Mapping[str, Config] = {
    "supertonic-3": Config(),
    "supertonic-2": _V2,
    "supertonic": _V2,
    "tiny": Config(**_TINY, intermediate_dim=64, text_attn_units=32, text_n_heads=4),
    "tiny-v2": dataclasses.replace(_V2, **_TINY, intermediate_dim=48, text_attn_units=24, text_n_heads=2),
}
DEFAULT_CONFIG = "supertonic-3"
DEFAULT_BUCKETS: Mapping[str, tuple[int, ...]] = {"frames": (64, 128, 250)}
DEFAULT_STEPS: tuple[int, ...] = (8, 5)
HUB_FILES: Mapping[str, tuple[str, ...]] = dict.fromkeys(CONFIGS, (f"onnx/{GRAPH}", "onnx/tts.json"))


def wrapped(**child: nn.Module) -> nn.Sequential:
    """Upstream keeps layers one level down: `wrapped(linear=...)` has the keys `linear.weight` and `linear.bias`."""
    return nn.Sequential(OrderedDict(child))


class Pointwise(nn.Conv1d):
    """A 1x1 convolution, weight [out, in, 1], as a linear over the last dimension."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.squeeze(-1), self.bias)


class Depthwise(nn.Module):
    def __init__(self, c: Config, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.weight = nn.Parameter(torch.empty(c.hidden, 1, c.ksz))
        self.bias = nn.Parameter(torch.empty(c.hidden))

    def forward(self, x: Tensor, extent: Tensor) -> Tensor:
        return depthwise(x, self.weight, self.bias, extent, self.dilation)


class ConvNeXt(nn.Module):
    def __init__(self, c: Config, dilation: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(1, c.hidden, 1))
        self.dwconv = Depthwise(c, dilation)
        self.norm = wrapped(norm=nn.LayerNorm(c.hidden, c.layer_norm_eps))
        self.pwconv1 = Pointwise(c.hidden, c.intermediate_dim)
        self.pwconv2 = Pointwise(c.intermediate_dim, c.hidden)

    def forward(self, x: Tensor, mask: Tensor, extent: Tensor) -> Tensor:
        """x: [B, T, D], zero in the padding; mask: [B, T, 1], 1 = real frame; extent: [B]."""
        y: Tensor = self.pwconv2(F.gelu(self.pwconv1(self.norm(self.dwconv(x, extent)))))
        return (x + self.gamma.view(-1) * y) * mask


class ConvNeXtStack(nn.Module):
    def __init__(self, c: Config, dilations: Sequence[int]) -> None:
        super().__init__()
        self.convnext = nn.ModuleList(ConvNeXt(c, dilation) for dilation in dilations)

    def forward(self, x: Tensor, mask: Tensor, extent: Tensor) -> Tensor:
        for block in self.convnext:
            x = block(x, mask, extent)
        return x


class TimeEncoder(nn.Module):
    """time: [1] -> [1, time_dim]. Keep it float32: 1000 t in half precision would lose its phase."""

    frequencies: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        half = c.time_dim // 2
        powers = torch.arange(half, dtype=torch.float64, device="cpu") / max(half - 1, 1)
        self.register_buffer("frequencies", (10000.0**-powers).float(), persistent=False)
        first, second = nn.Linear(c.time_dim, c.time_hdim), nn.Linear(c.time_hdim, c.time_dim)
        self.mlp = nn.Sequential(wrapped(linear=first), nn.Mish(), wrapped(linear=second))

    def forward(self, time: Tensor) -> Tensor:
        angle = 1000.0 * time[:, None] * self.frequencies
        encoded: Tensor = self.mlp(torch.cat([angle.sin(), angle.cos()], dim=-1))
        return encoded


class TimeBlock(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.linear = wrapped(linear=nn.Linear(c.time_dim, c.hidden))

    def forward(self, x: Tensor, mask: Tensor, time: Tensor) -> Tensor:
        shift: Tensor = self.linear(time)
        return (x + shift[:, None, :]) * mask


@dataclass(frozen=True)
class Rotation:
    """cos, sin: [B, 1, T, E / 2]."""

    cos: Tensor
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """x: [B, H, T, E], turned by halves."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], dim=-1)


@dataclass(frozen=True)
class Condition:
    """What a cross-attention looks at. key, value: [B or 1, L, width], what its keys and values are projected from.

    tokens: what replaces key and value, [1, L or 1, width], in rows with drop ([B] bool, True = unconditional).
    """

    key: Tensor
    value: Tensor
    tokens: tuple[Tensor, Tensor] | None
    drop: Tensor | None
    bias: Tensor | None = None
    query_rotation: Rotation | None = None
    key_rotation: Rotation | None = None


class CrossAttention(nn.Module):
    """Scores are divided by the root of the condition's width (16 as released), not of the head's."""

    def __init__(self, c: Config, width: int, units: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, width**-0.5
        self.W_query = wrapped(linear=nn.Linear(c.hidden, units))
        self.W_key = wrapped(linear=nn.Linear(width, units))
        self.W_value = wrapped(linear=nn.Linear(width, units))
        self.out_fc = wrapped(linear=nn.Linear(units, c.hidden))

    def project_key(self, source: Tensor) -> Tensor:
        key: Tensor = self.W_key(source)
        return key

    def split_heads(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        """[B, L, U] -> [B, H, L, E]."""
        rows, length, units = x.shape
        x = x.view(rows, length, self.heads, units // self.heads).transpose(1, 2)
        return x if rotation is None else rotation(x)

    def forward(self, x: Tensor, given: Condition) -> Tensor:
        """x: [B, T, D]. Selects behind the projections: what comes from tokens alone is a constant of the model."""
        key, value = self.project_key(given.key), self.W_value(given.value)
        if given.tokens is not None and given.drop is not None:
            key_token, value_token = given.tokens
            drop = given.drop[:, None, None]
            key = torch.where(drop, self.project_key(key_token), key)
            value = torch.where(drop, self.W_value(value_token), value)
        key = self.split_heads(key.expand(x.shape[0], -1, -1), given.key_rotation)
        query = self.split_heads(self.W_query(x), given.query_rotation)
        out = attention(query, key, self.split_heads(value), given.bias, self.scale)
        projected: Tensor = self.out_fc(out.transpose(1, 2).flatten(2))
        return projected


class StyleAttention(CrossAttention):
    def project_key(self, source: Tensor) -> Tensor:
        return super().project_key(source).tanh()


class AttentionBlock(nn.Module):
    """name: upstream's for the attention inside, `attn` for text and `attention` for style."""

    def __init__(self, c: Config, name: str, attention: CrossAttention) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, attention)
        self.norm = wrapped(norm=nn.LayerNorm(c.hidden, c.layer_norm_eps))

    def forward(self, x: Tensor, mask: Tensor, given: Condition) -> Tensor:
        normed: Tensor = self.norm(x + self.get_submodule(self.name)(x, given))
        return normed * mask


class VectorField(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.proj_in = wrapped(net=Pointwise(c.latent_channels, c.hidden, bias=False))
        self.time_encoder = TimeEncoder(c)
        self.main_blocks = nn.ModuleList()
        for _ in range(c.n_blocks):
            text = CrossAttention(c, c.text_dim, c.text_attn_units, c.text_n_heads)
            style = StyleAttention(c, c.style_dim, c.style_dim, c.style_n_heads)
            self.main_blocks.extend([ConvNeXtStack(c, c.dilations_0), TimeBlock(c)])
            self.main_blocks.extend([ConvNeXtStack(c, (1,)), AttentionBlock(c, "attn", text)])
            self.main_blocks.extend([ConvNeXtStack(c, (1,)), AttentionBlock(c, "attention", style)])
        self.last_convnext = ConvNeXtStack(c, (1,) * c.n_last_convnext)
        self.proj_out = wrapped(net=Pointwise(c.hidden, c.latent_channels, bias=False))

    def forward(
        self, latent: Tensor, mask: Tensor, *, extent: Tensor, time: Tensor, text: Condition, style: Condition
    ) -> Tensor:
        """latent: [B, T, C]; mask: [B, T, 1]; extent: [B]; time: [1] -> velocity [B, T, C]."""
        now = self.time_encoder(time)
        x = self.proj_in(latent) * mask
        for index, block in enumerate(self.main_blocks):
            x = block(x, mask, (extent, now, extent, text, extent, style)[index % 6])
        velocity: Tensor = self.proj_out(self.last_convnext(x, mask, extent)) * mask
        return velocity


class VectorEstimator(nn.Module):
    """State keys: the released names without `Config.prefix`, and `style_key`."""

    theta: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.positions = c.max_positions + 1  # never cut to the whole: torch.export would guard against that size
        half = c.text_attn_units // c.text_n_heads // 2
        powers = torch.arange(half, dtype=torch.float64, device="cpu") / half
        self.register_buffer("theta", (c.rotary_scale * c.rotary_base**-powers).float(), persistent=False)
        self.style_key = nn.Parameter(torch.empty(1, c.n_style, c.style_dim))
        self.vector_field = VectorField(c)
        if c.guidance_in_graph:
            bank = (1, c.n_style, c.style_dim)
            shapes = {"text": (1, c.text_dim, 1), "style_key": bank, "style_value": bank}
            tokens = {f"{name}_special_token": nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}
            self.uncond_masker = nn.ParameterDict(tokens)

    def rotation(self, size: int, lengths: Tensor) -> Rotation:
        """Length-aware: the angles of position n grow with n / length_b.

        Computed for every position and cut, as upstream does: the table then needs the lengths alone, which are known
        before there is a latent whose size could be asked.
        """
        positions = torch.arange(self.positions, device=lengths.device)
        angle = (positions[None, :, None] / lengths[:, None, None].to(self.theta.dtype) * self.theta)[:, None]
        return Rotation(angle.cos()[:, :, :size], angle.sin()[:, :, :size])

    def forward(
        self,
        noisy_latent: Tensor,
        time: Tensor,
        text_emb: Tensor,
        style_ttl: Tensor,
        lengths: Tensor,
        extent: Tensor,
        text_lengths: Tensor,
        drop: Tensor | None = None,
    ) -> Tensor:
        """Shapes as `region` declares them. Returns the velocity, [B, C, T], zero in the padding."""
        frames, characters = noisy_latent.shape[2], text_emb.shape[2]
        mask = (torch.arange(frames, device=lengths.device) < lengths[:, None])[:, :, None].to(noisy_latent.dtype)
        emb, text_tokens, style_tokens = text_emb.transpose(1, 2), None, None
        if drop is not None:
            tokens = self.uncond_masker
            text_tokens = (tokens["text_special_token"].transpose(1, 2),) * 2
            style_tokens = (tokens["style_key_special_token"], tokens["style_value_special_token"])
        text = Condition(
            key=emb,
            value=emb,
            tokens=text_tokens,
            drop=drop,
            bias=key_bias(torch.arange(characters, device=lengths.device) < text_lengths[:, None]),
            query_rotation=self.rotation(frames, lengths),
            key_rotation=self.rotation(characters, text_lengths),
        )
        style = Condition(key=self.style_key, value=style_ttl, tokens=style_tokens, drop=drop)
        velocity: Tensor = self.vector_field(
            noisy_latent.transpose(1, 2), mask, extent=extent, time=time, text=text, style=style
        )
        return velocity.transpose(1, 2)


def config_from(values: Mapping[str, Any]) -> Config:
    """Names as in `Config`; latent_dim * chunk_compress_factor stands for latent_channels."""
    values = dict(values)
    factors = [values.pop(name, None) for name in ("latent_dim", "chunk_compress_factor")]
    known = {f.name for f in dataclasses.fields(Config)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(f"supertonic: unknown hyperparameters {unknown!r}; known are {sorted(known)!r}")
    if None not in factors and values.setdefault("latent_channels", math.prod(factors)) != math.prod(factors):
        raise UsageError(f"supertonic: latent_channels {values['latent_channels']!r} is not the product of {factors!r}")
    if "dilations_0" in values:
        values["dilations_0"] = tuple(values["dilations_0"])
    return Config(**values)


def _skeleton(config: Config) -> VectorEstimator:
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        return VectorEstimator(config)


def _released_key(config: Config, name: str) -> str:
    return name if name == STYLE_KEY else config.prefix + name


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return {_released_key(config, k): tuple(v.shape) for k, v in _skeleton(config).state_dict().items()}


def formula_weights(config: Config) -> dict[str, Tensor]:
    """None: theta and the positions are formulas in upstream's graph, but no checkpoint entries of ours."""
    return {}


def _weights_file(path: Path) -> Path:
    if not path.is_dir():
        return path
    candidates = [path / "onnx" / GRAPH, path / GRAPH]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise CheckpointMismatch(f"{path}: wanted the released folder, with {' or '.join(map(str, candidates))}")


def read_checkpoint(path: Path, config: str | Config | None = None) -> tuple[Config, dict[str, Tensor]]:
    """The released folder, its folder `onnx`, `vector_estimator.onnx`, or a .safetensors with the same keys.

    Without `config` the hyperparameters are those of the file. A .safetensors tells neither head counts nor factors:
    the released ones (text heads of width 64, two style heads, 4 and 3) are taken then.
    """
    if isinstance(config, str) and config not in CONFIGS:
        raise UnknownModel(f"supertonic has no configuration {config!r}; known are {', '.join(CONFIGS)}")
    file = _weights_file(path)
    facts, weights = read_graph(file) if file.suffix == ".onnx" else ({}, read_tensors(file))
    values = {**sizes(str(file), weights), **facts}
    if config is not None:
        chosen = CONFIGS[config] if isinstance(config, str) else config
        wrong = [f"{k} is {v!r}, wanted {getattr(chosen, k)!r}" for k, v in values.items() if getattr(chosen, k) != v]
        if wrong:
            raise CheckpointMismatch(f"{file}: not the configuration {config!r}: {'; '.join(wrong)}")
    else:
        defaults = {"text_n_heads": max(values["text_attn_units"] // 64, 1)}
        if not values["guidance_in_graph"]:
            defaults |= {"guidance_cond": 1.0, "guidance_uncond": 0.0}
        try:
            chosen = Config(**{**defaults, **values})
        except UsageError as error:
            raise CheckpointMismatch(f"{file}: {error}") from error
    check_shapes(str(file), weights, checkpoint_shapes(chosen))
    return chosen, weights


def _guidance(config: Config) -> Guidance | None:
    """4 c - 3 u = c + 3 (c - u): the scale is upstream's factor of the unconditional branch."""
    if not config.guidance_in_graph:
        return None
    branches = (Branch(name="conditional", flags={}), Branch(name="unconditional", flags={"drop": True}))
    return Guidance(equation="classifier_free", branches=branches, scale=config.guidance_uncond)


def _spec(config: Config) -> RegionSpec:
    c, longest = config, config.max_positions

    def lengths(name: str, doc: str) -> Input:
        return Input(name=name, shape=("B",), dtype="int64", binding="REQUEST", low=1, high=longest + 1, doc=doc)

    drop = Input(name="drop", shape=("B",), dtype="bool", binding="REQUEST", flag=True, doc="unconditional tokens")
    return RegionSpec(
        name="vector_estimator",
        inputs=(
            Input(
                name="noisy_latent", shape=("B", c.latent_channels, "frames"), binding="STATE", doc="noise at time 0"
            ),
            Input(name="time", shape=(1,), binding="TIME", doc="current_step / total_step, 0 = noise"),
            Input(name="text_emb", shape=("B", c.text_dim, "text"), binding="REQUEST", doc="of the text encoder"),
            Input(name="style_ttl", shape=("B", c.n_style, c.style_dim), binding="REQUEST", doc="of the voice file"),
            lengths("lengths", "real latent frames"),
            lengths("extent", "where the frames' edge is replicated from"),
            lengths("text_lengths", "real characters"),
            *([drop] if config.guidance_in_graph else []),
        ),
        dims=(
            Dim(name="frames", max=longest, length="lengths", extent="extent", doc="latent frames, 3072 samples each"),
            Dim(name="text", max=longest, length="text_lengths", doc="characters"),
        ),
        guidance=_guidance(config),
        call=Call(
            parameters=(
                *(Parameter(name=n, kind="tensor", feeds=n) for n in ("noisy_latent", "text_emb", "style_ttl")),
                Parameter(name="latent_mask", kind="mask", feeds="frames"),
                Parameter(name="text_mask", kind="mask", feeds="text"),
                Parameter(name="current_step", kind="step"),
                Parameter(name="total_step", kind="steps"),
            ),
            returns="next_state",
            source="supertone-inc/supertonic 9015bd0, onnx/vector_estimator.onnx",
        ),
    )


def region(config: Config, weights: Mapping[str, Tensor]) -> Region:
    check_shapes("supertonic", weights, checkpoint_shapes(config))
    module = _skeleton(config)
    state = {name: weights[_released_key(config, name)].float().contiguous() for name in module.state_dict()}
    module.load_state_dict(state, assign=True)
    return Region(_spec(config), module.requires_grad_(False).eval())


def program(steps: int, *, solver: str | None = None, grid: str | None = None, sway: float | None = None) -> Program:
    """x <- x + v / N at the times i / N, the only loop that the released graph can run."""
    if solver not in (None, "euler") or grid not in (None, "linear") or sway is not None:
        raise OptionUnsupported(
            f"supertonic: solver={solver!r}, grid={grid!r}, sway={sway!r}; the released contract knows only "
            "solver='euler' on grid='linear' without sway"
        )
    if steps < 1:
        raise UsageError(f"steps={steps!r}: a schedule needs at least 1 step")
    return euler(Schedule(times=tuple(i / steps for i in range(steps + 1))))


def case_program(case: Case) -> Program:
    if case.kind == "sampler":
        return program(int(case.scalars["total_step"]))
    times = case.inputs["current_step"] / case.inputs["total_step"]
    return probe(sorted(set(times.reshape(-1).tolist())))


def replay(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    """Padded batches as upstream runs them, the edge at the tensor's end; `alone_b` from the same batch, exact edge."""
    results = _replay_sampler(case, sampler) if case.kind == "sampler" else _replay_region(case, sampler)
    unknown = sorted(set(case.outputs) - set(results))
    if unknown:
        raise UsageError(f"{case.name}: outputs {unknown!r} are unknown; a {case.kind} case has {sorted(results)!r}")
    return {name: results[name] for name in case.outputs}


def _prefix_lengths(case: Case, name: str) -> Tensor:
    """[B, 1, N] of ones, then zeros -> [B] int64."""
    mask = case.inputs[name][:, 0]
    lengths = mask.sum(1).long()
    if not torch.equal(mask, (torch.arange(mask.shape[1]) < lengths[:, None]).to(mask.dtype)):
        raise UsageError(f"{case.name}: {name} is no prefix mask, 1 up to a row's length and 0 beyond")
    return lengths


def _request(case: Case) -> dict[str, Any]:
    """Conditioning, lengths, and upstream's edge."""
    lengths = _prefix_lengths(case, "latent_mask")
    return {
        "text_emb": case.inputs["text_emb"],
        "style_ttl": case.inputs["style_ttl"],
        "lengths": lengths,
        "extent": torch.full_like(lengths, case.inputs["latent_mask"].shape[2]),
        "text_lengths": _prefix_lengths(case, "text_mask"),
    }


def _replay_region(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    spec, request, results = _spec(config_from(case.config)), _request(case), dict[str, Tensor]()
    steps = torch.stack([case.inputs["current_step"], case.inputs["total_step"]], dim=1)
    for pair in torch.unique(steps, dim=0):  # a region has one time for all rows, upstream's graph one for each
        rows = (steps == pair).all(dim=1).nonzero()[:, 0]
        upstream = {p.name: case.inputs[p.name][rows] for p in spec.call.parameters}
        state, time = upstream["noisy_latent"], float(pair[0] / pair[1])
        asked = {name: value[rows] for name, value in request.items()}
        exact = sampler.evaluate(state, time, packed=True, **{**asked, "extent": asked["lengths"]})
        if spec.guidance is not None:
            exact = EQUATIONS[spec.guidance.equation](exact, spec.guidance.scale)
        branches = sampler.evaluate(state, time, packed=True, **asked)
        names = ("velocity_cond", "velocity_uncond")[: len(branches) // len(rows)]
        found = dict(zip(names, torch.chunk(branches, len(names)), strict=True))
        found["denoised_latent"] = sampler.denoiser()(**upstream)
        found["alone"] = (state + exact / pair[1]) * upstream["latent_mask"]
        for name, value in found.items():
            results.setdefault(name, torch.zeros_like(case.inputs["noisy_latent"]))[rows] = value
    alone = results.pop("alone")
    return results | {f"alone_{b}": alone[b : b + 1, :, :n] for b, n in enumerate(request["lengths"].tolist())}


def _replay_sampler(case: Case, sampler: Sampler) -> dict[str, Tensor]:
    chosen = program(int(case.scalars["total_step"]))
    noise = case.inputs["noise"] * case.inputs["latent_mask"]
    states = list(sampler.trajectory(noise=noise, program=chosen.name, **_request(case)))
    schedule = torch.tensor(chosen.times, dtype=torch.float32)
    return {"latent": states[-1], "latent_after_first": states[0], "schedule": schedule}
