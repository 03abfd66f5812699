"""`patchstore follow` as a process: what it prints and says, and how it ends."""

import importlib.util
import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import torch
from follow_process import Following

from patchstore import Publisher, open_store
from tests.support.vllm_stub import StubServer, serving

UNREACHABLE = "http://127.0.0.1:9"
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture
def bucket(tmp_path: Path, stub: StubServer) -> Path:
    publish(tmp_path / "bucket", 1, stub)
    return tmp_path / "bucket"


def publish(bucket: Path, num_versions: int, *stubs: StubServer) -> None:
    """Begin a run that the stubs will know."""
    with Publisher(open_store(bucket), {"w": torch.zeros(10)}) as publisher:
        for step in range(num_versions):
            publisher.publish_patch(step).result()
        for stub in stubs:
            stub.run_id = publisher.run_id


@pytest.fixture
def follow(bucket: Path) -> Iterator[Callable[..., Following]]:
    started: list[Following] = []

    def start(*options: object) -> Following:
        started.append(Following(bucket, *options))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_each_change_is_one_json_object_and_a_signal_ends_it_well(bucket, stub, follow, ending):
    following = follow("--server", stub.url, "--json")
    events = [following.event() for _ in range(2)]
    code, _, complaints = following.end(ending)
    assert [(event["event"], event["version"]) for event in events] == [("initialised", None), ("applied", 0)]
    assert events[1]["server"] == stub.url
    assert all(re.fullmatch(TIME, event["time"]) for event in events)
    assert events[1]["timings"].keys() == {"stage_s", "apply_s"}
    assert stub.opened == {"store": str(bucket)}
    assert code == 0, complaints


def test_a_bucket_that_was_swapped_for_another_runs_is_followed_when_the_run_is_named(bucket, stub, follow):
    following = follow("--server", stub.url, "--json")
    assert [following.event()["event"] for _ in range(2)] == ["initialised", "applied"]
    following.end()
    before = stub.run_id
    shutil.rmtree(bucket)
    publish(bucket, 2, stub)
    following = follow("--server", stub.url, "--json")
    refused = following.event()
    following.end()
    assert (refused["server"], refused["error"]["kind"], stub.history) == (stub.url, "store-replaced", [0])
    assert before in refused["error"]["message"] and f"--run {stub.run_id}" in refused["error"]["message"]
    following = follow("--server", stub.url, "--json", "--run", stub.run_id)
    events = [following.event() for _ in range(2)]
    following.end()
    assert [(event["event"], event["version"]) for event in events] == [("initialised", None), ("applied", 1)]
    # The wrong name of a run is said before anything is done.
    following = follow("--server", stub.url, "--json", "--run", before)
    assert following.event()["error"]["kind"] == "store-replaced"


def test_several_servers_are_followed_by_one_process(bucket, stub, follow):
    with ExitStack() as stack:
        others = [stack.enter_context(serving(StubServer())) for _ in range(2)]
        for other in others:
            other.run_id = stub.run_id
        listed = bucket.parent / "servers"
        listed.write_text(others[1].url)
        following = follow(
            *("--server", stub.url, "--server", others[0].url, "--server", UNREACHABLE),
            *("--servers-file", listed, "--json"),
        )
        applied = set()
        while len(applied) < 3:
            if (event := following.event())["event"] == "applied":
                applied.add(event["server"])
        assert following.end()[0] == 0
        assert applied == {stub.url, *(other.url for other in others)}


def test_the_log_is_json_with_what_machines_ask_for(stub, follow):
    following = follow("--server", stub.url, "--server", UNREACHABLE, "--log-format", "json")
    applied = following.logged(lambda line: line.get("event") == "applied")
    assert (applied["server"], applied["version"], applied["level"]) == (stub.url, 0, "info")
    assert applied["seconds"] >= 0
    failed = following.logged(lambda line: line.get("event") == "failed")
    assert failed["server"] == UNREACHABLE
    assert (failed["kind"], failed["level"]) == ("server-unavailable", "warning")
    code, out, rest = following.end()
    assert (code, out) == (0, "")
    assert all(json.loads(line)["time"] for line in rest.splitlines())


def test_people_read_lines_and_a_failure_is_one_line(stub, follow):
    following = follow(*("--server", stub.url, "--server", UNREACHABLE, "--at", 0, "--pause-mode", "abort"))
    lines: list[str] = []
    while not (any("applied" in line for line in lines) and any("failed" in line for line in lines)):
        lines.append(following.process.stdout.readline())
    code, _, complaints = following.end()
    assert any(re.fullmatch(rf"{TIME} {re.escape(stub.url)}: applied version 0\n", line) for line in lines)
    refused = rf"{TIME} {re.escape(UNREACHABLE)}: step failed: \[server-unavailable\] .*refused.*\n"
    assert any(re.fullmatch(refused, line) for line in lines)
    assert (code, stub.held, [pause["mode"] for pause in stub.pauses]) == (0, 0, ["abort"])
    assert "step failed" not in complaints


