"""Prompts and generated ids for tests of decoding."""

from clearhead.models.decoding import Sampling, generate
from helpers.models import random_ids

GREEDY = Sampling(temperature=0)
PROMPTS = [random_ids(B=1, T=n, seed=n)[0].tolist() for n in (3, 12, 1, 30, 7)]  # of 12 positions


def generated_ids(model, prompts, num_tokens, sampling=GREEDY, **options):
    """Returns the generated ids of each prompt, greedy by default."""
    steps = generate(model, prompts, num_tokens, sampling, **options)
    return [list(row) for row in zip(*steps, strict=True)]
