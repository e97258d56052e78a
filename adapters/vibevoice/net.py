"""VibeVoice's prediction head as a torch module, and the released keys it is made from.

Restates microsoft/VibeVoice e73d1e1 (MIT), vibevoice/modular/modular_vibevoice_diffusion_head.py. Matrices that
multiply the same vector are stacked, so that a frame needs one product where upstream's module runs several: the
modulations of all layers, and gate and up of each feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from voicehub_aot.adapters._tables import cosines_first

PREFIX = "model.prediction_head."
FEATURES = 256  # of the time embedding; no hyperparameter upstream


@dataclass(frozen=True)
class Config:
    """Upstream's hyperparameters, values as every release has them.

    guidance_scale: default of upstream's demos, in upstream's convention: 1 = the conditional prediction alone.
    """

    hidden_size: int
    head_layers: int = 4
    head_ffn_ratio: float = 3.0
    rms_norm_eps: float = 1e-5
    latent_size: int = 64
    guidance_scale: float = 1.3

    @property
    def inner(self) -> int:
        return int(self.hidden_size * self.head_ffn_ratio)


def released_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Every released key without its prefix."""
    width = c.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "noisy_images_proj.weight": (width, c.latent_size),
        "cond_proj.weight": (width, width),
        "t_embedder.mlp.0.weight": (width, FEATURES),
        "t_embedder.mlp.2.weight": (width, width),
    }
    for i in range(c.head_layers):
        shapes |= {
            f"layers.{i}.norm.weight": (width,),
            f"layers.{i}.ffn.gate_proj.weight": (c.inner, width),
            f"layers.{i}.ffn.up_proj.weight": (c.inner, width),
            f"layers.{i}.ffn.down_proj.weight": (width, c.inner),
            f"layers.{i}.adaLN_modulation.1.weight": (3 * width, width),
        }
    return shapes | {
        "final_layer.adaLN_modulation.1.weight": (2 * width, width),
        "final_layer.linear.weight": (c.latent_size, width),
    }


def module_state(c: Config, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Released weights, prefix removed -> the state of `PredictionHead`, float32."""

    def stacked(*keys: str) -> Tensor:
        return torch.cat([weights[key].float() for key in keys])

    layers = [f"layers.{i}" for i in range(c.head_layers)]
    state = {
        "noisy_images_proj.weight": stacked("noisy_images_proj.weight"),
        "cond_proj.weight": stacked("cond_proj.weight"),
        "t_embedder.0.weight": stacked("t_embedder.mlp.0.weight"),
        "t_embedder.2.weight": stacked("t_embedder.mlp.2.weight"),
        "modulations.weight": stacked(*(f"{at}.adaLN_modulation.1.weight" for at in (*layers, "final_layer"))),
        "linear.weight": stacked("final_layer.linear.weight"),
    }
    for at in layers:
        state |= {
            f"{at}.norm": stacked(f"{at}.norm.weight"),
            f"{at}.gate_up.weight": stacked(f"{at}.ffn.gate_proj.weight", f"{at}.ffn.up_proj.weight"),
            f"{at}.down.weight": stacked(f"{at}.ffn.down_proj.weight"),
        }
    return state


class Layer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.eps = c.rms_norm_eps
        self.norm = nn.Parameter(torch.empty(c.hidden_size))
        self.gate_up = nn.Linear(c.hidden_size, 2 * c.inner, bias=False)
        self.down = nn.Linear(c.inner, c.hidden_size, bias=False)

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
        """x, shift, scale, gate: [B, D] -> [B, D]."""
        h = F.rms_norm(x, x.shape[-1:], self.norm, self.eps) * (1 + scale) + shift
        opened, up = self.gate_up(h).chunk(2, dim=-1)
        out: Tensor = x + gate * self.down(F.silu(opened) * up)
        return out


class PredictionHead(nn.Module):
    """The arguments are the region's inputs; returns the v-prediction [B, latent].

    All modulations are one product of time and request, apart from the state: it runs for every step of a frame at
    once, before the first.
    """

    def __init__(self, c: Config) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        width = c.hidden_size
        self.eps = c.rms_norm_eps
        self.noisy_images_proj = linear(c.latent_size, width)
        self.cond_proj = linear(width, width)
        self.t_embedder = nn.Sequential(linear(FEATURES, width), nn.SiLU(), linear(width, width))
        self.modulations = linear(width, (3 * c.head_layers + 2) * width)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.head_layers))
        self.linear = linear(width, c.latent_size)

    def forward(
        self, *, noisy_images: Tensor, time: Tensor, condition: Tensor, neg_condition: Tensor, negative: Tensor
    ) -> Tensor:
        chosen = torch.where(negative[:, None], neg_condition, condition)
        waves = cosines_first(time, FEATURES, scale=1.0)
        mixed = F.silu(self.cond_proj(chosen) + self.t_embedder(waves))
        parts = self.modulations(mixed).chunk(3 * len(self.layers) + 2, dim=-1)
        x = self.noisy_images_proj(noisy_images)
        for i, layer in enumerate(self.layers):
            x = layer(x, *parts[3 * i : 3 * i + 3])
        shift, scale = parts[-2:]
        out: Tensor = self.linear(F.rms_norm(x, x.shape[-1:], None, self.eps) * (1 + scale) + shift)
        return out