def test_the_text_log_begins_with_the_time_in_utc(follow: Callable[..., Following]) -> None:
    following = follow("--server", UNREACHABLE, "--log-format", "text")
    line = following.process.stderr.readline()
    following.end()
    assert re.match(rf"{TIME} WARNING patchstore\.", line)


def test_servers_are_held_over_http_and_still_are_after_a_restart(bucket, stub, follow):
    with Publisher(open_store(bucket), {"w": torch.zeros(10)}, resume=True) as publisher:
        publisher.publish_patch(1).result()
    options = ("--listen", "0", "--pin-file", bucket.parent / "pin.json", "--log-format", "json")
    following = follow("--server", stub.url, *options)
    listening = following.logged(lambda line: line.get("event") == "listening")["url"]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", listening)
    head = following.logged(lambda line: line.get("event") == "applied")["version"]
    assert head > 0
    if importlib.util.find_spec("plotly"):
        page = httpx.get(f"{listening}/report.json").json()
        served = {each["id"]: each["figure"]["data"] for each in page["charts"]}["served"]
        assert [(each["name"], each["y"][-1]) for each in served] == [("newest", head), (stub.url, head)]

    assert httpx.post(f"{listening}/pin", json={"version": 0}).status_code == 200
    assert following.logged(lambda line: line.get("event") == "applied")["version"] == 0
    assert following.end()[0] == 0

    stub.restart()
    following = follow("--server", stub.url, *options)
    assert following.logged(lambda line: line.get("event") == "applied")["version"] == 0
    assert following.end()[0] == 0


def test_the_command_line_can_keep_running_requests_from_computing_again(stub, follow):
    following = follow("--server", stub.url, "--prefix-cache", "version", "--json")
    while following.event()["event"] != "applied":
        pass
    following.end()
    assert (stub.held, stub.paused, stub.stale_prefixes, stub.pauses) == (0, False, False, [])

    stub.restart()
    stub.has_plugin = False
    following = follow("--server", stub.url, "--prefix-cache", "version", "--json")
    event = following.event()
    following.end()
    assert (event["event"], event["error"]["kind"], stub.held) == ("failed", "server-unavailable", None)
    assert "did not load the plugin" in event["error"]["message"]


def test_a_switch_under_way_is_ended_before_the_process_ends(stub, follow):
    go_on = stub.block("/finish_weight_update")
    following = follow("--server", stub.url, "--json", "--log-format", "json")
    try:
        assert stub.entered["/finish_weight_update"].wait(60)
        following.process.send_signal(signal.SIGTERM)
        following.logged(lambda line: line.get("event") == "stopping")
        go_on.set()
        out, _ = following.process.communicate(timeout=60)
    finally:
        go_on.set()
    assert following.process.returncode == 0
    assert json.loads(out.splitlines()[-1])["event"] == "applied"
    assert (stub.held, stub.paused, stub.switch) == (0, False, None)


def test_a_server_that_hangs_in_a_switch_is_left_running_when_time_is_up(stub, follow):
    go_on = stub.block("delta_pause")
    following = follow("--server", stub.url, "--grace", "0", "--json")
    try:
        assert stub.entered["delta_pause"].wait(60)
        code, _, _ = following.end()
        assert (code, stub.paused, stub.switch) == (0, False, None)
        assert stub.calls[-1] == "delta_resume"
    finally:
        go_on.set()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--server", "localhost:8000"),
        ("--server", "http://127.0.0.1:80o0"),
        ("--server", "http://"),
        ("--server", f"{UNREACHABLE}/v1"),
        ("--server", f"{UNREACHABLE}/v1/"),
        ("--server", f"{UNREACHABLE}?key=value"),
        ("--server", "http://user:secret@127.0.0.1:9"),
        ("--server", UNREACHABLE, "--pin-file", "/none/pin.json"),
        ("--server", UNREACHABLE, "--listen", "here"),
        ("--servers-file", "/none"),
    ],
)
def test_a_wrong_call_ends_at_once(follow: Callable[..., Following], options: tuple[str, ...]) -> None:
    following = follow(*options, "--json")
    out, _ = following.process.communicate(timeout=60)
    assert (following.process.returncode, json.loads(out)["error"]["kind"]) == (2, "usage")
    assert "secret" not in out


@pytest.mark.parametrize("page", [b"<html>\n<body>hello\n</body>", b'{"detail": "Not Found"}', b"[]"])
def test_a_server_that_is_not_vllm_is_said_so_on_one_line(stub, follow, page):
    stub.page, stub.is_dev = page, False
    following = follow("--server", stub.url)
    line = following.process.stdout.readline()
    assert "unlike vLLM" in line
    assert line.endswith("\n") and "VLLM_SERVER_DEV_MODE" not in line
