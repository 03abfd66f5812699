"""One real server through all that an update can do to it."""

import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
import vllm
from asking import PROMPT, ask, streaming
from server_process import ServerProcess, call, connection, live
from trainer import replayed

from examples.demo import tables
from patchstore import PatchstoreError
from patchstore.bucket import history
from patchstore.errors import ServerUnavailable, UsageError
from patchstore.follow.reconcile import Reconciler
from patchstore.follow.verify import verify_server
from patchstore.follow.vllm_protocol import Connection, Driver
from patchstore.follow.vllm_server import VllmServer
from patchstore.ops.doctor import examine
from tests.support.spans import named, recording, trace_id, within
from tests.support.tiny_qwen import served

SERVER = ServerProcess
"""The command of users, and not a fork."""
# After the first token nothing is sent before the end, so that a call is not behind what it shall interrupt.
SERVER_ARGUMENTS = ("--stream-interval", "1000")


def answer(server: VllmServer) -> list[int]:
    return ask(server.url).tokens


def stream(server: VllmServer, begun: Event) -> tuple[list[int], str | None]:
    """Return a long answer and why it ended; says when the first tokens are there."""
    with streaming(server.url, PROMPT[:8], max_tokens=240) as written:
        return written.tokens(begun=begun), written.ended


UNLABELLED = None if vllm.__version__.startswith("0.26.") else object()
"""What a vLLM that does not label answers yet says of its weight version."""


@pytest.fixture
def refused(server: VllmServer):
    """Run a call that must be refused with a kind, and see that the server stays as it was."""

    def check(kind: str, call: Callable[[], object]) -> PatchstoreError:
        before, held, words = live(server), server.status().serving, answer(server)
        with pytest.raises(PatchstoreError) as caught:
            call()
        assert caught.value.kind == kind
        status = server.status()
        assert (status.serving, status.half_applied, status.update_open) == (held, False, False)
        assert not server.is_paused()
        assert live(server) == before
        assert answer(server) == words
        return caught.value

    return check


def test_a_server_knows_the_version_of_the_folder_it_was_started_from(server, new_trainer):
    # First in this module: no other version was applied yet.
    trainer = new_trainer()
    state = trainer.publish().state
    trainer.step()
    stranger = new_trainer()
    stranger.step()

    # Opening another run's store first must not make it forget.
    server.init_weight_transfer(stranger.url)
    assert server.status().serving is None
    server.init_weight_transfer(trainer.url)

    status = server.status()
    assert (status.serving, status.state_digest) == (0, state.total)


def test_a_server_reaches_any_version_bit_for_bit(server, new_trainer):
    trainer = new_trainer(anchor_every=3)
    trainer.publish()
    server.init_weight_transfer(trainer.url)
    for _ in range(6):
        trainer.step()

    # Each delta, one back through an anchor, several deltas at once, and across an anchor.
    for version in (0, 1, 2, 1, 6, 3, 5):
        server.apply(version)
        assert live(server) == served(trainer.history[version])
        assert server.status().serving == version
        assert server.weight_version() in {str(version), UNLABELLED}


def test_answers_follow_the_version_and_the_prefix_cache_does_not_answer_for_old_weights(server, trainer):
    trainer.step(density=0.5)
    answer(server)
    first = ask(server.url)
    assert first.num_cached > 0

    server.apply(1)
    second = ask(server.url)
    server.apply(0)
    third = ask(server.url)

    assert (second.num_cached, third.num_cached) == (0, 0)
    assert second.tokens != first.tokens == third.tokens


@pytest.mark.parametrize("version", [-1, -(2**40), 2**62, True, 1.5, "1", None, [1]])
def test_what_is_no_version_is_refused_by_every_way_in(server, trainer, refused, version):
    is_number = type(version) is int
    kind = "version-not-found" if version == 2**62 else "usage"

    def update() -> None:
        server.start_weight_update()
        connection(server).post("/update_weights", {"update_info": {"version": version}})

    ways = [update]
    if kind == "usage":
        ways.append(lambda: connection(server).every_rank("delta_prefetch", version))
    if is_number:
        ways.append(lambda: server.apply(version))
    for way in ways:
        said = str(refused(kind, way))
        assert not is_number or str(version) in said
    trainer.step()
    server.apply(1)
    assert live(server) == served(trainer.tensors)


