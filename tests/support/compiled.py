"""Compile kernels for a GPU, with or without one: Triton's interpreter takes what its compiler refuses.

A process of its own compiles, as the kernels of the process that runs tests are interpreted there.
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

TARGET = ("cuda", 90, 32)
"""An H100: backend, compute capability, and threads of a warp."""
_DTYPE = "dtype "


def described(
    kernel: Any, names: Sequence[str], constants: Sequence[str], args: Sequence[Any], named: Mapping[str, Any]
) -> str:
    """Return a line that says which kernel is launched, and with arguments of which types."""
    from triton.runtime.jit import mangle_type

    given = dict(zip(names, args, strict=False)) | dict(named)
    types = {name: "constexpr" if name in constants else mangle_type(given[name]) for name in names}
    values = {name: _written(given[name]) for name in names if types[name] == "constexpr"}
    warps = {"num_warps": named["num_warps"]} if "num_warps" in named else {}
    return json.dumps([kernel.__module__, kernel.__name__, types, values, warps])


def _written(value: Any) -> Any:
    return f"{_DTYPE}{value.name}" if type(value).__module__.startswith("triton.") else value


class Compiler:
    """Compiles kernels in a process that begins with the first one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._seen: set[str] = set()

    def check(self, launch: str) -> None:
        """Fail where a kernel, as `described`, does not compile. Each is compiled once."""
        if launch in self._seen:
            return
        self._seen.add(launch)
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        print(launch, file=self._process.stdin, flush=True)
        error = json.loads(self._process.stdout.readline() or '"its process ended"')
        assert not error, f"does not compile for {TARGET}: {launch}\n{error}"

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def _compile(module: str, kernel: str, types: dict[str, str], values: dict[str, Any], warps: Any) -> None:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(module), kernel)
    place = {name: (number,) for number, name in enumerate(function.arg_names)}
    constants = {}
    for name, value in values.items():
        is_dtype = isinstance(value, str) and value.startswith(_DTYPE)
        constants[place[name]] = tl.dtype(value.removeprefix(_DTYPE)) if is_dtype else value
    # As most memory is that torch allocates.
    aligned = {place[name]: [["tt.divisibility", 16]] for name, its in types.items() if its.startswith("*")}
    source = ASTSource(fn=function, signature=types, constexprs=constants, attrs=aligned)
    triton.compile(source, target=GPUTarget(*TARGET), options=warps)


def main() -> None:
    """Compile what each line of the input describes; answer with an error, or an empty string."""
    for line in sys.stdin:
        error = ""
        try:
            _compile(*json.loads(line))
        except Exception as exc:  # noqa: BLE001 -- whatever it is, the test that launched the kernel says so
            error = f"{type(exc).__name__}: {exc}"
        sys.stdout.write(json.dumps(error) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
