"""generate.py: several prompts and samples, end of a text, compilation."""

import json
import os
import re
import shlex

import pytest
import torch
from helpers.models import tiny_model
from helpers.refusals import printed_keys
from helpers.runs import train_in

import generate
from clearhead.models import decoding
from clearhead.models.huggingface import to_hf
from clearhead.parallel import device

SHORT = ["checkpoint=runs/run", "max_new_tokens=12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with runs/run, a model with byte tokens trained on a few words."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text("the quick fox jumps over the dog\n" * 60, encoding="utf-8")
    train_in(folder, "name=run", "trainer.max_steps=40", "trainer.eval_every=0")
    return folder


@pytest.fixture
def written(in_process, folder, capsys):
    """written(*arguments) -> the stdout of the command."""

    def run(*arguments):
        capsys.readouterr()
        code, out, err = in_process(generate.main, folder, *SHORT, *arguments)
        assert (code, err) == (0, "")
        return out

    return run


def test_several_prompts_and_samples(written, monkeypatch):
    """The random numbers of a text depend neither on the batch nor on the number of threads."""
    arguments = ['prompt=["the quick","a, b"]', "num_samples=2", "precision=fp32", "temperature=2"]
    out = written(*arguments)
    texts = out.removesuffix("\n").split("\n\n---\n")
    assert [text[:4] for text in texts] == ["the ", "the ", "a, b", "a, b"]
    assert texts[0] != texts[1]
    for batch_size in (1, 3):
        assert written(*arguments, f"batch_size={batch_size}") == out
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert written(*arguments, "threads=3") == out
    assert threads == [3]
    assert written("prompt=the quick", *arguments[2:]).removesuffix("\n") == texts[0]
    assert written(*arguments, "seed=1") != out


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_model_with_nonfinite_logits_is_refused(in_process, tmp_path, temperature):
    model = tiny_model(vocab_size=257)
    torch.nn.init.constant_(model.final_norm.weight, 3e38)  # finite
    to_hf(model, tmp_path)
    arguments = (f"checkpoint={tmp_path}", f"temperature={temperature}")
    code, _, err = in_process(generate.main, tmp_path, *arguments)
    assert (code, printed_keys(err)) == (3, ["checkpoint"])


def test_printing_shows_whole_characters_until_the_end_of_text_token(written, monkeypatch):
    """Unless it is ignored. Invalid bytes are shown as U+FFFD."""

    def spelled(*_, end_token, **__):
        tokens = [*"é🙂".encode(), 0xC3, 256, *b"cd"]
        return ([token] for token in tokens[: tokens.index(end_token) + 1 if end_token else None])

    pieces, print_piece = [], generate.print_piece
    monkeypatch.setattr(
        generate, "print_piece", lambda text: (pieces.append(text), print_piece(text))
    )
    monkeypatch.setattr(decoding, "generate", spelled)
    assert written("prompt=x") == "xé🙂\n"
    assert {"é", "🙂"} <= set(pieces)
    assert written("prompt=x", "ignore_end=true") == "xé🙂\ufffd<|endoftext|>cd\n"


def test_ctrl_c_ends_the_program_and_replaces_no_file(in_process, folder, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        yield [ord("a")]
        raise KeyboardInterrupt

    monkeypatch.setattr(decoding, "generate", interrupted)
    model = f"checkpoint={folder / 'runs' / 'run'}"
    assert in_process(generate.main, tmp_path, model, "prompt=one") == (130, "onea", "")
    (tmp_path / "rows.jsonl").write_text("precious")
    code, *_ = in_process(generate.main, tmp_path, model, "out=rows.jsonl", "overwrite=true")
    assert code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert (tmp_path / "rows.jsonl").read_text() == "precious"


def test_compiled_on_request(written, monkeypatch):
    """With the eager backend; the campaign uses the default backend."""
    backend, made = os.environ.get("CAMPAIGN_COMPILER", "eager"), []
    compiled = torch.compile

    def spy(step, **options):
        made.append(options)
        return compiled(step, **options, backend=backend, fullgraph=True)

    monkeypatch.setattr(torch, "compile", spy)
    expected = written("precision=fp32", "compile=false")
    assert made == []
    assert written("precision=fp32", "compile=true") == expected
    assert made == [{"dynamic": False}]


@torch._dynamo.config.patch(suppress_errors=False)
def test_a_failing_compiler_is_an_error_only_where_it_was_asked_for(
    in_process, folder, written, monkeypatch
):
    def broken(graph, inputs):
        raise RuntimeError("no compiler of C is found")

    torch._dynamo.reset()
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **_: compiled(step, backend=broken))
    expected = written("precision=fp32")
    assert in_process(generate.main, folder, "checkpoint=runs/run", "compile=true")[0] == 4
    chosen, gpu = device.compiled_step, torch.device("cuda")
    monkeypatch.setattr(device, "can_compile", lambda _: True)
    monkeypatch.setattr(device, "compiled_step", lambda choice, *_: chosen(choice, gpu, 10**6))
    code, out, _ = in_process(generate.main, folder, *SHORT, "precision=fp32")  # torch warns
    assert (code, out) == (0, expected)


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_command_that_a_run_prints(in_process, tmp_path, capsys):
    """It works in the folder in which the run was started, with any characters in the prompt."""
    (tmp_path / "text.txt").write_text(
        "@fox's den and the dog sees @fox's den\n" * 60, encoding="utf-8"
    )
    folder = train_in(tmp_path, "name=run")
    (line,) = re.findall("generate text +(.*)", capsys.readouterr().out)
    _, script, *arguments = shlex.split(line)
    assert (tmp_path / script).samefile(generate.__file__)
    code, out, err = in_process(generate.main, tmp_path, *arguments, "max_new_tokens=1")
    assert (code, err) == (0, "")
    prompt = json.loads((folder / "run.json").read_text())["settings"]["trainer"]["sample_prompt"]
    assert {"@", "'"} <= {*prompt}
    assert out.startswith(prompt)


def test_texts_are_written_as_rows(written, folder):
    """They are those that are printed; plain text and JSON Lines; all batch sizes."""
    (folder / "prompts.txt").write_bytes("the quick\r\n\n é \ndog".encode())
    prompts = ["the quick", " é ", "dog"]
    lines = [json.dumps({"id": n, "prompt": prompt}) for n, prompt in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = ["num_samples=2", "precision=fp32", "temperature=2", "top_p=0.9", "seed=3"]
    printed = written("prompts=prompts.txt", *options).removesuffix("\n").split("\n\n---\n")
    for name, size in (("prompts.txt", 4), ("prompts.jsonl", 1)):
        more = ["out=rows.jsonl", "overwrite=true", f"batch_size={size}"]
        written(f"prompts={name}", *options, *more)
        rows = rows_of(folder / "rows.jsonl")
        assert [row["prompt"] + row["completion"] for row in rows] == printed
        assert [row["prompt"] for row in rows] == [p for p in prompts for _ in range(2)]
        assert [row["sample"] for row in rows] == [0, 1] * 3
        expected = {"temperature": 2.0, "top_k": 50, "top_p": 0.9, "seed": 3, "step": 40}
        assert all(row | expected == row for row in rows)
    written("prompt=dog", "out=rows.jsonl", "overwrite=true")
    assert [row["prompt"] for row in rows_of(folder / "rows.jsonl")] == ["dog"]


BAD_PROMPTS = {
    "prompts=no.txt": "prompts",
    "prompts=.": "prompts",
    "prompts=latin.txt": "prompts",
    "prompts=blank.txt": "prompts",
    "prompts=pipe": "prompts",
    "prompts=no-json.jsonl": "prompts",
    "prompts=no-key.jsonl": "prompts",
    "prompts=number.jsonl": "prompts",
    "prompts=list.jsonl": "prompts",
    "prompts=half.jsonl": "prompts",
    "prompts=ok.txt prompt=a": "prompts",
    "prompts=ok.txt out=kept.jsonl": "out",
    "prompts=ok.txt out=dangling": "out",
    "prompts=ok.txt out=ok.txt overwrite=true": "out",
    "prompts=ok.txt out=no/x.jsonl": "out",
}


def test_bad_prompts_are_refused_and_change_nothing(in_process, folder, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "blank.txt").write_text("\n  \n")
    (tmp_path / "kept.jsonl").write_text("precious")
    (tmp_path / "ok.txt").write_text("the\n")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name, line in {
        "no-json": "{",
        "no-key": '{"text": "a"}',
        "number": '{"prompt": 1}',
        "list": '["prompt"]',
        "half": '{"prompt": "\\ud83d"}',
    }.items():
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a"}\n' + line)
    before = sorted(path.name for path in tmp_path.iterdir())
    model = f"checkpoint={folder / 'runs' / 'run'}"
    for arguments, key in BAD_PROMPTS.items():
        code, out, err = in_process(generate.main, tmp_path, model, *arguments.split())
        assert (code, out, printed_keys(err)) == (2, "", [key]), arguments
        assert sorted(path.name for path in tmp_path.iterdir()) == before, arguments
    assert (tmp_path / "kept.jsonl").read_text() == "precious"
    assert (tmp_path / "ok.txt").read_text() == "the\n"
