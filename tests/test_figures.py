"""The README's figures are those of recorded runs: each is computed here from `benchmarks/results`."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = " ".join((ROOT / "README.md").read_text().split())


def rows(name: str, **wanted: Any) -> list[dict[str, Any]]:
    lines = (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if wanted.items() <= row.items()]
    assert found, f"{name}.jsonl has no row of {wanted}"
    return found


def row(name: str, **wanted: Any) -> dict[str, Any]:
    (found,) = rows(name, **wanted)
    return found


def ms(seconds: float, digits: int = 0) -> str:
    return f"{1000 * seconds:.{digits}f} ms"


def test_the_table_of_learning_rates():
    table = [
        f"| {found['learning_rate']:.0e} | {100 * found['density']:.2g} % | "
        f"{found['payload_bytes'] / 1e6:.2g} MB | {found['anchor_bytes'] / 1e6:.0f} MB |".replace("e-0", "e-")
        for found in rows("rates-cpu")
    ]

    assert " ".join(table) in README
    assert {round(found["num_elements"] / 1e6) for found in rows("rates-cpu")} == {20}


def test_the_table_of_updates():
    names = {
        (0, "reset"): "1 % changed, idle server",
        (16, "reset"): "1 % changed, 16 streams; prefix cache reset",
        (16, "version"): "16 streams, `--prefix-cache version`: nothing recomputed, nothing stale",
    }
    for (streams, cache), name in names.items():
        wanted = {"concurrency": streams, "prefix_cache": cache, "density": 0.01}
        path = row("prefixes-h200", row="path", **wanted)
        line = f"| {name} | {ms(path['compare_s'])} | {path['total_s']:.2f} s | {ms(path['pause_s'])} | "
        line += f"{ms(path['engine_apply_s'], 1)} |"
        if streams:
            latency = row("prefixes-h200", row="latency", **wanted)
            assert latency["in_flight"] == streams
            stall = latency["stall_s"]
            line += f" {f'{stall:.2f} s' if stall > 0.1 else ms(stall)}"
        assert line in README


def test_a_version_through_a_network_with_delay():
    far = row("far-cpu", round_trip_ms=40.0, mbit_s=1000)
    updates = rows("prefixes-h200", row="path", density=0.01)

    assert {round(update["payload_bytes"] / 1e6) for update in updates} == {far["mb"]} == {93}
    assert f"Such a version is {far['mb']} MB. Through S3 that is 40 ms away at 1 Gbit/s" in README
    assert (
        f"its upload takes {far['upload_s']:.1f} s, the commit {ms(far['commit_s'])} and the download "
        f"{far['fetch_s']:.1f} s"
    ) in README
    assert f"up to {far['poll_s']:.0f} s pass" in README


def test_beside_the_broadcast_of_vllm():
    ours, theirs, ours_30b, theirs_30b = (
        row("native-h100", row="way", shape=shape, way=way)
        for shape in ("qwen3-8b", "qwen3-30b-a3b")
        for way in ("patchstore", "nccl")
    )

    assert (
        f"brings an answer of new 8B weights after {theirs['answer_s']:.2f} s and pauses for "
        f"{ms(theirs['pause_s'])}, patchstore after {ours['answer_s']:.2f} s and for {ms(ours['pause_s'])}; "
        f"Qwen3-30B-A3B after {theirs_30b['answer_s']:.1f} and {ours_30b['answer_s']:.1f} s"
    ) in README


def test_shards_and_the_write():
    shards, gather = (row("shards-h200", shape="qwen3-8b", ranks=2, way=way) for way in ("shards", "gather"))
    ours, theirs = (
        row("apply-h200", shape="qwen3-8b", density=0.01, way=way)
        for way in ("patchstore-decoded", "vllm-patch")
    )

    assert f"blocks for {ms(shards['block_s'])}; a gather to rank 0 takes {ms(gather['block_s'])}" in README
    assert f"takes {ms(ours['pause_s'], 1)} where vLLM's patch loader takes {ms(theirs['pause_s'])}" in README


def test_bytes():
    context = row("encodings-cpu", source="trace", encoding="context")
    bf16, fp8 = (row("quantized-cpu", source="trace", form=form) for form in ("bf16", "fp8-block"))
    fewer = bf16["payload_bytes"] / fp8["payload_bytes"]

    assert f"A changed bf16 element takes {context['bytes_per_change']:.2f} bytes" in README
    assert f"matrices in FP8 take {fewer:.1f} times fewer bytes" in README


def test_memory_of_the_snapshot():
    device, host = (row("native-h100", row="anchor", shape=shape) for shape in ("qwen3-8b", "qwen3-30b-a3b"))
    little, rest = host["publisher_device_bytes"] / 1e9, host["num_bytes"] / 1e9

    assert f"{device['publisher_device_bytes'] / 1e9:.0f} GB of the GPU's memory for 8B" in README
    assert f"{little:.1f} GB of it for 30B-A3B, and {rest:.0f} GB of the host's" in README
