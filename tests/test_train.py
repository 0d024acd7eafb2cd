"""The loop, trained for real on a tiny model: what it learns, writes, saves and continues."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from helpers import NO_NETWORK, REPOSITORY, TINY
from helpers.runs import assert_same, rows, stop_behind, weights

from errors import ConfigError, RunDirectoryError
from train import DivergedError, Trainer
from training import announce, checkpoint, directory, resume
from training.command import compose
from training.config import complete
from training.directory import settings_of
from training.guard import Guard
from training.parallel import Parallel

# ------------------------------------------------------------------------------------- learning


def test_one_batch_is_learnt_by_heart(trainer, tmp_path):
    """Everything has to work for the loss to fall below 0.1: data, model, loss, optimizer."""
    text = tmp_path / "short.txt"
    text.write_text(
        "The ferry bell at the top of the steps rang twice, and nobody came.\n", "utf-8"
    )
    run = trainer(
        f"data.path={text}",
        "data.val_fraction=0",
        "trainer.batch_size=2",
        "trainer.max_steps=150",
        "trainer.sample_tokens=0",
        "model.dropout=0",
        "model.emb_dim=64",
        "optimizer.lr=1e-2",
        "optimizer.weight_decay=0",
    )
    assert len(run.train_set) == 2
    run.train()
    first, *_, last = rows(run.folder)
    assert first["train/loss"] > 2
    assert last["train/loss"] < 0.1


def test_loss_starts_at_that_of_guessing(trainer):
    run = trainer()
    assert run.validate()["val/loss"] == pytest.approx(math.log(257), abs=0.1)


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_accumulated_gradients_equal_those_of_the_whole_batch(trainer, micro):
    """8 windows as 1 x 8, 4 x 2, 8 x 1, and as 3 + 3 + 2, which weighting by batches gets wrong."""

    def gradients(size):
        run = trainer("model.dropout=0", f"trainer.micro_batch_size={size}")
        taken = {}

        def keep(model, optimizer, grad_clip, guard):
            taken.update({name: p.grad.clone() for name, p in model.named_parameters()})
            return torch.tensor(0.0)

        run.parallel.update = keep
        loss, _ = run.step()
        return loss, taken

    whole_loss, whole = gradients(8)
    loss, accumulated = gradients(micro)
    assert float(loss) == pytest.approx(float(whole_loss), abs=1e-6)
    for name, gradient in whole.items():
        torch.testing.assert_close(accumulated[name], gradient, atol=1e-6, rtol=1e-5)


def test_gradients_are_clipped_to_the_norm():
    layer = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = torch.nn.utils.parameters_to_vector(layer.parameters()).detach().clone()
    parallel = Parallel(torch.device("cpu"), torch.float32)
    parallel.backward(100 * layer(torch.ones(1, 3)).sum())
    norm = parallel.update(layer, optimizer, 0.5, Guard(1, parallel.device))
    moved = torch.nn.utils.parameters_to_vector(layer.parameters()).detach() - before
    assert float(norm) > 100
    assert float(moved.norm()) == pytest.approx(0.5, rel=1e-4)
    assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("grad_clip", [0, 0.5, 1e6])
def test_the_fused_kernel_clips_as_scaling_does(grad_clip):
    """It is told by what to divide: the same parameters and moments after three steps."""
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        layer = torch.nn.Linear(5, 3)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=fused)
        parallel = Parallel(torch.device("cpu"), torch.float32)
        guard, norms = Guard(1, parallel.device), []
        for size in (100, 0.01, 1):  # the second is within the norm
            parallel.backward(layer(torch.full((1, 5), float(size))).square().sum())
            norms.append(parallel.update(layer, optimizer, grad_clip, guard))
        moments = [optimizer.state[p]["exp_avg_sq"] for p in layer.parameters()]
        results.append([*layer.parameters(), *moments, *norms])
    for fused, scaled in zip(*results, strict=True):
        torch.testing.assert_close(fused, scaled, rtol=1e-5, atol=1e-12)


def test_the_norm_of_the_gradient_is_exact_however_large_the_matrix():
    """Summed up one by one in fp32, ten million squares lose a thousandth."""
    layer = torch.nn.Linear(4096, 2500, bias=False)
    layer.weight.grad = torch.randn(2500, 4096, generator=torch.Generator().manual_seed(0))
    norm = Parallel(torch.device("cpu"), torch.float32).total_norm(layer)
    assert float(norm) == pytest.approx(float(layer.weight.grad.double().norm()), rel=1e-4)


def test_the_learning_rate_is_what_the_optimizer_uses(trainer):
    run = trainer("trainer.warmup_steps=2", "optimizer.lr=0.5", "trainer.max_steps=4")
    used = []
    for _ in range(4):
        run.step()
        (rate,) = {group["lr"] for group in run.optimizer.param_groups}
        used.append(rate)
    assert used == pytest.approx([0.25, 0.5, 0.5, 0.05])


def test_same_seed_same_run_and_another_seed_another(trainer):
    def final(*overrides):
        run = trainer(*overrides)
        run.train()
        return weights(run)

    first = final("seed=1")
    assert_same(first, final("seed=1"))
    assert not torch.equal(first["token_emb.weight"], final("seed=2")["token_emb.weight"])


def test_validation_and_samples_leave_training_alone(trainer):
    """However often one looks, the weights come out the same, bit for bit, with dropout on."""

    def final(*overrides):
        run = trainer("model.dropout=0.2", *overrides)
        run.train()
        return weights(run)

    often = final("trainer.eval_every=1", "trainer.sample_tokens=5", "trainer.log_every=1")
    never = final("trainer.eval_every=0", "trainer.sample_tokens=0", "trainer.log_every=3")
    assert_same(often, never)


def test_bf16_keeps_master_weights_in_fp32_and_stays_near(trainer):
    full, half = trainer("model.dropout=0"), trainer("model.dropout=0", "trainer.precision=bf16")
    for _ in range(4):
        loss, half_loss = full.step()[0], half.step()[0]
        assert float(half_loss) == pytest.approx(float(loss), abs=0.02)
        assert float(half_loss) != float(loss)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}
    state = half.optimizer.state[half.model.token_emb.weight]
    assert state["exp_avg"].dtype == torch.float32


def test_validation_is_the_mean_over_the_windows(trainer):
    run = trainer("trainer.eval_windows=5", "trainer.micro_batch_size=2")
    found = run.validate()
    count = len(run.val_set)
    chosen = [round(i * (count - 1) / 4) for i in range(5)]
    run.model.eval()
    losses = []
    for window in chosen:
        input_ids, target_ids = run.val_set[window]
        losses.append(run.model(input_ids[None], target_ids[None])[1].item())
    assert found["val/loss"] == pytest.approx(sum(losses) / 5, rel=1e-5)
    # One byte a token: nats per token are bits per byte after division by ln 2.
    assert found["val/bits_per_byte"] == pytest.approx(found["val/loss"] / math.log(2), rel=1e-6)


def test_a_loss_that_is_no_number_ends_the_run_and_spoils_no_checkpoint(trainer):
    run = trainer("name=a", "trainer.save_every=1", "trainer.log_every=100", "trainer.keep=9")
    run.step()
    run.save()
    run.finish_saving()
    with torch.no_grad():
        run.model.final_norm.weight.fill_(float("nan"))
    with pytest.raises(
        DivergedError, match=r"validation loss is nan at step 2; .* step 1 is"
    ) as caught:
        run.train()
    assert caught.value.exit_code == 4
    model, state = checkpoint.load_model(checkpoint.find(run.folder))
    assert state.step == 1
    assert all(torch.isfinite(p).all() for p in model.parameters())


# ------------------------------------------------------------------------ what a run leaves behind


def test_the_run_directory(trainer, tmp_path):
    run = trainer("name=full", "lens=default", "lens.every=2", "trainer.save_every=3")
    run.train()
    folder = tmp_path / "runs" / "full"
    assert sorted(p.name for p in folder.iterdir()) == [
        ".lock",
        "attention",
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "report.html",
        "run.json",
        "samples.jsonl",
    ]
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["model"]["emb_dim"] == 32
    assert saved["optimizer"]["betas"] == [0.9, 0.95]

    start, *steps = rows(folder)
    assert start["step"] == 0
    assert "val/loss" in start
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    for row in steps:
        assert row["train/tokens"] == row["step"] * 8 * 32
        assert {"train/loss", "train/learning_rate", "train/grad_norm"} <= row.keys()
        assert ("val/loss" in row) == (row["step"] % 2 == 0)
    pictures = [key for key in steps[1] if key.startswith("attention/heatmap/")]
    assert len(pictures) == 4
    assert all((folder / steps[1][key]).is_file() for key in pictures)
    assert [json.loads(s)["step"] for s in (folder / "samples.jsonl").open()] == [2, 4]

    checkpoints = folder / "checkpoints"
    assert os.readlink(checkpoints / "last") == "step_00000004"
    assert (checkpoints / "best" / "model.safetensors").is_file()
    files = sorted(p.name for p in (checkpoints / "last").iterdir())
    assert files == ["SHA256SUMS", "model.safetensors", "optimizer.safetensors", "state.json"]


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.log_every=4", "trainer.eval_every=3"),
        ("data.val_fraction=0", "trainer.log_every=4", "trainer.eval_every=3"),
        ("trainer.log_every=4", "trainer.eval_every=0", "lens=default", "lens.every=2"),
    ],
    ids=["validation", "sample", "attention"],
)
def test_every_row_of_the_log_has_the_tokens(trainer, overrides):
    run = trainer(*overrides)
    run.train()
    logged = rows(run.folder)
    assert len(logged) > 1
    assert [row.get("train/tokens") for row in logged] == [row["step"] * 8 * 32 for row in logged]


def test_a_best_loss_of_zero_stays_the_best(trainer, capsys):
    run = trainer()
    run.state.step = 1
    run.save_if_due({"val/loss": 0.0})
    run.state.step = 2
    run.save_if_due({"val/loss": 0.5})
    assert (run.state.best_loss, run.state.best_step) == (0.0, 1)
    run.state.val_loss = 0.5
    capsys.readouterr()
    announce.conclude(run, 1.0)
    assert "0.0000" in capsys.readouterr().out


def test_only_the_best_and_the_newest_checkpoints_stay(trainer, monkeypatch):
    run = trainer("trainer.save_every=1", "trainer.keep=2", "trainer.max_steps=6")
    losses = iter([5.0, 1.0, 3.0, 4.0])  # at steps 0, 2, 4, 6
    monkeypatch.setattr(run, "validate", lambda: {"val/loss": next(losses)})
    run.train()
    folder = run.folder / "checkpoints"
    kept = sorted(p.name for p in folder.iterdir() if not p.is_symlink())
    assert kept == ["step_00000002", "step_00000005", "step_00000006"]
    assert os.readlink(folder / "best") == "step_00000002"


def test_default_names_never_collide(tmp_path):
    folders = {directory.create(None, "gpt2", tmp_path / "runs") for _ in range(5)}
    assert len(folders) == 5


# --------------------------------------------------------------------------------------- resuming


def test_a_resumed_run_equals_an_uninterrupted_one(trainer):
    """Bit for bit: weights, moments, order of data, dropout, schedule, the log."""
    whole = trainer("name=whole", "model.dropout=0.2", "trainer.max_steps=6")
    whole.train()

    half = trainer("name=half", "model.dropout=0.2", "trainer.max_steps=6", "trainer.save_every=3")
    stop_behind(half, 3)
    rest = trainer("name=half", "model.dropout=0.2", "trainer.max_steps=6", "trainer.save_every=3")
    assert rest.state.step == 3
    rest.train()
    assert_same(weights(rest), weights(whole))
    for a, b in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
        mine, theirs = rest.optimizer.state[a], whole.optimizer.state[b]
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    for row in (logs := [rows(whole.folder), rows(rest.folder)])[0] + logs[1]:
        row.pop("train/tokens_per_second", None)
    assert logs[0][4:] == logs[1][1:]  # the row of step 0 is there, of 1 to 3 none was logged


def test_rows_after_the_checkpoint_are_written_once(trainer):
    run = trainer("name=a", "trainer.save_every=2", "trainer.max_steps=4")
    run.train()
    (run.folder / "metrics.jsonl").open("a").write('{"step": 5, "train/loss": 1')  # cut off
    again = trainer("name=a", "trainer.save_every=2", "trainer.max_steps=6")
    again.train()
    assert [row["step"] for row in rows(again.folder)] == [0, 1, 2, 3, 4, 5, 6]


def test_resume_by_path_must_and_false(trainer):
    run = trainer("name=a")
    run.train()
    longer = trainer(f"trainer.resume={run.folder}", "trainer.max_steps=5")
    assert longer.folder.resolve() == run.folder.resolve()
    assert longer.state.step == 4
    branch = trainer(f"trainer.resume={run.folder}", "name=b", "trainer.max_steps=5")
    assert branch.folder.name == "b"
    with pytest.raises(ConfigError, match="nothing to resume"):
        trainer("name=c", "trainer.resume=must")
    with pytest.raises(ConfigError, match="holds a run"):
        trainer("name=a", "trainer.resume=false")
    with pytest.raises(checkpoint.CheckpointError, match="no such directory"):
        trainer("trainer.resume=nowhere")


# A run whose settings are not the defaults, and which are not given again.
OWN = ("optimizer.lr=1e-3", "model.dropout=0.2", "trainer.max_steps=6", "trainer.save_every=3")


def stored(run, group, key, value):
    """Writes something else into the settings of a run's checkpoints."""
    for folder in checkpoint.whole_ones(run.folder):
        state = json.loads((folder / "state.json").read_text())
        state["settings"][group][key] = value
        (folder / "state.json").write_text(json.dumps(state))
        sums = (folder / checkpoint.SUMS).read_text().splitlines()
        sums[2] = f"{checkpoint.checksum(folder / 'state.json')}  state.json"
        (folder / checkpoint.SUMS).write_text("\n".join(sums) + "\n")


