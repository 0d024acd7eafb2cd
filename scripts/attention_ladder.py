"""Attention in nine steps, from one dot product to heatmaps of trained heads.

    python -m scripts.attention_ladder

Each step prints its reason, its formula and its tensors, so the code can be read next to its
output. Attention computes a new vector for each token, here for each word: its context vector.

    query token    the token whose context vector is computed
    key token      a token that the query token attends to
    query, key     vectors of a token; a score is the dot product of the query of the query token
                   and the key of the key token
    weight         a score after the softmax; the weights of a query token sum to one
    value          vector of a token; the context vector is the sum of weight times value

In steps 1 to 3 the vector of a word is its query, its key and its value.

Shapes: B batch, T query tokens, S key tokens (here the same six words), d_in width of an
input, H heads, D head_dim, d_out = H * D.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import MultiHeadAttention, causal_attn_weights, causal_mask, explicit
from clearhead.config.command_line import ScriptConfig, settings_command

WORDS = ["The", "old", "ferry", "bell", "rang", "twice"]
# Each word as a vector of three numbers. A real model learns vectors of hundreds of numbers.
INPUTS = [
    [0.43, 0.15, 0.89],
    [0.55, 0.87, 0.66],
    [0.57, 0.85, 0.64],
    [0.22, 0.58, 0.33],
    [0.77, 0.25, 0.10],
    [0.05, 0.80, 0.55],
]
QUERY = 1  # "old", the query token of steps 1 and 2
SHADES = ".:-=+*#%@"  # from weight 0 to weight 1


def explain(number: int, title: str, why: str, formula: str) -> None:
    print(f"{'-' * 80}\nStep {number}: {title}\n\n{why}\n\n    {formula}\n")


def show(name: str, tensor: Tensor, rows=WORDS, columns=()) -> None:
    """Prints a tensor with its name and shape, a line for each row, one matrix after another."""
    print(f"{name} {tuple(tensor.shape)}")
    if columns:
        print(" " * 10 + "".join(f"{word:>9}" for word in columns))
    matrix = tensor.reshape(-1, tensor.shape[-1])
    for i, row in enumerate(matrix.tolist()):
        if tensor.dim() > 2 and i % tensor.shape[-2] == 0:
            print(f"  [{i // tensor.shape[-2]}]")
        print(f"{rows[i % len(rows)]:<10}" + "".join(f"{number:9.4f}" for number in row))
    print()


def show_shape(code: str, tensor: Tensor, meaning: str) -> Tensor:
    """Prints a line of code with the shape of its result; returns the result."""
    print(f"    {code:<28}{tuple(tensor.shape)!s:<12}{meaning}")
    return tensor


def show_heatmaps(title: str, attn_weights: Tensor) -> None:
    """Prints a heatmap of each head, side by side. attn_weights (H, T, S)."""
    print(title)
    header = "".join(f"{word:<6}" for word in WORDS)
    print("      " + "".join(f"{f'head {head}':<38}" for head in range(len(attn_weights))).rstrip())
    print("      " + "  ".join([header] * len(attn_weights)).rstrip())
    for t, word in enumerate(WORDS):
        rows = attn_weights[:, t, : t + 1].sqrt()  # the keys after t are masked
        cells = ["".join(SHADES[round(8 * root)] * 6 for root in row) for row in rows.tolist()]
        print(f"{word:<6}" + "".join(f"{line:<38}" for line in cells).rstrip())
    print()


def one_query(x: Tensor) -> Tensor:
    why = """\
Which tokens matter for one token, the query token? Its dot product with each key token is a simple
score: the more two vectors point in the same direction, and the longer they are, the larger it is.
The query token is "old"."""
    explain(1, "dot products as scores", why, "attn_scores[s] = x[query] . x[s]")
    attn_scores = x @ x[QUERY]  # (S,)
    show("attn_scores", attn_scores[None], [WORDS[QUERY]], WORDS)
    return attn_scores


def softmax(x: Tensor, attn_scores: Tensor) -> None:
    why = """\
Softmax turns the scores into weights, which are positive and sum to one. The context vector is the
average of the key tokens' vectors with these weights."""
    formula = "attn_weights = softmax(attn_scores);  context_vec = sum of attn_weights[s] x[s]"
    explain(2, "softmax and the context vector", why, formula)
    attn_weights = torch.softmax(attn_scores, dim=-1)  # (S,)
    show("attn_weights", attn_weights[None], [WORDS[QUERY]], WORDS)
    print(f"sum of the weights: {attn_weights.sum():.4f}\n")
    context_vec = attn_weights @ x  # (d_in,)
    show("context_vec", context_vec[None], [WORDS[QUERY]])


