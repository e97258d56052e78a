"""F5-TTS's DiT as upstream writes it: the eager candidate where the package f5-tts is not installed.

Ported line by line from SWivid/F5-TTS 2ae2c9bd9b64dab2cb069c4b97e5e7673c521e01 (MIT), src/f5_tts/model/
{cfm,modules,backbones/dit}.py, and x_transformers 2.31.10 (MIT) for the rotary embedding, for what one request runs:
no mask, both guidance branches packed, text embeddings cached over the steps, dropout off. The time embedding, every
modulation, the rotary tables and the whole input projection are computed in every step, as upstream does.

The cached text embeddings are arguments here, not thread-local attributes: so torch.compile and ONNX see one graph.
State keys are the released names without their prefix. `config` is anything with the adapter's hyperparameters as
attributes. Depends on torch alone: a fresh process must not pay for the rest of the package.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def precompute_freqs_cis(dim: int, end: int) -> Tensor:
    freqs = 1.0 / (10000.0 ** (torch.arange(0, dim, 2, device="cpu").float() / dim))
    freqs = torch.outer(torch.arange(end, device="cpu"), freqs).float()
    return torch.cat([torch.cos(freqs), torch.sin(freqs)], dim=-1)


class GRN(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1, 1, dim))
        self.beta = nn.Parameter(torch.zeros(1, 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        gx = torch.norm(x, p=2, dim=1, keepdim=True)
        nx = gx / (gx.mean(dim=-1, keepdim=True) + 1e-6)
        out: Tensor = self.gamma * (x * nx) + self.beta + x
        return out


class ConvNeXtV2Block(nn.Module):
    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv1d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, inner)
        self.grn = GRN(inner)
        self.pwconv2 = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x.transpose(1, 2)).transpose(1, 2))
        out: Tensor = x + self.pwconv2(self.grn(F.gelu(self.pwconv1(y))))
        return out


class TextEmbedding(nn.Module):
    freqs_cis: Tensor

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.mask_padding = c.text_mask_padding
        self.text_embed = nn.Embedding(c.text_num_embeds + 1, c.text_dim)
        if c.conv_layers > 0:
            self.register_buffer("freqs_cis", precompute_freqs_cis(c.text_dim, 8192), persistent=False)
        blocks = [ConvNeXtV2Block(c.text_dim, c.text_dim * 2) for _ in range(c.conv_layers)]
        self.text_blocks = nn.Sequential(*blocks)

    def forward(self, text: Tensor, seq_len: int, drop_text: bool) -> Tensor:
        text = (text + 1)[:, :seq_len]
        text = F.pad(text, (0, seq_len - text.shape[1]), value=0)
        padding = (text == 0)[..., None]
        x: Tensor = self.text_embed(torch.zeros_like(text) if drop_text else text)
        if len(self.text_blocks) == 0:
            return x
        x = x + self.freqs_cis[:seq_len]
        if not self.mask_padding:
            blocks: Tensor = self.text_blocks(x)
            return blocks
        x = x.masked_fill(padding, 0.0)
        for block in self.text_blocks:
            x = block(x).masked_fill(padding, 0.0)
        return x


class ConvPositionEmbedding(nn.Module):
    def __init__(self, dim: int, kernel: int = 31, groups: int = 16) -> None:
        super().__init__()
        convs = [nn.Conv1d(dim, dim, kernel, groups=groups, padding=kernel // 2) for _ in range(2)]
        self.conv1d = nn.Sequential(convs[0], nn.Mish(), convs[1], nn.Mish())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv1d(x.permute(0, 2, 1))
        return y.permute(0, 2, 1)


class InputEmbedding(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.proj = nn.Linear(c.mel_dim * 2 + c.text_dim, c.dim)
        self.conv_pos_embed = ConvPositionEmbedding(c.dim)

    def forward(self, x: Tensor, cond: Tensor, text_embed: Tensor, drop_audio_cond: bool) -> Tensor:
        if drop_audio_cond:
            cond = torch.zeros_like(cond)
        x = self.proj(torch.cat((x, cond, text_embed), dim=-1))
        return self.conv_pos_embed(x) + x  # type: ignore[no-any-return]


class RotaryEmbedding(nn.Module):
    inv_freq: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)))

    def forward(self, seq_len: int) -> Tensor:
        """[1, N, E]: every angle twice, for both channels of a pair."""
        t = torch.arange(seq_len, device=self.inv_freq.device)[None]
        freqs = torch.einsum("bi,j->bij", t.type_as(self.inv_freq), self.inv_freq) / 1.0
        return torch.stack((freqs, freqs), dim=-1).flatten(-2)


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.view(*x.shape[:-1], -1, 2).unbind(dim=-1)
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def apply_rotary(t: Tensor, freqs: Tensor, scale: float = 1.0) -> Tensor:
    """t: [B, H, N, E]. Each call computes its own cosines, and scales by 1: so does upstream."""
    freqs = freqs[:, None]
    width = freqs.shape[-1]
    t, unrotated = t[..., :width], t[..., width:]
    t = (t * freqs.cos() * scale) + (rotate_half(t) * freqs.sin() * scale)
    return torch.cat((t, unrotated), dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


class Attention(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        inner = c.heads * c.dim_head
        self.heads, self.pe_attn_head = c.heads, c.pe_attn_head
        self.to_q = nn.Linear(c.dim, inner)
        self.to_k = nn.Linear(c.dim, inner)
        self.to_v = nn.Linear(c.dim, inner)
        self.q_norm = RMSNorm(c.dim_head) if c.qk_norm else None
        self.k_norm = RMSNorm(c.dim_head) if c.qk_norm else None
        self.to_out = nn.ModuleList([nn.Linear(inner, c.dim)])

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        batch, pn = x.shape[0], self.pe_attn_head
        query, key, value = (
            linear(x).view(batch, -1, self.heads, linear.out_features // self.heads).transpose(1, 2)
            for linear in (self.to_q, self.to_k, self.to_v)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if pn is not None:
            query[:, :pn] = apply_rotary(query[:, :pn], rope)
            key[:, :pn] = apply_rotary(key[:, :pn], rope)
        else:
            query, key = apply_rotary(query, rope), apply_rotary(key, rope)
        x = F.scaled_dot_product_attention(query, key, value)
        x = x.transpose(1, 2).reshape(batch, -1, self.heads * value.shape[-1])
        out: Tensor = self.to_out[0](x)
        return out


class AdaLayerNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim * 6)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)

    def forward(self, x: Tensor, emb: Tensor) -> tuple[Tensor, ...]:
        emb = self.linear(F.silu(emb))
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = torch.chunk(emb, 6, dim=1)
        x = self.norm(x) * (1 + scale_msa[:, None]) + shift_msa[:, None]
        return x, gate_msa, shift_mlp, scale_mlp, gate_mlp


class AdaLayerNormFinal(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim * 2)
        self.norm = nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        scale, shift = torch.chunk(self.linear(F.silu(emb)), 2, dim=1)
        normed: Tensor = self.norm(x)
        return normed * (1 + scale)[:, None, :] + shift[:, None, :]


class FeedForward(nn.Module):
    def __init__(self, dim: int, mult: int) -> None:
        super().__init__()
        project_in = nn.Sequential(nn.Linear(dim, dim * mult), nn.GELU(approximate="tanh"))
        self.ff = nn.Sequential(project_in, nn.Dropout(0.1), nn.Linear(dim * mult, dim))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ff(x)
        return out


class DiTBlock(nn.Module):
    def __init__(self, c: Any) -> None:
        super().__init__()
        self.attn_norm = AdaLayerNorm(c.dim)
        self.attn = Attention(c)
        self.ff_norm = nn.LayerNorm(c.dim, elementwise_affine=False, eps=1e-6)
        self.ff = FeedForward(c.dim, c.ff_mult)

    def forward(self, x: Tensor, t: Tensor, rope: Tensor) -> Tensor:
        norm, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.attn_norm(x, t)
        x = x + gate_msa.unsqueeze(1) * self.attn(norm, rope)
        norm = self.ff_norm(x) * (1 + scale_mlp[:, None]) + shift_mlp[:, None]
        return x + gate_mlp.unsqueeze(1) * self.ff(norm)  # type: ignore[no-any-return]


class TimestepEmbedding(nn.Module):
    def __init__(self, dim: int, features: int = 256) -> None:
        super().__init__()
        self.features = features
        self.time_mlp = nn.Sequential(nn.Linear(features, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, timestep: Tensor) -> Tensor:
        half = self.features // 2
        emb = torch.exp(torch.arange(half, device=timestep.device).float() * -(math.log(10000) / (half - 1)))
        emb = 1000 * timestep.unsqueeze(1) * emb.unsqueeze(0)
        embedded: Tensor = self.time_mlp(torch.cat((emb.sin(), emb.cos()), dim=-1))
        return embedded


class Step(nn.Module):
    """One step of CFM.sample: both branches packed, guidance, Euler. Returns the next state [B, N, mel]."""

    def __init__(self, config: Any, cfg_strength: float) -> None:
        super().__init__()
        c = config
        self.cfg_strength = cfg_strength
        self.time_embed = TimestepEmbedding(c.dim)
        self.text_embed = TextEmbedding(c)
        self.input_embed = InputEmbedding(c)
        self.rotary_embed = RotaryEmbedding(c.dim_head)
        self.transformer_blocks = nn.ModuleList(DiTBlock(c) for _ in range(c.depth))
        self.long_skip_connection = nn.Linear(c.dim * 2, c.dim, bias=False) if c.long_skip_connection else None
        self.norm_out = AdaLayerNormFinal(c.dim)
        self.proj_out = nn.Linear(c.dim, c.mel_dim)

    def forward(
        self, x: Tensor, cond: Tensor, text_cond: Tensor, text_uncond: Tensor, time: Tensor, dt: Tensor
    ) -> Tensor:
        """x, cond: [B, N, mel]; text_cond, text_uncond: [B, N, C], cached over the steps; time, dt: []."""
        batch, seq_len = x.shape[0], x.shape[1]
        t = self.time_embed(time.repeat(batch))
        h_cond = self.input_embed(x, cond, text_cond, False)
        h_uncond = self.input_embed(x, cond, text_uncond, True)
        h = torch.cat((h_cond, h_uncond), dim=0)
        t = torch.cat((t, t), dim=0)
        rope = self.rotary_embed(seq_len)
        residual = h
        for block in self.transformer_blocks:
            h = block(h, t, rope)
        if self.long_skip_connection is not None:
            h = self.long_skip_connection(torch.cat((h, residual), dim=-1))
        pred, null_pred = torch.chunk(self.proj_out(self.norm_out(h, t)), 2, dim=0)
        return x + dt * (pred + (pred - null_pred) * self.cfg_strength)

    def prepare(self, request: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        """What upstream's first step leaves in its cache: the embeddings of the text and of the dropped text."""
        frames = state.shape[1]
        return {
            "cond": request["cond"],
            "text_cond": self.text_embed(request["text"], frames, False),
            "text_uncond": self.text_embed(request["text"], frames, True),
        }

    def inputs(
        self, prepared: Mapping[str, Tensor], state: Tensor, schedule: Sequence[float], step: int
    ) -> tuple[Tensor, ...]:
        """Arguments of `forward` in step `step`."""
        given = (prepared[name] for name in ("cond", "text_cond", "text_uncond"))
        return state, *given, *_times(schedule, step)