def keys_of(error) -> list[str]:
    return [key for key, *_ in error.value.problems]


@pytest.mark.parametrize("path", ["runs/half", "runs/half/checkpoints/step_00000003"])
def test_the_path_of_a_run_is_enough_to_resume_it(trainer, path):
    whole = trainer("name=whole", *OWN)
    whole.train()
    half = trainer("name=half", *OWN)
    stop_behind(half, 3)
    rest = trainer(f"trainer.resume={path}", "trainer.device=cpu", tiny=False)
    assert rest.state.step == 3
    assert rest.folder.resolve() == half.folder.resolve()
    rest.train()
    assert_same(weights(rest), weights(whole))
    groups = ("model", "data", "optimizer", "lens", "wandb")
    for group in groups:
        assert rest.state.settings[group] == half.state.settings[group]


def test_what_the_command_line_says_wins_over_the_settings_of_the_run(trainer, capsys):
    run = trainer("name=a", *OWN)
    run.train()
    more = ("trainer.max_steps=9", "trainer.micro_batch_size=4", "lens=default", "lens.every=3")
    branch = trainer("trainer.resume=runs/a", "name=b", *more, tiny=False)
    assert branch.folder.name == "b"
    assert branch.settings.trainer.micro_batch_size == 4  # more than the default batch has
    assert branch.settings.trainer.batch_size == 8
    assert (run.settings.lens.every, branch.settings.lens.every) == (0, 3)
    branch.train()
    assert branch.state.step == 9
    said = capsys.readouterr().out
    assert re.search(r"runs/a/checkpoints/step_00000006\b.*\btrainer\.max_steps=9 \(was 6\)", said)


