"""Tokenizer and incremental text: every split of every text gives the same characters."""

from __future__ import annotations

import itertools
import json
from functools import lru_cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from engine.chat_template import MAX_MESSAGES, ChatTemplate
from engine.core.errors import ConfigError, RequestError
from engine.detokenize import ByteDecoder, Decoder, StopMatcher, unfinished_utf8
from engine.tokenizer import Tokenizer

CORPUS = ["the quick brown fox jumps over the lazy dog", "naïve café, straße, 東京タワー, 🦊🦊 and 👩‍👩‍👧", "stop stops stopping"] * 4


@lru_cache
def byte_level_json() -> bytes:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|bos|>", "<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["plain added ☃"])
    return tokenizer.to_str().encode()


@lru_cache
def byte_fallback_json() -> bytes:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é", "▁a", "ab", "▁ab"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer.to_str().encode()


@lru_cache
def word_piece_json() -> bytes:
    words = ["[UNK]", "play", "##ing", "##ed", "the", "dog", "##s", "a"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer.to_str().encode()


def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_json(), eos_token_ids=(1,))


def stream(decoder: Decoder, ids: list[int]) -> list[str]:
    return [*(decoder.push(token) for token in ids), decoder.flush()]


@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_streamed_text_is_the_text(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    parts = stream(tokenizer.decoder(), ids)
    assert "".join(parts) == text
    assert not any("�" in part for part in parts if "�" not in text)


@given(ids=st.lists(st.integers(0, 420), max_size=40))
@settings(max_examples=200, deadline=None)
def test_random_ids_give_what_decoding_at_once_gives(ids: list[int]) -> None:
    tokenizer = byte_level()
    assert "".join(stream(tokenizer.decoder(), ids)) == tokenizer.decode(ids)
    shown = "".join(stream(tokenizer.decoder(skip_special_tokens=False), ids))
    assert shown == tokenizer.decode(ids, skip_special_tokens=False)


@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=300, deadline=None)
def test_any_split_of_any_bytes(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[a:b] for a, b in itertools.pairwise(edges)]
    decoder = ByteDecoder(lambda token: chunks[token])
    assert "".join(stream(decoder, list(range(len(chunks))))) == data.decode("utf-8", errors="replace")


@given(text=st.text(min_size=1, max_size=20), cut=st.integers(0, 80))
@settings(max_examples=200, deadline=None)
def test_prompt_cut_inside_a_character_yields_only_new_text(text: str, cut: int) -> None:
    data = text.encode()
    cut = min(cut, len(data))
    decoder = ByteDecoder(lambda token: data[token : token + 1], prompt=list(range(cut)))
    new_text = "".join(stream(decoder, list(range(cut, len(data)))))
    # The character the prompt had begun is new; the characters it had finished are not.
    finished = data[:cut].decode("utf-8", errors="ignore")
    assert finished + new_text == text


def test_half_a_character_in_the_prompt_is_not_repeated() -> None:
    tokenizer = byte_level()
    ids = [token for byte in "x😀".encode() if (token := tokenizer.token_id(_byte_char(byte))) is not None]
    decoder = tokenizer.decoder(ids[:3])
    assert [decoder.push(ids[3]), decoder.push(ids[4])] == ["", "😀"]
    decoder = tokenizer.decoder(ids[:3])
    assert decoder.push(ids[0]) == "�x"  # proven invalid by the next token, not before
    decoder = tokenizer.decoder(ids[:3])
    assert decoder.flush() == "�"


def _byte_char(byte: int) -> str:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte) if byte in printable else chr(256 + [b for b in range(256) if b not in printable].index(byte))


def test_a_space_does_not_flush_pending_bytes() -> None:
    decoder = ByteDecoder(lambda token: [b"\xe6\x9d", b"\xb1", b" "][token])
    assert [decoder.push(0), decoder.push(1), decoder.push(2)] == ["", "東", " "]
    decoder = ByteDecoder(lambda token: [b"\xe6\x9d", b"\xb1", b" "][token])
    assert [decoder.push(0), decoder.push(2), decoder.flush()] == ["", "� ", ""]


@pytest.mark.parametrize(
    ("data", "rest"),
    [
        (b"", b""),
        (b"a", b""),
        (b"\xe6\x9d", b"\xe6\x9d"),
        (b"\xe6\x9d\xb1", b""),
        (b"a\xf0", b"\xf0"),
        (b"\x80\x80\x80", b""),
        (b"\xc3\xa9", b""),
        (b"\xff", b""),
        (b"\xf0\x9f\x98", b"\xf0\x9f\x98"),
    ],
)
def test_unfinished_utf8(data: bytes, rest: bytes) -> None:
    assert unfinished_utf8(data) == rest


