"""Runs on texts of which a part is not used, or of which a part is read twice."""

import json

import pytest
from helpers import TEXT, TINY
from helpers.refusals import refused
from helpers.runs import change_state, copy_run, train_in
from helpers.settings import train_main
from helpers.texts import write_source

from clearhead.errors import ConfigError, DataError
from scripts.evaluate import main as evaluate
from scripts.prepare_data import main as prepare
from scripts.train_tokenizer import main as train_tokenizer

START, END = (f"*** {of} OF THE PROJECT GUTENBERG EBOOK A TALE ***\n" for of in ("START", "END"))
BOOK = f"Title: A Tale\n{START}{TEXT}{END}" + "You agree to this licence.\n" * 100


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """runs/book, a finished run on BOOK."""
    folder = tmp_path_factory.mktemp("book")
    write_source(folder / "text.txt", [BOOK])
    return train_in(folder, "name=book", "lens.prompts=null")


def share_in(text: str) -> bool:
    """Whether a text says how much of BOOK is used."""
    return f"{len(TEXT) / len(BOOK):.0%} of the text" in text


def test_each_command_says_what_it_uses_of_a_book(in_process, book):
    folder = book.parent.parent
    path = "data.path=text.txt"
    for main, *arguments in (
        (train_main, path, *TINY, "trainer.max_steps=1"),
        (prepare, path, "out=tokens", "workers=1"),
        (train_tokenizer, path, "out=bpe", "vocab_size=270"),
        (evaluate, path, f"checkpoint={book}"),
    ):
        for trim, has_note in (((), True), (("data.trim=false",), False)):
            more = [*trim, *[f"{a}{len(trim)}" for a in arguments if a.startswith("out=")]]
            kept = [a for a in arguments if not a.startswith("out=")]
            code, *printed = in_process(main, folder, *kept, *more)
            assert (code, share_in("".join(printed))) == (0, has_note), main.__module__
    config = json.loads((book / "run.json").read_text())["settings"]
    assert all(prompt in TEXT for prompt in config["lens"]["prompts"])


def test_a_book_without_text_is_refused(make_run, in_process, tmp_path):
    path = write_source(tmp_path / "book.txt", [START + END])
    with refused(DataError, "data.path", str(path), exit_code=3) as caught:
        make_run(f"data.path={path}")
    assert "data.trim" in caught.value.hint
    code, _, error = in_process(prepare, tmp_path, f"data.path={path}", "out=tokens", "workers=1")
    assert code == 3
    assert "data.trim" in error


def test_a_run_is_resumed_with_its_tokens(make_run, book, tmp_path):
    """A run of an earlier version has read all of a text, and still does."""
    text = book.parent.parent / "text.txt"
    (tmp_path / "runs").mkdir()
    run = copy_run(book)
    given = (f"data.path={text}", "name=book", "trainer.max_steps=6")
    assert make_run(*given).config.data.trim
    with refused(ConfigError, "data.trim", False):
        make_run(*given, "data.trim=false")
    read_all = make_run(f"data.path={text}", "data.trim=false", "name=all")
    stored = json.loads((run / "run.json").read_text())
    del stored["settings"]["data"]["trim"]
    (run / "run.json").write_text(json.dumps(stored))
    for folder in (run / "checkpoints").glob("step_*"):
        checksums = [list(pair) for pair in read_all.state.data]
        change_state(folder, **{"settings.data": stored["settings"]["data"], "data": checksums})
    new = make_run(f"from={run}", "name=new", f"data.path={text}", tiny=False)
    assert new.state.data == read_all.state.data
    for again in (given, [f"trainer.resume={run}", "trainer.max_steps=6"]):
        resumed = make_run(*again, tiny=again is given)
        assert not resumed.config.data.trim
        assert resumed.state.data == read_all.state.data


def test_a_run_says_how_much_of_its_validation_text_is_training_text(book, tmp_path):
    """At the start, at the end and in summary.json; not if it is little."""
    from clearhead.files import read_rows
    from clearhead.output.report import training_data

    path = write_source(tmp_path / "twice.txt", [TEXT * 2])
    twice = train_in(tmp_path, "name=twice", f"data.path={path}")
    for run, has_note in ((twice, True), (book, False)):
        summary = json.loads((run / "summary.json").read_text())
        result = training_data(run, read_rows(run / "metrics.jsonl"))["result"]
        assert ("100 %" in str(summary["start"])) == has_note
        assert ("100 %" in result) == has_note