def test_a_value_that_is_given_wins_though_it_is_the_default(trainer):
    trainer("name=a", *OWN).train()
    resumed = ("trainer.resume=runs/a", "trainer.max_steps=9")
    with pytest.raises(ConfigError) as error:
        trainer(*resumed, "optimizer.lr=3e-4", tiny=False)
    assert keys_of(error) == ["optimizer.lr"]
    again = trainer(*resumed, "optimizer.lr=3e-4", "trainer.resume_override=true", tiny=False)
    assert again.settings.optimizer.lr == 3e-4


def test_a_group_that_is_given_replaces_that_of_the_run(trainer):
    trainer("name=a", *OWN).train()
    muon = ("optimizer=muon", "trainer.max_steps=9", "trainer.resume_override=true")
    run = trainer("trainer.resume=runs/a", *muon, tiny=False)
    assert (run.settings.optimizer.name, run.settings.optimizer.lr) != ("adamw", 1e-3)
    assert run.settings.model.dropout == 0.2


def test_a_run_that_is_resumed_by_its_path_keeps_its_warmup(trainer):
    trainer("name=a", *OWN, "trainer.warmup_steps=null", "trainer.eval_every=null").train()
    before = checkpoint.load_state(checkpoint.find("runs/a")).settings["trainer"]
    run = trainer("trainer.resume=runs/a", "trainer.max_steps=5000", tiny=False)
    for key in ("warmup_steps", "eval_every", "eval_windows", "log_every"):
        assert getattr(run.settings.trainer, key) == before[key]


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "${", "${data.path}"])
def test_settings_of_a_run_are_no_references(trainer, text):
    run = trainer("name=a", *OWN)
    run.train()
    stored(run, "trainer", "sample_prompt", text)
    stored(run, "trainer", "of_a_later_version", text)
    longer = trainer("trainer.resume=runs/a", "trainer.max_steps=7", tiny=False)
    longer.train()
    assert checkpoint.load_state(checkpoint.find("runs/a")).step == 7
    assert longer.settings.trainer.sample_prompt == text
    assert settings_of(longer.folder)["trainer"]["sample_prompt"] == text


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("trainer", "batch_size", "many"),
        ("optimizer", "lr", [1]),
        ("model", "num_heads", 5),
        ("lens", "every", {}),
        ("trainer", "grad_clip", -1),
    ],
)
def test_settings_of_a_run_that_cannot_be_are_an_error_of_its_checkpoint(
    trainer, group, key, value
):
    run = trainer("name=a", *OWN)
    run.train()
    stored(run, group, key, value)
    with pytest.raises(checkpoint.CheckpointError) as error:
        trainer("trainer.resume=runs/a", "trainer.max_steps=7", tiny=False)
    assert error.value.exit_code == 3
    assert f"{group}.{key}" in str(error.value)


