"""tokens/tokenizer_json.py: files of Hugging Face's `tokenizers`, and which of them are refused."""

import json

import pytest
import tokenizers
from helpers.refusals import refused
from helpers.tally import trials
from helpers.texts import mixes
from hypothesis import given
from tokenizers import decoders, models, pre_tokenizers, trainers

from clearhead.errors import DataError
from clearhead.tokens import END_OF_TEXT
from clearhead.tokens.encoding import StreamEncoder, concatenate, utf8_blocks
from clearhead.tokens.tokenizer import get_tokenizer
from clearhead.tokens.tokenizer_json import from_json, load_tokenizer, to_json

TEXTS = [
    "Two boats lie in the harbour, the harbour of the town.\n",
    "zwei Boote, größer; 船 船",
] * 9


def their_tokenizer(specials: list[str], **options) -> tokenizers.Tokenizer:
    """A GPT-2 tokenizer as many projects train it: the special tokens have the first ids."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(**{"add_prefix_space": False} | options)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


@pytest.mark.parametrize("name", ["gpt2", "byte"])
def test_built_in_tokenizers_are_recognised(name, tmp_path):
    content = to_json(get_tokenizer(name))
    assert from_json(content) is get_tokenizer(name)
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert load_tokenizer(str(tmp_path)) is load_tokenizer(name) is get_tokenizer(name)


@pytest.mark.parametrize("specials", [[END_OF_TEXT], ["<s>", "<pad>", "</s>", "<unk>"]])
def test_ids_of_a_directory_of_another_project(specials, tmp_path):
    theirs = their_tokenizer(specials)
    theirs.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": {"content": specials[-2:][0]}, "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    ours = load_tokenizer(str(tmp_path))
    end = theirs.token_to_id(specials[-2:][0])
    assert (ours.n_vocab, ours.eot_token) == (theirs.get_vocab_size(), end)
    back = from_json(to_json(ours))
    assert back.name == ours.name != get_tokenizer("gpt2").name
    with_end = ours.encode(f"a{END_OF_TEXT}b", allowed_special={END_OF_TEXT})
    assert with_end[1] == end
    written = tokenizers.Tokenizer.from_str(to_json(ours).decode())
    assert written.encode(f"a{END_OF_TEXT}b").ids == with_end
    assert written.get_vocab_size() == ours.n_vocab

    @trials(20, 200)
    @given(mixes)
    def check(text):
        text = text.replace(END_OF_TEXT, "")
        ids = theirs.encode(text).ids
        assert ours.encode_ordinary(text) == back.encode_ordinary(text) == ids
        assert ours.decode(ids) == text
        streamed = concatenate(StreamEncoder(ours).encode(utf8_blocks(f"{text}{END_OF_TEXT}")))
        assert streamed.tolist() == [*ids, end]

    check()


def test_a_token_that_one_file_calls_special_is_special(tmp_path):
    """transformers 4 writes it to added_tokens.json, too, which does not say so."""
    (tmp_path / "tokenizer.json").write_bytes(to_json(get_tokenizer("byte")))
    (tmp_path / "added_tokens.json").write_text('{"[PAD]": 257}')
    with refused(DataError, "data.tokenizer", tmp_path, exit_code=3):
        load_tokenizer(str(tmp_path))
    settings = {"added_tokens_decoder": {"257": {"content": "[PAD]", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = load_tokenizer(str(tmp_path))
    assert (found.n_vocab, found.eot_token) == (258, 256)
    assert found.encode_ordinary("[PAD]") == [*b"[PAD]"]


def changed(change) -> bytes:
    content = json.loads(their_tokenizer([END_OF_TEXT]).to_str())
    change(content)
    return json.dumps(content).encode()


WORD_PIECE = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"[UNK]": 0}}
MANY = {f"<{n}>": 340 + n for n in range(2**16)}
REFUSED = {
    "nothing": b"",
    "no model": b"{}",
    "WordPiece": changed(lambda c: c.update(model=WORD_PIECE)),
    "SentencePiece": changed(lambda c: c["model"].update(byte_fallback=True)),
    "a normalizer": changed(lambda c: c.update(normalizer={"type": "NFC"})),
    "a space": changed(lambda c: c["pre_tokenizer"].update(add_prefix_space=True)),
    "no bytes": changed(lambda c: c.update(pre_tokenizer={"type": "Whitespace"})),
    "no pattern": changed(lambda c: c["pre_tokenizer"].update(use_regex=False)),
    "no end of text": changed(lambda c: c["added_tokens"][0].update(content="<end>")),
    "an added word": changed(
        lambda c: c["added_tokens"].append({"id": 340, "content": "boat", "special": False})
    ),
    "a gap": changed(lambda c: c["model"]["vocab"].update({"<x>": 500})),
    "a text as id": changed(lambda c: c["model"]["vocab"].update({"<x>": "340"})),
    "too many": changed(lambda c: c["model"]["vocab"].update(MANY)),
    "no byte": changed(lambda c: c["model"]["vocab"].update({"<x>": c["model"]["vocab"].pop("a")})),
    "a lost merge": changed(lambda c: c["model"]["merges"].pop(0)),
    "a foreign letter": changed(lambda c: c["model"]["merges"].append(["a", "船"])),
    "another order": changed(lambda c: c["model"]["merges"].reverse()),
    "a long token": changed(lambda c: c["model"]["merges"].append(["a" * 600, "b" * 600])),
}


@pytest.mark.parametrize("content", REFUSED.values(), ids=REFUSED)
def test_other_tokenizers_are_refused(content, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with refused(DataError, "data.tokenizer", tmp_path, exit_code=3):
        load_tokenizer(str(tmp_path))


def test_damaged_added_tokens_and_missing_files_are_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(to_json(get_tokenizer("byte")))
    added, settings = tmp_path / "added_tokens.json", tmp_path / "tokenizer_config.json"
    added.write_text('{"<x>": [1]}')
    with refused(DataError, "data.tokenizer", tmp_path, exit_code=3):
        load_tokenizer(str(tmp_path))
    added.unlink()
    settings.write_text('{"eos_token": ["<x>"]}')
    assert load_tokenizer(str(tmp_path)) is get_tokenizer("byte")
    (tmp_path / "tokenizer.json").unlink()
    for source in ("words", str(tmp_path)):
        with refused(DataError, "data.tokenizer", source, exit_code=3):
            load_tokenizer(source)


def test_merges_in_another_order_of_pairs_are_refused():
    """tokenizers merges "a" and "bc" only as listed; tiktoken would merge "ab" and "c" as well."""
    content = json.loads(to_json(get_tokenizer("byte")))
    content["added_tokens"][0]["id"] = 259
    content["model"]["vocab"] |= {"ab": 256, "bc": 257, "abc": 258}
    content["model"]["merges"] = [["a", "b"], ["b", "c"], ["ab", "c"]]
    assert from_json(json.dumps(content).encode()).encode_ordinary("abc") == [258]
    content["model"]["merges"][2] = ["a", "bc"]
    with pytest.raises(ValueError, match="merges"):
        from_json(json.dumps(content).encode())
