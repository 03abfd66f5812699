"""One owner for each element, and a writer for each file of an anchor."""

import pytest

from patchstore.bucket.records import Part, Schema, TensorSpec
from patchstore.errors import SchemaMismatch
from patchstore.publish import ownership


def spec(name: str, *shape: int, dtype: str = "BF16") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def rows(of: TensorSpec, start: int, size: int) -> Part:
    return Part(of, (start, *(0 for _ in of.shape[1:])), (size, *of.shape[1:]))


def test_replicas_are_spread_by_size_and_the_result_does_not_depend_on_chance() -> None:
    parts = [Part.whole(spec(name, size)) for name, size in (("a", 100), ("b", 60), ("c", 50), ("d", 1))]
    owned = ownership.own([parts, parts])
    assert owned == [[0, 3], [1, 2]]
    assert owned == ownership.own([list(parts), list(parts)])


def test_ranks_that_differ_in_a_tensor_are_refused() -> None:
    with pytest.raises(SchemaMismatch, match=r"ranks differ in tensor 'a'.*on the second"):
        ownership.own([[Part.whole(spec("a", 6))], [Part.whole(spec("a", 6, dtype="F32"))]])


def test_a_tensor_that_one_rank_has_whole_is_written_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "WRITER_BYTES", 64)
    shared, own = spec("shared", 8, 8), [spec(f"expert.{rank}", 8, 8) for rank in range(3)]
    owned = [
        [rows(shared, start, size), Part.whole(mine)]
        for (start, size), mine in zip(((0, 3), (3, 3), (6, 2)), own, strict=True)
    ]
    schema = Schema(tensors=tuple(sorted([shared, *own], key=lambda each: each.name)))
    plan = ownership.plan(schema, owned, max_shard_bytes=10**9)
    writers = plan.writers
    assert [writers[f"expert.{rank}"] for rank in range(3)] == [0, 1, 2]
    assert [name for name, _ in plan.files] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ]
    assert sorted(spec.name for _, specs in plan.files for spec in specs) == [
        spec.name for spec in schema.tensors
    ]


def test_a_small_model_has_one_file() -> None:
    weight = spec("a", 6, 4)
    plan = ownership.plan(
        Schema(tensors=(weight,)), [[rows(weight, 0, 2)], [rows(weight, 2, 4)]], max_shard_bytes=10**9
    )
    assert [name for name, _ in plan.files] == ["model.safetensors"]