def test_a_refused_fetch_leaves_what_another_driver_has_fetched(server, trainer, refused):
    trainer.step()
    server.prefetch(1)
    refused("usage", lambda: connection(server).every_rank("delta_prefetch", -1))
    (rank,) = connection(server).every_rank("delta_prefetch", 1)
    assert rank["is_done"]
    server.apply(1)


def test_answers_go_on_while_a_store_does_not_answer(server, trainer):
    trainer.step()
    server.apply(1)
    before = answer(server)
    options = {"key": "k", "secret": "s"}
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        # It takes connections, and never says a word.
        options["endpoint_url"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
        stop = Event()
        with VllmServer(server.url, stop=stop) as other:
            opening = pool.submit(other.init_weight_transfer, "s3://bucket/lost", options)
            with silent.accept()[0]:
                assert [answer(server) for _ in range(5)] == [before] * 5
                trainer.step()
                server.apply(2)
                assert not opening.done()
                stop.set()
            assert opening.result() is False
    assert live(server) == served(trainer.history[2])
    # The store that is lost does not keep another from being opened.
    server.init_weight_transfer(trainer.url)
    assert server.status().serving == 2


def test_unknown_keys_are_refused_with_the_known_ones(server, trainer, refused):
    init = {"init_info": {"store": trainer.url, "stroage_options": {}}}
    error = refused("usage", lambda: connection(server).post("/init_weight_transfer_engine", init))
    assert "storage_options" in str(error)

    server.start_weight_update()
    update = {"update_info": {"step": 1}}
    assert "version" in str(refused("usage", lambda: connection(server).post("/update_weights", update)))


def test_a_corrupt_payload_is_refused_and_a_repaired_one_applies(server, trainer, refused):
    (payload,) = trainer.step().delta.payloads
    path = Path(trainer.url) / payload.key
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])

    refused("corrupt-object", lambda: server.apply(1))

    path.write_bytes(data)
    server.apply(1)
    assert live(server) == served(trainer.history[1])


def test_calls_out_of_order_are_refused(server, trainer):
    trainer.step()
    with pytest.raises(UsageError, match="start_weight_update must be called"):
        server.update_weights(1)
    with pytest.raises(UsageError, match="no version is staged"):
        server.finish_weight_update("1")

    # The driver that began an update may be gone, so another may begin anew.
    server.start_weight_update()
    server.start_weight_update()
    with pytest.raises(UsageError, match="no version is staged"):
        server.finish_weight_update("1")
    server.start_weight_update()
    with pytest.raises(UsageError, match="unknown keys"):
        # One for each rank, which vLLM would hand out.
        connection(server).post("/update_weights", {"update_info": [{"version": 1}]})

    assert server.weight_version() in {"0", UNLABELLED}
    server.apply(1)
    assert server.status().serving == 1


def test_a_full_disk_is_said_and_a_later_try_succeeds(server, trainer, refused):
    trainer.step()
    call(server, "delta_fill_disk")
    assert "No space left" in str(refused("os", lambda: server.apply(1)))
    server.apply(1)
    assert live(server) == served(trainer.history[1])


@pytest.mark.parametrize("after", [1, 9])
def test_an_anchor_that_fails_halfway_leaves_the_version_before(server, new_trainer, refused, after):
    trainer = new_trainer(anchor_every=2)
    for _ in range(3):
        trainer.step(density=0.5)
    server.init_weight_transfer(trainer.url)
    server.apply(1)
    call(server, "delta_fail_anchors", after)
    # Back from 1 to 0 there is no delta.
    refused("load-failed", lambda: server.apply(0))

    server.apply(0)
    assert live(server) == served(trainer.history[0])


@pytest.mark.parametrize("route", ["/weight_checker", "/collective_rpc"])
def test_a_server_whose_weights_vllm_reset_serves_no_version_until_an_update(server, trainer, route):
    body = {"action": "reset"} if route == "/weight_checker" else {"method": "reset_weights", "args": []}
    connection(server).post(route, body)
    assert server.status().serving is None

    server.apply(0)

    assert verify_server(trainer.store, server).manifest.version == 0