def test_a_run_that_was_made_shorter_than_its_warmup_can_be_resumed(trainer):
    run = trainer("name=b", *OWN, "trainer.max_steps=40", "trainer.warmup_steps=8")
    stop_behind(run, 3)
    for steps in (5, 7):
        again = trainer("trainer.resume=runs/b", f"trainer.max_steps={steps}", tiny=False)
        again.train()
        assert again.state.step == steps
        assert again.settings.trainer.warmup_steps == 8


def test_a_branch_from_a_finished_run_needs_more_steps(trainer, tmp_path):
    trainer("name=a", *OWN).train()
    with pytest.raises(ConfigError) as error:
        trainer("trainer.resume=runs/a", "name=b", tiny=False)
    assert keys_of(error) == ["trainer.max_steps"]
    assert not (tmp_path / "runs" / "b").exists()


def test_a_setting_that_is_given_replaces_one_that_cannot_be(trainer):
    run = trainer("name=a", *OWN)
    run.train()
    stored(run, "lens", "prompts", ["a prompt"] * 25)  # when there was no limit
    resumed = trainer("trainer.resume=runs/a", "trainer.max_steps=7", "lens=off", tiny=False)
    assert resumed.state.step == 6


def test_the_sample_text_is_found_where_this_repository_is(trainer):
    run = trainer("name=a", *OWN)
    run.train()
    sample = REPOSITORY / "corpus" / "sample.txt"
    for path, expected in {
        "/another/clone/corpus/sample.txt": str(sample),
        "/another/text.txt": "/another/text.txt",
    }.items():
        stored(run, "data", "path", path)
        settings = compose(["trainer.resume=runs/a"])
        completed, _ = complete(settings, *resume.stored_settings(settings))
        assert completed.data.path == expected


