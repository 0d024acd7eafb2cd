"""The implementations that benchmarks/training.py compares: clearhead and other projects.

    Variant          a row of a table: an implementation and the options it runs with
    Implementation   its model, loss and optimizer, and our weights under its names

transformers is used where it is installed. nanoGPT and LLMs-from-scratch are used from checkouts
whose folders the user names; their files run unchanged. benchmarks/runner.py makes the steps.

Shapes: B batch, T query positions, V vocabulary.
"""

import contextlib
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

from errors import ConfigError, message_of
from interop.huggingface import hf_tensors
from model import GPT, ModelConfig
from training.config.schema import OptimizerConfig
from training.distributed.device import DTYPES
from training.optim.optimizers import build_optimizer
from training.reporting.machine import git

GPT2_VOCABULARY = 50257  # nanoGPT pads it to 50304, a multiple of 64, by default


@dataclass(frozen=True)
class Target:
    """What the variants of all implementations depend on."""

    device: str  # cpu | cuda | mps
    dtype: torch.dtype  # of matrix products
    can_compile: bool
    vocab_size: int


@dataclass(frozen=True)
class Variant:
    """A row of a table: an implementation and the options it runs with."""

    name: str
    implementation: str  # its key
    dtype: torch.dtype  # of matrix products; all else is fp32
    compiled: bool = False
    keeps_memory: bool = False  # freed memory is not returned to the system (device.py)
    fused: bool = False  # fused AdamW, although the project does not ask for it
    padded: bool = False  # vocabulary padded to a multiple of 64
    tf32: bool = False  # fp32 products in TF32 on a GPU that has it

    @property
    def precision(self) -> str:
        """`dtype` as the settings name it."""
        return next(name for name, dtype in DTYPES.items() if dtype == self.dtype)