def test_a_parameter_that_moved_is_refused_until_the_store_is_opened_again(server, trainer):
    trainer.step()
    call(server, "delta_move", "model.layers.0.mlp.down_proj.weight")
    with pytest.raises(PatchstoreError, match="open it again"):
        server.apply(1)

    server.init_weight_transfer(trainer.url)
    assert server.status().serving == 0
    server.apply(1)
    assert live(server) == served(trainer.history[1])


def test_generation_goes_on_while_a_version_is_staged_and_the_update_waits_for_it(server, trainer, tmp_path):
    trainer.step(density=0.5)
    old, marker = answer(server), tmp_path / "go"
    call(server, "delta_hold_staging", str(marker))
    killed = Connection(server.url, timeout_s=0.5)
    with VllmServer(server.url, timeout_s=120) as driver, ThreadPoolExecutor(2) as pool:
        updated = pool.submit(driver.apply, 1)
        try:
            # Answers, while the driver waits, and others that ask for the same, or for another version.
            assert not connection(server).every_rank("delta_prefetch", 1)[0]["is_done"]
            assert not connection(server).every_rank("delta_prefetch", 2, wait_s=60)[0]["is_done"]
            waiting = pool.submit(connection(server).every_rank, "delta_prefetch", 1, wait_s=60)
            with pytest.raises(ServerUnavailable):
                killed.every_rank("delta_prefetch", 1, wait_s=60)
            answers = [answer(server) for _ in range(3)]
            held, is_staging = server.status().serving, not updated.done() and not waiting.done()
        finally:
            marker.touch()
        updated.result()
        (told,) = waiting.result()

    assert (answers, held, is_staging) == ([old] * 3, 0, True)
    # Not after 60 s, when no one had rung.
    assert told["is_done"]
    assert server.status().serving == 1
    assert live(server) == served(trainer.history[1])


@pytest.mark.parametrize(("mode", "ended"), [("wait", "length"), ("abort", "abort"), ("keep", "length")])
def test_a_server_is_updated_in_each_pause_mode_of_vllm(server, trainer, mode, ended):
    trainer.step(density=0.5)
    old, _ = stream(server, Event())
    with ThreadPoolExecutor(1) as pool:
        # An answer that ends before the pause arrives proves nothing, so it is asked for again.
        for _ in range(20):
            begun = Event()
            asked = pool.submit(stream, server, begun)
            begun.wait(60)
            connection(server).post("/pause", {}, mode=mode)
            # Only what is kept is still to come; the others end before the update begins.
            is_caught = not asked.done() if mode == "keep" else asked.result()[1] == ended
            if is_caught:
                break
            server.resume()
        server.apply(1)
        stayed_paused = server.is_paused()
        server.resume()
        tokens, reason = asked.result()

    assert (is_caught, stayed_paused, reason) == (True, True, ended)
    if mode == "wait":
        assert tokens == old
    elif mode == "abort":
        assert 0 < len(tokens) < len(old)
        assert tokens == old[: len(tokens)]
    else:
        assert (len(tokens), tokens[0]) == (len(old), old[0])
    assert server.status().serving == 1
    assert verify_server(trainer.store, server, 1).num_verified == len(trainer.tensors)
    assert stream(server, Event())[0] != old


def test_status_tells_what_is_served_and_how(server, trainer):
    manifest = trainer.step()
    server.apply(1)
    (rank,) = server.status().ranks
    assert (rank["serving"], rank["parent"], rank["step"], rank["half_applied"]) == (1, 0, 2, False)
    mapped = rank["map"]
    assert mapped["mapped"] == len(trainer.tensors)
    assert (mapped["num_computed"], mapped["num_partial"], mapped["num_absent"]) == (0, 0, 0)
    # What the demo shows of an update.
    table = tables.versions_table()
    tables.add_version(
        table, manifest, loss=1.0, share=0.02, publish_s=0.1, timings=rank["timings"], equal=True
    )
    assert table.row_count == 1


