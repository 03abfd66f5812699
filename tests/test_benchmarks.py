"""What benchmarks compute from what they measured. That they measure is seen by running them."""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks import plots
from benchmarks.cases import encodings
from benchmarks.encodings.entropy import apply_difference, difference, entropy
from benchmarks.encodings.peers import PEERS
from benchmarks.encodings.rice import BitReader, BitWriter
from benchmarks.encodings.trace import Trace
from benchmarks.native.changes import Changes, fused
from benchmarks.registry import CASES
from benchmarks.serving import episodes, latency, updates
from benchmarks.serving.episodes import Episode
from benchmarks.serving.latency import Gap, Span
from benchmarks.serving.load import Request
from benchmarks.serving.updates import PARTS, Update
from benchmarks.support.shapes import SHAPES
from benchmarks.support.trainer import RATE, STANDARD_DEVIATION, take_step
from benchmarks.support.vllm_server import TimedServer
from patchstore.codec import ENCODINGS
from patchstore.follow.settings import PauseMode, PrefixCache
from patchstore.tensors.bits import bits
from tests.support.vllm_stub import StubServer, serving

RECORDED = Path(__file__).parents[1] / "benchmarks" / "results"


def update(called: float, *, pause_s: float = 0.25) -> Update:
    """A version whose every part but the pause took a second."""
    steps = ("called", "compared", "published", "noticed", "prefetched", "pausing")
    times = {name: called + second for second, name in enumerate(steps)}
    times |= {name: called + 5 + pause_s + n for n, name in enumerate(("resumed", "applied", "answered"))}
    return Update(
        version=1,
        num_changed=10,
        payload_bytes=20,
        **times,
        calls={"hold": 0.0625, "finish": 0.125, "resume": 0.03125},
        staging_bytes=1000,
        timings={"fetch": 0.5, "stage": 0.25, "apply": 0.125},
    )


def streamed(*times: float, client: int = 0) -> Request:
    return Request(client=client, times=times, counts=[1] * len(times))


def gap(began: float, ended: float, client: int = 0) -> Gap:
    return Gap(client=client, began=began, ended=ended)


def test_cases_are_there_on_a_machine_without_clients_of_stores():
    missing = ("s3fs", "obstore", "botocore", "aiobotocore", "huggingface_hub", "moto")
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); import benchmarks.registry"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=RECORDED.parents[1])


def test_quantiles_are_of_the_gaps_and_none_without_any():
    found = latency.quantiles([gap(0, seconds) for seconds in range(1, 102)])

    assert found == {"p50_s": 51, "p95_s": 96, "p99_s": 100, "max_s": 101}
    assert set(latency.quantiles([]).values()) == {None}


def test_tokens_that_came_together_are_one_arrival():
    found = latency.gaps([streamed(1.0, 1.0001, 1.0002, 1.5, 1.5001), streamed(7.0, 8.0, client=1)])

    assert found == [gap(1.0, 1.5), gap(7.0, 8.0, client=1)]


def test_a_gap_belongs_to_the_strongest_window_that_it_touches():
    spans = [
        Span(window="quiet", began=0, ended=10),
        Span(window="publishing", began=10, ended=12),
        Span(window="staging", began=12, ended=14),
        Span(window="commit", began=14, ended=15),
    ]
    within, across, publishing, staging, over, after = (
        gap(1, 2),
        gap(9.5, 10),
        gap(9.5, 10.5),
        gap(11, 13),
        gap(11, 16),
        gap(15, 16),
    )

    windows = latency.sort_gaps([within, across, publishing, staging, over, after], spans)

    assert windows == {
        "quiet": [within, across],
        "publishing": [publishing],
        "staging": [staging],
        "commit": [over],
    }
    assert latency.longest([within, staging, over], spans[-1]) == 5
    assert latency.longest([within], spans[-1]) is None


def test_a_series_keeps_the_longest_gap_of_each_stretch():
    found = [gap(0, at / 100) for at in range(1, 1000)]

    points = latency.series(found, zero=5, began=0, ended=10, num_points=20)

    assert len(points) == 20
    assert points[0] == [-4.51, 0.49]
    assert points[-1] == [4.99, 9.99]


def test_the_parts_of_an_update_are_all_of_its_time():
    one = update(100.0)

    assert sum(one.parts().values()) == one.answered - one.called
    assert one.parts() == dict.fromkeys(PARTS, 1.0) | {"pause_s": 0.25}


