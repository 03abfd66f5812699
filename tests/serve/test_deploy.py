"""What `examples/deploy/` shows: files that parse, and command lines that the programs accept."""

import configparser
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from patchstore.cli import main
from patchstore.errors import HostError
from patchstore.follow.desired import HeadWatcher
from patchstore.follow.metrics import Metrics
from patchstore.follow.reconcile import StepResult
from patchstore.stores.memory import MemoryStore

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"


def options_of(command: str, args: list[str]) -> dict[str, Any]:
    """What the command line makes of arguments of a command. Raises where it refuses them."""
    group = typer.main.get_command(main.app)
    return group.commands[command].make_context(command, list(args)).params


def follow_options(args: list[str]) -> dict[str, Any]:
    return options_of("follow", args)


@pytest.fixture
def unit() -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=True, interpolation=None)
    parsed.optionxform = str
    parsed.read_string((DEPLOY / "patchstore-follow.service").read_text())
    return parsed


@pytest.fixture
def manifests() -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


@pytest.fixture
def pod(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return manifests["Deployment"]["spec"]["template"]["spec"]


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_the_unit_runs_a_command_that_exists_with_options_that_it_takes(unit):
    program, command, *args = shlex.split(unit["Service"]["ExecStart"])
    assert (Path(program).name, command) == ("patchstore", "follow")
    options = follow_options(args)
    assert options["listen"] == "127.0.0.1:9464"
    assert float(unit["Service"]["TimeoutStopSec"]) > options["grace"]
    assert str(options["pin_file"]).startswith(f"%S/{unit['Service']['StateDirectory']}/")


def test_the_sidecar_takes_its_options_and_looks_after_the_server_beside_it(pod):
    containers = {each["name"]: each for each in pod["containers"]}
    options = follow_options(containers["follow"]["args"])
    served = dict(arg.lstrip("-").split("=", 1) for arg in containers["vllm"]["args"][1:])
    assert list(options["server"]) == [f"http://{served['host']}:{served['port']}"]
    assert served["worker-extension-cls"] == "vllm_plugin.DeltaWorkerExtension"
    assert pod["terminationGracePeriodSeconds"] > options["grace"]
    mounts = {mount["mountPath"] for mount in containers["follow"]["volumeMounts"]}
    assert str(Path(options["pin_file"]).parent) in mounts
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for each in pod["containers"] for mount in each.get("volumeMounts", [])} <= volumes


def test_the_sidecars_probes_ask_for_routes_that_exist(pod):
    follow = next(each for each in pod["containers"] if each["name"] == "follow")
    listen = follow_options(follow["args"])["listen"]
    routes = set(re.findall(r'"GET", "(/\w+)"', (ROOT / "patchstore/follow/http_api.py").read_text()))
    for probe, url in (("readinessProbe", "/readyz?max_lag=1"), ("livenessProbe", "/livez")):
        program, flag, code = follow[probe]["exec"]["command"]
        assert (program, flag) == ("python", "-c")
        compile(code, probe, "exec")
        assert f'"http://{listen}{url}"' in code
        assert url.partition("?")[0] in routes


def test_the_gate_lets_no_one_at_the_routes_that_update_weights(pod, manifests):
    gate = manifests["ConfigMap"]["data"]["default.conf"]
    assert gate.count("{") == gate.count("}")
    forwarded = dict(re.findall(r"location (?:= )?(\S+) \{ proxy_pass (\S+);", gate))
    assert set(forwarded) == {"/v1/", "/health", "/metrics", "/follow/metrics", "/follow/readyz"}
    assert forwarded["/follow/metrics"].endswith(":9464/metrics")
    # Nothing else is reachable from other pods.
    ports = {port["containerPort"] for each in pod["containers"] for port in each.get("ports", [])}
    assert ports == {8080}
    assert all("--host=127.0.0.1" in each["args"] for each in pod["containers"] if each["name"] == "vllm")