def _times(schedule: Sequence[float], step: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(schedule[step]), torch.tensor(schedule[step + 1] - schedule[step])


# --- upstream's own module

# Imported by f5_tts.model beside its networks; calling one uses none of them.
UNRELATED = (
    "accelerate", "accelerate.utils", "datasets", "ema_pytorch", "librosa", "librosa.filters", "torchaudio", "wandb",
)  # fmt: skip


class _StandIn(types.ModuleType):
    """A module whose every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class UpstreamStep(nn.Module):
    """Upstream's DiT in upstream's loop: its own thread-local text cache, filled by the first call."""

    def __init__(self, transformer: nn.Module, cfg_strength: float) -> None:
        super().__init__()
        self.transformer, self.cfg_strength = transformer, cfg_strength

    def forward(self, x: Tensor, cond: Tensor, text: Tensor, time: Tensor, dt: Tensor) -> Tensor:
        packed = self.transformer(x=x, cond=cond, text=text, time=time, mask=None, cfg_infer=True, cache=True)
        pred, null_pred = torch.chunk(packed, 2, dim=0)
        return x + dt * (pred + (pred - null_pred) * self.cfg_strength)

    def prepare(self, request: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        self.transformer.clear_cache()  # type: ignore[operator]
        return {"cond": request["cond"], "text": request["text"]}

    def inputs(
        self, prepared: Mapping[str, Tensor], state: Tensor, schedule: Sequence[float], step: int
    ) -> tuple[Tensor, ...]:
        return state, prepared["cond"], prepared["text"], *_times(schedule, step)


def upstream(config: Any, cfg_strength: float, weights: Mapping[str, Tensor]) -> UpstreamStep | None:
    """The package f5-tts's DiT with these weights; None where it is not installed."""
    absent = [name for name in UNRELATED if importlib.util.find_spec(name.partition(".")[0]) is None]
    sys.modules.update({name: _StandIn(name) for name in absent})
    try:
        from f5_tts.model import DiT  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        return None
    finally:
        for name in absent:
            del sys.modules[name]
    names = (
        "dim", "depth", "heads", "dim_head", "ff_mult", "mel_dim", "text_num_embeds", "text_dim", "text_mask_padding",
        "qk_norm", "conv_layers", "pe_attn_head", "attn_mask_enabled", "long_skip_connection",
    )  # fmt: skip
    transformer = DiT(**{name: getattr(config, name) for name in names})
    transformer.load_state_dict(dict(weights), assign=True)
    return UpstreamStep(transformer.eval().requires_grad_(False), cfg_strength)
