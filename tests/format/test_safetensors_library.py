"""Our safetensors files against the safetensors library: each reads what the other writes."""

import json
import re
from contextlib import suppress
from math import prod
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import load, load_file, save, save_file

from patchstore import Publisher
from patchstore.bucket.records import DTYPE_BYTES, PACKED
from patchstore.codec import tensor_file
from patchstore.errors import CorruptObject, SchemaMismatch
from patchstore.read import replay
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import TORCH_DTYPES, bits, from_bytes, spec_of
from tests.format import independent_reader, surgery
from tests.format.runs import eventful, tensors_of_every_dtype
from tests.support.weights import State, assert_same_bits, random_bits, rebuilt

GOLDEN = Path(__file__).parents[1] / "golden"


def stored_tensors() -> State:
    return {name: tensor for name, tensor in tensors_of_every_dtype().items() if name != "head.weight"}


def written(tensors: State, metadata: dict[str, str]) -> bytes:
    specs = tensor_file.aligned(spec_of(name, tensor) for name, tensor in tensors.items())
    return b"".join(tensor_file.write(specs, (tensors[spec.name] for spec in specs), metadata))


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = stored_tensors()
    (tmp_path / "ours").write_bytes(written(tensors, {"format": "pt", "naïve": "重み \n\0"}))
    assert_same_bits(load_file(tmp_path / "ours"), tensors)
    with safe_open(tmp_path / "ours", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "naïve": "重み \n\0"}
        assert_same_bits({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118 - no mapping


def of_runs(data: bytes, pieces: list[bytes]) -> State:
    """The tensors of a file, as it comes in pieces, from runs that are of one dtype each."""
    header, runs = tensor_file.read_runs("theirs", len(data), pieces)
    found: State = {}
    for some, values in runs:
        rest = values.tobytes()
        for entry in header.entries[some]:
            assert DTYPE_BYTES[entry.spec.dtype] == values.itemsize
            found[entry.spec.name] = from_bytes(entry.spec, bytearray(rest[: entry.spec.num_bytes]))
            rest = rest[entry.spec.num_bytes :]
        assert not rest
    return found


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "q": '"'}])
def test_we_read_what_the_library_writes(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    tensors = stored_tensors()
    save_file(tensors, tmp_path / "theirs", metadata)
    data = (tmp_path / "theirs").read_bytes()
    header, found = tensor_file.open_buffer("theirs", bytearray(data))
    assert header.metadata == (metadata or {})
    assert_same_bits(found, tensors)
    for size in (7, 8, 1000, len(data)):
        pieces = [data[at : at + size] for at in range(0, 5000, size)] + [data[-(-5000 // size) * size :]]
        assert b"".join(pieces) == data
        _, *items = tensor_file.read_stream("theirs", len(data), pieces)
        assert_same_bits({spec.name: tensor for spec, tensor in items}, tensors)  # type: ignore[misc]
        assert_same_bits(of_runs(data, pieces), tensors)
    assert independent_reader.parse_safetensors(data)[1].keys() == tensors.keys()


def test_as_many_tensors_as_have_arrived_are_read_at_once_and_refused_by_name() -> None:
    tensors = {f"{number:03d}": torch.randint(0, 2, (10,)).bool() for number in range(100)}
    data = written(tensors, {})
    start = len(data) - 1000
    _, runs = tensor_file.read_runs("file", len(data), [data[: start + 15], data[start + 15 :]])
    # The second lies in both pieces.
    assert [(some.start, some.stop) for some, _ in runs] == [(0, 1), (1, 2), (2, 100)]
    wrong = data[: start + 429] + b"\2" + data[start + 430 :]
    with pytest.raises(CorruptObject, match="'042' is of dtype BOOL, and has a byte other than 0 and 1"):
        of_runs(wrong, [wrong])
    for pieces in ([data[:-1]], [data, b"\0"]):
        with pytest.raises(CorruptObject, match=r"ends 1 bytes early|goes on after its last tensor"):
            of_runs(data, pieces)


def test_a_header_that_is_spelled_as_we_write_it_means_what_its_json_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = Random(0)
    data = written(stored_tensors(), {"format": "pt", "q": '"},{\\'})
    header, rest = surgery.take_apart(data)
    plain = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    without = plain.replace(json.dumps(header["__metadata__"], separators=(",", ":")), "{}")
    pieces = [*'{}[]",:0129-. \\', '"a"', '"__metadata__":{},', "[1]", '"dtype":"U8",', ",,", "٣", "\n"]

    def read(text: str) -> object:
        data = surgery.put_together(text.encode(), rest)
        try:
            found = tensor_file.read_header("file", len(data), lambda num_bytes: data[:num_bytes])
        except CorruptObject:
            return "refused"
        return found.entries, found.metadata

    texts = [
        plain,
        without,
        without.replace('"__metadata__":{},', ""),
        f"{plain}  ",
        f" {plain}",
        f"{plain}}}",
    ]
    for _ in range(3000):
        at = random.randrange(len(plain))
        texts.append(plain[:at] + random.choice(pieces) + plain[at + random.randrange(4) :])
    name = [*header][-1]
    entry = f'"{name}":{json.dumps(header[name], separators=(",", ":"))}'
    texts += [plain.replace(entry, f"{entry}{between}{entry}") for between in (",", "}", "", ", ")]
    assert all(tensor_file.as_written(text.encode()) for text in texts[:4])
    found = [read(text) for text in texts]
    monkeypatch.setattr(tensor_file, "as_written", lambda data: None)
    assert found == [read(text) for text in texts]
    assert 10 < found.count("refused") < len(texts) - 10


def test_a_file_without_tensors_goes_both_ways() -> None:
    assert load(written({}, {})) == {}
    header, tensors = tensor_file.open_buffer("theirs", bytearray(save({})))
    assert header.entries == ()
    assert tensors == {}


def dtypes_of_the_library() -> list[str]:
    """Every dtype that the installed release knows, as its own error lists them."""
    with pytest.raises(SafetensorError) as caught:
        deserialize(surgery.tensor_file({}, {"t": ("none", [1], b"\0")}))
    return re.findall(r"`(\w+)`", str(caught.value).partition("expected one of")[2])


@pytest.mark.parametrize("dtype", dtypes_of_the_library())
def test_every_dtype_of_the_library_is_published_bit_for_bit_or_refused_by_name(
    tmp_path: Path, dtype: str
) -> None:
    kinds, tensors = {}, {}
    for shape in ([8], [3, 16], [1, 2], [], [0], [0, 3], [3, 0], [2, 3]):
        # The library says which number of bytes is right, if any is.
        for num_bytes in range(8 * prod(shape) + 1):
            data = bytes(i * 37 % (2 if dtype == "BOOL" else 256) for i in range(num_bytes))
            whole = surgery.tensor_file({}, {"t": (dtype, shape, data)})
            (tmp_path / "theirs").write_bytes(whole)
            with suppress(SafetensorError):
                tensors[str(shape)] = load_file(tmp_path / "theirs")["t"].clone()
                kinds[str(shape)] = shape
                break
        if dtype not in TORCH_DTYPES or str(shape) not in tensors:
            with pytest.raises(CorruptObject, match=f"'t' .*{dtype}"):
                tensor_file.open_buffer("theirs", bytearray(whole))
        else:
            tensor = tensors[str(shape)]
            assert_same_bits(tensor_file.open_buffer("theirs", bytearray(whole))[1], {"t": tensor})
            assert written({"t": tensor}, {}).endswith(data)
    if dtype not in TORCH_DTYPES:
        for name, tensor in tensors.items():
            with pytest.raises(SchemaMismatch, match=f"has dtype {tensor.dtype}; storable are"):
                spec_of(name, tensor)
        return
    assert len(tensors) == (5 if dtype in PACKED else 8)
    store = MemoryStore()
    with Publisher(store, tensors, dtype=None) as publisher:
        publisher.publish_patch(0).result()
        for name in ("[8]", "[3, 16]"):
            bits(tensors[name])[1::2] ^= 1
        publisher.publish_patch(1).result()
    replay.verify(store, 1)
    replay.replay(store, out=tmp_path / "out")
    assert_same_bits(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    assert_same_bits(rebuilt(store), tensors)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as opened:
        assert {name: opened.get_slice(name).get_shape() for name in kinds} == kinds
    assert {spec.name: list(spec.listed_shape) for spec in publisher.schema.tensors} == kinds


@pytest.mark.filterwarnings("ignore")  # torch's, of dtypes that no one should use
@pytest.mark.parametrize(
    "dtype",
    sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str),
    ids=str,
)
def test_every_dtype_of_torch_is_published_or_refused_by_name(dtype: torch.dtype) -> None:
    tensor = torch.empty(2, dtype=dtype, device="meta")
    if dtype in TORCH_DTYPES.values():
        assert spec_of("t", tensor).num_bytes == 2 * dtype.itemsize
    else:
        with pytest.raises(SchemaMismatch, match=f"'t' has dtype {dtype}; storable are"):
            spec_of("t", tensor)


def test_codes_without_a_dimension_are_refused_with_what_to_do() -> None:
    with pytest.raises(SchemaMismatch, match=r"'t' .* has no dimension.*shape \[1\]"):
        spec_of("t", torch.empty((), dtype=torch.float4_e2m1fn_x2))


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_one_element_of_any_dtype_goes_both_ways(tmp_path: Path, dtype: str) -> None:
    for shape in ((1,), (0,)) if dtype in PACKED else ((1,), (), (0,)):
        tensor = random_bits(TORCH_DTYPES[dtype], shape)
        (tmp_path / "ours").write_bytes(written({"t": tensor}, {}))
        assert_same_bits(load_file(tmp_path / "ours"), {"t": tensor})
        assert_same_bits(tensor_file.open_buffer("theirs", bytearray(save({"t": tensor})))[1], {"t": tensor})


@pytest.mark.parametrize("encoding", ["raw", "gap"])
def test_the_library_reads_every_payload_and_every_replayed_file(tmp_path: Path, encoding: str) -> None:
    store = MemoryStore()
    eventful(store, encoding, None)
    payloads = [store.get(key) for key in store.list() if key.endswith(".safetensors")]
    assert len(payloads) > 8
    for data in payloads:
        header, tensors = tensor_file.open_buffer("ours", bytearray(data))
        (tmp_path / "file").write_bytes(data)
        with safe_open(tmp_path / "file", framework="pt") as file:
            assert file.metadata() == header.metadata
            assert_same_bits({name: file.get_tensor(name) for name in file.keys()}, tensors)  # noqa: SIM118 - no mapping
    replay.replay(store, out=tmp_path / "out")
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == {name: path.name for path in shards for name in load_file(path)}


def test_data_begin_at_a_multiple_of_their_element_size() -> None:
    header, _ = tensor_file.open_buffer("ours", bytearray(written(stored_tensors(), {"odd": "x"})))
    assert header.data_start % 8 == 0
    for entry in header.entries:
        assert entry.start % TORCH_DTYPES[entry.spec.dtype].itemsize == 0


def test_what_the_library_refuses_we_refuse() -> None:
    for name, (metadata, tensors) in {
        "a dtype of its own": ({}, {"t": ("F7", [1], b"\0")}),
        "too few bytes": ({}, {"t": ("F32", [2], bytes(4))}),
        "too many bytes": ({}, {"t": ("F32", [1], bytes(8))}),
        "half a byte": ({}, {"t": ("F4", [3], bytes(2))}),
        "half a byte a row": ({}, {"t": ("F4", [2, 3], bytes(3))}),
        "a code without a dimension": ({}, {"t": ("F4", [], bytes(1))}),
    }.items():
        data = surgery.tensor_file(metadata, tensors)
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the library raises
            load(data)
        with pytest.raises(CorruptObject) as caught:
            tensor_file.open_buffer(name, bytearray(data))
        assert name in str(caught.value)


@pytest.mark.parametrize("bucket", ["v1-gap", "v1-raw", "v1-sharded"])
def test_the_library_reads_golden_payloads(bucket: str) -> None:
    for path in (GOLDEN / bucket).rglob("*.safetensors"):
        assert_same_bits(load_file(path), tensor_file.open_buffer("golden", bytearray(path.read_bytes()))[1])
