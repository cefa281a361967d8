"""Scales of 8-bit pages from the keys and values that a model computes for sample prompts.

    calibration = Calibration()
    for layer in ...:                               # a forward pass over sample prompts
        calibration.observe(layer, key, value)
    calibration.apply(buffers)

An 8-bit element is value / scale. With the largest value at the end of the type's range nothing saturates; per head,
since some heads have values that are many times larger than those of others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvplane.base.layer_spec import DType
from kvplane_worker.pages.buffers import PageBuffers
from kvplane_worker.pages.dtypes import TORCH_DTYPES

EIGHT_BIT = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)
SMALLEST = 2.0**-60  # of a head whose sample values are all 0


class Calibration:
    """The largest absolute keys and values of each layer and head so far, on the device of the values."""

    def __init__(self) -> None:
        self._largest: dict[str, list[Tensor]] = {}

    def observe(self, layer: str, *parts: Tensor) -> None:
        """Take keys and values, [tokens, kv_heads, size] each, or latent rows [tokens, 1, size], into account; without
        tokens there is nothing to do. Does not wait for the device.
        """
        if not all(len(part) for part in parts):
            return
        found = [part.detach().abs().amax((0, 2)).float() for part in parts]
        before = self._largest.get(layer, found)
        self._largest[layer] = [torch.maximum(old, new) for old, new in zip(before, found, strict=True)]

    def apply(self, buffers: PageBuffers, margin: float = 1.0) -> None:
        """Set the scales of all observed layers: largest value x margin / largest number of the type. If one is
        refused, none is changed.

        Raises:
            NotFound: the pages have no layer of this name.
            InvalidArgument: a layer has pages without scales, or values that are not finite.
        """
        scales: dict[str, tuple[Tensor, Tensor | None]] = {}
        for layer, largest in self._largest.items():
            stored = buffers.layer(layer).spec.precision
            limit = torch.finfo(TORCH_DTYPES[stored]).max if stored in EIGHT_BIT else 1.0  # refused below
            k, *v = (part.clamp(min=SMALLEST) * (margin / limit) for part in largest)
            scales[layer] = k, v[0] if v else None
        buffers.set_all_scales(scales)
