"""generate.py as it is used: several prompts and samples, a loop of prompts, where text ends."""

import io
import os
import subprocess
import sys

import pytest
import torch
from helpers import NO_NETWORK, REPOSITORY, TINY

import generate
from frozen import Packed
from training.hf import load_reader

LINE = "The quick fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with runs/run, a model over bytes that has seen a few words."""
    from train import Trainer
    from training.command import compose

    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text("the quick fox jumps over the dog\n" * 60, encoding="utf-8")
    before = os.getcwd()
    os.chdir(folder)
    try:
        run = Trainer(compose([*TINY, "data.path=text.txt", "name=run", "trainer.max_steps=40"]))
        run.train()
        run.close(0)
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def written(in_process, folder, capsys):
    """written(*arguments) -> what the command prints."""

    def run(*arguments):
        capsys.readouterr()
        code, out, err = in_process(
            generate.main, folder, "checkpoint=runs/run", "max_new_tokens=12", *arguments
        )
        assert (code, err) == (0, "")
        return out

    return run


def test_several_prompts_and_samples(written):
    """Each text is its own, whatever is written at the same time."""
    arguments = ['prompt=["the quick","a, b"]', "num_samples=2", "precision=fp32", "temperature=2"]
    out = written(*arguments)
    texts = out.removesuffix("\n").split("\n\n---\n")
    assert [text[:4] for text in texts] == ["the ", "the ", "a, b", "a, b"]
    assert texts[0] != texts[1]
    for batch_size in (1, 3):
        assert written(*arguments, f"batch_size={batch_size}") == out
    assert written("prompt=the quick", *arguments[2:]).removesuffix("\n") == texts[0]
    assert written(*arguments, "seed=1") != out


def test_sampling_settings_are_used(written):
    greedy = written("temperature=0", "precision=fp32")
    for same in ("top_k=1", "top_p=0.000001"):
        assert written(same, "temperature=9", "precision=fp32") == greedy
    assert written("temperature=9", "precision=fp32") != greedy


def test_text_ends_at_its_end(written, monkeypatch):
    """Unless it is to go on."""
    import decoding

    def spelled(*_, end, **__):
        for token in (*b"ab", 256, *b"cd"):
            yield [token]
            if token == end:
                return

    monkeypatch.setattr(decoding, "generate", spelled)
    assert written("prompt=x") == "xab\n"
    assert written("prompt=x", "ignore_end=true") == "xab<|endoftext|>cd\n"


def test_a_character_comes_whole(written, monkeypatch):
    """Bytes that make up a character are shown together; those that make none, as a mark."""
    import decoding

    pieces = []
    show = generate.show
    monkeypatch.setattr(generate, "show", lambda text: (pieces.append(text), show(text)))
    monkeypatch.setattr(
        decoding, "generate", lambda *_, **__: ([t] for t in [*"é🙂".encode(), 0xC3])
    )
    assert written("prompt=x") == "xé🙂\ufffd\n"
    assert {"é", "🙂"} <= set(pieces)


