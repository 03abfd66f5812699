"""Sources: what a trainer hands to a publisher, one kind a file."""

from patchstore.publish.sources.layouts import interleaved_qkv, joined_gate_up, without_padding
from patchstore.publish.sources.mapped import mapped
from patchstore.publish.sources.pieces import LocalPart
from patchstore.publish.sources.quantized import Quantized
from patchstore.publish.sources.saved import as_saved
from patchstore.publish.sources.weights import Given, Place, Source, Weights, changed

__all__ = [
    "Given",
    "LocalPart",
    "Place",
    "Quantized",
    "Source",
    "Weights",
    "as_saved",
    "changed",
    "interleaved_qkv",
    "joined_gate_up",
    "mapped",
    "without_padding",
]
