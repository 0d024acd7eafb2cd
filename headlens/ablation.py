"""What a head is good for: the change of the loss when the head is removed (mean ablation).

A head is removed by replacing its context vector at every position by its mean over all windows and
positions. The head then no longer sends information from one position to another, and the layers
after it receive inputs of the usual size. The caller provides the function

    run(edit, first_layer) -> (losses, correct)

It runs the model without dropout on the same windows in each call. For each layer it calls
edit(layer, context), (B, H, T, D), and uses the returned tensor as the input of the output
projection. It returns the loss of each target (N,), in nats, and whether the largest logit is that
of the target (N,), or None if accuracy is of no interest. The first call has first_layer=0 and
changes nothing. In a later call, the context vectors of the layers before first_layer do not
change: the function may reuse the output of these layers.

Shapes: B windows, H heads, T positions, D head_dim, N targets, L layers.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .capturing import Captured, LayerAttention, Visit, output_projection

Head = tuple[int, int]  # (layer, head)
Edit = Callable[[int, Tensor], Tensor]  # (layer, context, (B, H, T, D)) -> what replaces it
RunModel = Callable[[Edit, int], tuple[Tensor, Tensor | None]]
CaptureIds = Callable[[Tensor, Visit], Captured]
Ablate = Callable[[dict[str, list[Head]]], dict | None]  # heads by name -> result of `ablate`
COLUMNS = ("loss_change", "loss_change_error", "accuracy_without")


def ablate(
    run: RunModel,
    windows: Tensor,
    groups: Mapping[str, Sequence[Head]],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict:
    """Removes each head alone, and all heads of each group together. Returns a dict for JSON.

    windows (N,): the window, 0 to B - 1, of each target. groups: heads by name. report: called
    after each pass without heads with their number until then and in all. Keys of the result:

        windows, targets    B and N
        loss, accuracy      of all targets, nothing removed; the accuracy may be None
        heads               for each head: layer, head and COLUMNS
        groups              for each group: name, the number of heads and COLUMNS

    loss_change is the change of the mean loss, in nats; loss_change_error is its standard error
    over windows. accuracy_without is the accuracy without these heads.
    """
    contexts = []

    def unchanged(_: int, context: Tensor) -> Tensor:
        contexts.append(context)
        return context

    with torch.no_grad():
        losses, correct = run(unchanged, 0)
    means = [context.mean((0, 2)) for context in contexts]
    heads = [(layer, head) for layer, mean in enumerate(means) for head in range(len(mean))]
    removed = [[head] for head in heads] + [list(group) for group in groups.values()]
    windows = windows.cpu()
    targets = torch.bincount(windows).double()  # (B,)
    results = []
    for number, group in enumerate(removed, start=1):
        with torch.no_grad():
            without, found = run(removal(group, means), min(layer for layer, _ in group))
        difference = (without - losses).cpu().double()  # (N,)
        results.append(_result(torch.bincount(windows, difference), targets, _mean(found)))
        report(number, len(removed))
    return {
        "windows": len(targets),
        "targets": len(losses),
        "loss": float(losses.mean()),
        "accuracy": _mean(correct),
        "heads": [
            {"layer": layer, "head": head} | result
            for (layer, head), result in zip(heads, results, strict=False)
        ],
        "groups": [
            {"name": name, "heads": len(group)} | result
            for (name, group), result in zip(groups.items(), results[len(heads) :], strict=True)
        ],
    }


def attention_modules(model: nn.Module) -> list[nn.Module] | None:
    """Returns the attention module of each layer: of our GPT, or of a decoder of transformers. None
    if they are not found."""
    modules = [m for m in model.modules() if "attention" in type(m).__name__.lower()]
    found = [m for m in modules if output_projection(m)]
    config = getattr(model, "config", None)
    known = (getattr(config, key, None) for key in ("num_layers", "num_hidden_layers"))
    return found if found and len(found) == next((n for n in known if n), 0) else None


def output_projections(model: nn.Module) -> list[nn.Module] | None:
    """Returns the output projection of the attention of each layer. None if they are not found.
    Their inputs are the context vectors of all heads."""
    found = [output_projection(module) for module in attention_modules(model) or ()]
    return [projection for projection in found if projection] or None


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
    capture: CaptureIds, projections: Sequence[nn.Module], prompts: Iterable[Sequence[int]]
) -> list[Tensor]:
    """Returns the mean context vector of each head over all tokens of prompts, (H, D) for each
    layer. capture: runs the model of these output projections. prompts: their token ids."""
    sums: list[Any] = [0] * len(projections)  # of each layer, (H D,)
    tokens = [0] * len(projections)  # in these sums: some models run twice to get the weights
    heads = 1

    def add(layer: int, context: Tensor) -> Tensor:
        sums[layer] = sums[layer] + context.float().sum((0, 1, 2))
        tokens[layer] += context.shape[0] * context.shape[2]
        return context

    def visit(_: int, attention: LayerAttention) -> None:
        nonlocal heads
        heads = attention.weights.shape[1]

    with edited_contexts(projections, add, num_heads=1):
        for token_ids in prompts:  # one by one: padding would be in the mean
            capture(torch.tensor([token_ids]), visit)
    means = [of_layer / count for of_layer, count in zip(sums, tokens, strict=True)]
    return [mean.unflatten(0, (heads, -1)) for mean in means]


@contextlib.contextmanager
def edited_contexts(projections: Sequence[nn.Module], edit: Edit, num_heads: int) -> Iterator[None]:
    """Replaces the context vectors of each layer by what `edit` returns."""

    def hook(layer: int, given: Tensor) -> Tensor:
        context = given.unflatten(-1, (num_heads, -1)).transpose(1, 2)  # (B, H, T, D)
        return edit(layer, context).transpose(1, 2).flatten(2)

    hooks = [
        projection.register_forward_pre_hook(lambda _, given, n=n: (hook(n, given[0]),))
        for n, projection in enumerate(projections)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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


def _mean(correct: Tensor | None) -> float | None:
    return None if correct is None else round(float(correct.float().mean()), 4)
