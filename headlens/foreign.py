"""The attention of models of transformers: run.

Each attention module of transformers calls the function that has the name of its config's attention
implementation. For the run it is a function of this file, which calls the model's own eager
attention. So soft caps, sinks, sliding windows, grouped keys and scales are those of the model. A
model without AttentionInterface, such as GPT-Neo or BLOOM, returns its weights.
"""

import collections
import contextlib
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .proof import Call, Receive

ADVICE = "pass attention=, a function that yields (weights, values) of each layer"
_NUMBERS = itertools.count()


def run(
    model: Any, ids: Tensor, mask: Tensor | None, receive: Receive, all_logits: bool = True
) -> tuple[Any, dict[int, str]]:
    """Runs a model on ids (B, T) and passes the calls of its attention to `receive`, in order.

    mask: False at padding, (B, T); None without padding. Returns the output of the model,
    and its other layers, {number: what they are}. Raises
    TypeError for an encoder and decoder, and ValueError if a layer gives no weights.
    """
    name, layers = type(model).__name__, _Layers(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise TypeError(f"{name} is an encoder and a decoder, not a decoder; {ADVICE}")
    inputs = inputs_of(model, ids, mask)
    if not all_logits and "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = 1
    is_fused = model.config.get_text_config()._attn_implementation not in (None, "eager")

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest, **options):
        output, weights, call = _eager(module, query, key, value, rest, options, is_fused)
        call.number = layers.number_of(module)
        receive(call)
        return output, weights

    with attention_function(model, attend):
        output = model(**inputs)
        if not layers.numbers:
            output = model(**inputs, output_attentions=True)
            for number, weights in enumerate(getattr(output, "attentions", None) or ()):
                if weights is not None:
                    layers.numbers.append(number)
                    receive(Call(weights.float(), number=number, dtype=weights.dtype))
    return output, layers.others()


def inputs_of(model: Any, ids: Tensor, mask: Tensor | None) -> dict[str, Any]:
    """Returns the arguments of a model. Positions of a padded text count its own tokens."""
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False, "return_dict": True}
    # without a mask, some models warn of padding
    inputs["attention_mask"] = torch.ones_like(ids) if mask is None else mask.to(ids.dtype)
    if mask is not None and "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs


@contextlib.contextmanager
def attention_function(model: nn.Module, function: Callable) -> Iterator[None]:
    """Makes all attention modules of a model of transformers call a function, with the mask of
    eager attention."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"headlens_{next(_NUMBERS)}"  # of this run: another may run at the same time
    masks, functions = AttentionMaskInterface._global_mapping, AttentionInterface._global_mapping
    configs = _configs(model)
    before = [each._attn_implementation for each in configs]
    try:
        functions[name], masks[name] = function, AttentionMaskInterface()["eager"]
        for each in configs:
            each._attn_implementation = name
        yield
    finally:
        for each, implementation in zip(configs, before, strict=True):
            each._attn_implementation = implementation
        functions.pop(name, None)
        masks.pop(name, None)


def _configs(model: nn.Module) -> list[Any]:
    """Returns the configs of a model and its parts, each after those that contain it: setting an
    attention implementation also sets that of the configs inside."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if config is not None and hasattr(config, "_attn_implementation"):
            found.pop(id(config), None)
            found[id(config)] = config
            for key in getattr(config, "sub_configs", ()):
                add(getattr(config, key, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


def _eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rest: tuple,
    options: dict,
    is_fused: bool,
) -> tuple[Tensor, Tensor, Call]:
    """Returns (output, weights, call) of the eager attention of a module.

    It is computed in fp32 if the model has a fused kernel, which rounds queries, keys and values to
    bf16 or fp16 but not the scores.
    """
    names = (sys.modules.get(each.__module__) for each in type(module).__mro__)
    eager = next(filter(None, (getattr(m, "eager_attention_forward", None) for m in names)), None)
    if eager is None:
        raise ValueError(f"{type(module).__name__} has no eager attention; {ADVICE}")
    device, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    given, values = (query, key, value), value.to(dtype)
    with contextlib.ExitStack() as stack:
        if is_fused and dtype.itemsize < 4:
            given = [each.to(dtype).float() for each in given]
            stack.enter_context(torch.autocast(device, enabled=False))
        softmax = stack.enter_context(_SoftmaxInput())
        output, weights = eager(module, *given, *rest, **options)
    scores, sink = softmax.scores(weights.shape, torch.finfo(dtype).min / 2)
    call = Call(weights.float(), scores, dtype=weights.dtype, module=module)
    call.values, call.output, call.sink = values, output, sink
    return output.to(dtype), weights, call


class _SoftmaxInput(TorchFunctionMode):
    """Records the argument of softmax: the scores, with soft cap and mask."""

    found: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.softmax, torch.softmax, Tensor.softmax):
            self.found = args[0]
        return func(*args, **(kwargs or {}))

    def scores(self, shape: torch.Size, masked: float) -> tuple[Tensor | None, Tensor | None]:
        """Returns the scores of the keys, fp32, -inf where masked; and the share of a learned sink,
        which is one more column after them, or None. masked: the mask is added; smaller scores have
        it. The scores are None if they are not of the shape of the weights."""
        found, keys = self.found, shape[-1]
        if found is None or found.shape[:-1] != shape[:-1] or found.shape[-1] - keys not in (0, 1):
            return None, None
        found = found.float().masked_fill(found < masked, float("-inf"))
        sink = found.softmax(-1)[..., -1] if found.shape[-1] > keys else None
        return found[..., :keys], sink