def test_the_server_of_a_benchmark_changes_what_it_does_with_requests_and_prefixes():
    keep = PauseMode.KEEP
    ways = [(keep, PrefixCache.RESET), (keep, PrefixCache.VERSION), (keep, PrefixCache.KEEP)]
    with serving(StubServer()) as stub, TimedServer(stub.url) as server:
        server.init_weight_transfer("memory://run")
        found = []
        for version, (mode, cache) in enumerate([*ways, (PauseMode.NONE, PrefixCache.VERSION)]):
            stub.calls.clear()
            server.spans.clear()
            server.use(mode, cache)
            server.apply(version)
            found.append(("delta_pause" in stub.calls, stub.engines[0].caches))
            assert server.spans.keys() >= {"prefetch", *updates.CALLS.values()}

    assert found == [(True, "reset"), (True, "version"), (True, "keep"), (False, "version")]


def path_row() -> dict:
    return updates.path([update(0, pause_s=0.25), update(0, pause_s=0.5), update(0, pause_s=1)])


def test_a_path_row_has_medians_and_what_they_lie_between():
    row = path_row()

    assert (row["total_min_s"], row["total_s"], row["total_max_s"]) == (7.25, 7.5, 8)
    assert (row["pause_min_s"], row["pause_s"], row["pause_max_s"]) == (0.25, 0.5, 1)
    assert row.keys() >= PARTS.keys() | {"num_changed", "payload_bytes", "engine_apply_s", "repeats"}
    json.dumps(row)


def episode() -> tuple[Episode, list[Request]]:
    quiet = [Span(window="quiet", began=0, ended=10)]
    times = [at / 4 for at in range(61)]
    # Nothing comes while weights are written, and for half a second after.
    late = [at for at in times if not 15 <= at <= 15.75]
    return Episode(density=0.01, updates=[update(10)], quiet=quiet), [streamed(*late, 16), streamed(1, 2)]


def test_a_latency_row_has_the_stall_of_the_answers_under_way():
    found, row = episodes.analyse(*episode())

    assert (row["stall_s"], row["in_flight"], row["commit_gaps"]) == (1.25, 1, 1)
    assert row["quiet_max_s"] == 1.0
    assert row["quiet_p50_s"] == 0.25
    assert row["staging_max_s"] == 0.25
    assert row["quiet_tokens_per_s"] == 4.2
    json.dumps(row)

    around = episodes.around(found, episode()[0])
    assert (around["marks"]["called"], around["stall_s"]) == (-5, 1.25)
    assert max(seconds for _, seconds in around["points"]) == 1.25
    json.dumps(around)


def test_an_update_without_an_answer_under_way_has_no_stall():
    _, row = episodes.analyse(episode()[0], [streamed(1, 2, 3)])

    assert (row["stall_s"], row["stall_max_s"], row["in_flight"]) == (None, None, 0)


