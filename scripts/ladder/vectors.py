"""Steps 1 to 3 of the ladder: text, tokens, windows, vectors."""

import torch
from torch import Tensor, nn

from data import GPTDatasetV1, create_dataloader, get_tokenizer
from scripts.ladder.printing import show, step

TEXT = "The old ferry bell rang twice, and Wenna ran to the boat."
INPUTS = [  # the vectors of the first six tokens
    [0.43, 0.15, 0.89],
    [0.55, 0.87, 0.66],
    [0.57, 0.85, 0.64],
    [0.22, 0.58, 0.33],
    [0.77, 0.25, 0.10],
    [0.05, 0.80, 0.55],
]


@step(1)
def text_to_tokens() -> None:
    """From text to tokens.

    A model computes with numbers. A tokenizer splits the text into tokens and gives each token its
    number in the vocabulary, the token id. GPT-2's vocabulary has 50,257 tokens. A frequent word is
    one token, together with the space before it. A rare word, such as a name, is several tokens.
    """
    tokenizer = get_tokenizer("gpt2")
    ids = tokenizer.encode(TEXT)
    print(TEXT)
    print(f"{len(TEXT)} characters, {len(ids)} tokens of {tokenizer.n_vocab:,}:\n")
    for i in ids:
        print(f"{i:>7}  {tokenizer.decode([i])!r}")
    print()


@step(2)
def tokens_to_windows() -> Tensor:
    """From tokens to windows and batches.

    The model learns to predict the next token. A window has max_length input tokens, and the target
    of each is the token after it, so one window contains max_length predictions. The next window
    starts `stride` tokens later: with stride = max_length, windows do not overlap. A data loader
    returns batches of windows. In training it shuffles them.
    """
    tokenizer = get_tokenizer("gpt2")
    for input_ids, target_ids in GPTDatasetV1(TEXT, tokenizer, max_length=6, stride=6):
        print("input ", "".join(f"{tokenizer.decode([i])!r:>10}" for i in input_ids))
        print("target", "".join(f"{tokenizer.decode([i])!r:>10}" for i in target_ids), end="\n\n")
    overlapping = GPTDatasetV1(TEXT, tokenizer, max_length=6, stride=1)
    print(f"with stride=1: {len(overlapping)} windows\n")

    loader = create_dataloader(TEXT, batch_size=2, max_length=6, stride=6, shuffle=False)
    input_ids, target_ids = next(iter(loader))  # (B, T) each
    print(f"input_ids {tuple(input_ids.shape)}\n{input_ids}\n")
    return input_ids


@step(3)
def ids_to_vectors(input_ids: Tensor) -> Tensor:
    """From token ids to vectors: token embedding plus position embedding.

    A table has a vector for each token of the vocabulary. A second table has a vector for each
    position in a window; without it, a word would have the same vector at every position. The input
    of the model is the sum of both. Both tables are random at first, and training changes them.
    Here the vectors have three numbers; those of GPT-2 have 768. We set the vectors of six tokens
    so that the sums are the input vectors of the book.
    """
    torch.manual_seed(123)
    token_emb, pos_emb = nn.Embedding(50257, 3), nn.Embedding(6, 3)
    with torch.no_grad():
        token_emb.weight[input_ids[0]] = torch.tensor(INPUTS) - pos_emb.weight

    x = token_emb(input_ids) + pos_emb(torch.arange(6))  # (B, T, d_in)
    show("token_emb(input_ids[0])", token_emb(input_ids[0]))
    show("pos_emb(positions)", pos_emb.weight, rows=range(6))
    show("x[0], the sum", x[0])
    return x.detach()
