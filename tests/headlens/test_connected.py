"""What a head connects in a text: lines of it, and the most frequent pairs of words or tokens."""

from collections import Counter

import numpy as np
import pytest

from headlens.connected import AROUND, Lines, Words
from headlens.prompts import texts_of


def line(tokens, query, key):
    """Returns the parts of the line around two tokens."""
    ends, texts = Lines([tokens]).ranges(0, query, key), texts_of(tokens)
    assert ends == sorted(ends)
    assert ends[0] <= key < query < ends[-1]
    parts = zip(ends[::2], ends[1::2], strict=True)
    return ["".join(texts[first:end]) for first, end in parts]


@pytest.mark.parametrize("of_letters", [True, False])
def test_a_line_is_the_sentence(of_letters):
    text = "It began before. Then the ferry bell rang twice, and nobody came. After this it ended."
    tokens = list(text) if of_letters else text.replace(" ", "| ").split("|")
    texts = "".join(tokens)
    at = (lambda word: texts.index(word)) if of_letters else (lambda word: tokens.index(f" {word}"))
    (found,) = line(tokens, at("rang"), at("ferry"))
    assert found.strip() == "Then the ferry bell rang twice, and nobody came."
    (found,) = line(tokens, at("this"), at("rang"))  # two sentences
    assert found.strip().startswith("Then the")
    assert found.endswith("ended.")


def test_a_line_without_a_sentence_is_cut_between_words():
    words = [f" word{n}" for n in range(80)]
    (found,) = line(words, 41, 40)
    assert found.startswith(" word")
    before, after = found.split("word40 word41")
    assert AROUND - 20 <= len(before) <= AROUND
    assert AROUND - 20 <= len(after) <= AROUND
    left, right = line(words, 70, 10)  # the middle is omitted
    assert left.split()[-1] != right.split()[0]
    assert "word10" in left
    assert "word70" in right
    assert len(left) + len(right) < 4 * AROUND + 20


def test_the_line_of_a_line_break_is_the_sentence_before_it():
    text = "Never. That she cannot come.\n\nBut why?"
    (found,) = line(list(text), text.index("\nBut"), text.index("\n"))
    assert found.strip() == "That she cannot come.⏎⏎"


def test_a_line_without_spaces_and_one_within_a_character():
    (found,) = line(list("日本語" * 100), 151, 150)
    assert 2 * AROUND <= len(found) <= 2 * AROUND + 2
    parts = [f"<0x{byte:02X}>" for byte in "日本".encode()]
    assert line(parts, 5, 1) == ["日本"]


def pairs_by_loops(tokens, keys, word_of):
    """Returns {key: Counter of queries} of the links between different words, each once; a token
    that is no word counts as one."""
    found, seen = {}, set()
    for window, of_window in enumerate(keys):
        for query, key in enumerate(of_window):
            if key < 0:
                continue
            one, two = word_of(window, query), word_of(window, key)
            if one == two or (window, one, two) in seen:
                continue
            seen.add((window, one, two))
            found.setdefault(two[1], Counter())[one[1]] += 1
    return found


def test_words_that_a_head_connects_in_a_text_of_letters():
    """Each pair of words once, for any number of links between their letters."""
    windows = [list(".the cat saw the dog."), list(".a cat saw a dog, so.")]
    words = [[("the", 1), ("cat", 5), ("saw", 9), ("the", 13), ("dog", 17)]]
    words += [[("a", 1), ("cat", 3), ("saw", 7), ("a", 11), ("dog", 13), ("so", 18)]]

    def word_of(window, place):
        for word, start in words[window]:
            if start <= place < start + len(word):
                return start, word
        return place, windows[window][place].replace(" ", "␣")

    size = len(windows[0])
    keys = np.full((1, 1, 2, size), -1)
    for window in range(2):
        for query in range(size):
            before = [start for word, start in words[window] if start + len(word) <= query]
            if before:
                keys[0, 0, window, query] = before[-1]  # the start of the word before
    found = Words(windows).pairs(keys)
    (head,) = found["of_heads"]
    assert found["queries"] == 2 * (size - 2)
    assert head["links"] == (keys >= 0).sum()
    wanted = pairs_by_loops(windows, keys[0, 0].tolist(), word_of)
    frequent = {key: of for key, of in wanted.items() if of.total() > 1}
    assert {found["texts"][key] for key, *_ in head["keys"]} == set(frequent)
    for key, count, queries in head["keys"]:
        of_key = frequent[found["texts"][key]]
        assert count == of_key.total()
        assert {found["texts"][query]: n for query, n in queries} == of_key


def test_a_head_without_links_has_no_pairs():
    found = Words([list("one two")]).pairs(np.full((2, 3, 1, 7), -1))
    assert [head["links"] for head in found["of_heads"]] == [0] * 6
    assert not any(head["keys"] for head in found["of_heads"])


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["The", " fer", "ry", " bell", ",", "\n", " "], "The ferry ferry bell , ⏎ ␣"),
        (["don", "'t", " é", "té"], "don't don't été été"),
        (["日本", "語の"], "日本 語の"),  # no spaces: a token is a word
        ([f"<0x{byte:02X}>" for byte in "éa".encode()[:2]] + ["a"], "é é² a"),
        (["שלום", " עולם"], "שלום עולם"),
        (list("abcdefghijklmnopqrstuvwxyz"), " ".join("abcdefghijklmnopqrstuvwxyz")),  # too long
    ],
)
def test_the_word_of_a_token(tokens, words):
    found = Words([[".", *tokens, "."]])
    assert [found.texts[number] for number in found.words[0, 1:-1]] == words.split(" ")
