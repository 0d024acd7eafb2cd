"""The last step of the ladder: five mistakes that run without an error.

Mistakes 1 to 4 compute attention weights from queries (..., T, D) and keys (..., S, D). Mistake 5
is a kernel, as in attention.py.
"""

import math

import torch
from torch import Tensor

from attention import MultiHeadAttention, causal_attn_weights, causal_mask
from scripts.ladder.modules import MultiHeadWrapper
from scripts.ladder.printing import WORDS, body, print_code, print_docstring, show


def masked(attn_scores: Tensor) -> Tensor:
    allowed = causal_mask(*attn_scores.shape[-2:], attn_scores.device)
    return attn_scores.masked_fill(~allowed, float("-inf"))


def scale_of_all_heads(queries: Tensor, keys: Tensor) -> Tensor:
    """Scores are divided by sqrt(d_out), with d_out = H * D, and not by sqrt(D).

    Scores are too small by a factor of sqrt(H), so the weights are too even.
    """
    d_out = queries.shape[-3] * queries.shape[-1]
    return masked(queries @ keys.mT / math.sqrt(d_out)).softmax(dim=-1)


def softmax_over_queries(queries: Tensor, keys: Tensor) -> Tensor:
    """The softmax is taken over the queries, dim=-2, and not over the keys, dim=-1.

    Each column sums to 1. A row may sum to less or to more than 1.
    """
    return masked(queries @ keys.mT / math.sqrt(queries.shape[-1])).softmax(dim=-2)


def mask_not_assigned(queries: Tensor, keys: Tensor) -> Tensor:
    """The mask is computed, but the result of masked_fill is not assigned.

    masked_fill returns a new tensor (masked_fill_ would change its own). Tokens attend to later
    tokens. In training the loss is far too low, because the model can read its targets.
    """
    attn_scores = queries @ keys.mT / math.sqrt(queries.shape[-1])
    masked(attn_scores)  # right: attn_scores = masked(attn_scores)
    return attn_scores.softmax(dim=-1)


def roles_exchanged(queries: Tensor, keys: Tensor) -> Tensor:
    """Keys are multiplied by the transposed queries, and not queries by the transposed keys.

    Row t has the scores of key t with all queries. The rows still sum to 1.
    """
    return masked(keys @ queries.mT / math.sqrt(queries.shape[-1])).softmax(dim=-1)


def wrapper_scale(queries: Tensor, keys: Tensor, values: Tensor, dropout_p: float = 0.0) -> Tensor:
    """A wrapper whose heads divide by the width of all heads, and not by their own width.

    Each head looks right. Only the comparison with the weight split shows the difference.
    """
    d_out = queries.shape[1] * queries.shape[-1]
    heads = zip(queries.unbind(1), keys.unbind(1), values.unbind(1), strict=True)
    context_vecs = [masked(q @ k.mT / math.sqrt(d_out)).softmax(dim=-1) @ v for q, k, v in heads]
    return torch.stack(context_vecs, dim=1)


# Each mistake, and the test of this repository that fails if attention.py makes it.
MISTAKES = {
    scale_of_all_heads: "tests/test_attention.py::test_attention_weights_are_the_definition",
    softmax_over_queries: "tests/test_attention.py::test_attention_weights_are_the_definition",
    mask_not_assigned: "tests/test_attention.py::test_attention_weights_are_the_definition",
    roles_exchanged: "tests/test_attention.py::test_attention_weights_are_the_definition",
    wrapper_scale: "tests/test_attention.py::test_module_equals_separate_heads",
}


def five_mistakes(x: Tensor, wrapper: MultiHeadWrapper, split: MultiHeadAttention) -> None:
    """Five mistakes that run without an error.

    All shapes are right and the model trains, so only the numbers are wrong. The queries, keys and
    values are those of step 12; masked() is the mask of step 7. A test compares the numbers with a
    definition in plain Python, or with a second implementation; its name is below each mistake.
    """
    print_docstring(f"{'=' * 80}\nStep 15", five_mistakes)
    queries, keys, _ = split.project(x)  # (B, H, T, D)
    for number, (mistake, test) in enumerate(MISTAKES.items(), start=1):
        print_docstring(f"{'-' * 80}\nMistake {number}", mistake)
        print_code(body(mistake))
        if mistake is wrapper_scale:
            outputs = torch.stack([split(x, wrapper_scale)[0], wrapper(x)[0]], dim=1)
            show("context_vec of old, both heads", outputs[1], rows=["wrong", "right"])
            show("context_vec of twice, both heads", outputs[5], rows=["wrong", "right"])
        else:
            weights = [mistake(queries, keys), causal_attn_weights(queries, keys)]
            of_head_1 = torch.stack(weights, dim=-2)[0, 1]  # (T, 2, S)
            rows = torch.cat([of_head_1, of_head_1.sum(dim=-1, keepdim=True)], dim=-1)
            show("attn_weights of old, head 1", rows[1], [*WORDS, "sum"], ["wrong", "right"])
            show("attn_weights of twice, head 1", rows[5], [*WORDS, "sum"], ["wrong", "right"])
        if mistake is scale_of_all_heads:
            published_row()
        print(f"The test that finds it: {test}\n")


def published_row() -> None:
    """Prints a row that a published tutorial shows, which has mistake 1, and the right row."""
    torch.manual_seed(123)
    x, attention = torch.randn(2, 5, 6), MultiHeadAttention(6, 6, 5, 0.0, num_heads=2)
    wrong = attention(x, lambda q, k, v, dropout_p: scale_of_all_heads(q, k) @ v)
    print(
        "A published tutorial prints the wrong row. Its input is torch.randn(2, 5, 6), seed 123:\n"
    )
    rows = torch.stack([wrong[0, 1], attention(x)[0, 1]])
    show("MultiHeadAttention(6, 6, 5, 0.0, num_heads=2)(x)[0, 1]", rows, rows=["wrong", "right"])
