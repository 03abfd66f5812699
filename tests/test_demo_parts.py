"""The demo's own parts, without vLLM; `make demo` itself is run by hand and before a release."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from examples import report
from examples.checkpoint import save, served_weights
from examples.demo import corpus, tables
from examples.demo.training import Trainer
from examples.processes import Program
from examples.stores import HubServer
from patchstore import open_store
from patchstore.errors import AlreadyExists
from tests.support.beside import is_running, until

pytestmark = pytest.mark.exhaustive


def test_the_tokenizer_gives_back_its_text_and_the_published_topic_is_kept_apart() -> None:
    texts, topic = corpus.read_topics()
    tokenizer = corpus.train_tokenizer([*texts, topic])
    assert topic not in texts
    assert len(tokenizer) == corpus.VOCABULARY
    assert tokenizer.decode(tokenizer.encode(topic)) == topic
    assert len(corpus.encode(tokenizer, texts)) > 1000


def test_the_checkpoint_has_the_bits_that_are_published(tmp_path: Path) -> None:
    texts, topic = corpus.read_topics()
    tokenizer = corpus.train_tokenizer(texts)
    trainer = Trainer(corpus.encode(tokenizer, texts), len(tokenizer))
    trainer.specialise(corpus.encode(tokenizer, [topic]))
    before = served_weights(trainer.model)
    assert trainer.step() > 0
    save(trainer.model, tokenizer, tmp_path)
    saved, served = load_file(tmp_path / "model.safetensors"), served_weights(trainer.model)
    assert saved
    assert all(torch.equal(saved[name].view(torch.int16), served[name].view(torch.int16)) for name in saved)
    assert any(not torch.equal(before[name], served[name]) for name in saved)
    assert (tmp_path / "tokenizer.json").is_file()


def test_a_step_is_computed_in_float32_where_the_cpu_has_no_bf16() -> None:
    step = """
import torch
from examples.demo.training import Trainer
trainer = Trainer(torch.arange(1000), 2048)
trainer.model.lm_head.register_forward_hook(lambda module, given, logits: print(logits.dtype))
trainer.step()
"""
    done = subprocess.run(
        [sys.executable, "-c", step],
        # As on a CPU with AVX2 alone, where such a step in bf16 takes half a minute.
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["torch.float32"]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What an example prints where its output is a file."""
    printed = io.StringIO()
    monkeypatch.setattr(report, "console", Console(file=printed, width=110))
    monkeypatch.setattr(report, "HEARTBEAT_S", 0.02)
    return printed


def test_a_log_shows_that_a_stage_goes_on(printed: io.StringIO) -> None:
    with report.stage("starting vLLM"):
        until(lambda: "starting vLLM: 0 s so far\n" in printed.getvalue())
    assert printed.getvalue().splitlines()[-1].startswith("starting vLLM (")


def test_a_log_shows_the_step_and_the_loss_of_a_training_and_what_is_left(printed: io.StringIO) -> None:
    def steps() -> Iterator[float]:
        yield 7.5
        until(lambda: "warming up: step 1 of 3, loss 7.50, about 0 s left" in printed.getvalue())
        yield from (5.0, 2.25)

    report.train("warming up", steps(), 3)
    assert printed.getvalue().endswith("loss 7.50 -> 2.25\n")


def test_a_log_shows_how_many_versions_are_served(printed: io.StringIO) -> None:
    table = tables.versions_table()
    with report.growing("publishing", table):
        table.add_row("1")
        until(lambda: "publishing: 1 so far" in printed.getvalue())


def test_a_program_ends_together_with_what_it_started(tmp_path: Path) -> None:
    deaf = f"{sys.executable} -c 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)'"
    with Program(["sh", "-c", f"{deaf} & echo $!; wait"], log=tmp_path / "log", piped=True) as program:
        assert program.process.stdout is not None
        child = int(program.process.stdout.readline())
        program.check_alive()
        program.process.stdout.close()
    until(lambda: not is_running(child))


def test_a_program_that_ended_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Program(["sh", "-c", "echo broken; exit 3"], log=tmp_path / "server.log") as program:
        program.process.wait()
        with pytest.raises(RuntimeError, match=r"server ended with status 3(?s:.*)broken"):
            program.check_alive()


def test_the_hub_of_the_demo_creates_an_object_only_once_and_ends_with_it(tmp_path: Path) -> None:
    with HubServer(tmp_path / "hub.log") as hub:
        store = open_store(hub.url, **hub.options)
        store.put("versions/00000000.json", b"first", if_absent=True)
        with pytest.raises(AlreadyExists):
            store.put("versions/00000000.json", b"second", if_absent=True)
        assert store.get("versions/00000000.json") == b"first"
        store.close()
        assert hub.process.stdout is not None
        hub.process.stdout.close()
    assert hub.process.returncode is not None


def test_generations_are_marked_from_where_they_part() -> None:
    console = Console(width=60, color_system=None)
    with console.capture() as capture:
        console.print(tables.generations_table(["a", "b"], [" [x] one", " same"], [" [x] two", " same"]))
    shown = capture.get()
    assert "a [x] one" in shown
    assert "a [x] two" in shown
    assert "unchanged │ b same" in shown