def test_rows_become_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    found, row = episodes.analyse(*episode())
    about = {"case": "serving", "shape": "tiny", "device": "a device", "density": 0.01}
    rows = plots.read([*sorted(RECORDED.glob("apply-*.jsonl")), RECORDED / "growth-cpu.jsonl"])
    rows += [
        about | {"case": "native", "row": "way", "way": way, "pause_s": 0.02, "answer_s": 0.3}
        for way in ("patchstore", "nccl")
    ]
    rows += [
        about | {"row": "path", "concurrency": 0} | path_row(),
        about | {"row": "path", "concurrency": 8} | path_row(),
        about | {"row": "latency", "concurrency": 8} | row,
        about | {"row": "series", "concurrency": 8} | episodes.around(found, episode()[0]),
    ]

    drawn = plots.draw(rows, tmp_path / "pictures")

    assert [path.name for path in drawn] == [
        "pause.png",
        "publish-to-serving.png",
        "latency-tiny.png",
        "growth.png",
        "native.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_rows_that_no_picture_is_of_are_left_out(tmp_path):
    rows = plots.read([RECORDED / "replay-cpu.jsonl", RECORDED / "encodings-cpu.jsonl"])

    assert plots.draw(rows, tmp_path) == []


@pytest.mark.parametrize("experts", [0, 3])
def test_changes_of_a_checkpoint_become_changes_of_the_tensors_that_vllm_joins(experts):
    shape = dataclasses.replace(SHAPES["tiny"], experts=experts)
    before = {name: torch.randn(size) for name, size in shape.tensors().items()}
    after = {name: tensor.clone() for name, tensor in before.items()}
    changes = []
    for name, tensor in after.items():
        at = torch.randperm(tensor.numel())[:5].sort().values
        tensor.view(-1)[at] = 0.0
        changes.append(Changes(name=name, shape=tensor.shape, indices=at.int(), values=torch.zeros(5)))

    found = {each.name: each for each in fused(changes)}

    def joined(tensors: dict[str, torch.Tensor], *parts: str) -> torch.Tensor:
        return torch.cat([tensors[f"model.layers.1.{part}.weight"].view(-1) for part in parts])

    def patched(name: str, *parts: str) -> torch.Tensor:
        served, change = joined(before, *parts), found[f"model.layers.1.{name}"]
        served[change.indices.long()] = change.values
        return served

    of_attention = [f"self_attn.{part}_proj" for part in "qkv"]
    assert torch.equal(patched("self_attn.qkv_proj.weight", *of_attention), joined(after, *of_attention))
    if experts:
        mlps = [f"mlp.experts.{number}" for number in range(experts)]
        # [experts, 2 * intermediate, hidden] and [experts, hidden, intermediate] of a layer, flat.
        ups = [f"{mlp}.{part}_proj" for mlp in mlps for part in ("gate", "up")]
        downs = [f"{mlp}.down_proj" for mlp in mlps]
        assert torch.equal(patched("mlp.experts.routed_experts.w13_weight", *ups), joined(after, *ups))
        assert torch.equal(patched("mlp.experts.routed_experts.w2_weight", *downs), joined(after, *downs))
    else:
        ups = ["mlp.gate_proj", "mlp.up_proj"]
        assert torch.equal(patched("mlp.gate_up_proj.weight", *ups), joined(after, *ups))
        assert len(found) == len(changes) - 3 * shape.layers


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_has_arguments_and_a_test_that_gates_it(case):
    case.arguments(argparse.ArgumentParser())

    assert (Path(__file__).parents[1] / case.gate).exists()


def some_weights(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def of_bits(*patterns: int) -> np.ndarray:
    return np.array(patterns, np.uint16)


def any_bits(num: int, seed: int = 0) -> np.ndarray:
    """NaNs, infinities and both zeros among them."""
    return np.random.default_rng(seed).integers(0, 2**16, num).astype(np.uint16)


def some_changed(num: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    old = random.normal(0, 0.02, num).astype(np.float32).view(np.uint32) >> 16
    step = random.choice([1, -1, 2, 40_000], num, p=[0.5, 0.4, 0.09, 0.01]) * (random.random(num) < share)
    return old.astype(np.uint16), (old + step).astype(np.uint16)


NAN, MINUS_ZERO, ONE = 0x7FC1, 0x8000, 0x3F80

STEPS = {
    "random bits, all changed": {
        "a": (any_bits(1000), any_bits(1000) ^ 1),
        "b": (any_bits(7), any_bits(7, 1)),
    },
    "NaNs and zeros": {
        "a": (of_bits(NAN, 0, MINUS_ZERO, ONE, NAN, ONE), of_bits(0xFFFF, MINUS_ZERO, 0, NAN, NAN, 0))
    },
    "one change": {"a": (of_bits(ONE), of_bits(ONE + 1)), "b": (of_bits(ONE, 0), of_bits(ONE, 0))},
    "a gap to bridge": {"a": (np.zeros(200_000, np.uint16), np.eye(1, 200_000, 199_999, np.uint16)[0])},
    "a few of many": {
        "a": some_changed(30_000, 0.01),
        "ä": some_changed(3000, 0.2, 1),
        "none": some_changed(9, 0),
    },
    "an update": {"a": some_changed(20_000, 1), "b": some_changed(1, 1)},
    "no change": {"a": some_changed(9, 0)},
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_peer_gives_the_same_bits_back(peer, step):
    if "zstd" in peer.name:
        pytest.importorskip("zstandard", reason="needs the extra `bench`")

    decoded = peer.decode(peer.encode(step), {name: old for name, (old, _) in step.items()})

    assert decoded.keys() == step.keys()
    for name, (_, new) in step.items():
        assert np.array_equal(decoded[name], new), name


def test_rice_codes_hold_outliers_among_small_numbers():
    numbers = np.array([0, 1, 0, 2**32 - 1, 23, 24, 25, 2**20, 0])
    stream = BitWriter()
    k = stream.rice(numbers)
    stream.bits(numbers > 1)
    assert stream.rice(numbers[:0]) == 0
    reader = BitReader(stream.to_bytes())

    assert np.array_equal(reader.rice(len(numbers), k), numbers)
    assert np.array_equal(reader.bits(len(numbers)), numbers > 1)


def test_differences_are_in_numerical_order_and_can_be_taken_back():
    old, new = of_bits(MINUS_ZERO, 0, ONE, ONE | 0x8000), of_bits(0, MINUS_ZERO, ONE + 2, (ONE + 2) | 0x8000)

    assert difference(old, new).tolist() == [1, -1, 2, -2]
    assert np.array_equal(
        apply_difference(any_bits(500), difference(any_bits(500), any_bits(500, 1))), any_bits(500, 1)
    )


def test_entropy_is_what_it_is_by_hand():
    one, two = [ONE] * 4, [ONE + 0x80] * 4
    step = {"a": (of_bits(*one, *two), of_bits(ONE + 1, ONE + 1, ONE, ONE, *two))}
    up_or_down = {"a": (of_bits(*one), of_bits(ONE + 1, ONE + 1, ONE + 1, ONE + 2))}

    found = entropy([step])
    assert (found.num_changed, found.positions, found.values) == (2, 4 / 8 / 2, 0)
    assert found.plain == pytest.approx(8 * (0.25 * 2 + 0.75 * np.log2(4 / 3)) / 8 / 2)
    # Two values in three to one: 0.811 bits a change, and no question which elements changed.
    assert entropy([up_or_down]).given_exponent == pytest.approx((0.25 * 2 + 0.75 * np.log2(4 / 3)) / 8)
    # Two steps, each with counts of its own.
    both = entropy([step, up_or_down])
    assert both.given_exponent == pytest.approx((4 + 4 * 0.811278) / 8 / 6)


def test_an_imitated_step_changes_the_share_asked_for_and_rather_small_weights():
    weights = {"a": some_weights(100, 300), "norm": torch.ones(50, dtype=torch.bfloat16)}
    trace = Trace.imitate(weights, 0.05)
    after = trace.copy()
    list(after.steps())

    changed = bits(after.weights["a"]) != bits(weights["a"])
    assert int(changed.sum()) == pytest.approx(0.05 * 30_050, abs=50)
    assert weights["a"].flatten()[changed].abs().median() < weights["a"].abs().median() / 4
    assert torch.equal(bits(trace.weights["a"]), bits(weights["a"]))


def test_a_trace_becomes_rows_for_every_encoding_and_peer(tmp_path):
    pytest.importorskip("zstandard", reason="needs the extra `bench`")
    base = {"w": some_weights(64, 64), "norm": torch.ones(64, dtype=torch.bfloat16)}
    steps = {}
    for step in range(2):
        indices = torch.arange(step, 4096, 50, dtype=torch.int32)
        flipped = (bits(base["w"])[indices] ^ 1).view(torch.bfloat16)
        steps |= {f"{step:02d}/w.idx": indices, f"{step:02d}/w.val": flipped}
    save_file(base, tmp_path / "base.safetensors")
    save_file(steps, tmp_path / "steps.safetensors")
    parser = argparse.ArgumentParser()
    encodings.arguments(parser)

    rows = list(encodings.run(parser.parse_args(["--trace", str(tmp_path), "--densities", "0.1"])))

    names = ["entropy", *ENCODINGS, *(peer.name for peer in PEERS)]
    assert [(row["source"], row["encoding"]) for row in rows] == [
        (source, name) for source in ("trace", "synthetic") for name in names
    ]
    assert len({tuple(row) for row in rows if row["encoding"] != "entropy"}) == 1
    for row in rows:
        json.dumps(row)
        assert row["num_changed"] == (164 if row["source"] == "trace" else 416)
        if row["encoding"] in ENCODINGS:
            assert row["with_manifest_per_change"] > row["bytes_per_change"] > 0


def test_a_shape_alone_is_measured_at_the_densities_asked_for():
    pytest.importorskip("zstandard", reason="needs the extra `bench`")
    parser = argparse.ArgumentParser()
    encodings.arguments(parser)

    rows = list(encodings.run(parser.parse_args(["--shape", "32", "64", "--densities", "0.125", "0.5"])))

    assert {row["num_changed"] for row in rows} == {256, 1024}
    with pytest.raises(SystemExit, match="nothing to measure"):
        next(encodings.run(parser.parse_args(["--shape", "32", "64"])))


@pytest.mark.parametrize(("rate", "least", "most"), [(0, 0, 0), (RATE, 0.008, 0.012)])
def test_a_step_as_adamw_takes_it_changes_its_share_and_small_weights_first(rate, least, most):
    random = torch.Generator().manual_seed(0)
    weights = torch.empty(1 << 20, dtype=torch.bfloat16).normal_(0, STANDARD_DEVIATION, generator=random)
    before = weights.clone()
    take_step(weights, rate, random)
    changed = bits(weights) != bits(before)
    assert least <= changed.float().mean() <= most
    if most:
        assert before[changed].abs().median() < before.abs().median() / 4
