"""StyleTTS2's released sizes, and how its checkpoints and configurations are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from voicehub_aot.adapters.styletts2.net import Config, StyleDenoiser
from voicehub_aot.errors import CheckpointMismatch, OptionUnsupported, UsageError
from voicehub_aot.spec.checkpoint import Reading, check_sizes, only_tensors, read_weights
from voicehub_aot.spec.hyperparameters import config_of, named_config, not_positive, refuse, without_fixed
from voicehub_aot.spec.network import count, shapes_of, size, unfilled, without_prefix

NAME = "styletts2"
PREFIX = "diffusion.net."
NAMES = (PREFIX, "unet.")  # a released file holds every tensor under both
FILES = ("*.pth", "*.pt", "*.safetensors")

# --- hyperparameters

PLACEHOLDER = 0.2  # upstream's own, in Configs/config_libritts.yml: good for synthetic weights only
_TINY: dict[str, Any] = {
    "sigma_data": PLACEHOLDER,
    "num_layers": 2,
    "channels": 16,
    "num_heads": 2,
    "head_features": 8,
    "context_embedding_features": 24,
    "embedding_max_length": 64,
}
CONFIGS: Mapping[str, Config] = {
    "LibriTTS": Config(sigma_data=PLACEHOLDER, context_features=256),
    "LJSpeech": Config(sigma_data=PLACEHOLDER),
    "tiny": Config(**_TINY, context_features=16),
    "tiny-single": Config(**_TINY),
}
RELEASED = ("LibriTTS", "LJSpeech")
CLASSES = ("StyleTransformer1d", "Transformer1d")  # with and without a reference style
FIXED: Mapping[str, Any] = {  # of every release
    "use_context_time": True,
    "use_rel_pos": False,
    "rel_pos_num_buckets": None,
    "rel_pos_max_distance": None,
    "context_features_multiplier": 1,
}
SIZES = (
    *("num_layers", "channels", "num_heads", "head_features", "multiplier", "context_embedding_features"),
    "embedding_max_length",
)
SIGMA_DATA = (
    "sigma_data is a statistic of the training data that no checkpoint holds: copy model_params.diffusion.dist."
    "sigma_data of the released config.yml into a .json file, as in "
    '{"class": "StyleTransformer1d", "sigma_data": …} (LibriTTS; LJSpeech: "Transformer1d"), or all of config.yml '
    "as JSON, and give it with --config"
)


def fault(config: Config) -> str | None:
    """What is wrong with the hyperparameters' values, if anything."""
    several = () if config.context_features is None else ("context_features",)
    if wrong := not_positive(vars(config), (*SIZES, *several)):
        return wrong
    if config.channels % 2:
        return f"channels={config.channels!r} is odd, but times have a sine and a cosine each"
    return None


def _of_training(values: Mapping[str, Any]) -> dict[str, Any]:
    """The released config.yml, as JSON -> the network's hyperparameters."""
    try:
        model = values["model_params"]
        diffusion, style = model["diffusion"], 2 * model["style_dim"]
        return {
            **diffusion["transformer"],
            "sigma_data": diffusion["dist"]["sigma_data"],
            "channels": style,
            "context_features": style if model["multispeaker"] else None,
        }
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{NAME}: model_params is not that of a released config.yml ({error!r}); wanted style_dim, multispeaker, "
            "diffusion.transformer and diffusion.dist.sigma_data"
        ) from error


def config_from(values: Mapping[str, Any]) -> Config:
    """Names as in `Config` and upstream's constructors, `class` among them, or a whole config.yml as JSON."""
    given = _of_training(values) if "model_params" in values else dict(values)
    given = without_fixed(NAME, given, FIXED, "every release has")
    network = given.pop("class", None)
    if given.get("sigma_data") is None:
        config_of(NAME, Config, {**given, "sigma_data": PLACEHOLDER}, ("class",))  # what else is wrong comes first
        raise UsageError(f"{NAME}: hyperparameter sigma_data is missing; {SIGMA_DATA}")
    if network is None and "context_features" not in given:
        raise UsageError(f"{NAME}: which network is it? Give class, one of {CLASSES!r}, or context_features")
    if network not in (None, *CLASSES):
        raise UsageError(f"{NAME}: class {network!r} is not known; known are {CLASSES!r}")
    if network == CLASSES[0]:
        given.setdefault("context_features", given.get("channels", Config.channels))
    sigma = given["sigma_data"]
    if not isinstance(sigma, int | float) or isinstance(sigma, bool) or not sigma > 0:
        raise UsageError(f"{NAME}: sigma_data={sigma!r}, wanted a positive number; {SIGMA_DATA}")
    config = config_of(NAME, Config, given, ("class",))
    if network is not None and (network == CLASSES[0]) != (config.context_features is not None):
        raise OptionUnsupported(f"{NAME}: {network} with context_features={config.context_features!r} has no release")
    refuse(NAME, fault(config))
    return config


