"""Text while it grows: whole characters, all of it, and nothing of a stop string."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.detokenize import TextSoFar
from mla_jax.errors import EngineError

tokenizers = pytest.importorskip("tokenizers")
TEXTS = st.text(alphabet="ab ñ中🙂\u200d", max_size=24)


def of_bytes() -> "tokenizers.Tokenizer":
    """A token for each byte, as byte-level BPE writes them, and a few of several bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = [(a, b) for a, b in itertools.product("ab", "ab")] + [("Ġ", "a"), ("ð", "Ł")]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def of_pieces() -> "tokenizers.Tokenizer":
    """SentencePiece's manner: a word's space is its first letter, unknown bytes are tokens."""
    vocab = [("<unk>", 0.0), *[(f"<0x{b:02X}>", -9.0) for b in range(256)]]
    vocab += [("▁", -2.0), ("a", -3.0), ("b", -3.0), ("▁ab", -1.0), ("▁a", -1.5)]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, 0, True))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    decoders = tokenizers.decoders
    made.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


BYTES, PIECES = of_bytes(), of_pieces()


def told(tokenizer, ids, stops=()) -> tuple[list[str], bool]:
    """Pieces of text as they are told, the rest last."""
    text = TextSoFar(decode=lambda ids: tokenizer.decode(list(ids)), stops=stops)
    pieces = []
    for id in ids:
        text, piece, found = text.push(id)
        pieces.append(piece)
        if found:
            assert text.rest() == ("", False)
            return pieces, True
    rest, found = text.rest()
    return [*pieces, rest], found


def test_a_word_behind_special_tokens_keeps_its_space():
    """Decoders drop the space of their first word, and a special token has no text."""
    special = of_pieces()
    special.add_special_tokens(["<s>"])
    word, mark = special.token_to_id("▁ab"), special.token_to_id("<s>")
    for ids in ([word] * 8 + [mark, word], [word] * 9 + [mark] * 12 + [word, mark, word]):
        assert "".join(told(special, ids)[0]) == special.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@given(text=TEXTS)
def test_all_pieces_make_the_text(tokenizer, text):
    ids = tokenizer.encode(text).ids
    pieces, _ = told(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if tokenizer is BYTES:
        assert "".join(pieces) == text


@given(text=TEXTS)
def test_no_piece_has_half_a_character(text):
    pieces, _ = told(BYTES, BYTES.encode(text).ids)
    assert not any("\ufffd" in piece for piece in pieces)


@given(ids=st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_are_told_as_the_tokenizer_writes_them(ids):
    """Whatever comes, nothing is lost: at most the last few are told late."""
    pieces, _ = told(BYTES, ids)
    whole = BYTES.decode(ids)
    runs = "".join("x" if c == "\ufffd" else "." for c in whole)
    if "x" * 12 not in runs:
        assert "".join(pieces) == whole


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@given(
    text=st.text(alphabet="ab ñ", max_size=20),
    stops=st.lists(st.text(alphabet="ab ñ", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_string(tokenizer, text, stops):
    """By the definition: the text of the tokens so far, cut where a stop string begins."""
    ids = tokenizer.encode(text).ids
    pieces, found = told(tokenizer, ids, tuple(stops))
    want, ended = tokenizer.decode(ids), False
    for n in range(1, len(ids) + 1):
        sofar = tokenizer.decode(ids[:n])
        if not sofar.endswith("\ufffd") and any(stop in sofar for stop in stops):
            want, ended = sofar[: min(sofar.find(s) for s in stops if s in sofar)], True
            break
    assert ("".join(pieces), found) == (want, ended)


def test_a_stop_string_over_three_tokens_is_never_told():
    ids = BYTES.encode("a STOP b").ids
    pieces, found = told(BYTES, ids, ("STOP",))
    assert found and "".join(pieces) == "a "
    ids = BYTES.encode("a STOb").ids
    pieces, found = told(BYTES, ids, ("STOP",))
    assert not found and "".join(pieces) == "a STOb"
    assert pieces[-2] == "STOb"  # told when it is clear that it is none


def test_the_first_of_several_stop_strings_in_a_token_counts():
    (id,) = BYTES.encode("ab").ids
    assert told(BYTES, [id], ("b", "a")) == ([""], True)
    assert told(BYTES, [id], ("b", "x")) == (["a"], True)


def test_pushing_again_changes_nothing():
    """A step that was interrupted is drawn again: its token is pushed onto the same text."""
    text = TextSoFar(decode=lambda ids: BYTES.decode(list(ids)))
    ids = BYTES.encode("中a").ids
    for id in ids:
        assert text.push(id)[1:] == text.push(id)[1:]
        text = text.push(id)[0]


def test_ids_without_a_text_are_no_error():
    def refuse(ids):
        if 7 in ids:
            raise EngineError("tokenizer.json", "7", "others")
        return "x" * len(ids)

    text = TextSoFar(decode=refuse)
    text, piece, _ = text.push(1)
    assert piece == "x"
    text, piece, found = text.push(7)
    assert text.broken and (piece, found) == ("", False)
    assert text.push(1)[0].broken and text.rest() == ("", False)


@pytest.mark.parametrize("broken", range(12, 20))
def test_a_character_behind_bytes_that_are_none_is_whole(broken):
    """Bytes are settled when no character can have them any more, and those behind them wait."""
    (half,) = BYTES.encode("é").ids[1:]
    ids = [half] * broken + BYTES.encode("中 end").ids
    assert "".join(told(BYTES, ids)[0]) == BYTES.decode(ids)
    pieces, found = told(BYTES, ids, ("中",))
    assert found and "中" not in "".join(pieces)
