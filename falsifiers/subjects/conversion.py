"""Tensors as arrays, and the reference's sizes and scalars as `impl`'s configurations."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import ml_dtypes
import numpy as np
import torch

from blackswan.impl.classifier import Adaptation
from blackswan.impl.config import DecoderConfig, RopeScaling
from blackswan.reference.table import Array


def to_numpy(value: torch.Tensor) -> Array:
    """The tensor's content on the host; bfloat16 as ml_dtypes has it."""
    host = value.detach().cpu()
    if host.dtype == torch.bfloat16:
        return host.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return np.asarray(host.numpy())


def to_torch(value: Array) -> torch.Tensor:
    """The array as a tensor on the host that shares its memory, in whatever order its numbers lie there."""
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def config_of(scalars: Mapping[str, Any]) -> DecoderConfig:
    """The decoder of those sizes and scalars, among which others may be. Where no number of positions is given, it is for any, or with
    scaled positions for as many as there were before: the scaling holds at every length."""
    scaling = RopeScaling(**_of_fields(RopeScaling, scalars)) if scalars.get("factor", 1.0) != 1.0 else None
    positions = scaling.original_positions if scaling else 2**31
    return DecoderConfig(**_of_fields(DecoderConfig, {"tied": True, "max_positions": positions, **scalars}), rope_scaling=scaling)


def adaptation_of(scalars: Mapping[str, Any]) -> Adaptation:
    """The adaptation of those scalars: classes, LoRA, pooling and NF4."""
    return Adaptation(**_of_fields(Adaptation, scalars))


def _of_fields(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}
