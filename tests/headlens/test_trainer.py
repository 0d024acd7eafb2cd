"""LensCallback: snapshots of a training with transformers' Trainer, which does not change."""

import dataclasses
import re

import pytest
import torch
from helpers.foreign import WORDS, byte_level_tokenizer, foreign_model
from helpers.pages import read
from helpers.runs import wandb_records
from transformers import (
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)

from headlens import LensConfig, read_snapshot
from headlens.history import read_history
from headlens.trainer import LensCallback

TOKENIZER = byte_level_tokenizer()
CONFIG = LensConfig(every=3, prompts=["The bell rang twice."], repeat_length=4)
TEXT = WORDS * 8


def trainer(
    folder, *callbacks, family="gpt2", model=None, collator=None, tokenizer=None, **changes
):
    """Returns a Trainer of a tiny model for 7 steps."""
    ids = torch.tensor(TOKENIZER(TEXT).input_ids)
    rows = [{"input_ids": window, "labels": window} for window in ids.unfold(0, 24, 8)]
    options = {"max_steps": 7, "per_device_train_batch_size": 4, "report_to": "none", "seed": 3}
    options |= {"use_cpu": True, "disable_tqdm": True, "logging_steps": 2, "learning_rate": 0.01}
    options |= {"save_strategy": "no"} | changes
    arguments = TrainingArguments(str(folder), **options)
    model = foreign_model(family, vocab_size=len(TOKENIZER), **model or {})
    return Trainer(model, arguments, collator, rows, rows[:4], tokenizer, callbacks=[*callbacks])


def steps(folder):
    return [read_snapshot(path).step for path in sorted(folder.glob("attention/*.npz"))]


def callback(**options):
    return LensCallback(TOKENIZER, CONFIG, text=TEXT, **options)


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
ROPE = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}
SETUPS = {  # of ways to train: arguments of `trainer`
    "dropout": {},
    "grouped keys": {"family": "llama"},
    # The frequencies depend on the longest text that the model has seen, here a prompt.
    "dynamic rope": {
        "family": "llama",
        "model": {"rope_parameters": ROPE, "max_position_embeddings": 16},
    },
    "soft caps, eager": {"family": "gemma2"},
    "accumulation": {"gradient_accumulation_steps": 2},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "bf16 autocast": {"bf16": True},
    "compiled": {
        "model": {"n_layer": 1},  # to be fast
        "torch_compile": True,
        "torch_compile_backend": "eager",
    },
    "best model": EVALUATED | {"load_best_model_at_end": True},
    "noisy embeddings": {"neftune_noise_alpha": 5.0},
    "padding-free": {"collator": DataCollatorWithFlattening()},
}


@pytest.mark.parametrize("name", SETUPS)
def test_a_training_gives_the_same_weights_bit_for_bit(tmp_path, name):
    weights, config = [], dataclasses.replace(CONFIG, repeat_length=20)  # longer than the windows
    for callbacks in ([LensCallback(TOKENIZER, config, text=TEXT, context_length=64)], []):
        run = trainer(tmp_path, *callbacks, **SETUPS[name])
        run.train()
        weights.append(run.model.state_dict())
    assert weights[0].keys() == weights[1].keys()
    assert all(map(torch.equal, *(each.values() for each in weights)))
    assert steps(tmp_path) == [0, 3, 6, 7]


