"""The PyTorch types of the element types of pages. Pages of a type in `SCALED` are stored with a scale."""

from __future__ import annotations

import torch

from kvplane.base.layer_spec import DType

TORCH_DTYPES: dict[DType, torch.dtype] = {
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
    DType.FLOAT32: torch.float32,
    DType.FLOAT64: torch.float64,
    DType.FLOAT8_E4M3FN: torch.float8_e4m3fn,
    DType.FLOAT8_E5M2: torch.float8_e5m2,
    DType.UINT8: torch.uint8,
    DType.INT8: torch.int8,
}

SCALED = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
