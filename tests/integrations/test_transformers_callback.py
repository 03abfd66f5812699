"""A real Trainer takes steps, and every version in the store has its weights, bit for bit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training import Remember, assert_replayed, served, trainer_of, versions
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from patchstore import open_store, replay, verify
from patchstore.errors import PublishFailed, RunExists, SchemaMismatch, StoreUnavailable, UsageError
from patchstore.format import history
from patchstore.integrations.transformers import PublishCallback
from patchstore.stores.folder import FolderStore
from patchstore.tensors.bits import bits
from patchstore.testing import tiny_qwen


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_step_is_published_bit_for_bit(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    seen = Remember()
    model = tiny_qwen.build(tied=tied).to(dtype)
    trainer = trainer_of(model, tmp_path, PublishCallback(tmp_path / "bucket"), seen)
    trainer.train()
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
    trainer_of(tiny_qwen.build(), tmp_path, PublishCallback(tmp_path / "bucket", files=base)).train()
    assert list((tmp_path / "bucket" / "anchors").rglob("*notes.json*"))


def test_every_third_step_and_the_last_one(tmp_path: Path) -> None:
    seen = Remember()
    publish = PublishCallback(tmp_path / "bucket", every=3)
    trainer_of(tiny_qwen.build(), tmp_path, publish, seen, max_steps=5).train()
    assert [step for step, _ in versions(tmp_path / "bucket")] == [0, 3, 5]
    assert_replayed(tmp_path / "bucket", tmp_path, seen.states)


class _StopAt(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


def test_training_that_another_callback_ends_publishes_its_last_step(tmp_path: Path) -> None:
    publish = PublishCallback(tmp_path / "bucket", every=10)
    trainer_of(tiny_qwen.build(), tmp_path, publish, _StopAt()).train()
    assert [step for step, _ in versions(tmp_path / "bucket")] == [0, 2]


def test_figures_of_each_version_are_in_the_log(tmp_path: Path) -> None:
    trainer = trainer_of(tiny_qwen.build(), tmp_path, PublishCallback(tmp_path / "bucket"))
    trainer.train()
    log = trainer.state.log_history
    found = [entry for entry in log if "patchstore/version" in entry]
    assert found[-1]["patchstore/version"] == 4
    store = tmp_path / "bucket"
    stored = sum(file.stat().st_size for file in (store / "deltas").rglob("*") if file.is_file())
    assert sum(entry["patchstore/bytes"] for entry in found) > stored > 0
    assert all(entry["patchstore/blocked_ms"] >= 0 for entry in found)
    assert any(0 < entry.get("patchstore/changed", 0) <= 1 for entry in found)
    # The summary of the training has what came last.
    assert "train_runtime" in log[-1]


def test_a_process_beside_the_publisher_is_in_the_log(tmp_path: Path) -> None:
    publish = PublishCallback(tmp_path / "bucket", compact=True, anchor_every=2)
    trainer = trainer_of(tiny_qwen.build(), tmp_path, publish)
    trainer.train()
    found = [entry for entry in trainer.state.log_history if "patchstore/version" in entry]
    assert all(entry["patchstore/failures_beside"] == 0 for entry in found[:-1])
    assert all(entry["patchstore/anchors_beside"] >= 0 for entry in found[:-1])
    assert len(found) > 1


def _assert_last_version_is_what_is_saved(trainer: Any, folder: Path) -> None:
    """Fail unless the newest version in the bucket there has what `save_model` writes now."""
    trainer.save_model(str(folder / "saved"))
    saved = load_file(folder / "saved" / "model.safetensors")
    replay(str(folder / "bucket"), out=folder / "last")
    found: dict[str, torch.Tensor] = {}
    for file in (folder / "last").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(bits(found[name]), bits(tensor.to(torch.bfloat16))), name


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
    model = tiny_qwen.build().float()
    trainer = trainer_of(model, tmp_path, PublishCallback(tmp_path / "bucket"), **options)
    trainer.train()
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
    logged = [each for each in trainer.state.log_history if "patchstore/bytes" in each]
    store = FolderStore(tmp_path / "bucket")
    manifests = [history.read_manifest(store, version) for version in range(6)]
    assert sum(each["patchstore/bytes"] for each in logged) == sum(each.num_bytes for each in manifests)


class _AverageOfTheOptimiser(TrainerCallback):  # type: ignore[misc]
    def on_train_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer.eval()


def test_the_average_of_a_schedule_free_optimiser_is_the_last_version_if_a_callback_asks_for_it(
    tmp_path: Path,
) -> None:
    pytest.importorskip("schedulefree")
    seen, model = Remember(), tiny_qwen.build().float()
    callbacks = (PublishCallback(tmp_path / "bucket"), seen, _AverageOfTheOptimiser())
    trainer = trainer_of(model, tmp_path, *callbacks, **_SCHEDULE_FREE)
    trainer.train()
    _assert_last_version_is_what_is_saved(trainer, tmp_path)
    last, averaged = seen.states[4]["lm_head.weight"], served(model)["lm_head.weight"]
    assert not torch.equal(last, averaged)


def test_a_training_of_no_steps_is_one_version(tmp_path: Path) -> None:
    options = {"max_steps": -1, "num_train_epochs": 0}
    trainer_of(tiny_qwen.build(), tmp_path, PublishCallback(tmp_path / "bucket"), **options).train()
    assert versions(tmp_path / "bucket") == [(0, "anchor")]


class _Reporter(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.keys: set[str] = set()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.keys |= logs.keys()


def test_reporters_behind_the_callback_get_the_figures(tmp_path: Path) -> None:
    reporter = _Reporter()
    publish = PublishCallback(tmp_path / "bucket")
    trainer = trainer_of(tiny_qwen.build(), tmp_path, reporter, publish)
    trainer.callback_handler.callbacks.insert(0, trainer.pop_callback(publish))
    trainer.train()
    assert {"patchstore/version", "patchstore/bytes", "patchstore/changed"} <= reporter.keys


def test_a_resumed_training_continues_the_run(tmp_path: Path) -> None:
    bucket, seen = tmp_path / "bucket", Remember()
    model = tiny_qwen.build().float()
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer_of(copy.deepcopy(model), tmp_path, PublishCallback(bucket), seen, max_steps=3, **saving).train()
    # As after a crash: the newest checkpoint is of step 2, and step 3 was published.
    again = trainer_of(model, tmp_path, PublishCallback(bucket), seen, max_steps=5, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert versions(bucket) == [
        *((0, "anchor"), (1, "delta"), (2, "delta"), (3, "delta")),
        # The first claims the run for the new publisher, and the second is of the resumed step.
        *((2, "delta"), (2, "delta"), (3, "delta"), (4, "delta"), (5, "delta")),
    ]
    assert_replayed(bucket, tmp_path, seen.states)


def test_a_second_training_of_one_trainer_continues_the_run(tmp_path: Path) -> None:
    seen = Remember()
    trainer = trainer_of(tiny_qwen.build(), tmp_path, PublishCallback(tmp_path / "bucket"), seen, max_steps=1)
    trainer.train()
    trainer.train()
    assert [step for step, _ in versions(tmp_path / "bucket")] == [0, 1, 1, 0, 1]


def test_without_resume_an_existing_run_is_refused(tmp_path: Path) -> None:
    trainer_of(tiny_qwen.build(), tmp_path, PublishCallback(tmp_path / "bucket"), max_steps=1).train()
    again = trainer_of(tiny_qwen.build(), tmp_path, PublishCallback(tmp_path / "bucket", resume=False))
    with pytest.raises(RunExists):
        again.train()


class _Fail(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_a_training_that_was_interrupted_is_continued_in_the_same_process(tmp_path: Path) -> None:
    fail = _Fail()
    trainer = trainer_of(tiny_qwen.build(), tmp_path, PublishCallback(tmp_path / "bucket"), fail)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(fail)
    trainer.train()
    assert versions(tmp_path / "bucket")[-1] == (4, "delta")


class _Full(FolderStore):
    """A folder that can store no delta."""

    def upload(self, key: str, chunks: Any) -> None:
        if key.startswith("deltas/"):
            raise StoreUnavailable("no space left")
        super().upload(key, chunks)


def test_a_store_that_fails_ends_the_training_with_an_error(tmp_path: Path) -> None:
    publish = PublishCallback(_Full(tmp_path / "bucket"))
    trainer = trainer_of(tiny_qwen.build(), tmp_path, publish)
    with pytest.raises(PublishFailed, match="no space left"):
        trainer.train()
    # As `train()` does when it is called again.
    publish._abandon()
    assert publish.run_id is None


def test_adapters_are_published_merged_and_stay_as_they_are(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_qwen.build(), config)
    before = {name: each.clone() for name, each in model.named_parameters() if not each.requires_grad}
    seen = Remember()
    trainer_of(model, tmp_path, PublishCallback(tmp_path / "bucket"), seen).train()
    assert [step for step, _ in versions(tmp_path / "bucket")] == [0, 1, 2, 3, 4]
    assert_replayed(tmp_path / "bucket", tmp_path, seen.states)
    for name, each in model.named_parameters():
        assert name not in before or torch.equal(each, before[name])


def test_options_of_the_publisher_are_handed_on(tmp_path: Path) -> None:
    publish = PublishCallback(tmp_path / "bucket", anchor_every=2, snapshot="host", dtype="float16")
    trainer_of(tiny_qwen.build(), tmp_path, publish).train()
    kinds = [kind for _, kind in versions(tmp_path / "bucket")]
    assert kinds == ["anchor", "delta", "anchor", "delta", "anchor"]


def test_an_open_store_stays_open(tmp_path: Path) -> None:
    store = open_store(tmp_path / "bucket")
    trainer_of(tiny_qwen.build(), tmp_path, PublishCallback(store), max_steps=1).train()
    assert verify(store).version == 1


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


def test_a_store_must_be_a_store() -> None:
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
