"""Who is compared by benchmarks/training.py: this trainer and other projects, behind one interface.

    Row            a line of a table: a project, and how its steps are run
    Project        builds its model from our settings, loads our weights, gives loss and optimizer
    Contender      a project's model and optimizer, set up as a row says: step() is what is timed

Nothing of the other projects is kept here: transformers is used where it is installed, nanoGPT and
LLMs-from-scratch from checkouts whose folders the user names. Their files run as they are.

Shapes: B batch, T query positions, V vocabulary.
"""

import contextlib
import copy
import dataclasses
import importlib.util
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import torch
import torch.nn as nn
from torch import Tensor

from errors import ClearheadError, ConfigError, message_of
from interop.huggingface import hf_tensors
from model import GPT, ModelConfig
from training.distributed.device import DTYPES
from training.distributed.strategy import Strategy
from training.optim.nonfinite import NonFiniteCheck
from training.optim.optimizers import OptimizerConfig, build_optimizer

GPT2_VOCABULARY = 50257  # in whose place nanoGPT by default has 50304, a multiple of 64
CLIP = 1.0  # the largest norm of the gradient, for all
NUMBERS = ("lr", "betas", "eps", "weight_decay")  # of an AdamW
LEAVE_OUT = "check the checkout, or leave it out of contenders"
Batch = tuple[Tensor, Tensor]  # input_ids (B, T), target_ids (B, T)


