"""Continue texts with a model: strings in, pieces of text out.

texts = TextGenerator(model, tokenizer, window=1024, max_new_tokens=100, batch_size=2)
for pieces in texts.continuations(["The ferry bell", "Once"]):
    print("".join(pieces))
"""

import codecs
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from inference import decoding
from inference.cache import KVCache
from inference.decoding import Sampling
from inference.packed_weights import pack_weights
from model import GPT

if TYPE_CHECKING:
    import tiktoken


class TextGenerator:
    """Continues texts in batches, always with the same settings.

    The model's weights are packed in `dtype`: it cannot be trained or saved after that. window: how
    many tokens are read at most. ignore_end: continue after an end-of-text token. compile: compiles
    a decoding step, for example torch.compile.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: "tiktoken.Encoding",
        window: int,
        max_new_tokens: int,
        batch_size: int,
        sampling: Sampling = Sampling(),
        dtype: torch.dtype = torch.float32,
        ignore_end: bool = False,
        compile: Callable | None = None,
    ):
        self.model = pack_weights(model, dtype, batch_size, to_compile=compile is not None)
        self.tokenizer, self.sampling, self.window = tokenizer, sampling, window
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.end = None if ignore_end else tokenizer.eot_token
        self.cache = KVCache(window, compile) if compile else None
        self.num_texts = 0  # so far: each has its own random draws

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt; an empty one begins a text."""
        return self.tokenizer.encode(prompt, allowed_special="all") or [self.tokenizer.eot_token]

    def continuations(self, prompts: list[str]) -> list[Iterator[str]]:
        """The pieces of text that follow each of up to batch_size prompts.

        All texts are generated together while the pieces of the first are read; those of the others
        are complete then.
        """
        ids = [self.encode(prompt) for prompt in prompts]
        if self.cache:  # compiled code has one shape
            ids += ids[:1] * (self.batch_size - len(ids))
        steps = decoding.generate(
            self.model,
            ids,
            self.max_new_tokens,
            self.sampling,
            self.window,
            end=self.end,
            known=self.tokenizer.n_vocab,
            first=self.num_texts,
            cache=self.cache,
        )
        self.num_texts += len(prompts)
        rows: list[list[int]] = [[] for _ in ids]

        def first_row() -> Iterator[int]:
            for tokens in steps:
                for row, token in zip(rows, tokens, strict=True):
                    if token is not None:
                        row.append(token)
                if tokens[0] is not None:
                    yield tokens[0]

        return [self.decode(row) for row in (first_row(), *rows[1 : len(prompts)])]

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        """Tokens as text. A character of several tokens comes with the last one."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            if token != self.end:
                yield decoder.decode(self.tokenizer.decode_single_token_bytes(token))
        yield decoder.decode(b"", final=True)
