"""Anchor files: what makes them an ordinary Hugging Face checkpoint folder."""

import json
from collections.abc import Mapping

from patchstore.format.records import FORMAT_VERSION, Schema


def anchor_metadata(manifest_version: int, step: int, run_id: str) -> dict[str, str]:
    """The metadata of an anchor's files. `format` is what `transformers` insists on."""
    return {
        "format": "pt",
        "format_version": str(FORMAT_VERSION),
        "kind": "anchor",
        "run_id": run_id,
        "version": str(manifest_version),
        "step": str(step),
    }


def index_json(schema: Schema, weight_map: Mapping[str, str]) -> bytes:
    """The `model.safetensors.index.json` of a sharded checkpoint folder."""
    record = {"metadata": {"total_size": schema.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(record, indent=2, ensure_ascii=False).encode() + b"\n"