@given(text=st.text(alphabet="ab é東🦊", max_size=30))
@settings(max_examples=100, deadline=None)
def test_byte_fallback(text: str) -> None:
    tokenizer = Tokenizer(byte_fallback_json())
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text  # the leading space comes off the beginning of a whole text
    if text:  # a continuation keeps it
        assert "".join(stream(tokenizer.decoder([tokenizer.token_id("a") or 0]), ids)) == " " + text


def test_word_piece_by_window() -> None:
    tokenizer = Tokenizer(word_piece_json())
    ids = [tokenizer.token_id(word) or 0 for word in ["the", "dog", "##s", "play", "##ed", "a", "dog"] * 6]
    prompt, rest = ids[:3], ids[3:]
    assert tokenizer.decode(prompt) + "".join(stream(tokenizer.decoder(prompt), rest)) == tokenizer.decode(ids)
    assert "".join(stream(tokenizer.decoder(), ids)) == tokenizer.decode(ids)


def test_ids_beyond_the_vocabulary_are_silent() -> None:
    tokenizer = byte_level()
    assert stream(tokenizer.decoder(), [10**6]) == ["", ""]


# -- stop strings -------------------------------------------------------------------------------------------------------------


def naive_cut(text: str, stops: list[str], *, include_stop: bool = False) -> tuple[str, str | None]:
    """Read one character at a time; the first moment at which the text ends in a stop string cuts it, the longest such one."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include_stop else end - len(stop)], stop
    return text, None


@given(
    text=st.text(alphabet="abc\n", max_size=40),
    stops=st.lists(st.text(alphabet="abc\n", min_size=1, max_size=5), max_size=4),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=40),
    include_stop=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_stop_strings_against_a_naive_reader(text: str, stops: list[str], sizes: list[int], include_stop: bool) -> None:
    want, stop = naive_cut(text, stops, include_stop=include_stop)
    matcher = StopMatcher(stops, include_stop=include_stop)
    shown = ""
    position = 0
    for size in sizes * (len(text) + 1):
        if position >= len(text) or matcher.matched:
            break
        shown += matcher.push(text[position : position + size])
        position += size
        assert want.startswith(shown)  # nothing is ever shown that has to be taken back
    shown += matcher.flush()
    assert shown == want
    assert matcher.matched == stop


def test_stop_strings_wait_for_min_tokens() -> None:
    matcher = StopMatcher(["b"])
    assert matcher.push("abab", may_stop=False) == "abab"
    assert matcher.push("xb") == "x"
    assert matcher.matched == "b"


def test_held_text_comes_out_at_the_end() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push("the EN"), matcher.push("D"), matcher.flush()] == ["the ", "", ""]
    matcher = StopMatcher(["END"])
    assert [matcher.push("the EN"), matcher.flush()] == ["the ", "EN"]


# -- files and templates ------------------------------------------------------------------------------------------------------


def test_from_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(byte_level_json())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|end|>"}, "chat_template": "{{ messages[0].content }}"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [7, 1], "auto_map": {"AutoTokenizer": "evil.Evil"}}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_ids == (7, 1)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi"
    assert tokenizer.vocab_size > 300


@pytest.mark.parametrize("data", [b"", b"{}", b"\x80\x04", b'{"version": "1.0"}'])
def test_garbage_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Tokenizer(data)
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Tokenizer.from_folder(tmp_path)


def test_missing_tokenizer_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_lone_surrogate_is_the_clients_fault() -> None:
    with pytest.raises(RequestError) as caught:
        byte_level().encode("a\ud800b")
    assert caught.value.param == "prompt"


CHAT = """{{ bos_token }}{% for message in messages %}
<{{ message.role }}>{{ message['content'] | trim }}
{% if loop.last %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""


def test_chat_template() -> None:
    template = ChatTemplate(CHAT, bos_token="<s>")
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "ho"}]
    assert template.render(messages) == "<s><user>hi\n<assistant>ho\n<assistant>"
    assert (
        template.render(messages, add_generation_prompt=False, variables={"bos_token": "x", "messages": []})
        == "<s><user>hi\n<assistant>ho\n"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ 'x' * 999999999 }}",
        "{{ 999999999 * 'x' }}",
        "{{ [1] * 999999999 }}",
        "{{ 9 ** 9999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ 'x'.center(999999999) }}",
        "{{ 'x' | center(999999999) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for i in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
    ],
)
def test_hostile_or_unhappy_templates_are_refused(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_template_bounds() -> None:
    with pytest.raises(ConfigError):
        ChatTemplate("{% for %}")
    with pytest.raises(ConfigError):
        ChatTemplate("x" * (2 << 20))
    with pytest.raises(RequestError):
        ChatTemplate("x").render([{}] * (MAX_MESSAGES + 1))
    assert ChatTemplate("{{ messages | tojson }}").render([{"content": "<é>"}]) == '[{"content": "<é>"}]'