@pytest.mark.parametrize("saved", [True, False])
def test_the_command_to_resume_with_repeats_what_no_checkpoint_has(trainer, monkeypatch, saved):
    run = trainer("name=a")
    arguments = ["debug=true", "name=a", "trainer.max_steps=9", "trainer.resume=runs/b"]
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    (_, command) = run.resume_command(saved).split("train.py ")
    others = [] if saved else ["name=a", "trainer.max_steps=9"]
    assert command.split() == ["debug=true", *others, f"trainer.resume={run.folder}"]


@pytest.mark.parametrize("override", ["true", "false"])
def test_the_shape_of_a_model_cannot_be_overridden(trainer, override):
    trainer("name=a", *OWN).train()
    wish = ("model.emb_dim=64", "trainer.max_steps=7", f"trainer.resume_override={override}")
    for run in (["name=a", *TINY, *OWN], ["trainer.resume=runs/a"]):
        with pytest.raises(ConfigError) as error:
            trainer(*run, *wish, tiny="name=a" in run)
        assert keys_of(error) == ["model.emb_dim"]
        assert "resume_override" not in str(error.value)


def test_a_sweep_branches_off_from_a_run(trainer, in_process, tmp_path):
    import train

    run = trainer("name=a", *OWN)
    run.train()
    run.lock.close()
    arguments = ("-m", "trainer.resume=runs/a", "trainer.max_steps=7,8")
    code, _, err = in_process(train.main, tmp_path, *arguments)
    assert code == 0, err
    branches = [path for path in (tmp_path / "runs").iterdir() if path.name != "a"]
    states = [checkpoint.load_state(checkpoint.find(path)) for path in branches]
    assert sorted(state.step for state in states) == [7, 8]
    assert {state.settings["optimizer"]["lr"] for state in states} == {1e-3}


def test_an_older_checkpoint_needs_a_name_of_its_own(trainer, tmp_path):
    """Going on from it in place would overwrite what came after."""
    run = trainer("name=a", "trainer.save_every=1", "trainer.keep=9")
    run.train()
    older = run.folder / "checkpoints" / "step_00000002"
    with pytest.raises(ConfigError, match="runs/a has gone on to step 4; give name=NEW"):
        trainer(f"trainer.resume={older}")
    branch = trainer(f"trainer.resume={older}", "name=b")
    assert (branch.state.step, branch.state.best_loss, branch.state.wandb_id) == (2, None, None)
    branch.train()
    assert_same(weights(branch), weights(run))
    assert checkpoint.find(run.folder).name == "step_00000004"


def test_a_branch_never_overwrites_another_run(trainer):
    trainer("name=a").train()
    other = trainer("name=b", "seed=7")
    other.train()
    before = (other.folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="name=b: runs/b holds a run of its own"):
        trainer("trainer.resume=runs/a", "name=b", "trainer.max_steps=9")
    assert (other.folder / "metrics.jsonl").read_bytes() == before
    assert trainer("trainer.resume=runs/a", "name=a", "trainer.max_steps=9").state.step == 4


def test_a_checkpoint_copied_elsewhere_starts_a_run_of_its_own(trainer, tmp_path):
    run = trainer("name=a")
    run.train()
    shutil.copytree(checkpoint.find(run.folder), tmp_path / "backup" / "step4")
    again = trainer(f"trainer.resume={tmp_path}/backup/step4", "trainer.max_steps=6")
    assert again.folder.parent.name == "runs"
    assert again.folder.name != "a"
    assert again.state.step == 4
    assert sorted(p.name for p in (tmp_path / "backup").iterdir()) == ["step4"]


def test_a_dangling_last_is_refused_not_restarted(trainer):
    run = trainer("name=a")
    run.train()
    for folder in checkpoint.whole_ones(run.folder):
        shutil.rmtree(folder)
    before = (run.folder / "metrics.jsonl").read_bytes()
    with pytest.raises(checkpoint.CheckpointError, match="last: what it leads to is gone"):
        trainer("name=a")
    assert (run.folder / "metrics.jsonl").read_bytes() == before


def test_weights_that_are_not_there_are_refused(trainer, tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match=r"^trainer\.init_from=nowhere: no such"):
        trainer("trainer.init_from=nowhere")
    assert not (tmp_path / "runs").exists()


def test_a_damaged_newest_does_not_stop_what_the_command_says(trainer):
    """After a stop the command names the run, not a checkpoint."""
    run = trainer("trainer.save_every=1", "trainer.keep=3")
    run.train()
    (checkpoint.find(run.folder) / "model.safetensors").write_bytes(b"")
    assert trainer(f"trainer.resume={run.folder}", "trainer.max_steps=6").state.step == 3


def test_a_run_behind_a_link_goes_on_where_it_is(trainer, tmp_path, capsys):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "scratch")
    trainer("name=a").train()
    run = trainer("name=a", "trainer.max_steps=6")
    assert (run.state.step, run.saver.newest) == (4, 4)
    assert run.folder.resolve() == tmp_path / "scratch"
    assert "not used" not in capsys.readouterr().err


