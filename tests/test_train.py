"""The training loop with a tiny model: learning, files of a run, resuming, stopping."""

import contextlib
import errno
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import NO_NETWORK, REPOSITORY, TIMEOUT, TINY
from helpers.kernels import add_window
from helpers.refusals import printed_keys, refused
from helpers.runs import (
    assert_same,
    changed_paths,
    contents,
    copy_run,
    repeatable_rows,
    rows,
    train_in,
    weights,
)

import train
from attention import KERNELS, SCORES
from clearhead.checkpoint import format as checkpoint
from clearhead.checkpoint import listing
from clearhead.checkpoint.resume import changed_settings
from clearhead.checkpoint.tensors import load_model
from clearhead.compute.optimizers import NonFiniteCheck
from clearhead.errors import CheckpointError, ConfigError, DataError, DivergedError, RunError
from clearhead.models.huggingface import to_hf
from clearhead.models.pretrained import load_pretrained
from clearhead.output.report import write_run_page
from clearhead.output.tracker import Tracker
from clearhead.parallel.strategy import Strategy
from clearhead.run import evaluation
from clearhead.run.run import Run
from data import load_datasets
from headlens import read_snapshot
from train import fit, save, train_step

# Settings of the finished run that the tests resume. They differ from the defaults.
OWN = ("optimizer.lr=1e-3", "model.dropout=0.2", "trainer.log_every=2")
OWN += ("trainer.max_steps=6", "trainer.save_every=1", "trainer.keep=9")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 6 steps with a checkpoint at each step."""
    return train_in(tmp_path_factory.mktemp("whole"), "name=a", *OWN)


@pytest.fixture
def run(whole, make_run):
    """A copy of the run in the current directory, runs/a."""
    return copy_run(whole)


@pytest.fixture
def resumed(make_run):
    """resumed(*overrides) -> a Run; its other settings are those of the run that it resumes."""
    return lambda *overrides: make_run("trainer.device=cpu", *overrides, tiny=False)


def step_in(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def model_of(run: Path, name: str = "model.safetensors") -> str:
    """The checksum of a file in the checkpoint of step 6."""
    return checkpoint.checksum(step_in(run, 6) / name)


def saved_step(run: Path) -> int:
    return checkpoint.load_state(listing.find_checkpoint(run)).step


def test_two_windows_are_memorized(make_run, tmp_path):
    """The loss falls below 0.1 only if data, model, loss and optimizer all work."""
    text = tmp_path / "short.txt"
    text.write_text("The ferry bell at the top of the steps rang twice, and nobody came.\n")
    small = ("data.val_fraction=0", "trainer.batch_size=2", "trainer.sample_tokens=0")
    fast = ("trainer.max_steps=80", "optimizer.lr=1e-2", "optimizer.weight_decay=0")
    run = make_run(f"data.path={text}", *small, *fast, "model.emb_dim=64", "model.dropout=0")
    assert len(load_datasets(run.config.data, run.evaluator.tokenizer).train) == 2
    fit(run)
    first, *_, last = rows(run.directory)
    assert first["train/loss"] > 2
    assert last["train/loss"] < 0.1


def test_accumulated_gradients_equal_those_of_the_whole_batch(make_run):
    """8 windows in micro-batches of 8, 1, 2, and 3 (3 + 3 + 2: equal weight for each window)."""

    def gradients(size):
        run = make_run("model.dropout=0", f"trainer.micro_batch_size={size}")
        taken = {}

        def keep(model, optimizer, grad_clip, check):
            taken.update({name: p.grad.clone() for name, p in model.named_parameters()})
            return torch.tensor(0.0)

        run.strategy.update = keep
        loss, _ = train_step(run)
        return loss, taken

    whole_loss, whole = gradients(8)
    for micro in (1, 2, 3):
        loss, accumulated = gradients(micro)
        assert float(loss) == pytest.approx(float(whole_loss), abs=1e-6), micro
        for name, gradient in whole.items():
            torch.testing.assert_close(accumulated[name], gradient, atol=1e-6, rtol=1e-5)


def test_gradients_are_clipped_to_the_norm():
    """Fused and plain AdamW have the same parameters, moments and norms after three steps; the
    gradient of the second step is not clipped. An SGD step has the length of the clipped norm."""
    for grad_clip in (0, 0.5, 1e6):
        results = []
        for fused in (True, False):
            torch.manual_seed(0)
            layer = torch.nn.Linear(5, 3)
            optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=fused)
            parallel = Strategy(torch.device("cpu"), torch.float32)
            check, norms = NonFiniteCheck(1, parallel.device), []
            for size in (100, 0.01, 1):
                parallel.backward(layer(torch.full((1, 5), float(size))).square().sum())
                norms.append(parallel.update(layer, optimizer, grad_clip, check))
            moments = [optimizer.state[p]["exp_avg_sq"] for p in layer.parameters()]
            results.append([*layer.parameters(), *moments, *norms])
        for fused, plain in zip(*results, strict=True):
            torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-12)
    before = torch.nn.utils.parameters_to_vector(layer.parameters()).detach().clone()
    parallel.backward(100 * layer(torch.ones(1, 5)).sum())
    parallel.update(layer, torch.optim.SGD(layer.parameters(), lr=1.0), 0.5, check)
    moved = torch.nn.utils.parameters_to_vector(layer.parameters()).detach() - before
    assert float(moved.norm()) == pytest.approx(0.5, rel=1e-4)
    assert all(p.grad is None for p in layer.parameters())


def test_gradient_norm_of_a_large_matrix_is_exact():
    """A naive fp32 sum of ten million squares has an error of 0.1 %."""
    layer = torch.nn.Linear(4096, 2500, bias=False)
    layer.weight.grad = torch.randn(2500, 4096, generator=torch.Generator().manual_seed(0))
    norm = Strategy(torch.device("cpu"), torch.float32).total_norm(layer)
    assert float(norm) == pytest.approx(float(layer.weight.grad.double().norm()), rel=1e-4)


def test_weights_depend_on_the_seed_and_not_on_evaluation(make_run):
    """Validation, samples and logging do not change the weights, also with dropout."""

    def final(*overrides):
        run = make_run("model.dropout=0.2", *overrides)
        fit(run)
        return weights(run)

    often = ("trainer.eval_every=1", "trainer.sample_tokens=5", "trainer.log_every=1")
    never = ("trainer.eval_every=0", "trainer.sample_tokens=0", "trainer.log_every=3")
    first = final("seed=1", *often)
    assert_same(first, final("seed=1", *never))
    assert not torch.equal(first["token_emb.weight"], final("seed=2")["token_emb.weight"])


def test_bf16_keeps_weights_and_moments_in_fp32(make_run):
    same = ("model.dropout=0", "lens=default")
    full, half = make_run(*same), make_run(*same, "trainer.precision=bf16")
    for run in (full, half):
        run.lens.snapshot(run.model, 0)
    files = [run.directory / "attention" / "step_00000000.npz" for run in (full, half)]
    shots = [read_snapshot(path) for path in files]  # of equal models
    assert shots[0].details != shots[1].details  # the lens runs in the precision of the run
    for key, values in shots[0].row.values.items():
        assert shots[1].row.values[key] == pytest.approx(values, abs=1e-2, nan_ok=True), key
    losses = [(float(train_step(full)[0]), float(train_step(half)[0])) for _ in range(4)]
    for loss, half_loss in losses:
        assert half_loss == pytest.approx(loss, abs=0.02)
    assert any(half_loss != loss for loss, half_loss in losses)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}
    state = half.optimizer.state[half.model.token_emb.weight]
    assert state["exp_avg"].dtype == torch.float32


def test_the_validation_at_the_end_reads_more_windows(make_run, monkeypatch):
    """Their number is a fixed fraction of the training windows; `val/loss` keeps its windows."""
    monkeypatch.setattr(evaluation, "FINAL_FRACTION", 2.0)
    steps = ("data.val_fraction=0.5", "trainer.max_steps=3", "trainer.batch_size=4")
    run = make_run("name=one", *steps, "trainer.eval_windows=5", "trainer.micro_batch_size=2")
    fit(run)
    dataset = run.evaluator.validation.dataset
    run.model.eval()

    def by_hand(windows):
        """The loss of each of these evenly spaced windows."""
        places = np.linspace(0, len(dataset) - 1, windows).round().astype(int)
        parts = [dataset[int(window)] for window in places]
        return [run.model(ids[None], targets[None])[1].item() for ids, targets in parts]

    losses = by_hand(2 * 3 * 4)
    found = json.loads((run.directory / "validation.json").read_text())
    assert (found["step"], found["windows"], len(found["parts"])) == (3, 24, 24)
    assert found["loss"] == pytest.approx(sum(losses) / 24, rel=1e-5)
    assert found["loss_error"] == pytest.approx(statistics.stdev(losses) / 24**0.5, rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2), rel=1e-6)
    assert run.objective() == found["loss"]
    summary = json.loads((run.directory / "summary.json").read_text())
    assert summary["final_validation"] == {k: v for k, v in found.items() if k != "parts"}
    assert summary["val/loss"] == rows(run.directory)[-1]["val/loss"] == run.state.val_loss
    assert summary["val/loss"] == pytest.approx(statistics.fmean(by_hand(5)), rel=1e-5)
    monkeypatch.setattr(evaluation, "FINAL_FRACTION", 1e9)
    everything = make_run(*steps, "trainer.eval_windows=1")
    fit(everything)
    assert everything.evaluator.final["windows"] == len(dataset)
    assert len(everything.evaluator.final["parts"]) == evaluation.PARTS


@pytest.mark.parametrize(
    ("where", "file"),
    [
        ("clearhead.run.run", "validation.json"),
        ("headlens.lens", "attention/heads.csv"),
        ("headlens.lens", "attention/ablation.json"),
        ("clearhead.output.summary", "summary.json"),
    ],
)
def test_a_run_whose_end_cannot_be_written_is_finished_by_its_next_start(
    make_run, monkeypatch, where, file
):
    own = ("name=run", "lens=default", "lens.every=2", "debug=false")
    folder, written = Path("runs/run"), sys.modules[where].atomic_write
    fit(make_run(*own))
    kept = {path: path.read_bytes() for path in [folder / file, *folder.glob("attention/*.csv")]}
    shutil.rmtree(folder)

    def full(path, content):
        if path.resolve() == (folder / file).resolve():
            raise OSError(errno.ENOSPC, "No space left on device")
        written(path, content)

    run = make_run(*own)
    with monkeypatch.context() as patched:
        patched.setattr(f"{where}.atomic_write", full)
        with refused(RunError, "name", "run", exit_code=4):
            fit(run)
    before = rows(folder)
    assert not (folder / file).exists()
    assert not (folder / "summary.json").exists()
    assert fit(make_run(*own))["steps"] == 4
    assert rows(folder) == before
    for path, content in kept.items():
        assert path.name == "summary.json" or path.read_bytes() == content
    assert make_run(*own).was_finished


@pytest.mark.parametrize(("max_steps", "validate"), [(4, fit), (1, Run.evaluate)])
def test_nan_validation_loss_ends_the_run_without_a_checkpoint(make_run, max_steps, validate):
    """Also in the last validation, which has several parts."""
    run = make_run("trainer.save_every=1", f"trainer.max_steps={max_steps}")
    train_step(run)
    with torch.no_grad():
        run.model.final_norm.weight.fill_(float("nan"))
    with refused(DivergedError, "optimizer.lr", exit_code=4):
        validate(run)
    assert not listing.has_checkpoint(run.directory)


def test_run_directory(make_run, tmp_path):
    run = make_run("name=full", "lens=default", "lens.every=2", "trainer.save_every=3")
    fit(run)
    folder = tmp_path / "runs" / "full"
    logs = {
        "metrics.jsonl",
        "samples.jsonl",
        "starts.jsonl",
        "run.html",
        "play.html",
        "attention",
        "validation.json",
    }
    names = {".lock", "checkpoints", "config.yaml", "run.json", "summary.json", *logs}
    assert {p.name for p in folder.iterdir()} == names
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["model"]["emb_dim"] == 32
    assert saved["optimizer"]["betas"] == [0.9, 0.95]

    start, *steps = rows(folder)
    assert start["step"] == 0
    assert "val/loss" in start
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    for row in steps:
        assert {"train/loss", "train/learning_rate", "train/grad_norm"} <= row.keys()
        assert ("val/loss" in row) == (row["step"] % 2 == 0)
    pictures = [path for value in steps[3].values() if isinstance(value, list) for path in value]
    assert len(pictures) == 4 + 1  # of prompts, of the clearest head
    assert all((folder / path).is_file() for path in pictures)
    assert [json.loads(s)["step"] for s in (folder / "samples.jsonl").open()] == [2, 4]
    texts = {run.evaluator.sample(run.model, step)["text"] for step in (2, 4)}
    assert len(texts) == 1  # the same random numbers at every step

    checkpoints = folder / "checkpoints"
    assert os.readlink(checkpoints / "last") == "step_00000004"
    assert (checkpoints / "best" / "model.safetensors").is_file()


def test_the_page_is_written_with_each_row(make_run, monkeypatch):
    """While the run trains, only if the last one took at most one percent of the time since."""
    written = []

    def write_and_note(folder, state):
        written.append((rows(folder)[-1]["step"], state))
        return write_run_page(folder, state)

    monkeypatch.setattr("clearhead.output.run_log.write_run_page", write_and_note)
    for share, steps in ((1e9, [0, 1, 2, 3]), (0, [0])):
        monkeypatch.setattr("clearhead.output.run_log.MAX_SHARE", share)
        fit(make_run(f"name=share-{share:g}", "lens=default"))
        assert written == [*((step, "running") for step in steps), (4, "finished")]
        written.clear()


def test_a_page_that_cannot_be_written_ends_no_run(make_run, monkeypatch, capsys):
    def full(folder, state):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("clearhead.output.run_log.write_run_page", full)
    run = make_run("name=full", "debug=false")
    fit(run)
    assert (run.directory / "summary.json").is_file()
    assert "No space left" in capsys.readouterr().err
    assert not (run.directory / "run.html").exists()


def test_every_row_has_the_number_of_tokens(make_run):
    """Rows with only attention (steps 0, 2), a sample without validation (3), a loss (4)."""
    rare = ("trainer.log_every=4", "trainer.eval_every=3", "data.val_fraction=0")
    run = make_run(*rare, "lens=default", "lens.every=2")
    fit(run)
    found = [(row["step"], row.get("train/tokens")) for row in rows(run.directory)]
    assert found == [(step, step * 8 * 32) for step in (0, 2, 3, 4)]


def test_newest_checkpoints_and_the_best_are_kept(make_run, monkeypatch):
    """A best loss of 0.0 is not treated as missing."""
    run = make_run("trainer.save_every=1", "trainer.keep=2", "trainer.max_steps=6")
    losses = iter([5.0, 0.0, 3.0, 4.0])  # at steps 0, 2, 4, 6
    monkeypatch.setattr(run, "evaluate", lambda: {"val/loss": next(losses)})
    folder, rmtree = run.directory / "checkpoints", shutil.rmtree

    def remove(path, **options):
        if path.exists():  # a kill now leaves a link to the newest checkpoint
            assert os.readlink(folder / "last") == listing.list_checkpoints(run.directory)[0].name
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", remove)
    fit(run)
    kept = sorted(p.name for p in folder.iterdir() if not p.is_symlink())
    assert kept == ["step_00000002", "step_00000005", "step_00000006"]
    assert os.readlink(folder / "best") == "step_00000002"
    assert (run.state.best_loss, run.state.best_step) == (0.0, 2)


def test_resume_is_bit_exact(make_run, run, resumed, whole):
    """Weights, moments, state, log and samples equal those of the uninterrupted run. The run is
    given as a name, a path or a checkpoint."""

    def state(folder):
        found = json.loads((step_in(folder, 6) / "state.json").read_text())
        groups = ("model", "data", "optimizer", "lens", "wandb")
        return found | {"settings": {group: found["settings"][group] for group in groups}}

    resume_it = {
        "by_name": lambda: make_run("name=by_name", *OWN, "data.path=text.txt"),
        "by_path": lambda: resumed("trainer.resume=runs/by_path"),
        "by_step": lambda: resumed(f"trainer.resume={step_in(Path('runs/by_step'), 3)}"),
    }
    after_step_3 = shutil.ignore_patterns("step_0000000[456]", "last")
    for way, start in resume_it.items():
        folder = Path("runs", way)
        shutil.copytree(run, folder, symlinks=True, ignore=after_step_3)
        torch.manual_seed(12345)
        rest = start()
        assert rest.state.step == 3, way
        assert rest.directory.resolve() == folder.resolve(), way
        fit(rest)
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert model_of(folder, name) == model_of(whole, name), (way, name)
        assert state(folder) == state(whole), way
        assert repeatable_rows(folder) == repeatable_rows(whole), way
        assert (folder / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


@pytest.mark.parametrize(("given", "chosen"), [("null", 4), ("0", 0)])
def test_longer_run_keeps_warmup_and_intervals(make_run, resumed, given, chosen):
    """By default they depend on the number of steps of the original run."""
    open_settings = ("trainer.warmup_steps=null", "trainer.eval_every=null")
    first = (*open_settings, f"trainer.warmup_steps={given}", "trainer.max_steps=20")
    run = make_run("name=a", *first)
    train_step(run)
    save(run)
    run.checkpointer.finish(run.state)
    before = run.config.trainer
    assert before.warmup_steps == chosen
    more = ("trainer.max_steps=400", "lens=default")  # the lens was off before
    for longer in (
        make_run("name=a", *open_settings, *more),
        resumed("trainer.resume=runs/a", *more),
    ):
        assert longer.state.step == 1
        for key in ("warmup_steps", "eval_every", "eval_windows", "log_every"):
            assert getattr(longer.config.trainer, key) == getattr(before, key), key
        assert longer.config.lens.every == 40
        longer.state.step = 20  # after the warm-up
        assert longer.learning_rate(longer.config.optimizer.lr) == longer.config.optimizer.lr


def test_invalid_settings_of_a_run_are_refused_or_replaced(run, resumed):
    """The message is short. An override replaces a stored setting that is not valid any more."""
    given = (f"trainer.resume={run}", "trainer.max_steps=7")
    stored = json.loads((run / "run.json").read_text())
    for group, key, value, valid in (
        ("lens", "prompts", ["a prompt"] * 25, "lens.prompts=[]"),
        ("wandb", "group", "a group" * 5000, "wandb.group=a"),
    ):
        stored["settings"][group][key] = value
        (run / "run.json").write_text(json.dumps(stored))
        with refused(CheckpointError, "trainer.resume", exit_code=3) as caught:
            resumed(*given)
        assert key in caught.value.reason
        assert len(str(caught.value)) < 2000
        given += (valid,)
    assert resumed(*given).state.step == 6


# Runs that cannot be resumed or started: (settings, error, keys). In runs/: a, a finished run;
# b, another run; gone, a run without its checkpoints; begun, a run without a checkpoint yet; and
# notes, a file.
REFUSALS = [
    ("name=new trainer.resume=must", ConfigError, ["trainer.resume"]),
    ("name=a trainer.resume=false", ConfigError, ["name"]),
    ("name=notes", ConfigError, ["name"]),
    ("name=begun seed=6", ConfigError, ["seed"]),
    ("name=gone", CheckpointError, ["checkpoint"]),
    ("trainer.resume=nowhere", CheckpointError, ["trainer.resume"]),
    ("trainer.resume=runs/a name=b trainer.max_steps=9", ConfigError, ["name"]),
    ("trainer.resume=runs/begun", ConfigError, ["trainer.resume"]),
    ("trainer.resume=runs/a experiment=book", ConfigError, ["experiment"]),
    ("trainer.resume=runs/a/checkpoints/step_00000002", ConfigError, ["trainer.resume"]),
    ("trainer.resume=runs/a trainer.batch_size=2", ConfigError, ["trainer.batch_size"]),
    ("name=a seed=5 model.emb_dim=64", ConfigError, ["seed", "model.emb_dim"]),
    ("name=a optimizer=muon", ConfigError, ["optimizer.name"]),
    ("name=a data.within_documents=true", ConfigError, ["data.within_documents"]),
]


def test_refusals_name_the_settings_and_change_nothing(run, make_run, resumed):
    shutil.copytree(run, "runs/b", symlinks=True)
    shutil.copytree(run, "runs/gone", symlinks=True, ignore=shutil.ignore_patterns("step_*"))
    shutil.copytree(run, "runs/begun", ignore=shutil.ignore_patterns("checkpoints"))
    Path("runs/notes").mkdir()
    Path("runs/notes/notes.txt").write_text("mine")
    before = contents(Path("runs"))
    for text, kind, keys in REFUSALS:
        words = text.split()
        by_path = words[0].startswith("trainer.resume=runs/")
        with pytest.raises(kind) as caught:
            resumed(*words) if by_path else make_run(*OWN, *words)
        assert [problem.key for problem in caught.value.problems] == keys, text
        assert not changed_paths(Path("runs"), before), text
    assert make_run(*OWN, "trainer.resume=runs/a", "name=a", "trainer.max_steps=9").state.step == 6


def test_a_kernel_with_other_scores_is_another_model(run, resumed, make_run, monkeypatch):
    kernel = {"model.attention": "explicit"}
    assert not changed_settings({"model.attention": "sdpa"}, kernel, run)
    add_window(monkeypatch)
    assert changed_settings({"model.attention": "window"}, kernel, run)
    monkeypatch.setitem(KERNELS, "explicit", KERNELS["window"])
    with refused(ConfigError, "model.attention", "explicit"):  # it does not declare its scores
        make_run(*OWN, "model.attention=explicit")
    monkeypatch.setitem(SCORES, "explicit", SCORES["window"])
    with refused(ConfigError, "model.attention", "explicit"):
        resumed(f"trainer.resume={run}", "trainer.max_steps=8", "model.attention=explicit")
    with refused(ConfigError, "model.attention", "explicit"):
        make_run(*OWN, "model.attention=explicit", f"trainer.init_from={run}")
    fit(make_run(*OWN, "name=window", "model.attention=explicit", "trainer.max_steps=2"))
    with pytest.raises(CheckpointError):
        to_hf(load_pretrained("runs/window").model, "exported")
    assert not Path("exported").exists()


def test_other_settings_may_change_and_are_named(run, resumed, make_run, capsys):
    more = ("optimizer.lr=1e-2", "trainer.micro_batch_size=4", "lens.every=3", "model.dropout=0")
    for start, arguments in ((make_run, (*OWN, "name=a")), (resumed, (f"trainer.resume={run}",))):
        again = start(*arguments, "trainer.max_steps=8", *more)
        assert (again.state.step, again.config.optimizer.lr) == (6, 1e-2)
        assert (again.config.trainer.micro_batch_size, again.config.lens.every) == (4, 3)
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "was 0.001" in line]
        changed = {"trainer.max_steps", *(setting.partition("=")[0] for setting in more)}
        assert {*re.findall(r"([a-z_.]+)=", line)} == changed
    fit(again)
    assert again.state.settings["optimizer"]["lr"] == 1e-2


def test_other_data_are_refused(run, resumed):
    text = Path("text.txt")
    shutil.copy(text, "more.txt")
    longer = (f"trainer.resume={run}", "trainer.max_steps=8")
    with refused(DataError, "data.path", exit_code=3):
        resumed(*longer, "data.path=[text.txt,more.txt]")
    resumed(*longer, "data.path=[more.txt]").close()  # the same tokens
    text.write_text(text.read_text().replace("fox", "cat"))
    with refused(DataError, "data.path", exit_code=3):
        resumed(*longer, "data.path=text.txt")


def test_a_run_without_a_checkpoint_is_replaced_by_the_same_run(make_run):
    make_run("name=a", "seed=5").log.tracker.log({"train/loss": 1.0}, 1)
    run = make_run("name=a", "seed=5")
    fit(run)
    assert [row["step"] for row in rows(run.directory)] == [0, 1, 2, 3, 4]


def test_a_finished_run_is_not_changed_by_starting_it_again(run, make_run, capsys):
    before = contents(run)
    for steps in (6, 3):
        fit(make_run(*OWN, "name=a", f"trainer.max_steps={steps}"))
        assert not changed_paths(run, before)
    assert "resum" not in capsys.readouterr().out


@pytest.mark.parametrize("when", ["in the last validation", "before the summary"])
def test_a_run_that_was_stopped_at_its_end_is_finished_by_the_next_start(
    make_run, monkeypatch, when
):
    """summary.json is written and the W&B run ends, without an error; then nothing changes."""
    ended = []
    monkeypatch.setattr(Tracker, "finish", lambda _, exit_code=0: ended.append(exit_code))
    run = make_run("name=a")
    with monkeypatch.context() as patched:
        if when == "before the summary":
            patched.setattr("clearhead.run.run.write_summary", lambda *_: sys.exit(143))
        else:
            validate = run.evaluator.validate

            def stop_at_the_end(model, step, is_last):
                run.stop.signals.received = signal.SIGTERM if is_last else 0
                return validate(model, step, is_last)

            run.evaluator.validate = stop_at_the_end
        with pytest.raises(SystemExit):
            fit(run)
    assert ended[-1] == 143
    summary = run.directory / "summary.json"
    assert (saved_step(run.directory), summary.exists()) == (4, False)
    assert rows(run.directory)[-1]["step"] == (4 if when == "before the summary" else 3)
    before = weights(run)
    again = make_run("name=a")
    fit(again)
    assert ended[-1] == 0
    assert_same(weights(again), before)
    assert [row["step"] for row in rows(run.directory)] == [0, *range(1, 5)]
    assert json.loads(summary.read_text())["steps"] == 4
    before = contents(run.directory)
    fit(make_run("name=a"))
    assert not changed_paths(run.directory, before)


def test_train_without_network_account_or_stdout(tmp_path, text_file):
    """As in README, in a separate process with stdout on a full disk: it trains, reports once that
    W&B is offline, and drops its output."""
    arguments = [s for s in TINY if not s.startswith(("lens", "wandb"))]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, REPOSITORY / "train.py", *arguments, "data.path=text.txt", "name=a"],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(NO_NETWORK)},
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT,
        )
    assert done.returncode == 0, done.stderr
    assert saved_step(tmp_path / "runs" / "a") == 4
    assert printed_keys(done.stderr) == ["W&B"]


def test_debug_adds_the_traceback(in_process, tmp_path):
    given = [*TINY, "data.path=any.txt", "debug=true"]
    code, _, err = in_process(train.main, tmp_path, *given)
    assert code == 3
    assert "Traceback" in err


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_rank_saves_and_stops_when_its_torchrun_has_died(make_run, monkeypatch, by_torchrun):
    """Without torchrun, a process continues when its parent has ended."""
    run = make_run("trainer.eval_every=0")
    step = train.train_step

    def parent_dies_after_step_1(run):
        if by_torchrun:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        if run.state.step == 1:
            monkeypatch.setattr("os.getppid", lambda: 1)
        return step(run)

    monkeypatch.setattr(train, "train_step", parent_dies_after_step_1)
    with contextlib.suppress(SystemExit):
        fit(run)
    expected = (signal.SIGTERM, 1) if by_torchrun else (0, 4)
    assert (run.stop.signals.received, saved_step(run.directory)) == expected


def test_compiled_training_uses_and_saves_the_same_parameters(make_run, tmp_path, monkeypatch):
    """Uses the eager backend of torch.compile, which generates no code."""
    real, made, ran = torch.compile, [], []

    def backend(graph, _):
        def forward(*inputs):
            ran.append(torch.is_grad_enabled())
            return graph.forward(*inputs)

        made.append(graph)
        return forward

    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend=backend))
    short = ("model.dropout=0", "trainer.max_steps=2")
    compiled = make_run("trainer.compile=true", "name=compiled", *short)
    plain = make_run("trainer.compile=false", *short)
    fit(compiled)
    fit(plain)
    assert len(made) == 1  # all blocks use the same compiled code
    # Validation, samples and the lens run the uncompiled module.
    assert ran == [True] * compiled.config.model.num_layers * 2
    assert compiled.metrics.train_loss == pytest.approx(plain.metrics.train_loss, rel=1e-5)
    model, _ = load_model(listing.find_checkpoint(tmp_path / "runs" / "compiled"))
    assert_same(model.state_dict(), weights(compiled))


def test_tokens_per_second_counts_training_only(make_run, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    run = make_run("trainer.log_every=3", "trainer.eval_every=2", "trainer.max_steps=6")

    def slow(method, seconds):
        def timed(*arguments):
            now[0] += seconds
            return method(*arguments)

        return timed

    monkeypatch.setattr(train, "train_step", slow(train.train_step, 1.0))
    monkeypatch.setattr(train, "evaluate_and_log", slow(train.evaluate_and_log, 100.0))
    fit(run)
    speeds = [row["train/tokens_per_second"] for row in rows(run.directory) if "train/loss" in row]
    assert speeds == pytest.approx([256.0, 256.0])
