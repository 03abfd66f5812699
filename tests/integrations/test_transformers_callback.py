"""A real Trainer takes steps, and every version in the store has its weights, bit for bit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from training import On, Remember, assert_replayed, build, served, trained, trainer_of, versions
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from patchstore import open_store, replay, verify
from patchstore.bucket import history
from patchstore.errors import PublishFailed, RunExists, SchemaMismatch, UsageError
from patchstore.integrations.transformers import PublishCallback
from patchstore.stores.folder import FolderStore
from patchstore.testing.faults import Fault
from tests.support import tiny_qwen
from tests.support.copies import Unsteady
from tests.support.weights import assert_same_bits, loaded


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_step_is_published_bit_for_bit(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    seen = Remember()
    trained(tmp_path, seen, model=tiny_qwen.build(tied=tied).to(dtype))
    assert versions(tmp_path / "bucket") == [(0, "anchor"), *((step, "delta") for step in (1, 2, 3, 4))]
    assert_replayed(tmp_path / "bucket", tmp_path, seen.states)
    assert verify(str(tmp_path / "bucket")).version == 4


def test_the_replay_of_a_step_is_a_checkpoint_that_transformers_loads(tmp_path: Path) -> None:
    base = tiny_qwen.save(tiny_qwen.build(), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    trainer = trainer_of(model, tmp_path, PublishCallback(tmp_path / "bucket"))
    trainer.processing_class = trainer.callback_handler.processing_class = AutoTokenizer.from_pretrained(base)
    trainer.train()
    replay(str(tmp_path / "bucket"), 4, out=tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    for name, tensor in served(model).items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size == tiny_qwen.VOCABULARY


def test_files_of_the_caller_are_preferred(tmp_path: Path) -> None:
    base = tiny_qwen.save(tiny_qwen.build(), tmp_path / "base")
    (base / "notes.json").write_text("{}")
    trained(tmp_path, publish={"files": base})
    assert list((tmp_path / "bucket" / "anchors").rglob("*notes.json*"))


STOP_AT_2 = On(
    "on_step_end",
    lambda state, control, **_: setattr(control, "should_training_stop", state.global_step == 2),
)


@pytest.mark.parametrize(
    ("every", "options", "callbacks", "steps"),
    [
        (3, {"max_steps": 5}, (), [0, 3, 5]),
        # Another callback ends the training.
        (10, {}, (STOP_AT_2,), [0, 2]),
        (1, {"max_steps": -1, "num_train_epochs": 0}, (), [0]),
    ],
)
def test_steps_that_are_due_and_the_last_one_are_published(
    tmp_path: Path, every: int, options: dict[str, Any], callbacks: tuple[Any, ...], steps: list[int]
) -> None:
    seen, store = Remember(), open_store(tmp_path / "bucket")
    publish = PublishCallback(store, every=every)
    trainer_of(tiny_qwen.build(), tmp_path, publish, seen, *callbacks, **options).train()
    assert [step for step, _ in versions(tmp_path / "bucket")] == steps
    assert_replayed(tmp_path / "bucket", tmp_path, seen.states)
    # An open store stays open.
    assert verify(store).version == len(steps) - 1


def test_figures_of_each_version_are_in_the_log(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    log = trainer.state.log_history
    found = [entry for entry in log if "weight_sync/version" in entry]
    assert found[-1]["weight_sync/version"] == 4
    store = tmp_path / "bucket"
    stored = sum(file.stat().st_size for file in (store / "deltas").rglob("*") if file.is_file())
    assert sum(entry["weight_sync/bytes"] for entry in found) > stored > 0
    assert all(entry["perf/weight_sync_s"] > entry["perf/weight_sync/commit_s"] > 0 for entry in found)
    assert all(entry["perf/weight_sync/blocked_s"] >= 0 for entry in found)
    assert any(0 < entry.get("weight_sync/share_changed", 0) <= 1 for entry in found)
    # The summary of the training has what came last.
    assert "train_runtime" in log[-1]


def test_a_process_beside_the_publisher_is_in_the_log(tmp_path: Path) -> None:
    trainer = trained(tmp_path, publish={"compact": True, "anchor_every": 2})
    found = [entry for entry in trainer.state.log_history if "weight_sync/version" in entry]
    assert all(entry["weight_sync/failures_beside"] == 0 for entry in found[:-1])
    assert all(entry["weight_sync/anchors_beside"] >= 0 for entry in found[:-1])
    assert len(found) > 1


def _assert_last_version_is_what_is_saved(trainer: Any, folder: Path) -> None:
    """Fail unless the newest version in the bucket there has what `save_model` writes now."""
    trainer.save_model(str(folder / "saved"))
    saved = loaded(folder / "saved")
    replay(str(folder / "bucket"), out=folder / "last")
    assert_same_bits(loaded(folder / "last"), {n: each.to(torch.bfloat16) for n, each in saved.items()})


_SCHEDULE_FREE = {"optim": "schedule_free_adamw", "lr_scheduler_type": "constant", "learning_rate": 1e-2}
_EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        # An evaluation of the last step leaves other weights than the step had.
        (_SCHEDULE_FREE | _EVALUATED, [0, 1, 2, 3, 4, 4]),
        (_SCHEDULE_FREE, [0, 1, 2, 3, 4]),
        (_EVALUATED, [0, 1, 2, 3, 4]),
    ],
)
def test_the_last_version_is_what_save_model_writes(
    tmp_path: Path, options: dict[str, Any], steps: list[int]
) -> None:
    if "optim" in options:
        pytest.importorskip("schedulefree")
    trainer = trained(tmp_path, **options, model=tiny_qwen.build().float())
    assert [step for step, _ in versions(tmp_path / "bucket")] == steps
    _assert_last_version_is_what_is_saved(trainer, tmp_path)


@pytest.mark.parametrize(("best", "steps"), [(4, [0, 1, 2, 3, 4]), (2, [0, 1, 2, 3, 4, 4])])
def test_the_best_model_is_the_last_version_without_a_second_one_if_it_is_the_newest(
    tmp_path: Path, best: int, steps: list[int]
) -> None:
    model = tiny_qwen.build()
    saving = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    scored = {"metric_for_best_model": "score", "greater_is_better": True}
    trainer = trainer_of(
        model, tmp_path, PublishCallback(tmp_path / "bucket"), **_EVALUATED, **saving, **scored
    )
    trainer.compute_metrics = lambda _: {"score": -abs(best - trainer.state.global_step)}
    trainer.train()
    assert [step for step, _ in versions(tmp_path / "bucket")] == steps
    _assert_last_version_is_what_is_saved(trainer, tmp_path)


class _Averaged(TrainerCallback):  # type: ignore[misc]
    """Puts averaged weights in place when training ends, and takes itself off the list."""

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        self.trainer.remove_callback(self)


@pytest.mark.parametrize("is_before", [True, False])
def test_weights_that_another_callback_puts_in_place_at_the_end_are_the_last_version(
    tmp_path: Path, is_before: bool
) -> None:
    publish, average = PublishCallback(tmp_path / "bucket"), _Averaged()
    callbacks = (average, publish) if is_before else (publish, average)
    average.trainer = trainer = trainer_of(tiny_qwen.build(), tmp_path, *callbacks)
    others = [each for each in trainer.callback_handler.callbacks if each is not average]
    trainer.train()
    assert [step for step, _ in versions(tmp_path / "bucket")] == [0, 1, 2, 3, 4, 4]
    _assert_last_version_is_what_is_saved(trainer, tmp_path)
    assert trainer.callback_handler.callbacks == others
    logged = [each for each in trainer.state.log_history if "weight_sync/bytes" in each]
    store = FolderStore(tmp_path / "bucket")
    manifests = [history.read_manifest(store, version) for version in range(6)]
    assert sum(each["weight_sync/bytes"] for each in logged) == sum(each.num_bytes for each in manifests)


def test_the_average_of_a_schedule_free_optimiser_is_the_last_version_if_a_callback_asks_for_it(
    tmp_path: Path,
) -> None:
    pytest.importorskip("schedulefree")
    seen, model = Remember(), tiny_qwen.build().float()
    trainer = trained(
        tmp_path,
        seen,
        On("on_train_end", lambda optimizer, **_: optimizer.eval()),
        model=model,
        **_SCHEDULE_FREE,
    )
    _assert_last_version_is_what_is_saved(trainer, tmp_path)
    last, averaged = seen.states[4]["lm_head.weight"], served(model)["lm_head.weight"]
    assert not torch.equal(last, averaged)


def test_reporters_get_the_figures_although_they_are_asked_before_other_callbacks(tmp_path: Path) -> None:
    keys: set[str] = set()
    reporter = On("on_log", lambda logs, **_: keys.update(logs))
    trainer_of(tiny_qwen.build(), tmp_path, reporter, PublishCallback(tmp_path / "bucket")).train()
    assert {"weight_sync/version", "weight_sync/bytes", "weight_sync/share_changed"} <= keys
    assert {f"perf/weight_sync/{part}_s" for part in ("compare", "encode", "upload", "commit")} <= keys


def test_a_resumed_training_continues_the_run(tmp_path: Path) -> None:
    bucket, seen = tmp_path / "bucket", Remember()
    model = tiny_qwen.build().float()
    saving = {"save_strategy": "steps", "save_steps": 2}
    trained(tmp_path, seen, model=copy.deepcopy(model), max_steps=3, **saving)
    # As after a crash: the newest checkpoint is of step 2, and step 3 was published.
    again = trainer_of(model, tmp_path, PublishCallback(bucket), seen, max_steps=5, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert versions(bucket) == [
        *((0, "anchor"), (1, "delta"), (2, "delta"), (3, "delta")),
        # The first claims the run for the new publisher, and has the weights of the resumed step.
        *((2, "delta"), (3, "delta"), (4, "delta"), (5, "delta")),
    ]
    assert_replayed(bucket, tmp_path, seen.states)


def test_a_second_training_of_one_trainer_continues_the_run(tmp_path: Path) -> None:
    seen = Remember()
    trainer = trained(tmp_path, seen, max_steps=1)
    trainer.train()
    assert [step for step, _ in versions(tmp_path / "bucket")] == [0, 1, 1, 1]


def test_without_resume_an_existing_run_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=1)
    again = trainer_of(tiny_qwen.build(), tmp_path, PublishCallback(tmp_path / "bucket", resume=False))
    with pytest.raises(RunExists):
        again.train()


def test_a_training_that_was_interrupted_is_continued_in_the_same_process(tmp_path: Path) -> None:
    def interrupt(state: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt

    fail = On("on_step_end", interrupt)
    trainer = trainer_of(tiny_qwen.build(), tmp_path, PublishCallback(tmp_path / "bucket"), fail)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(fail)
    trainer.train()
    assert versions(tmp_path / "bucket")[-1] == (4, "delta")


def test_a_store_that_fails_ends_the_training_with_an_error(tmp_path: Path) -> None:
    fault = Fault(verb="upload", key="deltas/*", effect="fail-before", times=None)
    store = Unsteady(FolderStore(tmp_path / "bucket"), fault)
    trainer = trainer_of(tiny_qwen.build(), tmp_path, PublishCallback(store))
    with pytest.raises(PublishFailed, match="injected"):
        trainer.train()
    store.arm()
    trainer.train()
    assert versions(tmp_path / "bucket")[-1] == (4, "delta")


def test_options_of_the_publisher_are_handed_on(tmp_path: Path) -> None:
    trained(tmp_path, publish={"anchor_every": 2, "snapshot": "host", "dtype": "float16"})
    kinds = [kind for _, kind in versions(tmp_path / "bucket")]
    assert kinds == ["anchor", "delta", "anchor", "delta", "anchor"]


def test_an_adapter_is_published_as_peft_saves_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    safetensors = pytest.importorskip("safetensors.torch")
    trainer = trained(tmp_path, model=build(0, "lora", ""), publish={"adapter": "default"})
    replay(str(tmp_path / "bucket"), out=tmp_path / "out")
    assert_same_bits(
        safetensors.load_file(tmp_path / "out" / "adapter_model.safetensors"),
        peft.get_peft_model_state_dict(trainer.model, save_embedding_layers=False),
    )
    assert len(versions(tmp_path / "bucket")) == 5


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"every": 0}, "every"),
        ({"every": 1.5}, "every"),
        ({"group": None}, "no option group"),
        ({"anchor_evry": 3}, "anchor_every"),
    ],
)
def test_impossible_arguments_are_refused_before_training(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        PublishCallback("memory://x", **given)
    with pytest.raises(UsageError, match="not by int"):
        PublishCallback(3)  # type: ignore[arg-type]


def test_a_model_on_the_meta_device_is_refused_when_training_begins(tmp_path: Path) -> None:
    publish = PublishCallback(tmp_path / "bucket")
    trainer = trainer_of(tiny_qwen.build(), tmp_path, publish)
    with torch.device("meta"):
        elsewhere = tiny_qwen.build()
    with pytest.raises(SchemaMismatch, match="meta"):
        publish.on_train_begin(trainer.args, trainer.state, trainer.control, model=elsewhere)
    assert publish.run_id is None