def test_a_loop_of_prompts(written, monkeypatch):
    """A line each; nothing is asked where nobody is at a terminal. Every text has draws of its
    own."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("the quick\n\nthe quick\nfox"))
    texts = written("interactive=true", "temperature=2").splitlines()
    assert [text[:3] for text in texts if text[:3] in ("the", "fox")] == ["the", "the", "fox"]
    assert texts[0] != texts[1]


def test_a_prompt_in_another_encoding(written, monkeypatch):
    """Whatever the locale makes of standard input, the loop goes on."""
    lines = io.TextIOWrapper(io.BytesIO("fox\nB\xe4r\nfox\n".encode("latin-1")), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", lines)
    texts = written("interactive=true").splitlines()
    assert [text[:3] for text in texts if text[:3] in ("fox", "B\ufffdr")] == [
        "fox",
        "B\ufffdr",
        "fox",
    ]


def test_ctrl_c_ends_a_text_and_not_the_loop(in_process, folder, monkeypatch):
    import decoding

    def interrupted(*_, **__):
        yield [ord("a")]
        raise KeyboardInterrupt

    monkeypatch.setattr(decoding, "generate", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    arguments = ["checkpoint=runs/run", "interactive=true"]
    assert in_process(generate.main, folder, *arguments) == (0, "onea\ntwoa\n", "")
    code, out, err = in_process(generate.main, folder, "checkpoint=runs/run", "prompt=one")
    assert (code, out, err) == (130, "onea\n", "")


def test_a_reader_that_has_seen_enough(folder):
    """As with `| head -c 3`: no traceback, and no complaint at exit."""
    command = "set -o pipefail; {} -u {} checkpoint=runs/run max_new_tokens=3000 | head -c 3"
    done = subprocess.run(
        ["bash", "-c", command.format(sys.executable, REPOSITORY / "generate.py")],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(NO_NETWORK)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "The", "")


@pytest.mark.parametrize("compile", ["true", "false"])
def test_compiled_on_request(written, monkeypatch, compile):
    """By the real compiler's front end: what it makes is run by torch itself, quickly; in the
    campaign it is compiled for good."""
    backend = os.environ.get("CAMPAIGN_COMPILER", "eager")
    made = []

    def spy(step, **options):
        made.append(options)
        assert not any(isinstance(module, Packed) for module in step.modules())
        return compiled(step, **options, backend=backend, fullgraph=True)

    compiled = torch.compile
    expected = written("precision=fp32")
    monkeypatch.setattr(torch, "compile", spy)
    assert written(f"compile={compile}", "precision=fp32") == expected
    assert made == ([{"dynamic": False}] if compile == "true" else [])


@torch._dynamo.config.patch(suppress_errors=False)  # and afterwards as it was
def test_what_is_compiled_unasked(monkeypatch):
    """Much text, on a GPU, where there is a compiler; there whole steps are launched at once."""
    from training import device

    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(device, "can_compile", lambda _: True)
    assert device.compiled_step("auto", cpu, 10**6) is None
    assert device.compiled_step("auto", gpu, 100) is None
    assert device.compiled_step(False, gpu, 10**6) is None
    seen = {}
    monkeypatch.setattr(torch, "compile", lambda step, **options: seen.update(options))
    device.compiled_step("auto", gpu, 10**6)("a step")
    assert seen["mode"] == "reduce-overhead"
    monkeypatch.setattr(device, "can_compile", lambda _: False)
    assert device.compiled_step("auto", gpu, 10**6) is None


@torch._dynamo.config.patch(suppress_errors=False)
def test_a_compiler_that_fails_ends_only_what_asked_for_it(
    in_process, folder, written, monkeypatch
):
    from training import device

    def broken(graph, inputs):
        raise RuntimeError("no compiler of C is found")

    torch._dynamo.reset()
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **_: compiled(step, backend=broken))
    expected = written("precision=fp32")
    code, _, err = in_process(generate.main, folder, "checkpoint=runs/run", "compile=true")
    assert (code, "no compiler of C is found" in err) == (4, True)
    chosen, gpu = device.compiled_step, torch.device("cuda")
    monkeypatch.setattr(device, "can_compile", lambda _: True)
    monkeypatch.setattr(device, "compiled_step", lambda choice, *_: chosen(choice, gpu, 10**6))
    assert written("precision=fp32") == expected


@pytest.mark.parametrize("precision", ["auto", "bf16", "fp32"])
def test_precision(folder, monkeypatch, precision):
    from training.command import parse
    from training.device import best_dtype

    arguments = ["checkpoint=x", f"precision={precision}"]
    settings = parse(generate.GenerateConfig, arguments)
    reader = load_reader(folder / "runs" / "run")
    generate.Writer(reader, settings)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    wanted = types.get(precision) or best_dtype(torch.device("cpu"))
    assert reader.model.token_emb.weight.dtype == wanted