def test_a_run_of_the_same_name_elsewhere_is_branched_off(trainer, tmp_path):
    trainer("name=a").train()
    shutil.move(tmp_path / "runs", tmp_path / "elsewhere")
    before = (tmp_path / "elsewhere" / "a" / "metrics.jsonl").read_bytes()
    run = trainer(f"trainer.resume={tmp_path}/elsewhere/a", "name=a", "trainer.max_steps=6")
    assert run.folder == Path("runs/a")
    assert run.state.best_loss is None
    run.train()
    assert (tmp_path / "elsewhere" / "a" / "metrics.jsonl").read_bytes() == before


def test_a_branch_that_is_cut_off_before_its_first_checkpoint_begins_there_again(
    trainer, monkeypatch
):
    trainer("name=a").train()
    branch = ["name=b", "trainer.resume=runs/a", "trainer.max_steps=9"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert trainer(*branch).state.step == 4
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again = trainer(*branch)
    assert (again.state.step, again.folder.name) == (4, "b")
    again.train()
    assert trainer(*branch, "trainer.max_steps=11").state.step == 9


def test_who_comes_too_late_for_a_name_leaves_the_run_alone(trainer, tmp_path, monkeypatch):
    """Another process has made the directory, trained and ended, while this one was loading."""
    late = Trainer.open_run

    def open_run(run):
        monkeypatch.setattr(Trainer, "open_run", late)
        shutil.copytree(tmp_path / "runs" / "other", tmp_path / "runs" / "new", symlinks=True)
        late(run)

    trainer("name=other").train()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs" / "other").rglob("*")}
    monkeypatch.setattr(Trainer, "open_run", open_run)
    with pytest.raises(RunDirectoryError, match="another process has begun runs/new just now"):
        trainer("name=new", "seed=3")
    names = {p.relative_to(tmp_path / "runs" / "other") for p in before}
    new = tmp_path / "runs" / "new"
    assert {p.relative_to(new) for p in new.rglob("*")} == names
    assert len(rows(new)) == 5


def test_a_directory_has_one_run(trainer, tmp_path):
    run = trainer("name=a")
    with pytest.raises(RunDirectoryError) as caught:
        Trainer(run.settings)
    assert caught.value.exit_code == 2
    assert str(caught.value) == (
        f"name=a: runs/a is being written by another process (process {os.getpid()} on "
        f"{socket.gethostname()}); wait for it, or give another name"
    )


def test_what_is_no_run_is_left_as_it_is(trainer, tmp_path):
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="runs/a holds something else than a run"):
        trainer("name=a")
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_run_without_a_checkpoint_is_written_over_by_the_same_one_only(trainer):
    run = trainer("name=a", "seed=5")
    run.tracker.log({"train/loss": 1.0}, 1)
    (run.folder / "config.yaml.part-0123456789abcdef").write_text("half")
    with pytest.raises(ConfigError, match="runs/a was trained with 5, and has no checkpoint; "):
        trainer("name=a", "seed=6")
    assert len(rows(run.folder)) == 1
    trainer("name=a", "seed=5").train()
    assert [row["step"] for row in rows(run.folder)] == [0, 1, 2, 3, 4]
    assert not list(run.folder.glob("*.part-*"))


def test_with_override_a_changed_setting_is_told_and_taken(trainer, text_file, capsys):
    trainer("name=a").train()
    text_file.write_text(text_file.read_text().replace("fox", "cat"))
    changed = ["name=a", "optimizer.lr=1e-2", "trainer.max_steps=6"]
    with pytest.raises(ConfigError, match="resume_override") as error:
        trainer(*changed)
    assert keys_of(error) == ["optimizer.lr"]
    run = trainer(*changed, "trainer.resume_override=true")
    run.train()
    said = capsys.readouterr().out
    assert "note: optimizer.lr=0.01: runs/a was trained with 0.0003" in said
    assert re.search(r"note: data.path=\S*: .*byte", said)
    assert run.state.step == 6
    assert run.state.settings["optimizer"]["lr"] == 1e-2


def test_memory_that_runs_out_before_the_first_step_is_no_micro_batch(trainer, monkeypatch):
    import data

    def too_much(_):
        raise MemoryError("cannot allocate")

    monkeypatch.setattr(data, "load_datasets", too_much)
    with pytest.raises(MemoryError):
        trainer("trainer.micro_batch_size=auto")


def test_a_longer_run_keeps_its_warmup(trainer):
    run = trainer("name=a", "trainer.warmup_steps=null", "trainer.max_steps=20")
    assert run.settings.trainer.warmup_steps == 4
    run.train()
    more = ("trainer.max_steps=400", "lens=default")  # the lens was off before
    longer = trainer("name=a", "trainer.warmup_steps=null", *more)
    assert longer.state.step == 20
    assert longer.settings.trainer.warmup_steps == 4
    assert longer.settings.lens.every == 40
    assert longer.learning_rate(20) == longer.settings.optimizer.lr


