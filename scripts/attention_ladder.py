"""Attention step by step: from a text to the block of GPT-2, and five mistakes to avoid.

    python -m scripts.attention_ladder

Each step prints its explanation, its code and the tensors that the code computes, and the next
steps use these tensors. The code of the steps is in scripts/ladder/. The input vectors (step 3) and
the random seeds are those of S. Raschka, Build a Large Language Model (From Scratch), chapter 3, so
you can compare the figures with the book. docs/tutorial.ipynb continues with training.

Shapes: B windows in a batch, T query tokens, S key tokens (here the same tokens), H heads,
D head_dim (width of a head), d_in and d_out width of the input and of the output vectors.
"""

from clearhead.config.command_line import ScriptConfig, settings_command
from scripts.ladder import formulas, mistakes, modules, vectors


class LadderConfig(ScriptConfig):
    """python -m scripts.attention_ladder

    Attention in 15 small steps: the explanation, the code and the tensors of each.
    """


@settings_command(LadderConfig)
def main(settings: LadderConfig) -> None:
    print(__doc__)
    vectors.text_to_tokens()
    input_ids = vectors.tokens_to_windows()
    x = vectors.ids_to_vectors(input_ids)  # (B, T, d_in)

    formulas.dot_products(x[0])
    queries, keys, values = formulas.projections(x[0])
    attn_scores = formulas.scores(queries, keys)
    masked_scores = formulas.causal(attn_scores)
    attn_weights = formulas.softmax(attn_scores, masked_scores)
    context_vec = formulas.weighted_sum(attn_weights, values)

    modules.one_head(x, context_vec)
    wrapper = modules.several_heads(x)
    split = modules.weight_split(x, wrapper)
    modules.index_notation(x, split)
    modules.in_a_block(x)

    mistakes.five_mistakes(x, wrapper, split)


if __name__ == "__main__":
    main()
