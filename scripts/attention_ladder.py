"""Attention in eight small steps, from one dot product to the module that trains GPT-2.

    python -m scripts.attention_ladder

Every step says why it is taken, gives its formula and prints its tensors, so the code can be
read next to its output. Step 8 ends with figures that can be compared with published ones.

Shapes: B batch, T query positions, S key positions (here the same six words as T),
d_in width of an input, H heads, D head_dim, d_out = H * D.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import MultiHeadAttention, causal_attn_weights, causal_mask, explicit
from training.config.command_line import ScriptConfig, settings_command

WORDS = ["The", "old", "ferry", "bell", "rang", "twice"]
# Each word as three numbers. Real models learn hundreds; three fit on a line.
INPUTS = [
    [0.43, 0.15, 0.89],
    [0.55, 0.87, 0.66],
    [0.57, 0.85, 0.64],
    [0.22, 0.58, 0.33],
    [0.77, 0.25, 0.10],
    [0.05, 0.80, 0.55],
]
QUERY = 1  # "old", the word that is the query of steps 1 and 2


def explain(number: int, title: str, why: str, formula: str) -> None:
    print(f"{'-' * 80}\nStep {number}: {title}\n\n{why}\n\n    {formula}\n")


def show(name: str, tensor: Tensor, rows=WORDS, columns=()) -> None:
    """Prints a tensor with its name and shape, one line for each row, matrix after matrix."""
    print(f"{name} {tuple(tensor.shape)}")
    if columns:
        print(" " * 10 + "".join(f"{word:>9}" for word in columns))
    matrix = tensor.reshape(-1, tensor.shape[-1])
    for i, row in enumerate(matrix.tolist()):
        if tensor.dim() > 2 and i % tensor.shape[-2] == 0:
            print(f"  [{i // tensor.shape[-2]}]")
        print(f"{rows[i % len(rows)]:<10}" + "".join(f"{number:9.4f}" for number in row))
    print()


def one_query(x: Tensor) -> Tensor:
    why = """\
Attention asks, for one word, how much each word matters to it. A dot product is the simplest
answer: it is large when two vectors point the same way. The word that asks is the query."""
    explain(1, "dot products as scores", why, "attn_scores[s] = x[query] . x[s]")
    attn_scores = x @ x[QUERY]  # (S,)
    show("attn_scores", attn_scores[None], [WORDS[QUERY]], WORDS)
    return attn_scores


def softmax(x: Tensor, attn_scores: Tensor) -> None:
    why = """\
Softmax turns the scores into weights that are positive and sum to one. Weighted with them, the
inputs are averaged: the context vector is the word seen together with what matters to it."""
    formula = "attn_weights = softmax(attn_scores);  context_vec = sum of attn_weights[s] x[s]"
    explain(2, "softmax, and a context vector", why, formula)
    attn_weights = torch.softmax(attn_scores, dim=-1)  # (S,)
    show("attn_weights", attn_weights[None], [WORDS[QUERY]], WORDS)
    print(f"sum of the weights: {attn_weights.sum():.4f}\n")
    context_vec = attn_weights @ x  # (d_in,)
    show("context_vec", context_vec[None], [WORDS[QUERY]])


def all_queries(x: Tensor) -> None:
    why = """\
Every word may ask, and all at once: a matrix product is a table of dot products. Row t holds
the weights of query t, so the softmax runs along the row, over the keys."""
    explain(3, "all queries in one matrix product", why, "context_vec = softmax(x x^T) x")
    attn_scores = x @ x.T  # (T, S)
    attn_weights = torch.softmax(attn_scores, dim=-1)  # (T, S), over the keys
    show("attn_weights", attn_weights, columns=WORDS)
    show("context_vec", attn_weights @ x)  # (T, d_in); the row of "old" is the one of step 2


def trainable(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    why = """\
So far nothing can be learned. Three matrices let a word play three parts: what it looks for
(query), what it is found by (key), what it hands over (value). A score sums D products, so it
spreads with sqrt(D); dividing by that keeps the softmax soft at any width."""
    formula = "queries = x W_query;  context_vec = softmax(queries keys^T / sqrt(D)) values"
    explain(4, "trainable queries, keys and values, and scaled scores", why, formula)
    d_in, head_dim = x.shape[-1], 2
    torch.manual_seed(123)
    W_query = torch.rand(d_in, head_dim)  # (d_in, D); so are the next two
    W_key = torch.rand(d_in, head_dim)
    W_value = torch.rand(d_in, head_dim)
    queries, keys, values = x @ W_query, x @ W_key, x @ W_value  # (T, D) each
    show("queries", queries)
    attn_scores = queries @ keys.T  # (T, S)
    attn_weights = torch.softmax(attn_scores / math.sqrt(head_dim), dim=-1)  # (T, S)
    show("attn_weights", attn_weights, columns=WORDS)
    show("context_vec", attn_weights @ values)  # (T, D)
    return queries, keys, values


def causal(queries: Tensor, keys: Tensor) -> Tensor:
    why = """\