@pytest.mark.parametrize("steps", [4, 3])
def test_a_finished_run_is_not_disturbed_by_calling_it_again(trainer, capsys, steps):
    run = trainer("name=a")
    run.train()
    files = [run.folder / name for name in ("metrics.jsonl", "config.yaml")]
    before = [file.read_bytes() for file in files]
    trainer("name=a", f"trainer.max_steps={steps}").train()
    assert [file.read_bytes() for file in files] == before
    assert "finished already, after step 4" in capsys.readouterr().out


def test_another_setting_that_matters_is_refused_by_name(trainer):
    run = trainer("name=a")
    run.train()
    with pytest.raises(ConfigError) as caught:
        trainer("name=a", "optimizer.lr=0.5", "model.emb_dim=64", "trainer.max_steps=9")
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("model.emb_dim=64: ")
    assert "was trained with 32" in lines[0]
    assert lines[1].startswith("optimizer.lr=0.5: ")


def test_what_a_run_says_of_its_windows_and_its_vocabulary(trainer, capsys):
    run = trainer("model.vocab_size=600", "trainer.eval_windows=2", "trainer.max_steps=2")
    run.train()
    said = capsys.readouterr().out
    assert f"{len(run.val_set)} to validate (2 of them each time); " in said
    note = "data.tokenizer=byte has 257 ids; model.vocab_size=257 is enough"
    assert f"note: model.vocab_size=600: {note}\n" in said


def test_the_command_for_more_text_names_the_folder_as_one_word(trainer, capsys):
    run = trainer()
    run.folder = Path("my runs/a")
    announce.conclude(run, 1.0)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "generate.py" in line)
    assert "checkpoint=my runs/a" in shlex.split(line)


def test_the_command_that_begins_with_a_models_weights_is_one_word(trainer, tmp_path):
    trainer("name=a").train()
    model = tmp_path / "my model"
    shutil.copytree(tmp_path / "runs" / "a" / "checkpoints" / "last", model)
    (model / "optimizer.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        trainer("name=b", f"trainer.resume={model}")
    assert f"trainer.init_from={model}" in shlex.split(str(caught.value))


# ------------------------------------------------------------------------------ as a user meets it


def test_a_padded_vocabulary_has_samples(trainer):
    """An id that no token has is left out, as in generate.py."""
    run = trainer("model.vocab_size=400", "trainer.sample_tokens=60", "trainer.max_steps=2")
    run.train()
    assert run.last_sample.startswith("The")


def test_a_run_from_the_command_line(command, tmp_path, text_file):
    """README's way: sockets blocked, no account, an empty home; then text from what was trained."""
    settings = [s for s in TINY if not s.startswith(("lens", "wandb"))]
    done = command("train.py", *settings, f"data.path={text_file}", "name=mine")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("step 4/4  loss ") for line in lines)
    assert any(line.startswith("training loss    ") for line in lines)
    assert any(line.startswith("validation loss  ") for line in lines)
    assert "run directory    runs/mine" in lines
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("W&B: no API key found, so this run is recorded offline")
    assert not list((tmp_path / "home").rglob("*.bpe*"))

    talk = ["generate.py", "checkpoint=runs/mine", "prompt=Line 1", "max_new_tokens=20"]
    spoken = command(*talk)
    assert spoken.returncode == 0, spoken.stderr
    assert spoken.stdout.startswith("Line 1")
    assert len(spoken.stdout) > 10


@pytest.mark.parametrize(
    ("overrides", "code", "says"),
    [
        (["data.path=nowhere.txt"], 3, "data.path=nowhere.txt: no such file"),
        (["trainer.device=cuda"], 2, "trainer.device=cuda: this machine"),
    ],
)
def test_errors_are_one_line_and_leave_no_run(command, tmp_path, text_file, overrides, code, says):
    done = command("train.py", *TINY, f"data.path={text_file}", *overrides)
    assert done.returncode == code
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    shown = command("train.py", *TINY, f"data.path={text_file}", *overrides, "debug=true")
    assert shown.returncode == code
    assert "Traceback" in shown.stderr


@pytest.mark.parametrize("to", ["/dev/full", "a pipe that nobody reads", "closed"])
def test_training_goes_on_without_its_words(tmp_path, text_file, to):
    """As with a log on a disk that is full, with `| head`, or a Ctrl-C that ends `tee` first."""
    settings = [*TINY, f"data.path={text_file}", "name=mute"]
    run = shlex.join([sys.executable, str(REPOSITORY / "train.py"), *settings])
    command = {
        "/dev/full": f"{run} > /dev/full",
        "a pipe that nobody reads": f"set -o pipefail; {run} | true",
        "closed": f"{run} >&-",
    }
    path = {"PYTHONPATH": str(NO_NETWORK)}
    done = subprocess.run(
        ["bash", "-c", command[to]],
        cwd=tmp_path,
        env=os.environ | path | {"PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert checkpoint.load_state(checkpoint.find(tmp_path / "runs" / "mute")).step == 4
    assert done.stderr.count("\n") == (to != "closed"), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_stops(tmp_path, text_file, number, code):
    settings = [*TINY, f"data.path={text_file}", "trainer.max_steps=100000", "name=long"]
    settings += ["trainer.eval_every=0", "trainer.log_every=1"]  # so that each step has its row
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "train.py"), *settings],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:  # waits for the first steps, not for a time
        if line.startswith("step") and "/100000" in line:
            break
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    command = f"python {REPOSITORY / 'train.py'} trainer.device=cpu trainer.resume=runs/long"
    assert f"saved in runs/long; resume with: {command}\n" in errors
    last = tmp_path / "runs" / "long" / "checkpoints" / "last"
    step = json.loads((last / "state.json").read_text())["step"]
    assert step >= 1
    assert rows(tmp_path / "runs" / "long")[-1]["step"] == step