def test_snapshots_of_a_training(tmp_path):
    found = []
    watched = callback(on_snapshot=lambda snapshot, step: found.append((step, snapshot)))
    runs = []
    for name, callbacks in (("with", [watched]), ("without", [])):
        runs.append(trainer(tmp_path / name, *callbacks))
        runs[-1].args.report_to = ["wandb"]  # which the given function replaces
        runs[-1].args.logging_steps = 1  # the page has the loss of the last step
        runs[-1].train()
    losses = [[row.get("loss") for row in run.state.log_history] for run in runs]
    assert losses[0] == losses[1]
    assert [step for step, _ in found] == steps(tmp_path / "with") == [0, 3, 6, 7]
    assert all(snapshot.metrics and snapshot.images for _, snapshot in found)
    assert (tmp_path / "with" / "attention" / "heads.csv").is_file()
    (curve,) = read(tmp_path / "with" / "attention" / "page.html")[0]["curves"].values()
    assert curve == [[row["step"], row["loss"]] for row in runs[0].state.log_history[:7]]
    last = read_snapshot(tmp_path / "with" / "attention" / "step_00000007.npz")
    assert last.run == "with"
    ids = torch.tensor([last.prompts[0].token_ids])
    with torch.no_grad():
        logits = runs[0].model.eval()(ids).logits
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    torch.testing.assert_close(torch.tensor(last.row.losses[0]), expected, atol=1e-3, rtol=1e-3)


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_evaluate(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("last", [5, 6])  # 6 has a snapshot before it is known to be the last
def test_a_training_that_stops_early_has_a_last_snapshot_of_its_last_step(tmp_path, last):
    """Of the model at this step, although the best one is loaded again."""
    saved = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    saved |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    seen = []
    taken = callback(on_snapshot=lambda snapshot, step: seen.append(weights_of(run.model)))
    saved |= {"greater_is_better": True}  # so that the first model is the best
    run = trainer(tmp_path, taken, StopAt(last), **saved)
    run.train()
    assert run.state.best_global_step == 1
    assert steps(tmp_path) == [0, 3, last]
    (page,) = read(tmp_path / "attention" / "page.html")
    assert [frame["step"] for frame in page["frames"]] == [0, 3, last]
    assert [row.step for row in read_history(tmp_path / "attention" / "statistics.jsonl")] == [
        0,
        3,
        last,
    ]
    assert (tmp_path / "attention" / "heads.csv").is_file()
    assert not torch.equal(seen[-1], weights_of(run.model))


def weights_of(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_a_resumed_training_continues_its_snapshots(tmp_path):
    often = {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 4, "eval_steps": 4}
    trainer(tmp_path, callback(), StopAt(4), **often).train()
    again = trainer(tmp_path, callback())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert steps(tmp_path) == [0, 3, 4, 6, 7]  # 4 was the last step
    frames = read(tmp_path / "attention" / "page.html")[0]["frames"]
    assert [frame["step"] for frame in frames] == [0, 3, 4, 6, 7]


def test_images_and_pages_are_logged_to_wandb(tmp_path, monkeypatch):
    import wandb

    wandb.teardown()  # of earlier tests of this process: W&B reads its variables once
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    rows, log = [], wandb.Run.log
    keep = lambda run, row, *rest, **options: rows.append(row) or log(run, row, *rest, **options)  # noqa: E731
    monkeypatch.setattr(wandb.Run, "log", keep)
    trainer(tmp_path, callback(), report_to=["wandb"], run_name="mine").train()
    of_lens = [row for row in rows if any(str(key).startswith("attention/") for key in row)]
    assert [row["train/global_step"] for row in of_lens] == [0, 3, 6, 7]
    summary = dict(wandb.run.summary)
    wandb.finish()
    assert summary["train/global_step"] == 7
    assert summary["attention/page"]["_type"] == "html-file"
    assert summary["attention/heads"]["_type"] == "images/separated"
    keys = {"attention/largest", "attention/table", "attention_names/self"}
    assert {*keys, "attention_histograms/self", "attention_heads/self/L00H01"} <= summary.keys()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    metrics = [each["metric"] for each in wandb_records(file) if each["type"] == "metric"]
    hidden = {each["glob_name"] for each in metrics if each["options"].get("hidden")}
    assert hidden == {"attention_heads/*", "attention_layers/*", "Custom Chart Tables/*"}
    files = [*tmp_path.glob("wandb/offline-run*/files/media/**/*")]
    assert {".html", ".png"} <= {file.suffix for file in files}
    assert read_snapshot(tmp_path / "attention" / "step_00000007.npz").run == "mine"


def test_an_error_of_the_first_snapshot_ends_the_training_and_a_later_one_does_not(
    tmp_path, capsys
):
    def fails_at(*failing):
        def on_snapshot(_, step):
            if step in failing:
                raise OSError("no space left")

        return callback(on_snapshot=on_snapshot)

    with pytest.raises(OSError, match="no space"):
        trainer(tmp_path / "first", fails_at(0)).train()
    run = trainer(tmp_path / "later", fails_at(3))
    run.train()
    assert run.state.global_step == 7
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "no space" in line]
    assert "3" in line
    assert steps(tmp_path / "later") == [0, 3, 6, 7]


def test_a_training_with_little_time_for_snapshots(tmp_path, capsys):
    config = dataclasses.replace(CONFIG, max_percent=1e-9)
    trainer(
        tmp_path / "run", LensCallback(TOKENIZER, config, folder=tmp_path / "attention")
    ).train()
    assert steps(tmp_path) == [0, 7]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("attention")]
    assert len(lines) > 2  # names of heads, if there are any; skipped snapshots; the page
    assert re.search(r"\b2 of 4 snapshots\b", lines[-2])
    assert str(tmp_path / "attention" / "page.html") in lines[-1]


def test_no_snapshots_of_other_processes_or_with_an_interval_of_0(tmp_path):
    run = trainer(tmp_path)
    never = LensCallback(TOKENIZER, LensConfig(every=0))
    for taken, is_main in ((callback(), False), (never, True)):
        state = TrainerState(max_steps=3, is_world_process_zero=is_main)
        taken.on_train_begin(run.args, state, run.control, model=run.model)
        for step in range(1, 4):
            state.global_step = step
            taken.on_step_end(run.args, state, run.control, model=run.model)
        taken.on_log(run.args, state, run.control, model=run.model, logs={"train_runtime": 1.0})
        assert not (tmp_path / "attention").exists()


def test_the_tokenizer_is_that_of_the_trainer(tmp_path):
    own = LensCallback(config=CONFIG, text=TEXT)
    trainer(tmp_path / "own", own, tokenizer=TOKENIZER, collator=default_data_collator).train()
    (tokens,) = {
        read_snapshot(path).prompts[0].text for path in tmp_path.glob("own/*/*_00000000.npz")
    }
    assert tokens == CONFIG.prompts[0]
    with pytest.raises(ValueError, match="tokenizer"):
        trainer(tmp_path / "none", own).train()


def test_an_unknown_option_and_sharded_weights_are_refused_at_once(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="contextlength"):
        callback(contextlength=24)

    def begins(run, error):
        with pytest.raises(ValueError, match=error):
            callback().on_train_begin(run.args, state, run.control, model=run.model)

    state = TrainerState(max_steps=3)
    for mark in ("ds_id", "device_mesh"):  # of parameters of ZeRO-3; of a DTensor
        sharded = trainer(tmp_path)
        setattr(next(sharded.model.parameters()), mark, 0)
        begins(sharded, "ZeRO-3 or tensor")
    fsdp = trainer(tmp_path)
    fsdp.args.fsdp = True
    begins(fsdp, "FSDP")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # as accelerate launch --use_fsdp does
    begins(trainer(tmp_path), "FSDP")
