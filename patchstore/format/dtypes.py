"""Which tensors are served in which dtype, in few words: for logs, `doctor` and servers."""

import re
from collections import Counter
from collections.abc import Iterable

from patchstore.format.records import Schema

_NUM_LISTED = 8


def alike(names: Iterable[str]) -> str:
    """List names: of those that differ in numbers alone one, with * in their place, and how many there are.

    Example: "layers.*.mlp.gate.bias (58), norm.weight".
    """
    counts = Counter(re.sub(r"\d+", "*", name) if re.search(r"\d", name) else name for name in names)
    listed = [f"{name} ({count:,})" if count > 1 else name for name, count in sorted(counts.items())]
    more = f" and {len(listed) - _NUM_LISTED} more" if len(listed) > _NUM_LISTED else ""
    return ", ".join(listed[:_NUM_LISTED]) + more


def of_schema(schema: Schema) -> str:
    """Say how many tensors have the dtype of most elements, and which have another one.

    Example: "305 tensors as BF16; as F32: layers.*.mlp.gate.bias (58)".
    """
    sizes = Counter[str]()
    names: dict[str, list[str]] = {}
    for spec in schema.tensors:
        sizes[spec.dtype] += spec.num_elements
        names.setdefault(spec.dtype, []).append(spec.name)
    most, *others = sorted(names, key=lambda dtype: (-sizes[dtype], dtype))
    said = f"{len(names[most]):,} tensor{'s' if len(names[most]) > 1 else ''} as {most}"
    return "; ".join([said, *(f"as {dtype}: {alike(names[dtype])}" for dtype in others)])
