"""The change of the loss when a head is removed (mean ablation).

    head_removal(model, windows)["heads"]  # for each head: layer, head, loss_change and its error

A head is removed by replacing its context vector at every position by its mean over all windows and
positions. The head then no longer sends information from one position to another, and the layers
after it receive inputs of the usual size. The context vectors of all heads are the input of the
output projection, see projections.py, so a hook there removes heads of any model.

Shapes: B windows, H heads, T positions, D head_dim, N targets, L layers, V vocabulary.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .capturing import (
    Visit,
    arguments_of,
    capture,
    inputs_of,
    output_projections,
    unchanged,
    unwrapped,
)
from .projections import Projection, device_of
from .proof import first_tensor

Head = tuple[int, int]  # (layer, head), counted over the layers with attention
Edit = Callable[[int, Tensor], Tensor]  # (layer, context, (B, H, T, D)) -> what replaces it
CaptureIds = Callable[[Tensor, Visit], Any]
Ablate = Callable[[dict[str, list[Head]]], dict | None]  # heads by name -> result of head_removal
Report = Callable[[int, int], None]  # (passes done, passes in all)
COLUMNS = ("loss_change", "loss_change_error", "accuracy_without")
TOKENS_AT_ONCE = 512  # in a pass: the logits of a large vocabulary take memory


def head_removal(
    model: nn.Module,
    windows: Tensor | Sequence[Sequence[int]],
    groups: Mapping[str, Sequence[Head]] | None = None,
    *,
    targets: Tensor | None = None,
    accuracy: bool = False,
    estimate: bool = False,
    report: Report = lambda done, total: None,
) -> dict:
    """Removes each head alone, and all heads of each group together. Returns a dict for JSON.

    model: any whose output projections are found; it does not change. windows: token ids
    (B, T). groups: heads by name. targets (B, T): the token after each position, negative where it
    does not count; by default the next one of the window. accuracy: whether to measure it too.
    report: called after each pass. Keys of the result:

        method              "exact" or "estimate"
        windows, targets    B and N
        loss, accuracy      of all targets, nothing removed; the accuracy may be None
        heads               for each head: layer, head and COLUMNS
        groups              for each group: name, the number of heads and COLUMNS

    loss_change is the change of the mean loss, in nats; loss_change_error is its standard error
    over windows. accuracy_without is the accuracy without these heads.

    Exact: one forward pass for each head and each group. estimate: two forward passes and one
    backward pass in all give the change to first order, the gradient of the loss with respect to
    the context vectors times (mean - context) (Nanda 2023, Attribution Patching; Michel et al.
    2019, Are Sixteen Heads Really Better than One, has it for zero instead of the mean). It can be
    wrong by any amount where the loss is not linear, as in a model whose loss is nearly 0.

    Raises ValueError for a model whose output projections are not found.
    """
    model = unwrapped(model)
    projections, device, groups = known_projections(model), device_of(model), groups or {}
    ids, _ = inputs_of(model, windows, None)  # (B, T)
    targets = F.pad(ids[:, 1:], (0, 1), value=-1) if targets is None else targets.to(device)
    size = max(1, TOKENS_AT_ONCE // ids.shape[1])
    batches = [*zip(ids.split(size), targets.split(size), strict=True)]
    counts = (targets >= 0).sum(1).cpu().double()  # (B,)
    if not counts.sum():
        raise ValueError("windows: no token has a next token; give two or more per window")
    alone = [(layer, head) for layer, of in enumerate(projections) for head in range(of.num_heads)]
    removed = [[head] for head in alone] + [[*dict.fromkeys(group)] for group in groups.values()]
    check_heads(itertools.chain(*removed), projections)

    def run(edit: Edit) -> tuple[Tensor, float | None]:
        """Returns the sum of the losses of each window, (B,), and the accuracy."""
        with edited_contexts(projections, edit):
            losses, correct = zip(*(_losses(model, *batch) for batch in batches), strict=True)
        share = round(sum(correct) / float(counts.sum()), 4)
        return torch.cat(losses), share if accuracy and not estimate else None

    with unchanged(model, device), torch.autocast(device.type, enabled=False):
        sums = [torch.zeros(())] * len(projections)
        losses, whole = run(_adding_to(sums))
        means = [each / ids.numel() for each in sums]
        slopes = torch.zeros(())  # of the estimate
        if estimate:
            slopes = torch.cat([_slopes(model, projections, means, *batch) for batch in batches])
        rows: list[dict] = [{"layer": layer, "head": head} for layer, head in alone]
        rows += [{"name": name, "heads": len(group)} for name, group in groups.items()]
        for number, (row, group) in enumerate(zip(rows, removed, strict=True), start=1):
            if estimate:
                columns = [alone.index(head) for head in group]
                without, found = losses + slopes[:, columns].sum(1), None
            else:
                without, found = run(removal(group, means))
            row |= _result(without - losses, counts, found)
            report(number, len(removed))
    return {
        "method": "estimate" if estimate else "exact",
        "windows": len(ids),
        "targets": int(counts.sum()),
        "loss": float(losses.sum() / counts.sum()),
        "accuracy": whole,
        "heads": rows[: len(alone)],
        "groups": rows[len(alone) :],
    }


def known_projections(model: nn.Module) -> list[Projection]:
    """Returns the output projections of a model. Raises ValueError if they are not found, and what
    `capture` raises for a model that it does not support."""
    if found := output_projections(model):
        return found
    capture(model, [0, 1])
    reason = "the output projections of its attention are not found"
    if any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
        reason = "nn.MultiheadAttention does not call its out_proj, where heads are removed"
    raise ValueError(f"{type(model).__name__}: {reason}")


def check_heads(heads: Iterable[Head], projections: Sequence[Projection]) -> None:
    """Raises ValueError for heads that a model does not have."""
    counts = [of.num_heads for of in projections]
    for layer, head in heads:
        if layer not in range(len(counts)) or head not in range(counts[layer]):
            known = f"{len(counts)} layers with attention, of {max(counts)} heads"
            raise ValueError(f"head {head} of layer {layer}: the model has {known}")


def _losses(model: nn.Module, ids: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    """Returns the sum of the losses of each window, fp64 (B,) on the CPU, and the number of targets
    with the largest logit."""
    targets = targets.where(targets >= 0, -100)  # are ignored
    logits = first_tensor(model(**arguments_of(model, ids)))  # (B, T, V)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    correct = int((logits.argmax(-1) == targets).sum())
    return losses.cpu().double().view_as(targets).sum(1), correct


def _slopes(
    model: nn.Module, projections: Sequence[Projection], means: Sequence[Tensor], *batch: Tensor
) -> Tensor:
    """Returns how the sum of the losses of each window changes to first order without each head,
    fp64 (B, L H) on the CPU."""
    contexts: list[Tensor] = []

    def keep(_: int, context: Tensor) -> Tensor:
        if not context.requires_grad:  # no weight before it has a gradient
            context = context.detach().requires_grad_()
        contexts.append(context)
        return context

    with torch.enable_grad(), edited_contexts(projections, keep):
        gradients = torch.autograd.grad(_losses(model, *batch)[0].sum(), contexts)
    moves = (mean[:, None] - c.detach().float() for mean, c in zip(means, contexts, strict=True))
    slopes = [(g.float() * move).sum((2, 3)) for g, move in zip(gradients, moves, strict=True)]
    return torch.cat(slopes, 1).cpu().double()


def _adding_to(sums: list[Tensor]) -> Edit:
    """Returns an edit that changes nothing. It adds the context vectors of each layer to sums."""

    def edit(layer: int, context: Tensor) -> Tensor:
        sums[layer] = sums[layer] + context.float().sum((0, 2))  # (H, D)
        return context

    return edit


def removal(group: Sequence[Head], means: Sequence[Tensor]) -> Edit:
    """Returns the edit that removes the heads of a group. means: the mean context vector of each
    head, (H, D) for each layer."""

    def edit(layer: int, context: Tensor) -> Tensor:
        heads = [head for of_layer, head in group if of_layer == layer]
        if heads:
            context = context.clone()
            context[:, heads] = means[layer][heads][:, None].to(context.dtype)
        return context

    return edit


def mean_contexts(
    model: nn.Module, prompts: Iterable[Sequence[int]], run: CaptureIds | None = None
) -> list[Tensor]:
    """Returns the mean context vector of each head over all tokens of prompts, (H, D) for each
    layer. prompts: their token ids. run: captures the model, by default with `capture`."""
    run = run or functools.partial(capture, model, logits=False)
    projections = known_projections(model)
    sums, tokens = [torch.zeros(())] * len(projections), 0
    with edited_contexts(projections, _adding_to(sums)):
        for token_ids in prompts:  # one by one: padding would be in the mean
            run(torch.tensor([token_ids]), lambda *_: None)
            tokens += len(token_ids)
    return [each / tokens for each in sums]


@contextlib.contextmanager
def edited_contexts(projections: Sequence[Projection], edit: Edit) -> Iterator[None]:
    """Replaces the context vectors of each layer by what `edit` returns."""
    layers: dict[nn.Module, list[int]] = {}  # some models have one module in several layers
    for layer, projection in enumerate(projections):
        layers.setdefault(projection.module, []).append(layer)
    turns = {module: itertools.cycle(of) for module, of in layers.items()}

    def hook(module: nn.Module, given: tuple) -> tuple:
        layer = next(turns[module])
        context = given[0].unflatten(-1, (projections[layer].num_heads, -1))  # (B, T, H, D)
        return (edit(layer, context.transpose(1, 2)).transpose(1, 2).flatten(2), *given[1:])

    with contextlib.ExitStack() as stack:
        for module in layers:
            stack.callback(module.register_forward_pre_hook(hook).remove)
        yield


def is_estimate(found: dict) -> bool:
    """Returns whether a result of head_removal is an estimate."""
    return found.get("method") == "estimate"  # earlier versions measure and do not write it


def most_important(results: Iterable[dict]) -> dict | None:
    """Returns the result with the largest increase of the loss, without increases of less than two
    standard errors."""
    clear = [row for row in results if row["loss_change"] > 2 * (row["loss_change_error"] or 0)]
    return max(clear, key=lambda row: row["loss_change"], default=None)


def within_noise(result: dict) -> bool:
    """Returns whether a result changes the loss by at most two standard errors, which is no
    evidence of a change. False without a standard error."""
    error = result["loss_change_error"]
    return error is not None and abs(result["loss_change"]) <= 2 * error


def _result(change: Tensor, targets: Tensor, accuracy: float | None) -> dict:
    """change (B,): of the sum of the losses of each window. targets (B,): their number.

    The error is that of a ratio of sums: windows may have different numbers of targets.
    """
    mean = change.sum() / targets.sum()
    rest = change - targets * mean  # (B,)
    error = None
    if len(rest) > 1:
        variance = (rest**2).sum() * len(rest) / (len(rest) - 1)
        error = round(float(variance.sqrt() / targets.sum()), 6)
    return dict(zip(COLUMNS, (round(float(mean), 6), error, accuracy), strict=True))
