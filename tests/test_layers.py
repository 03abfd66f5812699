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
    "patchstore.format": 2,
    "patchstore.signing": 3,
    "patchstore.kernels": 5,
    "patchstore.tensors": 3,
    "patchstore.quantization": 3,
    "patchstore.encodings": 4,
    "patchstore.payloads": 5,
    "patchstore.retention": 6,
    "patchstore.read": 6,
    "patchstore.publish": 6,
    "patchstore.compact": 7,
    "patchstore.apply": 7,
    "patchstore.serve": 8,
    "patchstore.replicate": 8,
    "patchstore.mirror": 8,
    "patchstore.testing": 8,
    "patchstore.integrations": 9,
    "patchstore.doctor": 9,
    "patchstore.cli": 10,
    "patchstore.__main__": 10,
    "vllm_plugin": 8,
}
"""Module or package -> layer; `docs/architecture.md` says what each layer is."""

FOREIGN = {
    "torch": lambda name: layer(name) >= 3,
    "triton": lambda name: name.startswith("patchstore.kernels"),
    "safetensors": lambda name: name.startswith("vllm_plugin"),
    "fsspec": lambda name: name.startswith("patchstore.stores"),
    "s3fs": lambda name: name.startswith("patchstore.stores"),
    "botocore": lambda name: name.startswith("patchstore.stores"),
    # The second looks for what vLLM downloaded, on this host alone.
    "huggingface_hub": lambda name: name in {"patchstore.stores.hub_api", "vllm_plugin.opening"},
    "hf_xet": lambda name: (
        name == "patchstore.stores.hub_content" or name.startswith("patchstore.testing.hub")
    ),
    "obstore": lambda name: name.startswith("patchstore.stores"),
    "transformers": lambda name: (
        name.startswith(("patchstore.integrations", "patchstore.testing"))
        or name == "patchstore.publish.sources.saved"
    ),
    "trl": lambda name: name == "patchstore.integrations.trl",
    "ray": lambda name: name == "patchstore.integrations.verl",
    "verl": lambda name: name.startswith("patchstore.integrations.verl"),
    "vllm": lambda name: name.startswith("vllm_plugin"),
    "httpx": lambda name: (
        name.startswith(("patchstore.serve", "patchstore.doctor")) or name == "patchstore.mirror.consumers"
    ),
    "prometheus_client": lambda name: name in {"patchstore.serve.metrics", "patchstore.serve.progress"},
    "cryptography": lambda name: name == "patchstore.signing.keys",
    "sigstore": lambda name: name == "patchstore.signing.keyless",
    "blake3": lambda name: name == "patchstore.format.hashing",
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
        "import sys, patchstore, patchstore.cli.main, patchstore.serve.reconcile;"
        "print(sorted({'torch', 'vllm', 's3fs', 'fsspec', 'safetensors', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"