GPT predicts the next word, so a word must not see the ones after it. Their scores become minus
infinity *before* the softmax: exp(-inf) is 0, and what remains still sums to one. Zeroing
weights afterwards would leave rows that sum to less."""
    formula = "attn_weights = softmax(mask(queries keys^T / sqrt(D))),  mask: s > t becomes -inf"
    explain(5, "the causal mask", why, formula)
    attn_scores = queries @ keys.T / math.sqrt(queries.shape[-1])  # (T, S)
    mask = causal_mask(len(queries), len(keys), queries.device)  # (T, S), True where allowed
    attn_scores = attn_scores.masked_fill(~mask, float("-inf"))
    show("attn_scores", attn_scores, columns=WORDS)
    attn_weights = torch.softmax(attn_scores, dim=-1)  # (T, S)
    show("attn_weights", attn_weights, columns=WORDS)
    show("sum of each row", attn_weights.sum(dim=-1, keepdim=True))
    # These lines are attention.causal_attn_weights, which the next steps call.
    same = torch.equal(attn_weights, causal_attn_weights(queries, keys))
    print(f"the same as attention.causal_attn_weights: {same}\n")
    return attn_weights


def dropout(attn_weights: Tensor) -> None:
    why = """\
While training, some weights are dropped at random, so that no word relies on one other word.
The kept ones grow by 1 / (1 - p): a row sums to one on average. After training, p is 0."""
    formula = "attn_weights *= kept / (1 - p),  kept = 1 with probability 1 - p, else 0"
    explain(6, "dropout on the weights, here with p = 0.5", why, formula)
    torch.manual_seed(123)
    show("attn_weights", F.dropout(attn_weights, p=0.5), columns=WORDS)


def several_heads(x: Tensor) -> None:
    why = """\
One softmax row is one opinion. Several heads, each with its own three matrices, can look for
different things; their context vectors are concatenated. First as a loop over the heads, then
with their matrices joined into one, whose output is viewed as heads: one big product, not many
small ones."""
    formula = "context_vec = [head_1, ..., head_H],  head_h = step 5 with matrices of its own"
    explain(7, "several heads: a loop, then one matrix viewed as heads", why, formula)
    num_tokens, d_in, num_heads, head_dim = *x.shape, 2, 2
    torch.manual_seed(123)
    W_query, W_key, W_value = torch.rand(3, num_heads, d_in, head_dim)  # (H, d_in, D) each

    heads = []
    for h in range(num_heads):
        attn_weights = causal_attn_weights(x @ W_query[h], x @ W_key[h])  # (T, S)
        heads.append(attn_weights @ (x @ W_value[h]))  # (T, D)
    from_loop = torch.cat(heads, dim=-1)  # (T, H * D)
    show("context_vec, from the loop", from_loop)

    def project(W: Tensor) -> Tensor:
        joined = torch.cat(W.unbind(0), dim=-1)  # (d_in, H * D): head 0's columns, then head 1's
        return (x @ joined).view(num_tokens, num_heads, head_dim).transpose(0, 1)  # (H, T, D)

    attn_weights = causal_attn_weights(project(W_query), project(W_key))  # (H, T, S)
    show("attn_weights, one matrix for each head", attn_weights, columns=WORDS)
    context_vec = attn_weights @ project(W_value)  # (H, T, D)
    context_vec = context_vec.transpose(0, 1).flatten(1)  # (T, H * D)
    show("context_vec, from one matrix viewed as heads", context_vec)
    print(f"both are equal: {torch.allclose(from_loop, context_vec, atol=1e-6)}\n")


def the_real_one(x: Tensor) -> None:
    why = """\
attention.MultiHeadAttention is all of this for a batch of sequences, with one output matrix that
mixes what the heads found. These are the lines that train GPT-2."""
    formula = "output = context_vec W_out + b_out"
    explain(8, "attention.MultiHeadAttention", why, formula)
    batch = torch.stack([x, x])  # (B, T, d_in): two copies of the sentence
    torch.manual_seed(123)
    attention = MultiHeadAttention(3, 2, 6, 0.0, num_heads=2)
    with torch.no_grad():
        show("output", attention(batch))  # (B, T, d_out)

    print("""\
The width to scale by is that of *one head*, D. A published tutorial divides by sqrt(d_out), the
width of all heads together. Nothing fails, the numbers are just others. On its input, row 2:
""")
    torch.manual_seed(123)
    x = torch.randn(2, 5, 6)
    attention = MultiHeadAttention(6, 6, 5, 0.0, num_heads=2)
    d_out, head_dim = attention.num_heads * attention.head_dim, attention.head_dim
    with torch.no_grad():
        right = attention(x)  # (B, T, d_out)
        # A kernel is a function of queries, keys and values; explicit divides by sqrt(D) already.
        too_small = math.sqrt(head_dim / d_out)
        attention.kernel = lambda q, k, v, dropout_p: explicit(q * too_small, k, v, dropout_p)
        wrong = attention(x)
    show("divided by sqrt(d_out), as in the tutorial", wrong[0, 1:2], ["wrong"])
    show("divided by sqrt(head_dim), as the definition says", right[0, 1:2], ["right"])


class LadderConfig(ScriptConfig):
    """python -m scripts.attention_ladder

    Attention in eight small steps: what each is for, its formula, its tensors.
    """


@settings_command(LadderConfig)
def main(settings: LadderConfig) -> None:
    x = torch.tensor(INPUTS)  # (T, d_in)
    show("x, the six words", x)
    attn_scores = one_query(x)
    softmax(x, attn_scores)
    all_queries(x)
    queries, keys, _ = trainable(x)
    attn_weights = causal(queries, keys)
    dropout(attn_weights)
    several_heads(x)
    the_real_one(x)


if __name__ == "__main__":
    main()
