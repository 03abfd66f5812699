"""Sources: what a trainer hands to a publisher, as plain tensors under the names that servers know."""

from patchstore.publish.sources.adapter import PeftAdapter
from patchstore.publish.sources.layouts import interleaved_qkv, joined_gate_up, mapped, without_padding
from patchstore.publish.sources.pieces import LocalPart
from patchstore.publish.sources.weights import Source, Weights, as_saved

__all__ = [
    "LocalPart",
    "PeftAdapter",
    "Source",
    "Weights",
    "as_saved",
    "interleaved_qkv",
    "joined_gate_up",
    "mapped",
    "without_padding",
]
