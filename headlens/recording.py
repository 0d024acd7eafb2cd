"""Records the attention of all heads at one step, on prompts and on whole text.

    data = record(capture, prompts, step=40)   # a SnapshotData

capture(input_ids, visit) runs the model, see capturing.py. Each layer is reduced on its device to
statistics and to one byte per weight before the next layer runs, so the weights of only one layer
are in memory. The weights of all layers of GPT-2 small at 1,024 tokens are 576 MiB.

Shapes: L layers, H heads, T tokens, V vocabulary.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from .ablation import CaptureIds, Head, edited_contexts, mean_contexts, removal
from .capturing import LayerAttention, capture, output_projections
from .heads import MAX_DRAWN, names_of
from .history import Row, json_values
from .prompts import Prompt, token_texts
from .snapshot_data import SnapshotData, from_codes, stack_layers, to_codes
from .statistics import (
    STATISTICS,
    Chance,
    HeadStatistics,
    best_offsets,
    by_layer,
    by_statistic,
    chance_of,
    chances_of,
    positional,
    ratio_of_sums,
    uniform_values,
)
from .whole_text import TextRecorder

TOKENS_AT_ONCE = 256  # of prompts, with padding: the logits of a large vocabulary take memory
MOST_LIKELY = 5  # next tokens recorded for each position
MIN_COMPARED = 8  # tokens; `positional` ignores shorter prompts
MAX_CELLS = 2**22  # of attention without heads, about 14 MB in a snapshot, see MAX_JSON_BYTES

Values = dict[str, np.ndarray]  # by statistic, (L, H)


@dataclass
class Predictions:
    """Predictions of the next token at each position of a prompt."""

    losses: np.ndarray  # fp32 (T - 1): -ln p(next token), in nats, of positions 0 to T - 2
    token_ids: np.ndarray  # int64 (T, 5): the most likely next tokens, the most likely first
    probabilities: np.ndarray  # fp32 (T, 5)


@dataclass
class Recorder:
    """What is recorded of the layers on one prompt."""

    prompt: Prompt
    codes: list[Tensor] = field(default_factory=list)  # of each layer (H, t (t + 1) / 2)
    value_norms: list[Tensor] = field(default_factory=list)  # (H, t)
    layers: list[int] = field(default_factory=list)  # their numbers in the model
    predictions: Predictions | None = None

    def add(self, attention: LayerAttention, row: int) -> None:
        """Records a layer. row: of the prompt in the batch, which may be padded at the end."""
        shown, weights = self.prompt.shown, attention.weights
        # The lower triangle, row by row: query 0 with key 0, query 1 with keys 0 and 1, ...
        q, k = torch.tril_indices(shown, shown, device=weights.device)
        self.codes.append(to_codes(weights[row][:, q, k]))
        self.layers.append(attention.number)
        if attention.value_norms is not None:
            self.value_norms.append(attention.value_norms[row, :, :shown].float())


class _Measured(Recorder):
    """Also the statistics of the heads."""

    def __init__(self, prompt: Prompt):
        super().__init__(prompt)
        self.statistics = HeadStatistics(torch.tensor([prompt.token_ids]), [prompt.tokens])
        self.sums: list[Tensor] = []  # of each layer (M, H), M = len(statistics.MEASURED)

    def add(self, attention: LayerAttention, row: int) -> None:
        super().add(attention, row)
        num_tokens = len(self.prompt.token_ids)
        weights = attention.weights[row, None, :, :num_tokens, :num_tokens]
        scores = attention.scores
        if scores is not None:
            scores = scores[row, None, :, :num_tokens, :num_tokens]
        self.sums.append(self.statistics.sums(weights, scores)[0])

    def means(self) -> tuple[np.ndarray, dict[str, Chance], np.ndarray]:
        """Returns the statistics, (M, L, H), those that are defined of uniform attention, and the
        number of queries of which they are the mean, (M, L)."""
        sums = torch.stack(self.sums, dim=1).cpu().numpy()[None]
        counts, uniform = self.statistics.expected()
        chances = uniform_values(uniform, counts)
        chances = {k: c if _is_defined(k, self.prompt) else None for k, c in chances.items()}
        return ratio_of_sums(sums, counts)[0], chances, counts[0]

    def visible(self) -> np.ndarray:
        """Returns whether the shown queries can see their keys, bool (L, t (t + 1) / 2)."""
        masks = torch.stack(self.statistics.masks)[:, 0].cpu().numpy()
        return np.ascontiguousarray(masks[:, *np.tril_indices(self.prompt.shown)])


def record(
    capture: CaptureIds,
    prompts: Sequence[Prompt],
    step: int,
    on_text: TextRecorder | None = None,
    run_name: str = "",
    token_bytes: Callable[[int], bytes] | None = None,
    before: Row | None = None,
) -> SnapshotData:
    """Runs the model on all prompts and returns the data of a snapshot.

    on_text: the statistics of the heads on a text, which are then those of the snapshot.
    token_bytes(id): the bytes of a token, for predictions, which are omitted without it.
    before: the row of the snapshot before, whose names heads keep if they are still nearly clear.
    """
    recorders = [_Measured(prompt) for prompt in prompts]
    longest = max(len(prompt.token_ids) for prompt in prompts)
    size = max(1, TOKENS_AT_ONCE // longest)
    models = [_run(capture, recorders[n : n + size]) for n in range(0, len(recorders), size)]
    codes = [stack_layers(r.codes).cpu().numpy() for r in recorders]
    found, uniform_of_prompts, counts = zip(*(r.means() for r in recorders), strict=True)
    pairs = zip(prompts, uniform_of_prompts, strict=True)
    prompts = [dataclasses.replace(prompt, uniform=of) for prompt, of in pairs]
    visible = [r.visible() for r in recorders]
    offsets = best_offsets(on_text.means if on_text else np.mean(found, axis=0))
    of_prompts = [
        {k: v if _is_defined(k, p) else np.full_like(v, np.nan) for k, v in values.items()}
        for p, values in zip(prompts, (by_statistic(of, offsets) for of in found), strict=True)
    ]
    values = {key: _mean([of[key] for of in of_prompts]) for key in STATISTICS}
    uniform, errors = _uniform_of(prompts), {}
    if len(_compared(prompts)) > 1:
        # The bytes have no meaning if the weights of a diverged model are NaN.
        has_diverged = np.isnan(values["entropy"])
        values["positional"] = np.where(has_diverged, np.nan, _positional(prompts, codes, visible))
    if on_text:
        values = by_statistic(on_text.means, offsets) | {"positional": values["positional"]}
        uniform = on_text.uniform | {"positional": uniform["positional"]}
        errors = by_statistic(on_text.errors, offsets)
        errors = {key: e for key, e in errors.items() if STATISTICS[key].of == "targets"}
    predictions = [r.predictions for r in recorders if r.predictions]
    losses = [found.losses for found in predictions]
    row = Row(step, values, losses, errors)
    row.offsets, row.layers = offsets, recorders[0].layers
    known = before.names if before and before.names.shape == row.names.shape else None
    shape = found[0].shape
    queries = [by_statistic(np.broadcast_to(of[..., None], shape), offsets) for of in counts]
    row.names, row.places = names_of(row, uniform, of_prompts, uniform_of_prompts, known, queries)
    details: dict[str, Any] = {
        "statistics": [
            {key: json_values(value.ravel()) for key, value in of_prompt.items()}
            for of_prompt in of_prompts
        ],
        "model": models[0],
    }
    if token_bytes and len(predictions) == len(prompts):
        details["predictions"] = _predictions(prompts, predictions, token_bytes)
    norms = []
    if all(r.value_norms for r in recorders):
        norms, largest = scaled([torch.stack(r.value_norms).cpu().numpy() for r in recorders])
        details["largest_norms"] = largest
    contexts = on_text.contexts if on_text else None
    hidden = [] if all(of.all() for of in visible) else visible
    return SnapshotData(
        run_name, prompts, row, details, codes, norms, uniform, contexts, visible=hidden
    )


def _uniform_of(prompts: Sequence[Prompt]) -> dict[str, Chance]:
    """Returns each statistic for uniform attention, mean over prompts; None if it is undefined."""
    found: dict[str, Chance] = {"positional": 0.0 if len(_compared(prompts)) > 1 else None}
    for key in STATISTICS.keys() - found.keys():
        layers = np.broadcast_arrays(*(by_layer(prompt.uniform[key]) for prompt in prompts))
        found[key] = chance_of(_mean(layers)[:, 0])
    return found


def predict(logits: Tensor, token_ids: Sequence[int], likely: int = MOST_LIKELY) -> Predictions:
    """Returns the predictions at all positions. logits: (T, V) or (1, T, V). likely: number of
    tokens at each."""
    logits = logits.detach().reshape(len(token_ids), -1)
    log_probabilities = logits.float().log_softmax(-1)  # (T, V)
    following = torch.tensor(token_ids[1:], dtype=torch.int64, device=logits.device)
    losses = -log_probabilities[:-1].gather(-1, following[:, None])[:, 0]
    most = log_probabilities.topk(min(likely, logits.shape[-1]))
    return Predictions(
        losses.cpu().numpy(), most.indices.cpu().numpy(), most.values.exp().cpu().numpy()
    )


def _run(capture: CaptureIds, recorders: Sequence[Recorder]) -> dict[str, Any]:
    """Runs the model on some prompts at once. Shorter ones are padded at the end, which causal
    attention does not see. Returns details["model"] of a snapshot, see snapshot_data.py."""
    token_ids = [torch.tensor(recorder.prompt.token_ids) for recorder in recorders]

    def visit(_: int, attention: LayerAttention) -> None:
        for row, recorder in enumerate(recorders):
            recorder.add(attention, row)

    captured = capture(pad_sequence(token_ids, batch_first=True), visit)
    if captured.logits is not None:
        for row, recorder in enumerate(recorders):
            ids = recorder.prompt.token_ids
            recorder.predictions = predict(captured.logits[row, : len(ids)], ids)
    proof = captured.proof
    others = {str(number): kind for number, kind in captured.others.items()}
    return {"others": others, "proof": proof.sentence if proof else None}


def _is_defined(statistic: str, prompt: Prompt) -> bool:
    return STATISTICS[statistic].on != ("texts" if prompt.period else "repeated")


def _mean(values: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the mean over prompts on which a statistic is defined; NaN if there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanmean(values, axis=0)


def _positional(
    prompts: Sequence[Prompt], codes: Sequence[np.ndarray], visible: Sequence[np.ndarray]
) -> np.ndarray:
    """Returns how much of the attention on prompts depends on positions only. -> (L, H)."""
    compared = _compared(prompts)
    num_tokens = min(prompts[n].shown for n in compared)
    first = num_tokens * (num_tokens + 1) // 2
    chances = [chances_of(visible[n][..., :first]) for n in compared]
    return positional([from_codes(codes[n][..., :first]) for n in compared], chances)


def _compared(prompts: Sequence[Prompt]) -> list[int]:
    """Returns the indices of the prompts that `positional` compares."""
    return [number for number, p in enumerate(prompts) if len(p.token_ids) >= MIN_COMPARED]


def scaled(norms: Sequence[np.ndarray]) -> tuple[list[np.ndarray], list]:
    """Returns value norms, (L, H, t) for each prompt, as bytes: round(255 sqrt(norm / largest)),
    and the largest of each head, for JSON."""
    largest = [of_prompt.max(-1, keepdims=True) + 1e-9 for of_prompt in norms]  # (L, H, 1)
    scaled = [n / most for n, most in zip(norms, largest, strict=True)]
    codes = [(255 * np.sqrt(np.nan_to_num(n))).round().astype(np.uint8) for n in scaled]
    return codes, [json_values(most.ravel()) for most in largest]


def record_without(
    model: nn.Module,
    prompts: Sequence[Prompt],
    groups: Mapping[str, Sequence[Head]],
    offsets: np.ndarray,
    token_bytes: Callable[[int], bytes],
) -> dict[str, dict] | None:
    """Returns what the model does on the prompts without each group of heads. None if the output
    projections of the model are not known. For each name of a group:

        tokens, of_prompts  what it predicts, as in details["predictions"]
        attention           of each group {name: {codes, values}}: for each prompt the mean weights
                            of its first MAX_DRAWN heads as a list of bytes, t (t + 1) / 2, and the
                            mean of the statistic of its name, None where it is undefined; {} if
                            it has more than MAX_CELLS bytes

    offsets: of each head, (L, H), see Row. A removed head has its mean
    context vector over all tokens of the prompts, see ablation.py. Costs a forward pass on the
    prompts, and one for each group.
    """
    if not (projections := output_projections(model)):
        return None
    run = functools.partial(capture, model)
    means = mean_contexts(model, [prompt.token_ids for prompt in prompts])
    cells = len(groups) ** 2 * sum(p.shown * (p.shown + 1) // 2 for p in prompts)
    drawn = groups if cells <= MAX_CELLS else {}

    def without(group: Sequence[Head]) -> dict[str, Any]:
        recorders = [_Measured(prompt) for prompt in prompts]
        with edited_contexts(projections, removal(group, means)):
            for recorder in recorders:
                _run(run, [recorder])
        predictions = [r.predictions for r in recorders if r.predictions]
        found = _predictions(prompts, predictions, token_bytes)
        shown = {n: _attention_of(recorders, n, heads, offsets) for n, heads in drawn.items()}
        return found | {"attention": shown}

    return {name: without(group) for name, group in groups.items()}


def _attention_of(
    recorders: Sequence[_Measured], name: str, heads: Sequence[Head], offsets: np.ndarray
) -> dict[str, list]:
    """Returns the attention of the heads of a name, as record_without describes it."""
    codes, values = [], []
    for recorder in recorders:
        weights = [from_codes(recorder.codes[i][j].cpu().numpy()) for i, j in heads[:MAX_DRAWN]]
        codes.append(to_codes(torch.from_numpy(np.mean(weights, 0))).tolist())
        found = by_statistic(recorder.means()[0], offsets)[name]
        value = np.mean([found[place] for place in heads])
        values.append(value if _is_defined(name, recorder.prompt) else math.nan)
    return {"codes": codes, "values": json_values(np.array(values))}


def _predictions(
    prompts: Sequence[Prompt],
    found: Sequence[Predictions],
    token_bytes: Callable[[int], bytes],
) -> dict[str, Any]:
    """Returns losses and most likely tokens of the shown positions; tokens as indices of texts."""
    ids = np.unique([i for of_prompt in found for i in of_prompt.token_ids.ravel()])
    return {
        "tokens": token_texts(ids.tolist(), token_bytes),
        "of_prompts": [
            {
                "losses": json_values(of.losses[: prompt.shown]),
                "tokens": np.searchsorted(ids, of.token_ids[: prompt.shown]).tolist(),
                "probabilities": json_values(of.probabilities[: prompt.shown]),
            }
            for prompt, of in zip(prompts, found, strict=True)
        ],
    }
