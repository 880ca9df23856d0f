"""What to call a model with: the first of several ways that the model in floating point takes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

Inputs = dict[str, Any]
IDS = (7, 3, 11, 5, 9, 4, 13, 6)


def ways(model: Any) -> Iterator[tuple[str, Inputs]]:
    """Words for what is given, and the arguments of a call."""
    names = inspect.signature(model.forward).parameters
    also: Inputs = {name: value for name, value in (("use_cache", False), ("return_dict", True)) if name in names}
    if "decoder_input_ids" in names and (model.config.is_encoder_decoder or "input_features" in names):
        also["decoder_input_ids"] = torch.tensor([IDS[:6]])
    if "input_ids" in names and "pixel_values" in names:
        yield from _text_and_image(model, also)
    if "input_ids" in names:
        yield "text", {**also, "input_ids": torch.tensor([IDS])}
    if "pixel_values" in names and "input_ids" not in names:
        yield from (("image", {**also, "pixel_values": image}) for image in images(model.config))
        if "decoder_input_ids" in names:
            ids = {"decoder_input_ids": torch.tensor([IDS[:6]])}
            yield from (("image", {**also, **ids, "pixel_values": image}) for image in images(model.config))
    for name in ("input_features", "input_values"):
        if name in names:
            yield from (("sound", {**also, name: sound}) for sound in _sounds(model.config))
    if "input_ids" in names and "bbox" in names:
        boxes = torch.tensor([[[0, 0, 5, 5]] * len(IDS)])
        yield "text with boxes", {**also, "input_ids": torch.tensor([IDS]), "bbox": boxes}


def images(config: Any) -> Iterator[torch.Tensor]:
    """Images of the sizes that a configuration may mean."""
    vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
    size = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or 32
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
    for shape in dict.fromkeys(((height, width), (32, 32), (64, 64), (224, 224))):
        yield _noise(1, channels, *shape)


def _text_and_image(model: Any, also: Inputs) -> Iterator[tuple[str, Inputs]]:
    """As many image tokens as the image has features."""
    config = model.config
    token = next((getattr(config, name) for name in ("image_token_id", "image_token_index", "img_token_id")
                  if isinstance(getattr(config, name, None), int)), None)  # fmt: skip
    if token is None or not hasattr(model, "get_image_features"):
        return
    for image in images(config):
        try:
            with torch.no_grad():
                features = model.get_image_features(pixel_values=image)
        except Exception:  # noqa: BLE001  (another shape, or text alone)
            continue
        features = getattr(features, "pooler_output", features)
        count = sum(part.shape[:-1].numel() for part in features) if isinstance(features, (list, tuple)) else (
            features.shape[:-1].numel())  # fmt: skip
        ids = torch.tensor([[*IDS[:3], *[token] * count, *IDS[3:]]])
        yield "text and image", {**also, "input_ids": ids, "pixel_values": image}
        break


def _sounds(config: Any) -> Iterator[torch.Tensor]:
    encoder = getattr(config, "encoder_config", None) or getattr(config, "audio_config", None) or config
    bins = next(
        (
            getattr(encoder, name)
            for name in (
                "num_mel_bins",
                "feat_size",
                "input_feat_per_channel",
                "input_dim",
                "feature_projection_input_dim",
            )
            if getattr(encoder, name, None)
        ),
        16,
    )
    frames = 2 * (getattr(encoder, "max_source_positions", None) or 32)
    yield _noise(1, bins, frames)
    yield _noise(1, frames, bins)
    yield _noise(1, getattr(config, "max_length", None) or 64, bins)
    yield _noise(1, 4000)


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def outputs(model: Any, inputs: Inputs) -> torch.Tensor:
    """The logits, or the first floating-point tensor, of a call."""
    torch.manual_seed(0)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    given = {name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
             for name, value in inputs.items()}  # fmt: skip
    result = model(**given)
    found = getattr(result, "logits", None)
    if not isinstance(found, torch.Tensor):
        found = next(each for each in result.to_tuple() if isinstance(each, torch.Tensor) and each.is_floating_point())
    return found.float()
