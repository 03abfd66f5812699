"""Alerts, the dashboard and the page speak of figures that a running `patchstore follow` has."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from follow_process import Following
from prometheus_client.parser import text_string_to_metric_families

from patchstore import Publisher
from patchstore.stores.folder import FolderStore
from tests.support.vllm_stub import StubServer, serving

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
OF_PROMETHEUS = {"job", "instance"}
"""Labels that a scrape adds."""


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text())["groups"]
    return group["rules"]


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana-dashboard.json").read_text())


def queries() -> list[str]:
    """What the panels ask Prometheus for, all variables given."""
    found = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [re.sub(r"\$\w+", ".*", each.replace("$__rate_interval", "5m")) for each in found]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The metrics of a process that updated one server, and finds none at another; the labels of samples."""
    bucket = tmp_path_factory.mktemp("follow") / "bucket"
    with Publisher(FolderStore(bucket), {"weight": torch.zeros(8)}) as publisher:
        publisher.publish_patch(0).result()
        publisher.publish_patch(1).result()
    with serving(StubServer()) as stub:
        stub.run_id = publisher.run_id
        gone = "http://127.0.0.1:9"
        following = Following(
            *(bucket, "--server", stub.url, "--server", gone, "--listen", 0, "--log-format", "json"),
            *("--max-poll-interval", 0.1),
        )
        url = following.logged(lambda line: line.get("event") == "listening")["url"]
        following.logged(lambda line: line.get("event") == "applied")
        following.logged(lambda line: line.get("kind") == "server-unavailable")
        text = httpx.get(f"{url}/metrics").text
        assert following.end()[0] == 0
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        # What has happened to no server and no store has a name, and no sample yet.
        found[f"{family.name}_total" if family.type == "counter" else family.name] = set()
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(sample.name, set()).update(sample.labels)
    return {name: labels for name, labels in found.items() if not name.endswith("_created")}


@pytest.mark.parametrize("source", ["alerts", "dashboard"])
def test_a_running_follow_has_what_is_asked_for(scraped: dict[str, set[str]], source: str) -> None:
    asked = queries() if source == "dashboard" else [rule["expr"] for rule in rules()]
    names = {name for each in asked for name in re.findall(r"patchstore_\w+", each)}
    assert len(names) > 6
    assert names - scraped.keys() == set()
    known = set.union(OF_PROMETHEUS, *scraped.values())
    matched = {label for each in asked for label in re.findall(r"(\w+)(?:=|!=)~?\"", each)}
    groups = [group for each in asked for group in re.findall(r"(?:by|on|group_left) \(([^)]*)\)", each)]
    grouped = {label for group in groups for label in group.split(", ")}
    assert (matched | grouped) - known == set()


def test_variables_and_legends_of_the_dashboard_name_labels(scraped: dict[str, set[str]]) -> None:
    found = dashboard()
    known = set.union(OF_PROMETHEUS, *scraped.values())
    variables = {each["name"]: each["query"] for each in found["templating"]["list"]}
    for name, query in variables.items():
        if name != "datasource":
            metric, label = re.fullmatch(r"label_values\((\w+).*, (\w+)\)", query["query"]).groups()
            assert metric in scraped and label == name and label in known
    text = json.dumps(found["panels"])
    assert set(re.findall(r"\$(?:\{)?([a-z]+)", text)) == variables.keys()
    assert set(re.findall(r"\{\{(\w+)\}\}", text)) <= known
    at = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in found["panels"]]
    assert len(set(at)) == len({panel["id"] for panel in found["panels"]}) == len(at)


def test_annotations_of_alerts_name_labels_that_the_alert_has(scraped: dict[str, set[str]]) -> None:
    known = set.union(OF_PROMETHEUS, *scraped.values())
    for rule in rules():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= known
    page = (ROOT / "docs" / "observability.md").read_text()
    assert set(re.findall(r"`(Patchstore\w+)`", page)) == {rule["alert"] for rule in rules()}


def test_the_page_has_a_row_for_each_figure_with_its_labels_and_no_other(
    scraped: dict[str, set[str]],
) -> None:
    page = (ROOT / "docs" / "follow.md").read_text()
    listed: dict[str, set[str]] = {}
    for names, labels in re.findall(r"^\| (`patchstore_.*?) \| (.*?) \|", page, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            listed[name] = set(re.findall(r"`(\w+)`", labels))
    parts = ("_bucket", "_count", "_sum")
    assert listed.keys() == {name for name in scraped if not name.endswith(parts)}
    # Those without a sample cannot say theirs; a histogram's are those of its count.
    found = {name: scraped.get(f"{name}_count") or scraped[name] for name in listed}
    assert {name: labels for name, labels in found.items() if labels and labels != listed[name]} == {}


@pytest.fixture
def promtool() -> Callable[..., str]:
    """Returns what the program says, and fails if it refuses a file."""
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool, which comes with Prometheus, is not in the PATH")

    def run(*args: str) -> str:
        done = subprocess.run([found, *args], check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_alerts_fire_when_they_are_to_and_else_do_not(promtool: Callable[..., str]) -> None:
    promtool("check", "rules", str(DEPLOY / "prometheus-rules.yaml"))
    tests = DEPLOY / "prometheus-rules.test.yaml"
    promtool("test", "rules", str(tests))
    assert {rule["alert"] for rule in rules()} == set(re.findall(r'alertname="(\w+)"', tests.read_text()))


def test_prometheus_reads_each_query_of_the_dashboard(promtool: Callable[..., str], tmp_path: Path) -> None:
    recorded = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(queries())]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    assert f"{len(recorded)} rules found" in promtool("check", "rules", str(path))