class _Layers:
    """The numbers of the layers whose attention was called, from the names of their modules:
    "model.layers.3.self_attn" is in layer 3. A module in several layers has several names."""

    def __init__(self, model: Any):
        self.model, self.stack = model, ""
        self.numbers: list[int] = []
        self.names: dict[nn.Module, collections.deque] = collections.defaultdict(collections.deque)
        for name, module in model.named_modules(remove_duplicate=False):
            self.names[module].append(name)

    def number_of(self, module: nn.Module) -> int:
        """Returns the number of the layer whose attention is called now."""
        number, names = len(self.numbers), self.names[module]
        if names and (found := re.match(r"(.*?)\.?\b(\d+)\b", names.popleft())):
            self.stack, number = found[1], int(found[2])
        if number in self.numbers:  # its layers run several times
            number = max(self.numbers) + 1
        self.numbers.append(number)
        return number

    def others(self) -> dict[int, str]:
        """Returns the other layers: {number: what it is}."""
        config, name = self.model.config.get_text_config(), type(self.model).__name__
        stack = [*self.model.get_submodule(self.stack).children()] if self.stack else []
        kinds = [getattr(config, key, None) for key in ("layer_types", "layers_block_type")]
        kinds = next((each for each in kinds if each), None)
        count = len(stack) or len(kinds or ()) or config.num_hidden_layers
        missing = [number for number in range(count) if number not in self.numbers]
        if self.numbers and not missing:
            return {}
        if not self.numbers or not (stack or kinds):
            found = f"attention weights of {len(self.numbers)} of {count} layers"
            raise ValueError(f"{name}: transformers gives {found}; {ADVICE}")
        if kinds and len(kinds) == count:
            return {number: kinds[number].replace("_", " ") for number in missing}
        used = {type(part) for n in self.numbers if n < count for part in stack[n].children()}
        return {number: _kind(stack[number], used, name) for number in missing}


def _kind(layer: nn.Module, used: set[type], model: str) -> str:
    """Returns what a layer without attention is, from the name of the class of the first part that
    no layer with attention has: "mamba mixer"."""
    part = next((each for each in layer.children() if type(each) not in used), layer)
    words = re.findall("[A-Z][a-z0-9]*", type(part).__name__)
    family = re.findall("[A-Z][a-z0-9]*", model)
    while len(words) > 1 and words[:1] == family[:1]:
        words, family = words[1:], family[1:]
    return " ".join(words).lower()
