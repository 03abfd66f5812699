"""Operations on a bucket: change something deep inside, and correct every size and digest around it.

Without that, a digest is wrong first, and the check behind it is never reached.
"""

import json
import struct
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from patchstore.bucket.digests import digest
from patchstore.stores.memory import MemoryStore
from tests.support.copies import put_back

Objects = dict[str, bytes]
"""A bucket: key -> bytes."""
Entries = dict[str, tuple[str, list[int], bytes]]
"""A safetensors file's tensors: name -> dtype, shape, bytes."""


def load(folder: Path) -> Objects:
    return dict(_loaded(folder))


@cache
def _loaded(folder: Path) -> Objects:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def lay_out(objects: Mapping[str, bytes], folder: Path) -> Path:
    for key, data in objects.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def store_of(objects: Mapping[str, bytes]) -> MemoryStore:
    store = MemoryStore()
    put_back(store, objects)
    return store


def manifest(objects: Objects, version: int) -> Any:
    return json.loads(objects[f"versions/{version:08d}.json"])


def edit_manifest(objects: Objects, version: int, edit: Callable[[Any], Any]) -> None:
    """Let `edit` change a manifest in place, and make its children name the new bytes."""
    record = manifest(objects, version)
    edit(record)
    put_manifest(objects, version, json.dumps(record).encode())


def put_manifest(objects: Objects, version: int, data: bytes) -> None:
    objects[f"versions/{version:08d}.json"] = data
    later = [
        int(key[9:17]) for key in sorted(objects) if key.startswith("versions/") and int(key[9:17]) > version
    ]
    for child in later:
        record = manifest(objects, child)
        if record["parent"] == version:
            record["parent_digest"] = digest(data)
            put_manifest(objects, child, json.dumps(record).encode())


def payload(objects: Objects, version: int, part: str, number: int = 0) -> bytes:
    return objects[manifest(objects, version)[part]["payloads"][number]["key"]]


def put_payload(objects: Objects, version: int, part: str, data: bytes, number: int = 0) -> None:
    """Store other bytes, and let the manifest vouch for them."""
    objects[manifest(objects, version)[part]["payloads"][number]["key"]] = data

    def vouch(record: Any) -> None:
        record[part]["payloads"][number] |= {"size": len(data), "digest": digest(data)}

    edit_manifest(objects, version, vouch)


def put_sums(objects: Objects, version: int, data: bytes) -> None:
    """Store other digest sums, and let the manifest vouch for them."""
    objects[manifest(objects, version)["state"]["sums"]["key"]] = data

    def vouch(record: Any) -> None:
        record["state"]["sums"] |= {"size": len(data), "digest": digest(data)}

    edit_manifest(objects, version, vouch)


def take_apart(data: bytes) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header and data."""
    (length,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def put_together(header: Any, data: bytes) -> bytes:
    if isinstance(header, bytes):
        text = header
    else:
        # As it is written, which is read in another way than other JSON.
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")
    return struct.pack("<Q", len(text)) + text + data


def entries(data: bytes) -> tuple[Any, Entries]:
    """A safetensors file's metadata and tensors."""
    header, rest = take_apart(data)
    metadata = header.pop("__metadata__", {})
    found = {name: (e["dtype"], e["shape"], rest[slice(*e["data_offsets"])]) for name, e in header.items()}
    return metadata, found


def tensor_file(metadata: Any, tensors: Entries) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    rest = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(rest), len(rest) + len(data)]}
        rest += data
    return put_together(header, rest)


def edit_file(
    objects: Objects, version: int, part: str, edit: Callable[[Any, Entries], Any], number: int = 0
) -> None:
    """Let `edit` change a payload's metadata and tensors in place."""
    metadata, tensors = entries(payload(objects, version, part, number))
    edit(metadata, tensors)
    put_payload(objects, version, part, tensor_file(metadata, tensors), number)


def edit_header(objects: Objects, version: int, part: str, edit: Callable[[Any], Any]) -> None:
    """Let `edit` change a payload's JSON header in place; the data stay."""
    header, rest = take_apart(payload(objects, version, part))
    edit(header)
    put_payload(objects, version, part, put_together(header, rest))


def edit_json(objects: Objects, key: str, edit: Callable[[Any], Any]) -> None:
    record = json.loads(objects[key])
    edit(record)
    objects[key] = json.dumps(record).encode()
