"""scripts/evaluate.py: loss, perplexity and bits per byte with sliding windows."""

import json
import math

import numpy as np
import pytest
import torch
from helpers import TEXT
from helpers.refusals import printed_keys
from helpers.runs import rows, train_in
from helpers.texts import prepare

from clearhead.models.huggingface import to_hf
from clearhead.models.perplexity import ScoredWindows
from clearhead.tokens.encoding import encode_text
from clearhead.tokens.token_stream import TokenStream
from clearhead.tokens.windows import IGNORED
from data import DataConfig, get_tokenizer, load_datasets
from model import GPT, ModelConfig
from scripts.evaluate import main

CONTEXT = 33  # positions of the weights; transformers' windows include the last target
BELL = "A bell rang: “twice”, said the keeper, naïve as ever.\n" * 3


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Returns a folder with texts, token files, Hugging Face directories, and runs/one, a run that
    was trained on the token files."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "bell.txt").write_text(BELL, encoding="utf-8")
    torch.manual_seed(1)
    for name, vocabulary in (("bytes", 257), ("gpt2", 50257)):
        # Larger weights than at the start of training, so that the loss depends on the context.
        model = GPT(ModelConfig(vocabulary, CONTEXT, 16, 2, 2, dropout=0.0, qkv_bias=True))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)
        to_hf(model, folder / name)
    tokens = folder / "tokens"  # nanoGPT's layout
    tokens.mkdir()
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype("<u2")
    ids[:2000].tofile(tokens / "train.bin")
    ids[2000 : 2000 + 20 * 32 + 1].tofile(tokens / "val.bin")  # 20 windows of 32, nothing left
    train_in(folder, f"data.path={tokens}", "trainer.eval_windows=1000", "name=one")
    return folder


@pytest.fixture
def figures(in_process, home):
    """Returns figures(*arguments), which evaluates and returns the content of out=."""

    def run(*arguments):
        code, out, err = in_process(main, home, *arguments, "out=figures.json")
        assert code == 0, err
        found = json.loads((home / "figures.json").read_text())
        assert f"{found['loss']:.4f}" in out
        return found

    return run


def by_the_rule(num_tokens, max_length, stride):
    """Returns the windows by their definition: (start, first scored token, end). The end is after
    the last target."""
    windows, first = [], 1
    while first < num_tokens:
        end = min(max_length + 1 + len(windows) * stride, num_tokens)
        windows.append((max(0, end - max_length - 1), first, end))
        first = end
    return windows


RULES = [(32, 32, 8), (32, 1, 64), (30, 7, 3)]  # in the first, the last window is moved back


