"""Weights in FP8: how they are rounded, which tensors are, and what a checkpoint's config says of it."""

from patchstore.quantization.configs import Quantization, check_config, quantization_of
from patchstore.quantization.forms import CHOICES, FORMS, Form

__all__ = ["CHOICES", "FORMS", "Form", "Quantization", "check_config", "quantization_of"]