def test_a_signal_that_comes_while_the_ranks_agree_is_not_lost(trainer, monkeypatch):
    run = trainer("name=a", "trainer.eval_every=0")

    def agree(number):
        run.signals.received = signal.SIGTERM
        return number

    with monkeypatch.context() as patch:
        patch.setattr(run.parallel, "largest", agree)
        assert not run.was_told_to_stop()
    with pytest.raises(SystemExit) as stopped:
        run.train()
    assert stopped.value.code == 143
    assert run.state.step == 1


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_rank_whose_torchrun_is_gone_saves_and_stops(trainer, monkeypatch, by_torchrun):
    """Else it would train on. A process that detached itself from its parent continues."""
    run = trainer("name=a", "trainer.eval_every=0")
    step = run.step

    def last_step_of_the_parent():
        if by_torchrun:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        if run.state.step == 1:
            monkeypatch.setattr("os.getppid", lambda: 1)
        return step()

    monkeypatch.setattr(run, "step", last_step_of_the_parent)
    if not by_torchrun:
        run.train()
        assert run.state.step == 4
        return
    with pytest.raises(SystemExit) as stopped:
        run.train()
    assert stopped.value.code == 143
    assert checkpoint.load_state(checkpoint.find(run.folder)).step == 2


def test_multirun_trains_once_for_each_value(command, tmp_path, text_file):
    settings = [s for s in TINY if "eval_every" not in s]
    done = command("train.py", "-m", *settings, f"data.path={text_file}", "seed=1,2")
    assert done.returncode == 0, done.stderr
    runs = sorted((tmp_path / "runs").iterdir())
    assert len(runs) == 2
    assert [yaml.safe_load((run / "config.yaml").read_text())["seed"] for run in runs] == [1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "multirun", "runs", "text.txt"]


def test_a_signal_at_the_end_of_a_job_ends_the_multirun(command, tmp_path, text_file, monkeypatch):
    """Too late for the loop: the job is finished and saved, and the next one does not begin."""
    settings = [s for s in TINY if "eval_every" not in s]
    script = tmp_path / "late.py"
    script.write_text(
        "import os, signal, train\nfrom training import announce\n"
        "conclude = announce.conclude\n"
        "def late(trainer, seconds):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    conclude(trainer, seconds)\n"
        "announce.conclude = late\n"
        "train.main()\n"
    )
    done = command(f"{script}", "-m", *settings, f"data.path={text_file}", "seed=1,2")
    assert done.returncode == 143, done.stderr
    finishing, last = done.stderr.splitlines()
    assert finishing == "finishing"
    assert last.startswith("sweep: stopped; 0 of 2 jobs done; resume with: python ")
    (run,) = (tmp_path / "runs").iterdir()
    assert checkpoint.load_state(checkpoint.find(run)).step == 4
    assert "report           " in done.stdout


def test_compiled_training_uses_and_saves_the_same_parameters(trainer, tmp_path, monkeypatch):
    """torch.compile is replaced by its eager backend: the plumbing, not the code generator."""
    real, made, ran = torch.compile, [], []

    def backend(graph, _):
        made.append(graph)
        return lambda *inputs: ran.append(torch.is_grad_enabled()) or graph.forward(*inputs)

    monkeypatch.setattr(torch, "compile", lambda model: real(model, backend=backend))
    compiled = trainer("trainer.compile=true", "name=compiled", "model.dropout=0")
    plain = trainer("trainer.compile=false", "model.dropout=0")
    settings = compiled.settings
    compiled.train()
    plain.train()
    assert len(made) == 1, "the blocks share their code"
    # Validation, samples and the lens run what stands in model.py.
    assert ran == [True] * settings.model.num_layers * settings.trainer.max_steps
    assert compiled.train_loss == pytest.approx(plain.train_loss, rel=1e-5)
    model, _ = checkpoint.load_model(checkpoint.find(tmp_path / "runs" / "compiled"))
    assert_same(model.state_dict(), weights(compiled))


def test_the_clock_leaves_out_looking(trainer, monkeypatch):
    """tokens_per_second counts training time alone, whatever a validation costs."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    run = trainer("trainer.log_every=3", "trainer.eval_every=2", "trainer.max_steps=6")
    step, look_up = run.step, run.look_up

    def slow_step():
        now[0] += 1.0
        return step()

    def slow_look_up(metrics):
        now[0] += 100.0
        return look_up(metrics)

    run.step, run.look_up = slow_step, slow_look_up
    run.train()
    speeds = [row["train/tokens_per_second"] for row in rows(run.folder) if "train/loss" in row]
    assert speeds == pytest.approx([256.0, 256.0])
