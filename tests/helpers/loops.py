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


def by_loops(a, token_ids, tokens, period=None, sees=lambda q, k: True, has_sink=False):
    """Returns the statistics of a head that are defined. a: nested lists (T, T). tokens: the text
    of each token. period: of a prompt, 0 for a text; None: all statistics, as on whole text.
    sees(q, k): whether the mask shows the key k <= q to the query. has_sink: whether rows sum to
    less than 1."""
    n = len(a)
    keys_of = [[k for k in range(q + 1) if sees(q, k)] for q in range(n)]

    def nats(row):
        return -sum(w / sum(row) * math.log(w / sum(row)) for w in row if w > 0)

    rows = [q for q in range(n) if sum(a[q])]
    far = [sum(a[q][k] * (q - k) for k in range(q + 1)) / sum(a[q]) for q in rows]
    even = [nats(a[q]) / math.log(len(keys_of[q])) for q in rows if len(keys_of[q]) > 1]
    found = {"entropy": fmean(even), "distance": fmean(far)}
    if has_sink:
        found["learned_sink"] = fmean(1 - sum(row) for row in a)
    for key, of_queries in targets(token_ids, tokens).items():
        visible = [{*keys} & {*keys_of[q]} for q, keys in enumerate(of_queries)]
        weights = [sum(a[q][k] for k in keys) for q, keys in enumerate(visible) if keys]
        if weights:
            found[key] = fmean(weights)
    offsets = [found.pop(key) for key in list(found) if key[0] == "offset"]
    if offsets:
        found["offset"] = max(offsets)
    undefined = {None: (), 0: ("induction", "duplicate_token")}
    for key in undefined.get(period, ("separator", "segment_start")):
        found.pop(key, None)
    return found
