"""`patchstore log`, `diff` and `status`: what they show of a run and of servers."""

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from patchstore.bucket import history, kept
from patchstore.cli import output
from patchstore.signing import KeySigner
from patchstore.stores.folder import FolderStore
from tests.signing.signed_runs import sign
from tests.support.commands import Cli
from tests.support.keys import key_pair
from tests.support.vllm_stub import StubServer, serving
from tests.support.weights import Run, lie


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(FolderStore(tmp_path / "bucket"))
    run.publish_and_close(6)
    return run


def lines(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def test_log_marks_versions_and_says_how_many_it_leaves_out(
    run: Run, tmp_path: Path, patchstore: Cli
) -> None:
    private, _ = key_pair(tmp_path)
    run.go_back(2)
    run.open(resume=2)
    run.close()
    kept.tag(run.store, "best", 5)
    sign(run.store, KeySigner(private), 4, 6)
    code, out, _ = patchstore("log", run.store.url, "-n", 3)
    rows = out.splitlines()
    assert (code, rows[-1]) == (0, "3 of 7 versions; -n shows more")
    assert [row.rpartition("│")[2].strip() for row in rows[2:-1]] == ["resumed, signed", "best", "signed"]
    assert [row.split("│")[0].strip() for row in rows[1:-1]] == ["version", "6", "5", "4"]
    assert "age" in rows[1]
    code, out, _ = patchstore("log", run.store.url)
    assert (code, len(out.splitlines())) == (0, 2 + 7)
    newest, *_ = lines(patchstore("log", run.store.url, "--json")[1])
    assert (newest["resumed"], newest["signed_by"]) == (True, [KeySigner(private).public_key.name])
    assert newest["share_changed"] == 0


def test_diff_shows_what_differs_most_first_and_says_how_much_it_leaves_out(
    run: Run, patchstore: Cli
) -> None:
    kept.tag(run.store, "best", 5)
    code, out, _ = patchstore("diff", run.store.url, 3, "best", "-n", 1)
    title, header, row, foot = out.splitlines()
    assert (code, foot) == (0, "1 of 3 tensors; -n shows more")
    assert title.startswith("versions 3 and 5 differ in ")
    assert header.split("│")[-1].strip() == "tensor"
    # It is the smallest, and as many elements of each were moved.
    assert row.endswith("layers.0.norm.weight")
    total, *tensors = lines(patchstore("diff", run.store.url, 3, "best", "--json")[1])
    assert (total["before"], total["after"], total["num_tensors"]) == (3, 5, 6)
    assert total["num_changed"] == sum(each["num_changed"] for each in tensors)
    assert total["tensors_changed"] == len(tensors) == 3
    code, out, _ = patchstore("diff", run.store.url, 5, 5)
    assert (code, len(out.splitlines())) == (0, 1)


@pytest.mark.parametrize(
    ("args", "code", "kind"),
    [
        ((1, 9), 2, "version-not-found"),
        ((1, "worst"), 2, "version-not-found"),
        ((1,), 2, "usage"),
        (("-1", 2), 2, "usage"),
        ((3, 5), 3, "state-mismatch"),
    ],
)
def test_what_cannot_be_compared_is_a_sentence(run: Run, patchstore: Cli, args, code, kind) -> None:
    lie(run.store, 5, "layers.0.proj.weight")
    found, out, err = patchstore("diff", run.store.url, *args, "--json")
    assert (found, lines(out)[-1]["error"]["kind"]) == (code, kind)
    assert kind in err


def test_diff_requires_keys(run: Run, tmp_path: Path, patchstore: Cli) -> None:
    private, public = key_pair(tmp_path)
    sign(run.store, KeySigner(private), 1, 2)
    assert patchstore("diff", run.store.url, 1, 2, "--require-signature", public)[0] == 0
    assert patchstore("diff", run.store.url, 2, 3, "--require-signature", public)[0] == 3


def test_status_says_what_each_server_serves_and_how_far_behind_it_is(run: Run, patchstore: Cli) -> None:
    header = history.run_header(run.store)
    stubs = [StubServer() for _ in range(4)]
    for stub, held in zip(stubs, (5, 3, None, 2), strict=True):
        stub.initialised, stub.held, stub.engines[0].run_id = held is not None, held, header.run_id
    stubs[3].engines[0].run_id = "another"
    with serving(stubs[0]), serving(stubs[1]), serving(stubs[2]), serving(stubs[3]):
        named = [word for stub in stubs for word in ("--server", stub.url)]
        code, out, err = patchstore("status", run.store.url, *named, "--server", "http://127.0.0.1:9")
        title, _, *rows = out.splitlines()
        store, *servers = lines(patchstore("status", run.store.url, *named, "--json")[1])
    # One of them does not answer.
    assert (code, "server-unavailable" in err) == (4, True)
    assert "version 5, step 5, " in title
    assert "reads anchor 4 and 1 deltas" in title
    # How long ago version 3 was replaced depends on the machine.
    cells = [[cell.strip() for cell in re.sub(r"\(.*?\)", "()", row).split("│")][1:] for row in rows]
    assert cells == [
        ["5", "0", ""],
        ["3", "2 ()", ""],
        ["-", "-", "follows no store yet"],
        ["2", "-", "of run another"],
        ["-", "-", "server-unavailable"],
    ]
    assert (store["version"], store["anchor"], store["num_deltas"]) == (5, 4, 1)
    assert [(each["serving"], each["behind"]) for each in servers] == [
        (5, 0),
        (3, 2),
        (None, None),
        (2, None),
    ]


def test_status_of_a_run_without_versions_or_with_damage_is_a_sentence(
    run: Run, tmp_path: Path, patchstore: Cli
) -> None:
    empty = Run(FolderStore(tmp_path / "empty"))
    empty.open()
    empty.close()
    code, out, _ = patchstore("status", empty.store.url)
    assert (code, out.strip().endswith("has no version yet")) == (0, True)
    assert patchstore("status", tmp_path / "nowhere")[0] == 2
    (tmp_path / "bucket" / "versions" / "00000004.json").unlink()
    with serving(StubServer()) as stub:
        code, out, err = patchstore("status", run.store.url, "--server", stub.url)
    assert (code, "no way leads to it" in out, stub.url in out) == (2, True, True)
    assert "version-not-found" in err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("replay {store} {tmp}/out 5", "version 5"),
        ("verify {store}", "version 5"),
        ("verify {store} --all", "6 of 6 versions verified"),
        ("verify {store} --sample 2", "2 of 2 versions verified"),
        ("diff {store} 1 5", "versions 1 and 5 differ"),
        ("compact {store} --anchor-every 2", "shortcuts were added"),
        ("mirror {store} {tmp}/mirror", "version 5"),
        ("replicate {store} {tmp}/replica", "6 versions copied"),
        ("prune {store} --keep-last 1", "nothing was written"),
        ("doctor {store} --read-only", "version"),
    ],
)
def test_what_takes_long_shows_a_bar_on_a_terminal_and_its_output_goes_where_it_went(
    run: Run, tmp_path: Path, patchstore: Cli, monkeypatch: pytest.MonkeyPatch, command: str, says: str
) -> None:
    words = command.format(store=run.store.url, tmp=tmp_path).split()
    terminal = StringIO()
    monkeypatch.setattr(output, "err", Console(file=terminal, force_terminal=True, width=80))
    _, out, _ = patchstore(*words)
    assert says in out
    assert words[0].removeprefix("verify") in terminal.getvalue()
    assert "━" in terminal.getvalue()
    assert "━" not in out


def test_no_bar_is_shown_where_standard_error_is_no_terminal(run: Run, patchstore: Cli) -> None:
    code, out, err = patchstore("diff", run.store.url, 1, 5)
    assert (code, err, "━" in out) == (0, "", False)
