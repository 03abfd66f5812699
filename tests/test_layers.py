"""Imports point down: each module may use only what lies below it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LAYERS = {
    "patchstore.errors": 0,
    "patchstore.support": 1,
    "patchstore.stores": 2,
    "patchstore.bucket": 2,
    "patchstore.signing": 3,
    "patchstore.kernels": 5,
    "patchstore.tensors": 3,
    "patchstore.quantization": 3,
    "patchstore.codec": 5,
    "patchstore.ops.retention": 6,
    "patchstore.read": 6,
    "patchstore.publish": 6,
    "patchstore.ops.compact": 8,
    "patchstore.apply": 7,
    "patchstore.follow": 8,
    "patchstore.ops.replicate": 8,
    "patchstore.ops.mirror": 8,
    "patchstore.ops.report": 8,
    "patchstore.testing": 8,
    "patchstore.integrations": 9,
    "patchstore.ops.doctor": 9,
    "patchstore.cli": 10,
    "patchstore.__main__": 10,
    "vllm_plugin": 8,
}
"""Module or package -> layer; `docs/architecture.md` says what each layer is."""

PRIVATE_REACHES = 14
"""At most so often tests reach what is private, in our code or another; lower it, never raise it."""

BY_NAME = {"setattr", "delattr", "getattr", "hasattr", "attrgetter", "object", "patch"}
"""Functions, also of pytest and `unittest.mock`, that take the names of attributes as text."""

FOREIGN = {
    "torch": lambda name: layer(name) >= 3,
    "triton": lambda name: name.startswith("patchstore.kernels"),
    "safetensors": lambda name: name.startswith("vllm_plugin"),
    "fsspec": lambda name: name.startswith("patchstore.stores"),
    "s3fs": lambda name: name.startswith("patchstore.stores"),
    "botocore": lambda name: name.startswith("patchstore.stores"),
    # The second looks for what vLLM downloaded, on this host alone.
    "huggingface_hub": lambda name: name in {"patchstore.stores.hub_api", "vllm_plugin.opening"},
    "hf_xet": lambda name: name == "patchstore.stores.hub",
    "obstore": lambda name: name.startswith("patchstore.stores"),
    "transformers": lambda name: (
        name.startswith("patchstore.integrations") or name == "patchstore.publish.sources.layouts"
    ),
    "trl": lambda name: name == "patchstore.integrations.trl",
    "ray": lambda name: name == "patchstore.integrations.verl",
    "verl": lambda name: name.startswith("patchstore.integrations.verl"),
    "vllm": lambda name: name.startswith("vllm_plugin"),
    # The second names the errors of a client that it is given.
    "httpx": lambda name: (
        name.startswith("patchstore.follow") or name == "patchstore.ops.doctor.store_checks"
    ),
    "prometheus_client": lambda name: name in {"patchstore.follow.metrics", "patchstore.follow.loop"},
    "opentelemetry": lambda name: name == "patchstore.support.tracing",
    "cryptography": lambda name: name == "patchstore.signing.keys",
    "blake3": lambda name: name == "patchstore.bucket.digests",
    "typer": lambda name: name.startswith("patchstore.cli"),
    "rich": lambda name: name == "patchstore.cli.output",
}
"""One foreign thing, one door: package -> which of our modules may import it."""


def layer(name: str) -> int:
    while name not in LAYERS:
        name, _, last = name.rpartition(".")
        assert name, f"{last} has no layer: add it to LAYERS"
    return LAYERS[name]


def modules() -> dict[str, Path]:
    found = {}
    for package in ("patchstore", "vllm_plugin"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """Names of modules that a file imports, those inside functions included, those for types not."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = modules()


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"patchstore"}))
def test_a_module_imports_only_from_its_layer_and_below(name: str) -> None:
    for imported in imports(MODULES[name]):
        own = next((p for p in (imported, imported.rpartition(".")[0]) if p in MODULES), None)
        if own is not None and own != "patchstore":
            assert layer(own) <= layer(name), (
                f"{name} (layer {layer(name)}) imports {own} (layer {layer(own)})"
            )


@pytest.mark.parametrize("name", sorted(MODULES))
def test_foreign_packages_enter_through_their_own_door(name: str) -> None:
    for imported in imports(MODULES[name]):
        package = imported.split(".")[0]
        if package in FOREIGN:
            assert FOREIGN[package](name), f"{name} imports {package}"


def test_tests_of_the_package_are_not_imported_by_it() -> None:
    for name, path in MODULES.items():
        if not name.startswith("patchstore.testing"):
            assert not any(i.startswith("patchstore.testing") for i in imports(path)), name


def test_looking_at_a_bucket_does_not_import_torch_or_a_store_driver() -> None:
    code = (
        "import sys, patchstore, patchstore.cli.main, patchstore.follow.service;"
        "print(sorted({'torch', 'vllm', 's3fs', 'fsspec', 'safetensors', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_tests_stand_on_public_ground() -> None:
    found = reached()
    assert len(found) <= PRIVATE_REACHES, "\n".join(found)


def reached() -> list[str]:
    """Where tests use `other._name`, import it or one from `other._name`, or set or ask for it by name.

    Of whichever package defines the name: this package, Python's own, or another one.
    """
    found = []
    for path, tree in trees("tests").items():
        for node in ast.walk(tree):
            names: list[str] = []
            match node:
                case ast.Attribute(value=ast.Name(id="self" | "cls")):
                    pass
                case ast.Attribute(attr=name):
                    names = [name]
                case ast.Import(names=each) | ast.ImportFrom(names=each, module=None):
                    names = [alias.name for alias in each]
                case ast.ImportFrom(names=each, module=str(module)):
                    # Once for the module, however many names are taken from it.
                    names = [module, *(alias.name for alias in each)]
                case ast.Call(func=ast.Attribute(attr=by) | ast.Name(id=by), args=args) if by in BY_NAME:
                    texts = (each.value for each in args if isinstance(each, ast.Constant))
                    names = [text for text in texts if isinstance(text, str)]
            found += [f"{path}:{node.lineno}: {name}" for name in names if is_within_private(name)]
    return found


def is_within_private(name: str) -> bool:
    return name.replace(".", "").isidentifier() and any(map(is_private, name.split(".")))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def trees(package: str) -> dict[Path, ast.Module]:
    return {
        path.relative_to(ROOT): ast.parse(path.read_text()) for path in sorted((ROOT / package).rglob("*.py"))
    }


def test_what_writes_weights_does_not_import_vllm() -> None:
    # So that it can be tested and measured on GPUs of machines without it.
    code = (
        "import sys, vllm_plugin.gpu.decode, vllm_plugin.live.rank_weights, vllm_plugin.map.provenance;"
        "print(sorted({'vllm'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"
