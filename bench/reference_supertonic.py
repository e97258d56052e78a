"""Supertonic's vector estimator as the released ONNX graph computes it, in torch: the eager candidate.

Upstream ships no torch code, only `onnx/vector_estimator.onnx` (supertone-inc/supertonic 9015bd0). This is that graph,
operation by operation: channels first throughout, replicate padding before every depthwise convolution, 1x1
convolutions, LayerNorm behind transposes, masks wherever the graph multiplies by one, the batch doubled inside (v3),
explicit softmax, and text, style and time work repeated in every step. Nothing is hoisted, fused or cached.

State keys are the released names without their prefix, and `style_key`. `config` is anything with the adapter's
hyperparameters as attributes. Depends on torch alone: a fresh process must not pay for the rest of the package.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wrapped(**child: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(child))


class ConvNeXt(nn.Module):
    def __init__(self, c: Any, dilation: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(1, c.hidden, 1))
        self.pad = c.ksz // 2 * dilation
        self.dwconv = nn.Conv1d(c.hidden, c.hidden, c.ksz, dilation=dilation, groups=c.hidden)
        self.norm = wrapped(norm=nn.LayerNorm(c.hidden, c.layer_norm_eps))
        self.pwconv1 = nn.Conv1d(c.hidden, c.intermediate_dim, 1)
        self.pwconv2 = nn.Conv1d(c.intermediate_dim, c.hidden, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: [B, D, L]; mask: [B, 1, L]."""
        x = x * mask
        y = self.dwconv(F.pad(x, (self.pad, self.pad), mode="replicate")) * mask
        y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        out: Tensor = (x + y) * mask
        return out


class ConvNeXtStack(nn.Module):
    def __init__(self, c: Any, dilations: Sequence[int]) -> None:
        super().__init__()
        self.convnext = nn.ModuleList(ConvNeXt(c, dilation) for dilation in dilations)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.convnext:
            x = block(x, mask)
        return x


class TimeEncoder(nn.Module):
    frequencies: Tensor

    def __init__(self, c: Any) -> None:
        super().__init__()
        half = c.time_dim // 2
        powers = torch.arange(half, dtype=torch.float64, device="cpu") / max(half - 1, 1)
        self.register_buffer("frequencies", (10000.0**-powers).float(), persistent=False)
        first, second = nn.Linear(c.time_dim, c.time_hdim), nn.Linear(c.time_hdim, c.time_dim)
        self.mlp = nn.Sequential(wrapped(linear=first), nn.Mish(), wrapped(linear=second))

    def forward(self, t: Tensor) -> Tensor:
        angle = t.reshape(-1, 1) * 1000.0 * self.frequencies
        encoded: Tensor = self.mlp(torch.cat([angle.sin(), angle.cos()], dim=-1))
        return encoded


