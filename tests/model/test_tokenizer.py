from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import UsageError
from kvxfer.model import Tokenizer
from kvxfer.model.tiny.tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return Tokenizer.load(directory)


def stream(tokenizer, tokens):
    detokenizer = tokenizer.stream()
    return [detokenizer.push(token) for token in tokens], detokenizer.finish()


@given(text=st.text())
def test_any_text_survives(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokens[0] == BOS_ID
    assert tokenizer.decode(tokens) == text
    pieces, rest = stream(tokenizer, tokens)
    assert "".join(pieces) + rest == text


awkward = st.sampled_from([*"é€😀\ufffd".encode(), 0xFF, 0x80, ord("a"), BOS_ID, EOS_ID])


@given(tokens=st.lists(awkward | st.integers(0, VOCAB_SIZE - 1)))
def test_streaming_any_tokens_equals_decoding_them(tokenizer, tokens):
    pieces, rest = stream(tokenizer, tokens)
    assert "".join(pieces) + rest == tokenizer.decode(tokens)


def test_a_character_comes_whole_with_its_last_byte(tokenizer):
    pieces, rest = stream(tokenizer, list("a€😀".encode()))
    assert pieces == ["a", "", "", "€", "", "", "", "😀"]
    assert rest == ""


def test_what_an_answer_breaks_off_is_told_at_its_end(tokenizer):
    pieces, rest = stream(tokenizer, list("a€".encode())[:-1])
    assert pieces == ["a", "", ""]
    assert rest == "\ufffd"


def test_vocab_size_counts_added_tokens(tokenizer):
    assert tokenizer.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model": {}}'])
def test_a_missing_or_broken_file_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError) as caught:
        Tokenizer.load(tmp_path)
    assert (caught.value.field, caught.value.value) == ("tokenizer", str(path))
    assert "\n" not in str(caught.value)
