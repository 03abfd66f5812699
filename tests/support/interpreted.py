"""Triton kernels on whatever this machine has: a GPU, or Triton's interpreter."""

import importlib
import importlib.util
import os
from types import ModuleType

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where tensors must be for the modules that `kernels` returns."""


def interpret(name: str) -> ModuleType:
    """Import a module so that the kernels which that defines are interpreted.

    Whether they are is settled then, so only the import sees the variable: servers that tests start must not
    inherit it.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        return importlib.import_module(name)
    finally:
        del os.environ["TRITON_INTERPRET"]


def kernels(name: str) -> ModuleType:
    """Import a module that defines kernels, or imports one that does; skips where there is no Triton."""
    pytest.importorskip("triton", reason="needs Triton")
    return importlib.import_module(name) if DEVICE.type == "cuda" else interpret(name)


if DEVICE.type == "cpu" and importlib.util.find_spec("triton"):
    # Triton's own functions are kernels too, and others may import it first.
    interpret("triton.experimental.gluon")
