"""Supertonic's vector estimator as a torch module, smallest parts first; the adapter says what it is.

Inside all is channels-last, so that every 1x1 convolution is a linear. Upstream masks before, within and after each
sub-block; only frames next to each other mix (the depthwise convolution), so one mask after it gives the same frames.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from voicehub_aot.kernels.attention import attention, key_bias
from voicehub_aot.kernels.depthwise import depthwise


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

    @property
    def prefix(self) -> str:
        return "vector_estimator.tts.ttl." if self.version >= 3 else "tts.ttl."


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
