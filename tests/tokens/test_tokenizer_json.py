"""tokens/tokenizer_json.py: files of Hugging Face's `tokenizers`, and which of them are refused."""

import json
import pickle

import pytest
import tokenizers
from helpers.refusals import refused, time_limit
from helpers.tally import trials
from helpers.texts import mixes
from hypothesis import given
from hypothesis import strategies as st
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
    name = specials[-2:][0]
    settings = {"eos_token": {"content": name}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    ours = load_tokenizer(str(tmp_path))
    end = theirs.token_to_id(name)
    assert (ours.n_vocab, ours.eot_token, ours.end) == (theirs.get_vocab_size(), end, name)
    back, copied = from_json(to_json(ours)), pickle.loads(pickle.dumps(ours))
    assert back.name == copied.name == ours.name != get_tokenizer("gpt2").name
    assert back.eot_token == copied.eot_token == end
    written = tokenizers.Tokenizer.from_str(to_json(ours).decode())
    assert written.get_vocab_size() == ours.n_vocab

    @trials(20, 200)
    @given(mixes, st.lists(st.sampled_from([*specials, END_OF_TEXT, "<", "s>"]), max_size=5))
    def check(text, parts):
        text = text.join(["", *parts, ""])
        ids = theirs.encode(text).ids
        for each in (ours, back, copied, written):
            found = each.encode(text, **({} if each is written else {"allowed_special": "all"}))
            assert getattr(found, "ids", found) == ids
        assert ours.decode(ids) == text
        streamed = concatenate(StreamEncoder(ours).encode(utf8_blocks(text)))
        assert streamed.tolist() == ids

    check()


def test_the_end_of_a_text_is_part_of_the_name(tmp_path):
    """Token files of two tokenizers that differ in it cannot be mixed."""
    their_tokenizer(["<s>", "</s>"]).save(str(tmp_path / "tokenizer.json"))
    names = set()
    for eos in ("<s>", "</s>"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        names.add(load_tokenizer(str(tmp_path)).name)
    assert len(names) == 2


def special_token(name: str, **flags):
    """A change that adds a special token to a file."""

    def change(content):
        ids = content["model"]["vocab"]
        number = ids.setdefault(name, len(ids))
        flags_of_it = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        token = {"id": number, "content": name, "special": True} | flags_of_it | flags
        content["added_tokens"].append(token)

    return change


def template(*before):
    pieces = [*({"SpecialToken": {"id": name, "type_id": 0}} for name in before)]
    pieces.append({"Sequence": {"id": "A", "type_id": 0}})
    ids = {name: {"id": name, "ids": [0], "tokens": [name]} for name in before}
    content = {"single": pieces, "pair": pieces[-1:] * 2, "special_tokens": ids}
    return lambda c: c.update(post_processor={"type": "TemplateProcessing"} | content)


PADDED = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_id": 0, "pad_type_id": 0}
PADDED |= {"pad_to_multiple_of": None, "pad_token": END_OF_TEXT}
CUT = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
# Files that are read: (change of tokenizer.json, tokenizer_config.json).
READ = {
    "another special token": (special_token("<user>"), {}),
    "normalized": (special_token("<user>", normalized=True), {}),
    "a token with spaces": (special_token("of the town"), {}),
    "a token that only the settings name": (
        lambda c: c["model"]["vocab"].update({"<user>": len(c["model"]["vocab"])}),
        {"pad_token": "<user>"},
    ),
    "an end and <|endoftext|>": (special_token("<user>"), {"eos_token": "<user>"}),
    "no dropout": (lambda c: c["model"].update(dropout=0.0), {}),
    "an unknown token": (lambda c: c["model"].update(unk_token=END_OF_TEXT, fuse_unk=True), {}),
    "ignore_merges": (lambda c: c["model"].update(ignore_merges=True), {}),
    "truncation and padding of calls": (lambda c: c.update(truncation=CUT, padding=PADDED), {}),
    "a template without tokens": (template(), {}),
}


@pytest.mark.parametrize(("change", "settings"), READ.values(), ids=READ)
def test_ids_are_those_of_transformers(change, settings, tmp_path):
    import transformers

    (tmp_path / "tokenizer.json").write_bytes(changed(change))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(str(tmp_path))
    for text in (f"boats <user>{END_OF_TEXT} of the town", " <user> of the towns <use", *TEXTS[:2]):
        assert ours.encode(text, allowed_special="all") == theirs(text)["input_ids"]


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
    assert found.encode("a[PAD]", allowed_special="all") == [97, 257]


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
    "dropout": changed(lambda c: c["model"].update(dropout=0.1)),
    "no splitting": changed(lambda c: c.update(pre_tokenizer=None)),
    "a template": changed(template(END_OF_TEXT)),
    "lstrip": changed(special_token("<x>", lstrip=True)),
    "rstrip": changed(special_token("<x>", rstrip=True)),
    "single_word": changed(special_token("<x>", single_word=True)),
    "a special byte": changed(special_token("a")),
    "a token without a merge": changed(
        lambda c: c["model"]["vocab"].update({"zzz": len(c["model"]["vocab"])})
    ),
    "a start": changed(special_token(f"{END_OF_TEXT}s")),
    "an end": changed(special_token(f"s{END_OF_TEXT}")),
    "an overlap": changed(special_token("|>x")),
    "an overlap with itself": changed(special_token("<x<")),
    "an empty special token": changed(special_token("")),
    "a long special token": changed(special_token("<" + "x" * 200)),
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
    for key, value in (
        ("eos_token", 3),
        ("pad_token", "<x>"),  # without an id
        ("extra_special_tokens", [{"content": END_OF_TEXT, "lstrip": True}]),
        *((key, True) for key in ("add_bos_token", "add_prefix_space", "split_special_tokens")),
    ):
        settings.write_text(json.dumps({key: value}))
        with refused(DataError, "data.tokenizer", tmp_path, exit_code=3):
            load_tokenizer(str(tmp_path))
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


def test_a_file_of_long_tokens_is_read_in_linear_time():
    """8,000 tokens of up to 1,000 bytes: comparing all pairs of each takes many minutes."""
    content = json.loads(to_json(get_tokenizer("byte")))
    content["model"]["vocab"].pop(END_OF_TEXT)
    merges = [[letter + "z" * n, "z"] for n in range(999) for letter in "abcdefgh"]
    ids = {"".join(pair): number for number, pair in enumerate(merges, start=256)}
    content["model"] |= {"vocab": content["model"]["vocab"] | ids, "merges": merges}
    content["added_tokens"][0]["id"] = 256 + len(merges)
    with time_limit():
        found = from_json(json.dumps(content).encode())
        assert json.loads(to_json(found))["model"]["merges"] == merges
