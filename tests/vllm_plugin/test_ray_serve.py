"""Ray Serve as `docs/in-process.md` has it: replicas follow a store, also one that Ray starts anew."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

pytest.importorskip("ray.serve", reason='needs pip install "ray[serve]"')

from asking import PROMPT, ask
from own_app import SMALL, UPDATES
from ray_nodes import Nodes
from server_process import ENVIRONMENT, ServerProcess
from trainer import replayed

from examples.processes import free_port
from tests.support.pages import code_of

pytestmark = pytest.mark.exhaustive

_WAIT_S = 600.0


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    nodes.environment = ENVIRONMENT | {"VLLM_SERVER_DEV_MODE": "0"} | nodes.environment
    try:
        nodes.start_head()
        nodes.start_other()
        yield nodes
    finally:
        nodes.stop()


def serve(nodes: Nodes, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Ray Serve, as a user of a cluster would in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "ray.serve.scripts", *arguments],
        env=os.environ | nodes.environment,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=_WAIT_S,
    )


def replicas() -> list[psutil.Process]:
    started = psutil.Process().children(recursive=True)
    return [each for each in started if "ServeReplica" in " ".join(each.cmdline())]


def answer_unlike(url: str, *others: list[int]) -> list[int]:
    """Ask until there is an answer that is none of `others`; a replica that is killed may owe one."""
    deadline = time.monotonic() + _WAIT_S
    said = ""
    while time.monotonic() < deadline:
        answer = httpx.post(f"{url}/ask", json=PROMPT, timeout=_WAIT_S)
        if answer.is_success and answer.json() not in others:
            return answer.json()
        said = f"{answer.status_code}: {answer.text}"
        time.sleep(0.5)
    pytest.fail(f"{url} answers {said}")


def test_replicas_follow_the_store_and_so_do_those_that_take_their_place(nodes, new_trainer, model, tmp_path):
    trainer = new_trainer()
    trainer.publish()
    folder = tmp_path / "app"
    folder.mkdir()
    (policy,) = code_of("docs/in-process.md", "Ray Serve")
    policy = policy.replace("model=model", f"model=model, {SMALL}").replace("MODEL", str(model))
    (folder / "updates.py").write_text(UPDATES)
    (folder / "policy.py").write_text(policy.replace("s3://bucket/my-run", trainer.url))
    url = f"http://127.0.0.1:{(port := free_port())}"
    # Both nodes are this machine, on which one proxy can have the port.
    begun = serve(nodes, folder, "start", "--http-port", str(port), "--proxy-location", "HeadOnly")
    assert begun.returncode == 0, begun.stdout + begun.stderr

    deployed = serve(nodes, folder, "run", "--non-blocking", "policy:policy")
    assert deployed.returncode == 0, deployed.stdout + deployed.stderr
    one, other = replicas()
    answers = [answer_unlike(url)]
    trainer.step(density=0.5)
    answers.append(answer_unlike(url, *answers))
    one.kill()
    trainer.step(density=0.5)
    answers.append(answer_unlike(url, *answers))
    other.kill()
    for each in (one, other):
        each.wait()
    # Of a replica that was started after the last version.
    assert answer_unlike(url) == answers[2]

    nodes.stop()
    fresh = replayed(trainer.store, 2, tmp_path / "replayed", model)
    with ServerProcess(tmp_path / "fresh.log").serving(fresh) as process:
        assert ask(process.url, ignore_eos=False).tokens == answers[2]