class Implementation:
    """A project: its model and how its own training script uses it."""

    key: str  # its name in the settings
    title: str

    def build(self, config: ModelConfig) -> nn.Module:
        """Its model of this shape, without dropout."""
        raise NotImplementedError

    def convert(self, weights: GPT) -> dict[str, Tensor]:
        """Our weights under its names and in its layout, for load_state_dict."""
        raise NotImplementedError

    def loss(self, model: nn.Module, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        """Mean cross-entropy. input_ids, target_ids: (B, T)."""
        raise NotImplementedError

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
        """AdamW as the project constructs it, with weight decay for matrices only."""
        return torch.optim.AdamW(decay_groups(model, config), lr=config.lr, betas=config.betas)

    def shipped(self, target: Target) -> list[Variant]:
        """How the project itself runs on this device by default."""
        return [Variant(self.title, self.key, torch.float32)]

    def equalised(self, target: Target) -> list[Variant]:
        """The same precision for all, compiled; the optimizer as the project constructs it."""
        return [Variant(self.title, self.key, target.dtype, target.can_compile)]

    def source(self) -> dict[str, str]:
        """The version or commit of the project."""
        return {}


def decay_groups(model: nn.Module, config: OptimizerConfig) -> list[dict]:
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


class Ours(Implementation):
    """This repository."""

    key = title = "ours"

    def build(self, config: ModelConfig) -> GPT:
        return GPT(config)

    def convert(self, weights: GPT) -> dict[str, Tensor]:
        return weights.state_dict()

    def loss(self, model: nn.Module, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        return model(input_ids, target_ids)[1]

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
        return build_optimizer(model, config)

    def shipped(self, target: Target) -> list[Variant]:
        """Eager and compiled: short runs are not compiled, long ones are."""
        eager = Variant("ours", self.key, target.dtype, keeps_memory=target.device == "cpu")
        compiled = dataclasses.replace(eager, name="ours, compiled", compiled=True)
        return [eager, compiled] if target.can_compile else [eager]

    def equalised(self, target: Target) -> list[Variant]:
        keeps = target.device == "cpu"
        return [Variant("ours", self.key, target.dtype, target.can_compile, keeps)]


class Transformers(Implementation):
    """GPT2LMHeadModel of Hugging Face transformers, with the defaults of its Trainer."""

    key = title = "transformers"

    def __init__(self):
        import transformers

        transformers.logging.set_verbosity_error()  # warns of special tokens outside a vocabulary
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

    def convert(self, weights: GPT) -> dict[str, Tensor]:
        theirs = hf_tensors(weights)
        return theirs | {"lm_head.weight": theirs["transformer.wte.weight"]}

    def loss(self, model: nn.Module, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        # Without shift_labels it shifts the labels by one and drops the last target of each window.
        return model(input_ids=input_ids, labels=target_ids, shift_labels=target_ids).loss

    def optimizer(self, model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
        fused = str(self.defaults.get("optim", "")).endswith("adamw_torch_fused")
        groups = decay_groups(model, config)
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)

    def shipped(self, target: Target) -> list[Variant]:
        variants = [Variant(self.title, self.key, torch.float32)]
        if target.dtype == torch.bfloat16:
            variants.append(Variant("transformers, bf16=True", self.key, target.dtype))
        return variants

    def source(self) -> dict[str, str]:
        return {"version": self.library.__version__}


class Checkout(Implementation):
    """A project that is not a package: a folder with its files."""

    files: ClassVar[tuple[str, ...]] = ()  # files that may define its model; the first found counts
    classes: ClassVar[tuple[str, ...]] = ()  # that the file has to define

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self.module = self.load_module()

    @classmethod
    def find_file(cls, folder: str) -> Path | None:
        """The file that defines its model; None when the folder is not a checkout of it."""
        return next((path for name in cls.files if (path := Path(folder) / name).is_file()), None)

    def load_module(self) -> ModuleType:
        """Imports the file that defines its model; ConfigError when that fails."""
        file = self.find_file(str(self.folder))
        # An own module name: our model.py has the same file name.
        spec = importlib.util.spec_from_file_location(f"_checkout_of_{self.key}", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses need it there
        folder = str(file.parent)
        sys.path.insert(0, folder)  # for imports of other files of the same folder
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            reason = f"{type(error).__name__}: {message_of(error)}"
            raise self.config_error(f"{file.name} cannot be imported ({reason})") from error
        finally:
            sys.path.remove(folder)
        if missing := [name for name in self.classes if not hasattr(module, name)]:
            raise self.config_error(f"{file.name} does not define {missing[0]}")
        return module

    def config_error(self, reason: str) -> ConfigError:
        hint = f"name the folder of a checkout of {self.title}"
        return ConfigError([(self.key, str(self.folder), reason, hint)])

    def source(self) -> dict[str, str]:
        # Without a .git of its own git would describe a repository around it.
        is_repository = (self.folder / ".git").exists()
        commit = git(self.folder, "rev-parse", "--short", "HEAD") if is_repository else "unknown"
        return {"commit": commit}


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

    def convert(self, weights: GPT) -> dict[str, Tensor]:
        theirs = {  # Hugging Face's names, with Linear instead of Conv1D
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

    def shipped(self, target: Target) -> list[Variant]:
        """On a CPU --device=cpu --compile=False, as its README says, without autocast. On a GPU the
        defaults of its train.py."""
        padded = target.vocab_size == GPT2_VOCABULARY
        if target.device != "cuda":
            return [Variant(self.title, self.key, torch.float32, padded=padded)]
        half = torch.bfloat16 if target.dtype == torch.bfloat16 else torch.float16
        compiled = target.can_compile
        return [Variant(self.title, self.key, half, compiled, padded=padded, tf32=True)]

    def equalised(self, target: Target) -> list[Variant]:
        """And once more with every option that makes it faster."""
        plain = Variant(self.title, self.key, target.dtype, target.can_compile)
        options = {"fused": target.device in ("cpu", "cuda"), "tf32": target.device == "cuda"}
        options |= {"keeps_memory": target.device == "cpu", "padded": True}
        return [plain, dataclasses.replace(plain, name="nanoGPT, all switched on", **options)]


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
    names: ClassVar = {  # ours: theirs
        "token_emb.weight": "tok_emb.weight",
        "pos_emb.weight": "pos_emb.weight",
        "final_norm.weight": "final_norm.scale",
        "final_norm.bias": "final_norm.shift",
    }
    names_in_block: ClassVar = {
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
                "ctx_len": config.context_length,  # its name in early versions
                "emb_dim": config.emb_dim,
                "n_heads": config.num_heads,
                "n_layers": config.num_layers,
                "drop_rate": 0.0,
                "qkv_bias": True,
            }
        )
        # The book's head has its own matrix. GPT-2 shares it with the embedding, and all
        # implementations have to train the same model.
        model.out_head.weight = model.tok_emb.weight
        return model

    def convert(self, weights: GPT) -> dict[str, Tensor]:
        def renamed(name: str) -> str:
            if name in self.names:
                return self.names[name]
            _, layer, rest = name.split(".", 2)
            ours = next(key for key in self.names_in_block if rest.startswith(key))
            return f"trf_blocks.{layer}.{self.names_in_block[ours]}{rest.removeprefix(ours)}"

        theirs = {renamed(name): value for name, value in weights.state_dict().items()}
        return theirs | {"out_head.weight": theirs["tok_emb.weight"]}

    def loss(self, model: nn.Module, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        logits = model(input_ids)  # (B, T, V)
        return nn.functional.cross_entropy(logits.flatten(0, 1), target_ids.flatten())


IMPLEMENTATIONS = {each.key: each for each in (Ours, Transformers, NanoGPT, LLMsFromScratch)}
CHECKOUTS = {key: each for key, each in IMPLEMENTATIONS.items() if issubclass(each, Checkout)}