@dataclass(frozen=True)
class Row:
    """A line of a table: a project, and how its steps are run."""

    name: str
    project: str
    dtype: torch.dtype  # what matrix products run in; fp32 otherwise
    compiled: bool = False
    kept: bool = (
        False  # freed memory is kept (training/distributed/device.py), not returned to the system
    )
    fused: bool = False  # AdamW in one kernel, although the project does not ask for it
    padded: bool = False  # the vocabulary, to a multiple of 64
    tf32: bool = False  # products of fp32 in TF32, where a GPU has it

    @property
    def precision(self) -> str:
        """What the settings call `dtype`."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)


class Disagreement(ClearheadError):
    """A contender that computes something else, whose speed would say nothing."""


# ------------------------------------------------------------------------------- the projects


class Project:
    """Another project: its model and how its own training script uses it."""

    key: str  # what the settings call it
    title: str

    def build(self, config: ModelConfig) -> nn.Module:
        """Its model of this shape, without dropout."""
        raise NotImplementedError

    def tensors(self, weights: GPT) -> dict[str, Tensor]:
        """Our weights under its names and in its layout, for load_state_dict."""
        raise NotImplementedError

    def loss(self, model: nn.Module, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
        """AdamW as the project constructs it; matrices decay, vectors do not."""
        return torch.optim.AdamW(decay_groups(model, config), lr=config.lr, betas=config.betas)

    def shipped(self, device: str, best: torch.dtype, compiles: bool, vocabulary: int) -> list[Row]:
        """How the project itself runs on this device when nothing else is asked for."""
        return [Row(self.title, self.key, torch.float32)]

    def equalised(self, device: str, dtype: torch.dtype, compiles: bool) -> list[Row]:
        """The same precision for all, compiled; the optimizer as the project constructs it."""
        return [Row(self.title, self.key, dtype, compiles)]

    def contender(self, row: Row, *setup) -> "Contender":
        return Contender(row, self, *setup)

    def source(self) -> dict:
        """Which version of it this is."""
        return {}


def decay_groups(model: nn.Module, config: OptimizerConfig) -> list[dict]:
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


class Ours(Project):
    """This repository. Its steps are taken by the class OurContender."""

    key = title = "ours"

    def build(self, config: ModelConfig) -> GPT:
        return GPT(config)

    def tensors(self, weights: GPT) -> dict[str, Tensor]:
        return weights.state_dict()

    def loss(self, model: nn.Module, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        return model(input_ids, target_ids)[1]

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
        return build_optimizer(model, config)

    def shipped(self, device: str, best: torch.dtype, compiles: bool, vocabulary: int) -> list[Row]:
        """Short runs are not compiled, long ones are (training/distributed/device.py,
        should_compile)."""
        eager = Row("ours", self.key, best, kept=device == "cpu")
        compiled = dataclasses.replace(eager, name="ours, compiled", compiled=True)
        return [eager, compiled] if compiles else [eager]

    def equalised(self, device: str, dtype: torch.dtype, compiles: bool) -> list[Row]:
        return [Row("ours", self.key, dtype, compiles, kept=device == "cpu")]

    def contender(self, row: Row, *setup) -> "Contender":
        return OurContender(row, self, *setup)


class Transformers(Project):
    """GPT2LMHeadModel of Hugging Face transformers, with what its Trainer does by default."""

    key = title = "transformers"

    def __init__(self):
        import transformers

        transformers.logging.set_verbosity_error()  # special tokens that a small vocabulary lacks
        self.library = transformers
        self.defaults = {
            name: field.default
            for name, field in transformers.TrainingArguments.__dataclass_fields__.items()
        }

    def build(self, config: ModelConfig) -> nn.Module:
        shape = self.library.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context_length,
            n_embd=config.emb_dim,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        shape.use_cache = bool(self.defaults.get("use_cache"))  # the Trainer's, not the model's
        return self.library.GPT2LMHeadModel(shape)

    def tensors(self, weights: GPT) -> dict[str, Tensor]:
        theirs = hf_tensors(weights)
        return theirs | {"lm_head.weight": theirs["transformer.wte.weight"]}

    def loss(self, model: nn.Module, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        # By itself it would shift labels by one, and lose the last target of each window.
        return model(input_ids=input_ids, labels=target_ids, shift_labels=target_ids).loss

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
        fused = str(self.defaults.get("optim", "")).endswith("adamw_torch_fused")
        groups = decay_groups(model, config)
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)

    def shipped(self, device: str, best: torch.dtype, compiles: bool, vocabulary: int) -> list[Row]:
        rows = [Row(self.title, self.key, torch.float32)]
        if best == torch.bfloat16:
            rows.append(Row("transformers, bf16=True", self.key, best))
        return rows

    def source(self) -> dict:
        return {"version": self.library.__version__}


class Checkout(Project):
    """A project that is no package: a folder with its files."""

    files: tuple[str, ...] = ()  # where its model stands, the first that is there
    classes: tuple[str, ...] = ()

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.module = self.load_module()

    @classmethod
    def file_in(cls, folder: str) -> Path | None:
        """The file with its model, if this is a checkout of it."""
        return next((path for name in cls.files if (path := Path(folder) / name).is_file()), None)

    def load_module(self) -> ModuleType:
        """Runs the file that its model stands in; raises ConfigError when it is not what is
        wanted."""
        file = self.file_in(str(self.folder))
        # A name of its own: model.py is what ours is called, too.
        spec = importlib.util.spec_from_file_location(f"_checkout_of_{self.key}", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look it up
        place = str(file.parent)
        sys.path.insert(0, place)  # for the other files of its own folder
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            self.refuse(
                f"{file.name} cannot be imported ({type(error).__name__}: {message_of(error)})"
            )
        finally:
            sys.path.remove(place)
        if missing := [name for name in self.classes if not hasattr(module, name)]:
            self.refuse(f"{file.name} has no {missing[0]}")
        return module

    def refuse(self, cause: str) -> None:
        fix = f"name the folder of a checkout of {self.title}"
        raise ConfigError([(self.key, str(self.folder), cause, fix)])

    def source(self) -> dict:
        from training.reporting.machine import git

        own = (self.folder / ".git").exists()  # else git would tell of a folder around it
        return {"commit": git(self.folder, "rev-parse", "--short", "HEAD") if own else "unknown"}


class NanoGPT(Checkout):
    """github.com/karpathy/nanoGPT."""

    key, title = "nanogpt", "nanoGPT"
    files, classes = ("model.py",), ("GPT", "GPTConfig")
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")

    def build(self, config: ModelConfig) -> nn.Module:
        shape = self.module.GPTConfig(
            block_size=config.context_length,
            vocab_size=config.vocab_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_embd=config.emb_dim,
            dropout=0.0,
            bias=True,
        )
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
            return self.module.GPT(shape)

    def tensors(self, weights: GPT) -> dict[str, Tensor]:
        theirs = {  # Hugging Face's names, with Linears in place of Conv1Ds
            name: value.T if name.endswith(self.transposed) else value
            for name, value in hf_tensors(weights).items()
        }
        return theirs | {"lm_head.weight": theirs["transformer.wte.weight"]}

    def loss(self, model: nn.Module, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        return model(input_ids, target_ids)[1]

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
        device = next(model.parameters()).device.type
        with contextlib.redirect_stdout(io.StringIO()):
            return model.configure_optimizers(
                config.weight_decay, config.lr, tuple(config.betas), device
            )

    def shipped(self, device: str, best: torch.dtype, compiles: bool, vocabulary: int) -> list[Row]:
        """On a CPU as its README says, --device=cpu --compile=False, which is without autocast. On
        a GPU what its train.py begins with."""
        padded = vocabulary == GPT2_VOCABULARY
        if device != "cuda":
            return [Row(self.title, self.key, torch.float32, padded=padded)]
        half = torch.bfloat16 if best == torch.bfloat16 else torch.float16
        return [Row(self.title, self.key, half, compiles, padded=padded, tf32=True)]

    def equalised(self, device: str, dtype: torch.dtype, compiles: bool) -> list[Row]:
        """And once more with all that one who knows could switch on for it."""
        plain = Row(self.title, self.key, dtype, compiles)
        more = {"name": "nanoGPT, all switched on", "fused": device in ("cpu", "cuda")}
        more |= {"kept": device == "cpu", "padded": True, "tf32": device == "cuda"}
        return [plain, dataclasses.replace(plain, **more)]


class LLMsFromScratch(Checkout):
    """github.com/rasbt/LLMs-from-scratch: the GPTModel of chapters 4 and 5."""

    key, title = "llms_from_scratch", "LLMs-from-scratch"
    files = (
        "ch05/01_main-chapter-code/previous_chapters.py",
        "ch04/01_main-chapter-code/gpt.py",
        "previous_chapters.py",
        "gpt.py",
    )
    classes = ("GPTModel",)
    outside: ClassVar = {  # ours: theirs
        "token_emb.weight": "tok_emb.weight",
        "pos_emb.weight": "pos_emb.weight",
        "final_norm.weight": "final_norm.scale",
        "final_norm.bias": "final_norm.shift",
    }
    inside: ClassVar = {
        "attn_norm.weight": "norm1.scale",
        "attn_norm.bias": "norm1.shift",
        "mlp_norm.weight": "norm2.scale",
        "mlp_norm.bias": "norm2.shift",
        "mlp.fc": "ff.layers.0",
        "mlp.out_proj": "ff.layers.2",
        "attn": "att",
    }

    def build(self, config: ModelConfig) -> nn.Module:
        model = self.module.GPTModel(
            {
                "vocab_size": config.vocab_size,
                "context_length": config.context_length,
                "ctx_len": config.context_length,  # its name before the book was out
                "emb_dim": config.emb_dim,
                "n_heads": config.num_heads,
                "n_layers": config.num_layers,
                "drop_rate": 0.0,
                "qkv_bias": True,
            }
        )
        # The book's head has a matrix of its own; GPT-2's is the embedding, and the comparison is
        # of one model.
        model.out_head.weight = model.tok_emb.weight
        return model

    def tensors(self, weights: GPT) -> dict[str, Tensor]:
        def renamed(name: str) -> str:
            if name in self.outside:
                return self.outside[name]
            _, layer, rest = name.split(".", 2)
            ours = next(key for key in self.inside if rest.startswith(key))
            return f"trf_blocks.{layer}.{self.inside[ours]}{rest.removeprefix(ours)}"

        theirs = {renamed(name): value for name, value in weights.state_dict().items()}
        return theirs | {"out_head.weight": theirs["tok_emb.weight"]}

    def loss(self, model: nn.Module, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        logits = model(input_ids)  # (B, T, V)
        return nn.functional.cross_entropy(logits.flatten(0, 1), target_ids.flatten())


PROJECTS = {each.key: each for each in (Ours, Transformers, NanoGPT, LLMsFromScratch)}
CHECKOUTS = {key: each for key, each in PROJECTS.items() if issubclass(each, Checkout)}


# ----------------------------------------------------------------------------- a row, set up


class Contender:
    """A project's model and optimizer as a row says. The step is that of the projects' own training
    scripts, which differ in no more than names."""

    def __init__(
        self,
        row: Row,
        project: Project,
        weights: GPT,
        optimizer: OptimizerConfig,
        parallel: Strategy,
        seed: int,
    ):
        self.row, self.project, self.seed, self.steps = row, project, seed, 0
        self.parallel = dataclasses.replace(parallel, dtype=row.dtype)
        self.set_up(padded(weights) if row.padded else weights, optimizer)
        for group in self.optimizer.param_groups:
            group["eps"] = optimizer.eps
        if row.fused:
            groups = [{k: g[k] for k in ("params", *NUMBERS)} for g in self.optimizer.param_groups]
            self.optimizer = torch.optim.AdamW(groups, fused=True)

    def set_up(self, weights: GPT, optimizer: OptimizerConfig) -> None:
        self.model = self.project.build(weights.config)
        load(self.project, self.model, weights)
        self.model.to(self.parallel.device).train()
        self.optimizer = self.project.optimizer(self.model, optimizer)
        self.fast_model = torch.compile(self.model) if self.row.compiled else self.model

    def step(self, input_ids: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        """A whole optimizer step: (loss, norm of the gradient), both still on the device."""
        scaler = self.parallel.scaler  # does nothing unless in fp16
        with self.parallel.autocast():
            loss = self.project.loss(self.fast_model, input_ids, target_ids)
        scaler.scale(loss).backward()
        scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return loss.detach(), norm


class OurContender(Contender):
    """Ours: the parts that the Trainer of train.py is made of, in the order of its step()."""

    def set_up(self, weights: GPT, optimizer: OptimizerConfig) -> None:
        self.model = self.parallel.prepare_model(weights.config, lambda: copy.deepcopy(weights))
        self.fast_model = self.parallel.wrap(self.model, self.row.compiled)
        self.optimizer = build_optimizer(self.model, optimizer)
        self.guard = NonFiniteCheck(10, self.parallel.device)

    def step(self, input_ids: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        self.parallel.reseed(self.seed, self.steps)
        with self.parallel.no_sync(more_to_come=False):
            with self.parallel.autocast():
                _, loss = self.fast_model(input_ids, target_ids)
            self.parallel.backward(loss)
        norm = self.parallel.update(self.model, self.optimizer, CLIP, self.guard)
        if self.parallel.device.type == "cpu":  # as the Trainer does
            self.guard.read()
        self.steps += 1
        return loss.detach(), norm


def load(project: Project, model: nn.Module, weights: GPT) -> None:
    """Gives a project's model our weights. Raises Disagreement when it has others than we have."""
    theirs = project.tensors(weights)
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if different := sorted(own ^ theirs.keys()):
        which = different[0]
        cause = f"has {'a' if which in own else 'no'} parameter {which}, other than GPT-2"
        raise Disagreement("contenders", project.key, cause, LEAVE_OUT)
    try:
        model.load_state_dict(theirs, strict=False)  # not its buffers, such as masks
    except RuntimeError as error:
        said = f"parameters of other shapes ({message_of(error)})"
        raise Disagreement("contenders", project.key, said, LEAVE_OUT) from error


def padded(weights: GPT) -> GPT:
    """The same model with rows of zeros, so that its vocabulary is a multiple of 64."""
    config = dataclasses.replace(
        weights.config, vocab_size=-(-weights.config.vocab_size // 64) * 64
    )
    larger = GPT(config)
    tensors = weights.state_dict()
    rows = tensors["token_emb.weight"]
    more = rows.new_zeros(config.vocab_size - len(rows), rows.shape[1])
    larger.load_state_dict(tensors | {"token_emb.weight": torch.cat([rows, more])})
    return larger