def all_queries(x: Tensor) -> None:
    why = """\
Each token is the query token of one row. One matrix product computes all dot products: row t holds
the scores of query token t, column s those of key token s. The softmax is taken along each row."""
    explain(3, "all query tokens in one matrix product", why, "context_vec = softmax(x x^T) x")
    attn_scores = x @ x.T  # (T, S)
    attn_weights = torch.softmax(attn_scores, dim=-1)  # (T, S), over the keys
    show("attn_weights", attn_weights, columns=WORDS)
    show("context_vec", attn_weights @ x)  # (T, d_in); the row of "old" is the one of step 2


def trainable(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    why = """\
So far nothing can be learned, and the scores are symmetric. Three matrices, which training changes,
give each token a query, a key and a value. A score is now the query of one token times the key of
another.

A score is a sum of D products. If the entries of queries and keys have variance 1, the scores have
variance D. Divided by sqrt(D) they have variance 1 at any width. Larger scores would make the
weights nearly 0 or 1, where the gradient of the softmax is nearly 0."""
    formula = "queries = x W_query;  context_vec = softmax(queries keys^T / sqrt(D)) values"
    explain(4, "queries, keys and values; scaled scores", why, formula)
    d_in, head_dim = x.shape[-1], 2
    torch.manual_seed(123)
    W_query = torch.rand(d_in, head_dim)  # (d_in, D), like the next two
    W_key = torch.rand(d_in, head_dim)
    W_value = torch.rand(d_in, head_dim)
    queries, keys, values = x @ W_query, x @ W_key, x @ W_value  # (T, D) each
    show("queries", queries)
    show("keys", keys)
    show("values", values)
    attn_scores = queries @ keys.T  # (T, S)
    show("attn_scores, before scaling", attn_scores, columns=WORDS)
    attn_scores = attn_scores / math.sqrt(head_dim)
    show("attn_scores, divided by sqrt(2)", attn_scores, columns=WORDS)
    attn_weights = torch.softmax(attn_scores, dim=-1)  # (T, S)
    show("attn_weights", attn_weights, columns=WORDS)
    show("context_vec", attn_weights @ values)  # (T, D)
    return queries, keys, values


def causal(queries: Tensor, keys: Tensor) -> Tensor:
    why = """\
GPT predicts the next token, so a token must not attend to the tokens after it. Their scores are set
to minus infinity before the softmax: exp(-inf) is 0, and each row still sums to one. If weights
were set to zero after the softmax, rows would sum to less than one."""
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
    print(f"equal to attention.causal_attn_weights: {same}\n")
    return attn_weights


def dropout(attn_weights: Tensor) -> None:
    why = """\
In training, dropout sets random weights to zero, so that the model does not depend on single
tokens. The other weights are divided by 1 - p, so the expected sum of a row is still one. After
training there is no dropout."""
    formula = "attn_weights *= kept / (1 - p),  kept = 1 with probability 1 - p, else 0"
    explain(6, "dropout on the weights, here with p = 0.5", why, formula)
    torch.manual_seed(123)
    show("attn_weights", F.dropout(attn_weights, p=0.5), columns=WORDS)


def several_heads(x: Tensor) -> None:
    why = """\
A head has one row of weights for each query token. With several heads, each with separate matrices,
a token can attend to different tokens for different reasons. The context vectors of the heads are
concatenated. The code first loops over the heads. Then it joins the matrices of all heads into one
and splits its output into heads: one large matrix product instead of many small ones."""
    formula = "context_vec = [head_1, ..., head_H],  head_h = step 5 with the matrices of head h"
    explain(7, "several heads: a loop, then one matrix that is split into heads", why, formula)
    num_tokens, d_in, num_heads, head_dim = *x.shape, 2, 2
    torch.manual_seed(123)
    W_query, W_key, W_value = torch.rand(3, num_heads, d_in, head_dim)  # (H, d_in, D) each

    heads = []
    for h in range(num_heads):
        attn_weights = causal_attn_weights(x @ W_query[h], x @ W_key[h])  # (T, S)
        heads.append(attn_weights @ (x @ W_value[h]))  # (T, D)
    from_loop = torch.cat(heads, dim=-1)  # (T, H * D)
    show("context_vec, from the loop", from_loop)

    def joined(W: Tensor) -> Tensor:
        return torch.cat(W.unbind(0), dim=-1)  # (d_in, H * D): head 0's columns, then head 1's

    print("The same with joined matrices, line by line:\n")
    split = (num_tokens, num_heads, head_dim)
    queries = show_shape("queries = x @ W_query", x @ joined(W_query), "(T, H * D)")
    queries = show_shape("  .view(T, H, D)", queries.view(split), "(T, H, D): H vectors per row")
    queries = show_shape("  .transpose(0, 1)", queries.transpose(0, 1), "(H, T, D): one per head")
    keys = (x @ joined(W_key)).view(split).transpose(0, 1)  # (H, T, D), like the values
    values = (x @ joined(W_value)).view(split).transpose(0, 1)
    attn_weights = causal_attn_weights(queries, keys)
    show_shape("attn_weights", attn_weights, "(H, T, S)")
    context_vec = show_shape("attn_weights @ values", attn_weights @ values, "(H, T, D)")
    context_vec = show_shape("  .transpose(0, 1)", context_vec.transpose(0, 1), "(T, H, D)")
    context_vec = show_shape("  .flatten(1)", context_vec.flatten(1), "(T, H * D): concatenated")
    print("\n.view(H, T, D) without the transpose has the same shape but mixes tokens and heads.\n")
    show("attn_weights, one matrix for each head", attn_weights, columns=WORDS)
    show("context_vec, from one matrix", context_vec)
    print(f"equal to the loop: {torch.allclose(from_loop, context_vec, atol=1e-6)}\n")


def the_module(x: Tensor) -> None:
    why = """\
attention.MultiHeadAttention is all of this for a batch of sequences. A last matrix, out_proj, mixes
the outputs of the heads. GPT-2 uses this module. The batch here has the same sentence twice."""
    explain(8, "attention.MultiHeadAttention", why, "output = context_vec W_out + b_out")
    batch = torch.stack([x, x])  # (B, T, d_in): two copies of the sentence
    torch.manual_seed(123)
    attention = MultiHeadAttention(3, 2, 6, 0.0, num_heads=2)
    show("output", attention(batch))  # (B, T, d_out)

    print("""\
A common error is to divide the scores by sqrt(d_out), the width of all heads together, instead of
sqrt(head_dim), the width of one head:

    scores = Q @ K.transpose(-2, -1) / (d_out ** 0.5)       # wrong
    scores = Q @ K.transpose(-2, -1) / (head_dim ** 0.5)    # right

No exception is raised, but the weights are too uniform: the scores are too small by a factor of
sqrt(H). Row 1 of the output for a random input (2, 5, 6), with two heads and d_out = 6:
""")
    torch.manual_seed(123)
    x, attention = torch.randn(2, 5, 6), MultiHeadAttention(6, 6, 5, 0.0, num_heads=2)
    # A kernel is a function of queries, keys and values; `explicit` divides by sqrt(D) itself.
    wrong = attention(x, lambda q, k, v, dropout_p: explicit(q / math.sqrt(2), k, v, dropout_p))
    show("divided by sqrt(d_out)", wrong[0, 1:2], ["wrong"])
    show("divided by sqrt(head_dim)", attention(x)[0, 1:2], ["right"])


def trained_heads(steps: int = 200) -> None:
    why = f"""\
The module is trained for {steps} steps to output the previous token. The inputs are the six words
in random order: a vector of 12 numbers, six for the word and six for the position. The heatmaps
show the weights of both heads for the sentence: row t is query token t, column s is key token s.
Before training attention is nearly uniform. After training both heads are previous-token heads:
each query token attends mostly to the token before it."""
    explain(9, "training, and heatmaps", why, "loss = cross_entropy(output[t], word[t - 1])")
    eye = torch.eye(len(WORDS))

    def inputs(words: Tensor) -> Tensor:
        return torch.cat([eye[words], eye.expand(len(words), -1, -1)], dim=-1)  # (B, T, 12)

    def weights_for_the_sentence() -> Tensor:
        queries, keys, _ = attention.project(inputs(torch.arange(len(WORDS))[None]))
        return causal_attn_weights(queries, keys)[0].detach()  # (H, T, S)

    torch.manual_seed(123)
    attention = MultiHeadAttention(12, 6, 6, 0.0, num_heads=2)
    optimizer = torch.optim.AdamW(attention.parameters(), lr=0.03)
    print(f"weights from 0 to 1 on a square-root scale: {SHADES}; empty: masked\n")
    show_heatmaps("before training", weights_for_the_sentence())
    for step in range(1, steps + 1):
        words = torch.stack([torch.randperm(len(WORDS)) for _ in range(32)])  # (B, T)
        output = attention(inputs(words))  # (B, T, 6): a logit for each word
        loss = F.cross_entropy(output[:, 1:].flatten(0, 1), words[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (1, steps):
            print(f"step {step:>3}  loss {loss.item():.4f}")
    show_heatmaps("\nafter training", weights_for_the_sentence())


class LadderConfig(ScriptConfig):
    """python -m scripts.attention_ladder

    Attention in nine small steps: the reason, the formula and the tensors of each.
    """


@settings_command(LadderConfig)
def main(settings: LadderConfig) -> None:
    x = torch.tensor(INPUTS)  # (T, d_in)
    print(__doc__)
    show("x, the six words", x)
    attn_scores = one_query(x)
    softmax(x, attn_scores)
    all_queries(x)
    queries, keys, _ = trainable(x)
    attn_weights = causal(queries, keys)
    dropout(attn_weights)
    several_heads(x)
    the_module(x)
    trained_heads()


if __name__ == "__main__":
    main()
