"""Names of settings in other projects, and the setting of this project for the same purpose.

The names are those of nanoGPT (train.py, sample.py), transformers (TrainingArguments, GPT2Config,
generate) and LitGPT. A hint about an unknown setting looks here first (training/config/schema.py).
"""

import difflib
from collections.abc import Sequence

from errors import UnknownSetting

# (setting, its names elsewhere, what to know when the value means something else)
OTHER_NAMES = (
    ("model.num_layers", "n_layer n_layers layers num_hidden_layers depth", ""),
    ("model.num_heads", "n_head n_heads heads num_attention_heads", ""),
    ("model.emb_dim", "n_embd n_embed d_model hidden_size hidden_dim embed_dim width", ""),
    ("model.context_length", "n_positions n_ctx max_position_embeddings", ""),
    ("model.vocab_size", "n_vocab padded_vocab_size", ""),
    ("model.qkv_bias", "bias attention_bias", "the other layers always have a bias"),
    ("model", "model_name model_type", ""),
    ("model.dropout", "resid_pdrop embd_pdrop attn_pdrop dropout_rate", ""),
    ("model.attention", "attn_implementation flash_attention use_flash", ""),
    (
        "data.max_length",
        "block_size seq_len seq_length sequence_length max_seq_length",
        "at most model.context_length",
    ),
    ("data.path", "dataset dataset_name data_dir train_file text text_file", ""),
    ("data.val_path", "validation_file val_file eval_file", ""),
    ("data.tokenizer", "tokenizer_name", ""),
    ("optimizer.name", "optim", ""),
    ("optimizer.lr", "learning_rate max_lr peak_lr", ""),
    ("optimizer.weight_decay", "decay wd", ""),
    ("optimizer.betas", "beta1 beta2 adam_beta1 adam_beta2", "a list of both, [0.9,0.95]"),
    ("optimizer.eps", "adam_epsilon", ""),
    ("optimizer.schedule", "lr_scheduler_type lr_scheduler scheduler", ""),
    ("optimizer.schedule", "decay_lr", "constant keeps the learning rate"),
    ("optimizer.min_lr_ratio", "min_lr", "the final learning rate divided by optimizer.lr"),
    ("trainer.max_steps", "steps max_iters num_iters num_steps total_steps train_steps", ""),
    ("trainer.max_steps", "lr_decay_iters", "the schedule ends with the run"),
    (
        "trainer.max_steps",
        "epoch epochs max_epochs num_epochs num_train_epochs",
        "a run has a number of steps, each of trainer.batch_size windows",
    ),
    (
        "trainer.micro_batch_size",
        "gradient_accumulation_steps grad_accum_steps grad_accum accumulate_grad_batches",
        "windows at a time on a device; trainer.batch_size counts the windows of a whole step",
    ),
    (
        "trainer.micro_batch_size",
        "per_device_train_batch_size device_batch_size",
        "trainer.batch_size counts the windows of a whole step on all devices",
    ),
    ("trainer.batch_size", "train_batch_size global_batch_size total_batch_size", ""),
    ("trainer.warmup_steps", "warmup warmup_iters lr_warmup_steps", ""),
    ("trainer.warmup_steps", "warmup_ratio", "a number of steps"),
    ("trainer.grad_clip", "max_grad_norm max_norm gradient_clip_val clip_grad", ""),
    ("trainer.activation_checkpointing", "gradient_checkpointing", ""),
    ("trainer.eval_every", "eval_interval eval_steps val_check_interval", ""),
    ("trainer.eval_windows", "eval_iters", "windows, not batches"),
    ("trainer.log_every", "log_interval logging_steps log_every_n_steps", ""),
    ("trainer.save_every", "save_steps save_interval checkpoint_every", ""),
    ("trainer.keep", "save_total_limit", ""),
    ("trainer.resume", "resume_from_checkpoint resume_from", "auto, must or a path"),
    ("trainer.init_from", "model_name_or_path pretrained from_pretrained initial_checkpoint", ""),
    ("trainer.precision", "dtype torch_dtype mixed_precision", ""),
    ("trainer.precision", "fp16 bf16", "trainer.precision=fp16 or trainer.precision=bf16"),
    (
        "trainer.device",
        "devices gpus num_gpus n_gpus",
        "for several devices: torchrun --nproc_per_node=N train.py",
    ),
    ("trainer.compile", "torch_compile", ""),
    ("trainer.sample_tokens", "max_new_tokens", ""),
    ("parallel.strategy", "ddp fsdp distributed_strategy", ""),
    ("wandb.project", "wandb_project", ""),
    ("wandb.name", "wandb_run_name", ""),
    ("wandb.mode", "wandb_log report_to use_wandb", "online, offline or disabled"),
    ("seed", "random_seed data_seed", ""),
    ("name", "run_name exp_name experiment_name", ""),
    ("name", "out_dir output_dir", "the run directory is runs/<name>"),
    # scripts/plan.py
    ("devices", "gpus num_gpus n_gpus num_devices nproc_per_node", ""),
    # generate.py
    ("max_new_tokens", "num_tokens max_tokens max_length n_tokens", ""),
    ("num_samples", "num_return_sequences n_samples", ""),
    ("checkpoint", "model model_path out_dir ckpt_path checkpoint_dir init_from", ""),
    ("prompt", "start text prompts", ""),
)


def same_purpose(name: str, known: Sequence[str]) -> tuple[str, str] | None:
    """(one of the settings `known`, what to know about its value) for a name of another project.

    name: without its group. None when the name is in no row whose setting is known.
    """
    for setting, names, remark in OTHER_NAMES:
        if name.lower() in names.split() and setting in known:
            return setting, remark
    return None


def nearest(key: str, known: Sequence[str]) -> str | None:
    """The setting that a misspelt key probably means: one of the same name in another group, else
    the nearest name, its own group first."""
    group, _, last = key.rpartition(".")
    there = [name for name in known if name.rpartition(".")[0] == group]
    near = [name for name in known if name.rpartition(".")[2] == last]
    near += [name for name in there if last and name.rpartition(".")[2].startswith(last)]
    for names in (there, known):
        # Without their groups: a group that two names share makes any two of them look alike.
        by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
        hits = difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)
        near += [by_last[hit] for hit in hits]
    return near[0] if near else None


def unknown_key(key: str, value: object, known: Sequence[str]) -> UnknownSetting:
    """The problem of a key that does not exist, with the setting that was probably meant."""
    group, _, last = key.rpartition(".")
    if found := same_purpose(last, known):
        setting, remark = found
        hint = f"use {setting}{remark and f' ({remark})'}"
    elif near := nearest(key, known):
        hint = f"did you mean {near}?"
    else:
        there = [name for name in known if group and name.startswith(f"{group}.")]
        names = ", ".join(name.rpartition(".")[2] for name in there)
        hint = f"{group} has {names}" if there else "--help lists all settings"
    return UnknownSetting(key, value, "no such setting", hint)