class TimeBlock(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.linear = wrapped(linear=nn.Linear(c.time_dim, c.hidden))

    def forward(self, x: Tensor, mask: Tensor, encoded: Tensor) -> Tensor:
        shift: Tensor = self.linear(encoded)
        return (x + shift[:, :, None]) * mask


class Attention(nn.Module):
    """What text and style attention share. scale: scores are divided by it."""

    def __init__(self, c: Any, width: int, units: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, float(width) ** 0.5
        self.W_query = wrapped(linear=nn.Linear(c.hidden, units))
        self.W_key = wrapped(linear=nn.Linear(width, units))
        self.W_value = wrapped(linear=nn.Linear(width, units))
        self.out_fc = wrapped(linear=nn.Linear(units, c.hidden))

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def mix(self, weights: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """weights: [B, H, L, T]; mask: [B, 1, L]. Queries in the padding get nothing. -> [B, D, L]."""
        weights = weights.masked_fill((mask == 0).transpose(1, 2)[:, None], 0.0)
        out = torch.matmul(weights, value).transpose(1, 2).flatten(2)
        projected: Tensor = self.out_fc(out) * mask.transpose(1, 2)
        return projected.transpose(1, 2)


class TextAttention(Attention):
    theta: Tensor
    increments: Tensor

    def __init__(self, c: Any) -> None:
        super().__init__(c, c.text_dim, c.text_attn_units, c.text_n_heads)
        half = c.text_attn_units // c.text_n_heads // 2
        powers = torch.arange(half, dtype=torch.float64, device="cpu") / half
        theta = (c.rotary_scale * c.rotary_base**-powers).float().reshape(1, 1, half)
        self.register_buffer("theta", theta, persistent=False)
        increments = torch.arange(c.max_positions, device="cpu").reshape(1, -1, 1)
        self.register_buffer("increments", increments, persistent=False)

    def rotate(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: [B, H, L, E], by halves; the angle of position n grows with n / length."""
        position = self.increments[:, : x.shape[2]].float() / mask.sum(2).reshape(-1, 1, 1)
        angle = (position * self.theta)[:, None]
        cos, sin = angle.cos(), angle.sin()
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)

    def forward(self, x: Tensor, mask: Tensor, text: Tensor, text_mask: Tensor) -> Tensor:
        """x: [B, D, L]; text: [B, 256, T]."""
        given = text.transpose(1, 2)
        query = self.rotate(self.split(self.W_query(x.transpose(1, 2))), mask)
        key = self.rotate(self.split(self.W_key(given)), text_mask)
        scores = torch.matmul(query, key.transpose(2, 3)) / self.scale
        scores = scores.masked_fill((text_mask == 0)[:, None], float("-inf"))
        return self.mix(scores.softmax(-1), self.split(self.W_value(given)), mask)


class StyleAttention(Attention):
    def __init__(self, c: Any) -> None:
        super().__init__(c, c.style_dim, c.style_dim, c.style_n_heads)

    def forward(self, x: Tensor, mask: Tensor, bank: Tensor, style: Tensor) -> Tensor:
        """x: [B, D, L]; bank, style: [B, 50, 256], what keys and values are projected from."""
        key = self.split(self.W_key(bank)).tanh()
        scores = torch.matmul(self.split(self.W_query(x.transpose(1, 2))), key.transpose(2, 3)) / self.scale
        return self.mix(scores.softmax(-1), self.split(self.W_value(style)), mask)


class AttentionBlock(nn.Module):
    def __init__(self, c: Any, name: str, attention: Attention) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, attention)
        self.norm = wrapped(norm=nn.LayerNorm(c.hidden, c.layer_norm_eps))

    def forward(self, x: Tensor, mask: Tensor, first: Tensor, second: Tensor) -> Tensor:
        x = x * mask
        y: Tensor = x + self.get_submodule(self.name)(x, mask, first, second)
        return self.norm(y.transpose(1, 2)).transpose(1, 2) * mask  # type: ignore[no-any-return]


class VectorField(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.proj_in = wrapped(net=nn.Conv1d(c.latent_channels, c.hidden, 1, bias=False))
        self.time_encoder = TimeEncoder(c)
        self.main_blocks = nn.ModuleList()
        for _ in range(c.n_blocks):
            self.main_blocks.extend([ConvNeXtStack(c, c.dilations_0), TimeBlock(c)])
            self.main_blocks.extend([ConvNeXtStack(c, (1,)), AttentionBlock(c, "attn", TextAttention(c))])
            self.main_blocks.extend([ConvNeXtStack(c, (1,)), AttentionBlock(c, "attention", StyleAttention(c))])
        self.last_convnext = ConvNeXtStack(c, (1,) * c.n_last_convnext)
        self.proj_out = wrapped(net=nn.Conv1d(c.hidden, c.latent_channels, 1, bias=False))

    def forward(
        self, latent: Tensor, mask: Tensor, t: Tensor, text: Tensor, text_mask: Tensor, bank: Tensor, style: Tensor
    ) -> Tensor:
        encoded = self.time_encoder(t)
        x = self.proj_in(latent) * mask
        more = [(), (encoded,), (), (text, text_mask), (), (bank, style)]
        for index, block in enumerate(self.main_blocks):
            x = block(x, mask, *more[index % 6])
        velocity: Tensor = self.proj_out(self.last_convnext(x, mask)) * mask
        return velocity


class Graph(nn.Module):
    """The graph's inputs in its order -> denoised_latent [B, 144, L], the next latent."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        c = self.config = config
        self.style_key = nn.Parameter(torch.empty(1, c.n_style, c.style_dim))
        self.vector_field = VectorField(c)
        if c.guidance_in_graph:
            bank = (1, c.n_style, c.style_dim)
            shapes = {"text": (1, c.text_dim, 1), "style_key": bank, "style_value": bank}
            tokens = {f"{name}_special_token": nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()}
            self.uncond_masker = nn.ParameterDict(tokens)

    def forward(
        self,
        noisy_latent: Tensor,
        text_emb: Tensor,
        style_ttl: Tensor,
        latent_mask: Tensor,
        text_mask: Tensor,
        current_step: Tensor,
        total_step: Tensor,
    ) -> Tensor:
        rows, _, length = text_emb.shape
        t = current_step / total_step
        bank = self.style_key.expand(rows, -1, -1)
        if not self.config.guidance_in_graph:
            velocity = self.vector_field(noisy_latent, latent_mask, t, text_emb, text_mask, bank, style_ttl)
        else:
            tokens = self.uncond_masker
            both = self.vector_field(
                noisy_latent.repeat(2, 1, 1),
                latent_mask.repeat(2, 1, 1),
                t.repeat(2),
                torch.cat([text_emb, tokens["text_special_token"].expand(rows, -1, length)]),
                text_mask.repeat(2, 1, 1),
                torch.cat([bank, tokens["style_key_special_token"].expand(rows, -1, -1)]),
                torch.cat([style_ttl, tokens["style_value_special_token"].expand(rows, -1, -1)]),
            )
            c, u = both[:rows], both[rows:]
            velocity = c * self.config.guidance_cond - u * self.config.guidance_uncond
        latent: Tensor = (noisy_latent + velocity * total_step.reciprocal().reshape(-1, 1, 1)) * latent_mask
        return latent

    def prepare(self, request: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        """What the loop holds over the steps: nothing is computed, the graph takes everything anew."""
        rows, _, frames = state.shape
        masks = {
            "latent_mask": torch.ones(rows, 1, frames),
            "text_mask": torch.ones(rows, 1, request["text_emb"].shape[2]),
        }
        return {"text_emb": request["text_emb"], "style_ttl": request["style_ttl"], **masks}

    def inputs(
        self, prepared: Mapping[str, Tensor], state: Tensor, schedule: Sequence[float], step: int
    ) -> tuple[Tensor, ...]:
        """Arguments of `forward` in step `step`; the graph knows even schedules only."""
        rows, total = state.shape[0], len(schedule) - 1
        if abs(schedule[step] - step / total) > 1e-6:
            raise ValueError(f"step {step} of {total} is at time {schedule[step]!r}, wanted an even schedule")
        given = (prepared[name] for name in ("text_emb", "style_ttl", "latent_mask", "text_mask"))
        return state, *given, torch.full((rows,), float(step)), torch.full((rows,), float(total))