def test_a_policy_admits_the_gate_and_no_other_port_of_these_pods(manifests):
    pods = manifests["Deployment"]["spec"]["template"]
    policy = manifests["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == pods["metadata"]["labels"]
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    (admitted,) = rule["ports"]
    ports = [port for each in pods["spec"]["containers"] for port in each.get("ports", [])]
    assert [(port["name"], port["containerPort"]) for port in ports] == [(admitted["port"], 8080)]
    assert rule["from"], "an empty list would admit everyone"


def test_the_job_of_each_day_takes_its_options_and_alone_may_write(pod, manifests):
    job = manifests["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    found = {}
    for container in (*job["initContainers"], *job["containers"]):
        program, command = container["command"]
        assert program == "patchstore"
        found[command] = options_of(command, container["args"])
        assert [each["secretRef"]["name"] for each in container["envFrom"]] == ["store-writer"]
    follow = next(each for each in pod["containers"] if each["name"] == "follow")
    store = follow_options(follow["args"])["store"]
    assert {each["store"] for each in found.values()} == {store}
    assert found["prune"]["yes"] and found["prune"]["keep_last"] > 1
    secrets = [each["secretRef"]["name"] for each in pod["containers"] for each in each.get("envFrom", ())]
    assert secrets == ["store-credentials"] * 2


def test_a_first_failure_which_begins_its_series_at_1_is_seen():
    store, rules = MemoryStore("memory://"), yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())
    metrics = Metrics(HeadWatcher(store))
    metrics.observe("s", StepResult(outcome="failed", error=HostError("no disk")))
    metrics.observe(None, StepResult(outcome="failed", error=HostError("no disk")))
    begun = re.findall(r"^(\w*failures_total)\{.*\} 1\.0$", metrics.expose()[0].decode(), re.MULTILINE)
    assert begun == ["patchstore_failures_total", "patchstore_store_failures_total"]
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    (panel,) = (each for each in board["panels"] if each["title"] == "Failures")
    shown = [each["expr"] for each in panel["targets"]]
    # A failure that lasts is one of many.
    alerts = [rule for rule in rules["groups"][0]["rules"] if "for" not in rule]
    shown += [each["expr"] for each in alerts if "increase(" in each["expr"]]
    assert len(shown) == 4
    for expr in shown:
        name, during = re.findall(r"increase\((.*?)\[(.*?)\]\) > 0", expr)[0]
        assert f"or ({name} unless {name} offset {during})" in expr
        assert name.partition("{")[0] in begun


def test_kubernetes_takes_every_object():
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    objects = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    assert len(objects) == 5
    for each in objects:
        for release in ("1.29", validate.latest_version()):
            validate.validate(each, release, strict=True)
    objects[0]["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(validate.ValidationError):
        validate.validate(objects[0], "1.29", strict=True)


def test_the_images_run_commands_that_exist_on_files_that_exist():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    entries = [yaml.safe_load(rest) for word, rest in instructions() if word == "ENTRYPOINT"]
    assert entries == [["patchstore", "follow"], ["vllm", "serve"]]
    assert "patchstore" in scripts
    assert "follow" in typer.main.get_command(main.app).commands
    known = {"FROM", "RUN", "COPY", "USER", "STOPSIGNAL", "ENTRYPOINT", "CMD", "ENV"}
    assert {word for word, _ in instructions()} <= known
    for word, rest in instructions():
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
        if word == "RUN":
            assert shlex.split(rest)[0] in {"pip", "useradd"}
    targets = re.findall(r"FROM \S+ AS (\w+)", (DEPLOY / "Dockerfile").read_text())
    assert targets == re.findall(r"--target (\w+)", (DEPLOY / "Dockerfile").read_text())


def test_the_page_names_every_option():
    page = (ROOT / "docs" / "follow.md").read_text()
    group = typer.main.get_command(main.app)
    options = {opt for each in group.commands["follow"].params for opt in each.opts if opt.startswith("--")}
    assert {each for each in options if f"`{each}" not in page} == set()
