"""Two Ray nodes on this machine, on which vLLM may place CPU workers as it places workers on GPUs."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from server_process import HERE, ROOT

from examples.processes import free_port

_START_S = 300.0
_ATTEMPTS = 6
_PORT = 6397
# Ray replaces 127.0.0.1 by an address that other machines reach; these it keeps, and none reaches them.
_HEAD, _OTHERS = "127.0.0.2", ("127.0.0.3", "127.0.0.4")

_PLATFORM = """
from vllm.platforms.cpu import CpuPlatform


def register():
    return "ray_cpu_platform.RayCpuPlatform"


class RayCpuPlatform(CpuPlatform):
    # What Ray reserves for a worker. It only counts them, so that a node without a GPU can offer one.
    ray_device_key = "GPU"
"""


class Nodes:
    """A Ray cluster of a head and another node, each with room for one worker."""

    def __init__(self) -> None:
        """Prepare. Nothing is started."""
        # Ray puts sockets there, whose paths have a limit of some 100 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        (self._folder / "ray_cpu_platform.py").write_text(_PLATFORM)
        about = self._folder / "ray_cpu_platform-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-cpu-platform\nVersion: 1\n")
        (about / "entry_points.txt").write_text(
            "[vllm.platform_plugins]\nray_cpu = ray_cpu_platform:register\n"
        )
        paths = [str(ROOT), str(HERE), str(self._folder), os.environ.get("PYTHONPATH", "")]
        self.environment = {
            "PYTHONPATH": os.pathsep.join(paths),
            "VLLM_HOST_IP": _HEAD,
            "RAY_ADDRESS": f"{_HEAD}:{_PORT}",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray listens on all addresses: only who knows this may use it.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_raylet_start_wait_time_s": str(int(_START_S)),
        }
        """Of a server on these nodes."""
        self._running: dict[str, psutil.Popen] = {}
        self._other = ""

    def start_head(self) -> None:
        at = ("--port", str(_PORT), "--temp-dir", str(self._folder / "t"))
        self._start(_HEAD, "--head", "--include-dashboard=false", *at)

    def start_other(self) -> None:
        """Start the other node; one that takes a killed one's place has an address of its own."""
        self._other = next(address for address in _OTHERS if address != self._other)
        self._start(self._other, "--address", f"{_HEAD}:{_PORT}")

    def _start(self, address: str, *arguments: str) -> None:
        # On a busy machine `ray start` may give up on a node that is late.
        for _ in range(_ATTEMPTS):
            if self._is_up(address, *arguments):
                return
        raise RuntimeError(f"a Ray node did not start:\n{self._log(address)}")

    def _is_up(self, address: str, *arguments: str) -> bool:
        """Start a node; return whether it came up. What is left of one that did not is killed."""
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", address),
            *("--num-gpus", "1", "--num-cpus", "2", "--object-store-memory", "100000000", *arguments),
        ]
        # A node ends if an agent that chooses its own port has not said it after 15 s, which is too little on
        # a busy machine.
        for agent in ("dashboard-agent-grpc", "runtime-env-agent", "metrics-export"):
            command += [f"--{agent}-port", str(free_port())]
        # Ray gives this one to the agent alone, so the node is told it where it looks for the agent's answer.
        listen, node = str(free_port()), secrets.token_hex(28)
        command += ["--dashboard-agent-listen-port", listen]
        with (self._folder / f"{address}.log").open("wb") as log:
            environment = os.environ | self.environment | {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": node}
            # To start the head, Ray must not look for one.
            del environment["RAY_ADDRESS"]
            self._running[address] = psutil.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + _START_S
        while "Ray runtime started" not in self._log(address):
            if _has_failed(self._running[address]) or time.monotonic() > deadline:
                _kill(self._running.pop(address))
                return False
            for session in (self._folder / "t").glob("session_2*"):
                (session / f"dashboard_agent_listen_port_{node}").write_text(listen)
            time.sleep(0.5)
        return True

    def _log(self, address: str) -> str:
        return (self._folder / f"{address}.log").read_text(errors="replace")

    def workers(self) -> list[int]:
        """Return how many of vLLM's workers each node runs, the head first."""
        return [
            sum("RayWorkerProc" in " ".join(process.cmdline()) for process in _tree(self._running[address]))
            for address in (_HEAD, self._other)
        ]

    def kill_other(self) -> None:
        """Kill every process of the node that is not the head, as if its machine lost power."""
        _kill(self._running.pop(self._other))

    def stop(self) -> None:
        """Kill all processes, and remove what they wrote."""
        for process in self._running.values():
            _kill(process)
        self._running = {}
        shutil.rmtree(self._folder, ignore_errors=True)


def _tree(process: psutil.Popen) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _has_failed(process: psutil.Popen) -> bool:
    """Whether a node ended, or its raylet did, which Ray itself notices only after `_START_S`."""
    if process.poll() is not None:
        return True
    with suppress(psutil.NoSuchProcess):
        ended = [each.name() for each in process.children() if each.status() == psutil.STATUS_ZOMBIE]
        return "raylet" in ended
    return False


def _kill(process: psutil.Popen) -> None:
    if process.poll() is None:
        for each in _tree(process):
            each.kill()
    process.wait()