def test_the_command_verifies_what_a_server_serves(server, trainer):
    trainer.step()
    server.apply(1)
    command = [sys.executable, "-m", "patchstore", "verify", "--server", server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"serves version 1, state {server.status().state_digest[7:19]}" in done.stdout

    call(server, "delta_write_behind", "model.norm.weight")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = " ".join(done.stderr.split())
    assert (done.returncode, "1 tensors differ, such as model.norm.weight" in said) == (3, True)


@pytest.mark.exhaustive
def test_a_killed_server_is_healed_by_follow(server, process: ServerProcess, model, trainer, tmp_path):
    follow = Reconciler(trainer.store, server)
    trainer.step()
    trainer.step()
    assert [follow.step().outcome for _ in range(2)] == ["applied", "nothing"]
    before, words = server.fingerprint(), answer(server)

    process.stop()
    assert follow.step().outcome == "failed"
    # Started from the replayed version, so this also is a fresh server to compare with.
    process.start(replayed(trainer.store, 2, tmp_path / "replayed", model))

    assert server.fingerprint() == before
    assert answer(server) == words
    done = follow.step()
    assert (done.outcome, done.version) == ("initialised", 2)
    assert server.weight_version() in {"2", UNLABELLED}
    assert follow.step().outcome == "nothing"
    trainer.step()
    assert (follow.step().version, server.status().serving) == (3, 3)
    assert live(server) == served(trainer.history[3])


def test_the_doctor_finds_a_server_well_and_a_model_of_another_shape_unfit(
    server, trainer, new_trainer, weights
):
    def look(store: str) -> dict[str, str]:
        before = (live(server), server.status())
        found = {each.kind: each.found for each in examine(store, [server.url], read_only=True)}
        assert (live(server), server.status()) == before
        return found

    assert {"server", "delta", "following", "tensors"} <= look(trainer.url).keys()

    other = new_trainer({**weights, "model.norm.weight": torch.zeros(8, dtype=torch.bfloat16)})
    other.publish()
    found = look(other.url)
    assert {"other-run", "tensors-unfit"} <= found.keys()
    assert "model.norm.weight" in found["tensors-unfit"]
    same = new_trainer()
    same.publish()
    assert {"other-run", "tensors"} <= look(same.url).keys()


def test_a_driver_that_comes_late_does_not_label_what_another_one_staged(server, trainer):
    for _ in range(2):
        trainer.step(density=0.5)
    late = VllmServer(server.url, timeout_s=120)
    late.start_weight_update()
    late.update_weights(1)
    server.start_weight_update()
    server.update_weights(2)

    with late, pytest.raises(UsageError, match="version 2 is served, so answers are not labelled 1"):
        late.finish_weight_update("1")

    assert server.status().serving == 2
    assert server.weight_version() in {"2", UNLABELLED}
    with pytest.raises(UsageError):
        server.finish_weight_update("2")
    assert live(server) == served(trainer.history[2])
    with pytest.raises(UsageError, match="version 2 is served"):
        server.set_weight_version("1")
    server.set_weight_version("policy of Monday")
    assert server.weight_version() in {"policy of Monday", UNLABELLED}


def test_two_drivers_that_differ_leave_the_server_as_it_is_until_one_goes(server, trainer):
    trainer.step(density=0.5)
    server.apply(0)
    before = answer(server)

    def follow(version: int) -> Reconciler:
        driver = Driver(wants=lambda: f"version {version}", seconds=60)
        client = VllmServer(server.url, timeout_s=120, driver=driver)
        return Reconciler(
            trainer.store, client, desired=lambda: history.read_manifest(trainer.store, version)
        )

    one, other = follow(0), follow(1)
    assert one.step().outcome in {"initialised", "nothing"}
    for _ in range(3):
        for each in (other, one):
            done = each.step()
            assert (done.outcome, done.error.kind) == ("failed", "driver-conflict")
    assert answer(server) == before
    one.server.close()
    assert {other.step().outcome for _ in range(3)} >= {"applied", "nothing"}
    other.server.close()
    assert server.status().serving == 1


def test_the_trace_of_a_version_has_each_call_that_a_server_answers(server, trainer):
    with recording() as spans:
        version, reconciler = trainer.step(), Reconciler(trainer.store, server)
        while (done := reconciler.step()).outcome != "applied":
            assert done.error is None
        ours = trace_id(version.run_id, version.version)
        found = [each for each in spans() if each.context.trace_id == ours]
    assert within(found, named(found, "publish")) == [
        *("source", "wait", "compare", "encode", "upload", "commit")
    ]
    # Fetched during the question, or waited for.
    assert [name for name in within(found, named(found, "update")) if name != "stage"] == [
        *("notice", "prove", "pause", "write", "resume")
    ]
