"""What a publisher reports of each version that it commits: figures, in the order of versions."""

import logging
import math
from pathlib import Path
from threading import Event, current_thread

import pytest
import torch

from patchstore import Publisher
from patchstore.errors import PublishFailed, UsageError
from patchstore.stores.base import Store
from patchstore.stores.folder import FolderStore
from patchstore.testing.faults import Fault, FaultyStore
from tests.support.weights import Run

Taken = list[tuple[int, dict[str, float]]]


@pytest.fixture
def taken() -> Taken:
    return []


@pytest.fixture
def opened(run: Run, taken: Taken) -> Run:
    """A run that reports to `taken`."""
    run.open(metrics=lambda step, values: taken.append((step, values)))
    return run


def test_each_version_is_reported_once_with_its_figures(opened: Run, taken: Taken) -> None:
    versions = opened.publish_versions(3)
    num_elements = opened.publisher.schema.num_elements
    opened.close()
    assert [step for step, _ in taken] == [0, 1, 2]
    assert [values["weight_sync/version"] for _, values in taken] == [0, 1, 2]
    assert [values["weight_sync/bytes"] for _, values in taken] == [each.num_bytes for each in versions]
    for (_, values), manifest in zip(taken[1:], versions[1:], strict=True):
        assert manifest.delta is not None
        assert values["weight_sync/share_changed"] == manifest.delta.num_changed / num_elements > 0
    # Of an anchor alone nothing is known to have changed.
    assert "weight_sync/share_changed" not in taken[0][1]
    assert all(type(value) is float for _, values in taken for value in values.values())


def test_the_parts_of_a_version_are_no_longer_than_the_whole(opened: Run, taken: Taken) -> None:
    opened.publish_versions(2)
    opened.close()
    anchor, delta = (values for _, values in taken)
    parts = {"source", "wait", "compare", "encode", "upload", "commit"}
    assert {name for name in delta if name.startswith("perf/weight_sync/")} == {
        f"perf/weight_sync/{part}_s" for part in (*parts, "blocked")
    }
    assert "perf/weight_sync/encode_s" not in anchor
    assert 0 < sum(delta[f"perf/weight_sync/{part}_s"] for part in parts) <= delta["perf/weight_sync_s"]
    assert delta["perf/weight_sync/compare_s"] <= delta["perf/weight_sync/blocked_s"]


def test_what_was_not_committed_is_not_reported(store: Store, taken: Taken) -> None:
    fault = Fault(verb="upload", key="deltas/00000001*", effect="fail-before", times=None)
    run = Run(FaultyStore(store, fault))
    run.open(metrics=lambda step, values: taken.append((step, values)))
    run.publish(0)
    run.train()
    with pytest.raises(PublishFailed):
        run.publish(1)
    run.publish(2)
    # Nothing has changed, so there is no version.
    run.publisher.publish_patch(3, if_changed=True).result()
    run.close()
    assert [step for step, _ in taken] == [0, 2]


def test_an_error_in_the_function_is_a_warning_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def fail(step: int, values: dict[str, float]) -> None:
        raise ValueError(f"no chart of step {step}")

    run.open(metrics=fail)
    with caplog.at_level(logging.WARNING):
        assert [each.version for each in run.publish_versions(3)] == [0, 1, 2]
        run.close()
    (warning,) = [each for each in caplog.records if "no chart" in each.getMessage()]
    assert "ValueError: no chart of step 0" in warning.getMessage()


def test_no_publication_waits_for_a_function_that_hangs(run: Run) -> None:
    free, names = Event(), []

    def wait(step: int, values: dict[str, float]) -> None:
        names.append(current_thread().name)
        free.wait()

    run.open(metrics=wait)
    assert [each.version for each in run.publish_versions(4)] == [0, 1, 2, 3]
    assert len(names) <= 1
    free.set()
    run.close()
    assert names == ["patchstore-report"] * 4


@pytest.mark.parametrize("given", [3, "tensorboard", {}, object(), logging.getLogger("charts"), math])
def test_what_takes_no_figures_is_refused_before_a_run_is_begun(store: Store, given: object) -> None:
    with pytest.raises(UsageError, match="metrics must be a function"):
        Publisher(store, {"weight": torch.ones(4)}, metrics=given)
    assert list(store.list("")) == []


def published(folder: Path, metrics: object) -> None:
    run = Run(FolderStore(folder / "bucket"))
    run.open(metrics=metrics)
    run.publish_versions(3)
    run.close()


def test_tensorboard_has_a_chart_of_each_figure(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "charts")) as writer:
        published(tmp_path, writer)
    found = EventAccumulator(str(tmp_path / "charts")).Reload()
    points = found.Scalars("weight_sync/version")
    assert [(point.step, point.value) for point in points] == [(0, 0), (1, 1), (2, 2)]
    assert "perf/weight_sync/commit_s" in found.Tags()["scalars"]


def test_mlflow_has_them_in_the_run_that_was_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with pytest.raises(UsageError, match="no active run"):
        published(tmp_path, mlflow)
    with mlflow.start_run() as active:
        published(tmp_path, mlflow)
    assert len(mlflow.search_runs(output_format="list")) == 1
    history = mlflow.MlflowClient().get_metric_history(active.info.run_id, "weight_sync/version")
    assert [(point.step, point.value) for point in history] == [(0, 0), (1, 1), (2, 2)]


def test_rows_of_a_wandb_run_get_them_also_after_the_trainer_has_gone_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="W&B is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="patchstore") as charts:
        # A version of an earlier step is committed later.
        charts.log({"loss": 1.0}, step=40)
        published(tmp_path, charts)
        charts.log({"loss": 0.5}, step=41)
        # Of rows that were sent: the one before this row.
        found = {name: charts.summary[name] for name in ("loss", "weight_sync/version", "weight_sync/step")}
    assert found == {"loss": 1.0, "weight_sync/version": 2, "weight_sync/step": 2}
