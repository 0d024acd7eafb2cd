"""Attention statistics by their definitions, in plain loops."""

import math
from statistics import fmean

import torch

OFFSETS = range(2, 9)
SEPARATING = set(" \n\t.,;:!?-—…'\"“”‘’()")  # characters of the texts of tests


def uniform_attention(num_tokens):
    """Returns the weights 1 / (q + 1) on each key token, (1, T, T)."""
    ones = torch.ones(num_tokens, num_tokens).tril()
    return (ones / ones.sum(-1, keepdim=True))[None]


def targets(token_ids, tokens):
    """Returns {statistic: [targets of query 0, of query 1, ...]} and the offsets as (offset, n).
    tokens: the text of each token."""
    n = len(token_ids)
    separators = [k for k in range(n) if tokens[k] and set(tokens[k]) <= SEPARATING]
    starts = [k for k in range(1, n) if k - 1 in separators and k not in separators]
    found = {
        "first_token": [[0] if q else [] for q in range(n)],
        "diagonal": [[q] if q else [] for q in range(n)],
        "previous_token": [[q - 1] if q else [] for q in range(n)],
        "induction": [
            [k for k in range(1, q) if token_ids[k - 1] == token_ids[q]] for q in range(n)
        ],
        "duplicate_token": [
            [k for k in range(q) if token_ids[k] == token_ids[q]] for q in range(n)
        ],
        "separator": [[k for k in separators if 0 < k < q] for q in range(n)],
        "segment_start": [[k for k in starts if k < q] for q in range(n)],
    }
    for back in OFFSETS:
        found["offset", back] = [[q - back] if q >= back else [] for q in range(n)]
    return found


def by_loops(a, token_ids, tokens, period=None):
    """Returns the statistics of a head that are defined. a: nested lists (T, T). tokens: the text
    of each token. period: of a prompt, 0 for a text; None: all statistics, as on whole text."""
    n = len(a)

    def nats(row):
        return -sum(w * math.log(w) for w in row if w > 0)

    found = {
        "entropy": fmean(nats(a[q]) / math.log(q + 1) for q in range(1, n)),
        "distance": fmean(sum(a[q][k] * (q - k) for k in range(q + 1)) for q in range(n)),
    }
    for key, of_queries in targets(token_ids, tokens).items():
        weights = [sum(a[q][k] for k in keys) for q, keys in enumerate(of_queries) if keys]
        if weights:
            found[key] = fmean(weights)
    offsets = [found.pop(key) for key in list(found) if key[0] == "offset"]
    if offsets:
        found["offset"] = max(offsets)
    undefined = {None: (), 0: ("induction", "duplicate_token")}
    for key in undefined.get(period, ("separator", "segment_start")):
        found.pop(key, None)
    return found