@pytest.mark.parametrize(("max_length", "stride", "batch_size"), RULES)
def test_loss_equals_that_of_transformers(figures, home, max_length, stride, batch_size):
    """Tokens that are not scored have the label -100, as in the guide of transformers."""
    from transformers import GPT2LMHeadModel

    ids, total = [256, *BELL.encode()], 0.0
    model = GPT2LMHeadModel.from_pretrained(home / "bytes").eval()
    for begin, first, end in by_the_rule(len(ids), max_length, stride):
        input_ids = torch.tensor([ids[begin:end]])
        labels = input_ids.clone()
        labels[:, : first - begin] = -100
        with torch.no_grad():
            total += float(model(input_ids, labels=labels).loss) * (end - first)
    expected = total / (len(ids) - 1)

    arguments = (f"max_length={max_length}", f"stride={stride}", f"batch_size={batch_size}")
    found = figures("checkpoint=bytes", "data.path=bell.txt", *arguments)
    assert found["loss"] == pytest.approx(expected, abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert (found["tokens"], found["bytes"]) == (len(ids) - 1, len(BELL.encode()))
    assert found["bits_per_byte"] == pytest.approx(expected / math.log(2), abs=2e-5)
    assert found["rule"]["stride"] == stride


@pytest.mark.parametrize("within_documents", [False, True])
def test_each_token_is_scored_once_with_the_specified_context(within_documents):
    """Brute force over documents of 0 to 20 tokens; all tokens are different."""
    ids, end_of_text = [], 999
    for length in (0, 20, 1, 2, 0, 3, 7, *range(4, 14), 0):
        ids += [end_of_text, *range(len(ids), len(ids) + length)]
    stream = TokenStream([np.array(ids[:50], "<u2"), np.array(ids[50:], "<u2")], 1000, end_of_text)
    starts = [n for n, token in enumerate(ids) if token == end_of_text]
    spans = list(zip(starts, [*starts[1:], len(ids)], strict=True))
    spans = spans if within_documents else [(0, len(ids))]
    for max_length, stride in ((1, 1), (4, 4), (5, 3), (6, 1), (40, 9)):
        windows = ScoredWindows(stream, max_length, stride, within_documents)
        expected = []  # (tokens that are read, token that is scored after them)
        for begin, end in spans:
            for window in by_the_rule(end - begin, max_length, stride):
                first, scored, stop = (begin + place for place in window)
                expected += [(ids[first:place], ids[place]) for place in range(scored, stop)]
        found = []
        for first in range(0, len(windows), 3):
            numbers = np.arange(first, min(first + 3, len(windows)))
            for inputs, targets in zip(*windows.batch(numbers), strict=True):
                places = np.flatnonzero(targets != IGNORED)
                found += [(inputs[: place + 1].tolist(), int(targets[place])) for place in places]
        assert found == expected, (max_length, stride)
        assert windows.num_targets == len(expected) == sum(end - begin - 1 for begin, end in spans)


def test_loss_of_a_run_is_its_validation_loss(figures, home):
    """On the files named val, by default."""
    last = rows(home / "runs" / "one")[-1]
    found = figures("checkpoint=runs/one", "data.path=tokens")
    assert (found["step"], found["tokens"]) == (4, 20 * 32)
    assert found["loss"] == pytest.approx(last["val/loss"], abs=1e-6)
    assert found["bits_per_byte"] == pytest.approx(last["val/bits_per_byte"], abs=1e-5)
    assert (found["rule"]["max_length"], found["rule"]["stride"]) == (32, 32)
    assert figures("checkpoint=runs/one", "data.path=tokens", "split=train")["tokens"] == 1999
    # The splits of a text are those of training.
    parts = load_datasets(
        DataConfig.with_defaults(path=str(home / "text.txt"), tokenizer="byte", max_length=32),
        get_tokenizer("byte"),
    )
    for split, part in {"val": parts.val, "train": parts.train}.items():
        tokens = figures("checkpoint=runs/one", "data.path=text.txt", f"split={split}")["tokens"]
        assert tokens == len(part.tokens) - 1


def test_bytes_are_those_of_the_text_with_gpt2_tokens(figures, home):
    text = f"{BELL}<|endoftext|>日本語, {TEXT[:500]}"
    (home / "mixed.txt").write_text(text, encoding="utf-8")
    found = figures("checkpoint=gpt2", "data.path=mixed.txt")
    ids = encode_text(text, get_tokenizer("gpt2"))
    assert found["tokens"] == len(ids)
    assert found["bytes"] == len(text.encode()) - len("<|endoftext|>")
    bits = found["loss"] * found["tokens"] / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits / found["bytes"], rel=1e-12)
    (home / "mixed.txt").write_text(text, encoding="utf-16")
    assert figures("checkpoint=gpt2", "data.path=mixed.txt", "data.encoding=utf-16") == found


def test_refusals_name_the_setting_and_write_nothing(in_process, home):
    (home / "i.txt").write_text("I", encoding="utf-8")
    huge = GPT(ModelConfig(257, CONTEXT, 16, 2, 1, dropout=0.0))
    torch.nn.init.constant_(huge.final_norm.weight, 3e38)
    to_hf(huge, home / "huge")
    prepare(home / "bell.txt", home / "shards", tokenizer="byte")
    for text, (code, key) in {
        "stride=34 max_length=33": (2, "stride"),
        "max_length=34": (2, "max_length"),
        "out=no/figures.json": (2, "out"),
        "data.path=any.txt": (3, "data.path"),
        "data.path=shards checkpoint=gpt2": (3, "data.tokenizer"),
        "split=val data.path=i.txt": (3, "data.path"),
        "checkpoint=huge": (3, "checkpoint"),  # whose loss is not finite
    }.items():
        given = dict(argument.split("=") for argument in text.split())
        values = {"checkpoint": "bytes", "data.path": "bell.txt", "out": "bad.json"} | given
        arguments = [f"{name}={value}" for name, value in values.items()]
        found, out, err = in_process(main, home, *arguments)
        assert (found, out, printed_keys(err)) == (code, "", [key]), text
        assert not (home / "bad.json").exists()
