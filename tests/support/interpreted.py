"""Triton kernels on whatever this machine has: a GPU, or Triton's interpreter."""

import importlib
import importlib.util
import os
from dataclasses import replace
from threading import Lock, RLock
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.compiled import described

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where tensors must be for the modules that `kernels` returns."""
LAUNCHED: set[str] = set()
"""What was interpreted, as `compiled.described` says it, and not yet compiled."""


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


def _hasten() -> None:
    """Leave out what Triton's interpreter does in vain, which was half of a test's time.

    At each call of a function by a kernel it prepares `triton.language` once more. And it computes whether
    sums overflow, but says so only in its debug mode. Kernels run one at a time, as its state is global and
    several threads may launch some.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    prepared: set[int] = set()
    one_at_a_time = Lock()

    def prepare_once(function: Any) -> Any:
        namespace = id(function.__globals__)
        if namespace in prepared:
            return interpreter._LangPatchScope()  # which undoes nothing
        prepared.add(namespace)
        return prepare(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        with one_at_a_time:
            if self.fn.__module__.startswith("patchstore."):
                LAUNCHED.add(described(self.fn, self.arg_names, self.constexprs, args, kwargs))
            prepared.clear()
            launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = prepare_once, launch_anew
    # Before 3.11.8 Python fails where two threads make syntax trees at a time: SystemError, "AST constructor
    # recursion depth mismatch".
    rewrite, one_tree_at_a_time = interpreter.FunctionRewriter.rewrite_ast, RLock()

    def rewrite_alone(self: Any) -> Any:
        with one_tree_at_a_time:
            return rewrite(self)

    interpreter.FunctionRewriter.rewrite_ast = rewrite_alone
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


if DEVICE.type == "cpu" and importlib.util.find_spec("triton"):
    # Triton's own functions are kernels too, and others may import it first.
    interpret("triton.experimental.gluon")
    _hasten()