# --- keys and shapes


def network(config: Config) -> StyleDenoiser:
    return unfilled(StyleDenoiser, config)


def checkpoint_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    return shapes_of(network(config), PREFIX)


def formula_weights(config: Config) -> dict[str, Tensor]:
    """None: every entry is learned."""
    return {}


# --- files


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted(file for pattern in FILES for file in path.rglob(pattern))
    if len(found) != 1:
        names = ", ".join(str(f.relative_to(path)) for f in found) or "none"
        raise CheckpointMismatch(f"{path}: wanted one checkpoint ({', '.join(FILES)}), found {names}; name the file")
    return found[0]


def _denoiser(file: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a training state that is the denoiser, or all of a file that holds nothing else."""
    networks = content.get("net", content)
    part = networks.get("diffusion") if isinstance(networks, Mapping) else None
    if isinstance(part, Mapping):
        return part
    if "net" in content:
        raise CheckpointMismatch(f"{file}: its 'net' has no 'diffusion', the style denoiser; give a second-stage file")
    return content


def _alike(one: Tensor, other: Tensor) -> bool:
    """Equal, NaN for NaN: what is wrong with values is said later."""
    if one is other or one.shape != other.shape or one.dtype != other.dtype:
        return one is other
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _own_weights(file: Path, reading: Reading) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    content = _denoiser(file, read_weights(file, reading)[0])
    for key, value in only_tensors(file, content, "a tensor or 'net'").items():
        bare = str(key)
        for name in NAMES:
            bare = bare.removeprefix(name)
        if not _alike(weights.setdefault(PREFIX + bare, value), value):
            raise CheckpointMismatch(f"{file}: two entries for {bare!r} differ; a released file holds it twice, alike")
    return weights


def _sizes_of(weights: Mapping[str, Tensor], base: Config) -> Config:
    """weights: bare keys. `base` with their sizes; of the attention they tell only the product of both its sizes."""
    channels = size(weights, base.channels, ("to_out.1.weight", 0), ("to_out.1.bias", 0))
    width = size(weights, base.width, ("to_out.1.weight", 1), ("to_mapping.0.weight", 0))
    inner = size(weights, base.num_heads * base.head_features, ("blocks.*.attention.to_q.weight", 0))
    forward = "blocks.*.feed_forward"
    hidden = size(weights, base.multiplier * width, (f"{forward}.0.weight", 0), (f"{forward}.2.weight", 1))
    style = base.context_features
    return replace(
        base,
        num_layers=count(weights, "blocks") or base.num_layers,
        channels=channels,
        num_heads=inner // base.head_features,
        multiplier=hidden // max(1, width),
        context_embedding_features=width - channels,
        context_features=None if style is None else size(weights, style, ("to_features.0.weight", 1)),
        embedding_max_length=size(weights, base.embedding_max_length, ("fixed_embedding.embedding.weight", 0)),
    )


def read_checkpoint(
    path: Path, config: str | Config | None, reading: Reading | None = None
) -> tuple[Config, dict[str, Tensor]]:
    """The second stage's training state, or a folder with one. It does not tell sigma_data: `config` must."""
    base = named_config(NAME, CONFIGS, config)
    if base is None or config in RELEASED:
        raise CheckpointMismatch(f"{path}: {SIGMA_DATA}")
    file = _find(path)
    weights = _own_weights(file, reading or Reading())
    found = _sizes_of(without_prefix(weights, PREFIX), base)
    check_sizes(file, fault(found), "a StyleTTS2 checkpoint")
    return found, weights
