"""What holds for every registered encoding, whatever changed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from patchstore.encodings import ENCODINGS, IndexEncoding
from patchstore.encodings import encoding as encoding_named
from patchstore.errors import UnsupportedFormat
from patchstore.format.records import TensorSpec
from patchstore.tensors import diff
from patchstore.tensors.bits import TORCH_DTYPES, TensorPatch, bits
from patchstore.testing.encoding import random_values

NUM = 150_000
INDEX_ENCODINGS = {name: each for name, each in ENCODINGS.items() if isinstance(each, IndexEncoding)}


@pytest.mark.parametrize("name", INDEX_ENCODINGS)
@settings(max_examples=30, deadline=None)
@given(
    dtype=st.sampled_from([*TORCH_DTYPES]),
    touched=st.sets(
        st.integers(0, NUM - 1) | st.sampled_from([0, 65_535, 65_536, 131_071, 131_072, NUM - 1]), max_size=8
    ),
    seed=st.integers(0, 2**32),
)
def test_a_patch_turns_the_old_tensor_into_the_new_one(
    name: str, dtype: str, touched: set[int], seed: int
) -> None:
    """What is stated is what changed and bridges; a bridge carries the value it was given."""
    old = random_values(1000, dtype, seed).repeat(NUM // 1000)
    new = old.clone()
    at = torch.tensor(sorted(touched), dtype=torch.int64)
    bits(new)[at] = bits(random_values(len(at), dtype, seed + 1))
    encoding, spec = INDEX_ENCODINGS[name], TensorSpec(name="w", dtype=dtype, shape=(NUM,))
    changed = diff.changed(new, old)
    stated = encoding.with_bridges(changed)
    patch = TensorPatch(name="w", indices=stated, values=bits(new)[stated].view(new.dtype))
    decoded = encoding.decode(encoding.encode(patch, spec), spec, "here")
    assert set(changed.tolist()) <= set(decoded.indices.tolist()) <= set(stated.tolist())
    applied = old.clone()
    for _ in range(2):
        bits(applied)[decoded.indices] = bits(decoded.values)
        assert torch.equal(bits(applied), bits(new))


def test_an_encoding_is_registered_under_its_own_name() -> None:
    assert {name: encoding.name for name, encoding in ENCODINGS.items()} == {name: name for name in ENCODINGS}
    assert all(encoding_named(name) is encoding for name, encoding in ENCODINGS.items())


def test_every_encoding_passes_the_conformance_suite() -> None:
    from tests.encodings import test_gap, test_raw

    tested = {type(suite.encoding) for suite in (test_raw.TestRaw, test_gap.TestGap)}
    assert tested == {type(encoding) for encoding in INDEX_ENCODINGS.values()}


def test_an_unknown_encoding_names_the_known_ones() -> None:
    with pytest.raises(UnsupportedFormat) as caught:
        encoding_named("context-2")
    assert caught.value.kind == "unsupported-format"
    assert all(name in str(caught.value) for name in ENCODINGS)


def test_small_tensors_compared_together_differ_where_each_does() -> None:
    pairs: list[diff.Pair] = []
    for number, size in enumerate((0, 1, 7, 1000, 70_000, 1, 3_000_000, 12)):
        for dtype in ("BOOL", "F8_E5M2", "BF16", "F32", "I64"):
            old = random_values(min(size, 1000), dtype, number).repeat(max(1, size // 1000))
            new = old.clone()
            at = torch.randperm(max(1, len(old)))[: number % 4 and len(old) // 3]
            bits(new)[at] = bits(random_values(len(at), dtype, number + 1))
            pairs.append((f"{dtype}.{number}", new, old))
    found = {name: at for (name, _, _), at in diff.changed_each(pairs)}
    for name, new, old in pairs:
        expected = diff.changed(new, old)
        assert (name in found) == bool(len(expected))
        if len(expected):
            assert found[name].dtype == expected.dtype
            assert torch.equal(found[name], expected)
