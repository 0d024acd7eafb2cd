"""Text from a trained model.

    python generate.py checkpoint=runs/NAME prompt="The ferry bell"
    python generate.py checkpoint=DIR prompt="Once" temperature=0 num_tokens=50

`checkpoint` is a run, one of its checkpoints, or a Hugging Face GPT-2 directory.
"""

import codecs
import math
import sys
from dataclasses import dataclass, field

from training.command import settings_command
from training.config import Problem, refuse


@dataclass
class GenerateConfig:
    """python generate.py checkpoint=runs/NAME prompt="The ferry bell" [KEY=VALUE ...]"""

    checkpoint: str = field(
        metadata={"help": "a run (its last checkpoint), a checkpoint, a Hugging Face directory"}
    )
    prompt: str = field(default="The", metadata={"help": "the text to continue"})
    num_tokens: int = field(default=100, metadata={"help": "how many tokens to add"})
    num_samples: int = field(default=1, metadata={"help": "how many continuations"})
    temperature: float = field(default=0.8, metadata={"help": "0: always the likeliest token"})
    top_k: int | None = field(default=50, metadata={"help": "draw from the k likeliest; null: all"})
    seed: int = field(default=0, metadata={"help": "start of the random draws"})
    device: str = field(default="auto", metadata={"help": "auto | cpu | cuda | mps"})
    debug: bool = field(default=False, metadata={"help": "true: errors with their traceback"})

    def problems(self) -> list[Problem]:
        """What does not fit: (key, value, cause, fix) for each problem; empty when all is well."""
        found = []
        for key in ("num_tokens", "num_samples"):
            if getattr(self, key) < 1:
                found.append((key, getattr(self, key), "must be at least 1", "use 1 or more"))
        if not 0 <= self.temperature < math.inf:
            found.append(("temperature", self.temperature, "must not be negative", "use 0 to 1"))
        if self.top_k is not None and self.top_k < 1:
            found.append(("top_k", self.top_k, "must be at least 1", "use 50, or null for all"))
        if self.device not in ("auto", "cpu", "cuda", "mps"):
            found.append(("device", self.device, "no such device", "use auto, cpu, cuda or mps"))
        return found


@settings_command(GenerateConfig)
def main(settings: GenerateConfig) -> None:
    import torch

    from data import get_tokenizer
    from training import device
    from training.hf import load_any

    refuse(device.check(settings.device))
    place = device.prepare(settings.device, settings.seed)
    model, state = load_any(settings.checkpoint)
    data = state.settings["data"] if state else {"tokenizer": "gpt2", "max_length": None}
    tokenizer = get_tokenizer(data["tokenizer"])
    window = data["max_length"]  # positions beyond it were never trained
    model.to(place)

    prompt_ids = tokenizer.encode(settings.prompt, allowed_special="all") or [tokenizer.eot_token]
    generator = torch.Generator().manual_seed(settings.seed)
    for number in range(settings.num_samples):
        if number > 0:
            print("\n---")
        print(settings.prompt, end="", flush=True)
        # A character may be spread over several tokens: print it when its last byte is there.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in model.generate(
            torch.tensor([prompt_ids], device=place),
            settings.num_tokens,
            settings.temperature,
            settings.top_k,
            window,
            generator,
        ):
            if (token := int(token)) == tokenizer.eot_token:
                break
            if token < tokenizer.n_vocab:  # a padded vocabulary has ids that stand for nothing
                print(
                    decoder.decode(tokenizer.decode_single_token_bytes(token)), end="", flush=True
                )
        print(decoder.decode(b"", final=True))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
