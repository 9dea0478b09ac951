"""Tokenizer and chat templates against transformers, and what they refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, normalizers, pre_tokenizers

from specserve.errors import InputError, ModelError
from specserve.text import control
from specserve.text.tokenizer import Tokenizer

SPECIALS = ("<s>", "</s>", "<unk>")
CHAT = [
    {"role": "system", "content": 'Be <brief> & "clear".'},
    {"role": "user", "content": "  héllo  "},
    {"role": "assistant", "content": "Hi there  "},
]


def byte_level() -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return with_specials(backend)


def with_specials(backend: Backend) -> Backend:
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("two words", normalized=False)])
    return backend


def sentencepiece() -> Backend:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "h", "i", "\u2581h", "\u2581hi"]
    merges = [("\u2581", "h"), ("\u2581h", "i")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    return with_specials(backend)


def write(folder: Path, backend: Backend | None = None, template: Any = None, **files: Any) -> Path:
    (backend or byte_level()).save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "unk_token": "<unk>"}
    if template is not None:
        config["chat_template"] = template
    for name, content in ({"tokenizer_config": config} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def theirs(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


# --- ids and bytes ----------------------------------------------------------------------------------------------------


def test_ids_of_special_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path))
    assert tokenizer.vocab_size == 261
    assert (tokenizer.bos_id, tokenizer.special_ids) == (256, {256, 257, 258})
    assert tokenizer.decode([256, 259], skip_special_tokens=True) == "<think>"
    assert tokenizer.decode([256, 259], skip_special_tokens=False) == "<s><think>"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {257}),
        ({"config": {"eos_token_id": 7}}, {7, 257}),
        ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [8, 9]}}, {8, 9, 257}),
        ({"config": {"eos_token_id": 7}, "generation_config": {}}, {7, 257}),
    ],
)
def test_end_ids_come_from_every_file_that_states_them(tmp_path: Path, files: Any, expected: set[int]) -> None:
    assert Tokenizer(write(tmp_path, **files)).eos_ids == expected


def test_truncation_and_padding_saved_with_a_tokenizer_do_not_apply(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert len(Tokenizer(write(tmp_path, backend)).encode("ten letters")) == 11


@pytest.mark.parametrize("build", [byte_level, sentencepiece])
@settings(max_examples=100)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=30))
def test_token_bytes_join_to_the_text(tmp_path_factory: pytest.TempPathFactory, build: Any, text: str) -> None:
    folder = tmp_path_factory.getbasetemp() / f"bytes-{build.__name__}"
    if not folder.exists():
        folder.mkdir()
        write(folder, build())
    tokenizer = Tokenizer(folder)
    joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))).decode()
    # Sentencepiece begins each stretch of text, at the start and after an added token, with a space of its own.
    assert joined == text if build is byte_level else joined.replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("build", [byte_level, sentencepiece])
def test_token_bytes_of_every_token_are_what_decode_makes_of_it(tmp_path: Path, build: Any) -> None:
    backend = build()
    tokenizer = Tokenizer(write(tmp_path, backend))
    before = backend.token_to_id("h")  # in front, so that no leading space is stripped
    for token in range(tokenizer.vocab_size):
        decoded = backend.decode([before, token], skip_special_tokens=False)
        assert decoded == "h" + tokenizer.token_bytes(token).decode(errors="replace")


def test_ids_beyond_the_vocabulary_are_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path))
    assert tokenizer.token_bytes(5000) == b""
    assert tokenizer.decode([5000]) == ""


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"]])
def test_ids_that_cannot_be_are_an_input_error(tmp_path: Path, ids: Any) -> None:
    with pytest.raises(InputError, match="token ids"):
        Tokenizer(write(tmp_path)).decode(ids)


def test_text_that_is_not_unicode_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="valid Unicode"):
        Tokenizer(write(tmp_path)).encode("\ud800")


def test_broken_and_unknown_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer(tmp_path)
    backend = Backend(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="decoder WordPiece"):
        Tokenizer(write(tmp_path, backend))


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = "import sys, specserve.text.tokenizer; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "text", ["Hello", " 12 + 34", "\tx = [1,  2]\n\n", "日本 👩‍👩‍👧 ё", "<|im_start|>u\nhi<|im_end|>", ""]
)
def test_the_real_tokenizer_equals_transformers(smollm2: Path, text: str) -> None:
    ours, other = Tokenizer(smollm2), theirs(smollm2)
    ids = ours.encode(text)
    assert ids == other.encode(text)
    for skip in (True, False):
        assert ours.decode(ids, skip) == other.decode(ids, skip_special_tokens=skip)


def test_the_real_tokenizer_has_the_published_ids(smollm2: Path) -> None:
    tokenizer = Tokenizer(smollm2)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, {0, 2}, 49152)
    assert [tokenizer.decode([token]) for token in tokenizer.encode(" 1 23")] == [" ", "1", " ", "2", "3"]


# --- chat templates ---------------------------------------------------------------------------------------------------

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATES = {
    "plain": PLAIN,
    "blocks": "  {% for m in messages %}\n    {{ m.content }}\n  {% endfor %}\nend{{ eos_token }}",
    "loop controls": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}"
        "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}"
    ),
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools | tojson(sort_keys=true) }}",
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = m.content %}[{{ x }}]"
        "{{ loop.index }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "namespace": "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + 1 %}{% endfor %}{{ n.k }}",
    "macro": "{% macro say(m) %}{{ m.role | upper }}: {{ m.content | trim }}{% endmacro %}{{ say(messages[-1]) }}",
    "undefined": "{{ pad_token }}{{ nothing }}{{ documents is none }}"
    "{{ tools is none }}{% if x is defined %}{{ x }}{% endif %}",
    "year": "{{ strftime_now('%Y') }}{{ messages[0].content }}",
    "slices": "{{ messages[1:][0]['content'].split()[0] }}{{ messages | length }}"
    "{{ messages | map(attribute='role') | list }}",
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f<>", "b": 1, "a": "é"}}]])
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_in_transformers(tmp_path: Path, name: str, tools: Any, prompt: bool) -> None:
    folder = write(tmp_path, template=TEMPLATES[name])
    options = {"add_generation_prompt": prompt, "tools": tools, "x": 5}
    expected = theirs(folder).apply_chat_template(CHAT, tokenize=False, **options)
    assert Tokenizer(folder).render_chat(CHAT, **options) == expected
    assert expected


@pytest.mark.parametrize("template", [PLAIN, PLAIN.replace("m['content']", "m['content'] | trim")])
@pytest.mark.parametrize(
    "content", ["Hi there", "Hi there  ", [{"type": "text", "text": "par"}, {"type": "text", "text": "ts "}]]
)
def test_the_last_message_is_continued_as_in_transformers(tmp_path: Path, template: str, content: Any) -> None:
    flat = "{% if m.content is string %}" + template.split("{% for m in messages %}")[1].split("\n{% endfor %}")[0]
    flat += "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    folder = write(tmp_path, template="{% for m in messages %}" + flat + "{% endfor %}")
    chat = [*CHAT[:2], {"role": "assistant", "content": content}]
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    expected = theirs(folder).apply_chat_template(chat, tokenize=False, **options)
    assert Tokenizer(folder).render_chat(chat, **options) == expected
    assert chat[-1]["content"] is content  # the caller's messages stay as they are


def test_the_real_template_equals_transformers(smollm2: Path) -> None:
    ours, other = Tokenizer(smollm2), theirs(smollm2)
    for chat in (CHAT, CHAT[1:2], CHAT[:2]):
        text = other.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(chat) == text
        assert ours.encode_chat(chat) == other.encode(text, add_special_tokens=False)


def test_a_template_file_comes_before_the_config(tmp_path: Path) -> None:
    (write(tmp_path, template="config") / "chat_template.jinja").write_text("file")
    assert Tokenizer(tmp_path).render_chat(CHAT) == "file"


def test_named_templates_serve_tools_and_the_rest(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    tokenizer = Tokenizer(write(tmp_path, template=named))
    assert tokenizer.render_chat(CHAT) == "plain"
    assert tokenizer.render_chat(CHAT, tools=[{"name": "f"}]) == "f"


def test_templates_in_files_of_their_own_come_in_order(tmp_path: Path) -> None:
    folder, tools = write(tmp_path), [{"name": "f"}]
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "settings"}))
    assert Tokenizer(folder).render_chat(CHAT) == "settings"
    others = folder / "additional_chat_templates"
    others.mkdir()
    (others / "tool_use.jinja").write_text("{{ tools[0].name }}")
    tokenizer = Tokenizer(folder)
    assert (tokenizer.render_chat(CHAT), tokenizer.render_chat(CHAT, tools=tools)) == ("settings", "f")
    tokenizer = Tokenizer(write(folder, template="config"))
    assert (tokenizer.render_chat(CHAT), tokenizer.render_chat(CHAT, tools=tools)) == ("config", "f")
    (folder / "chat_template.jinja").write_text("file")
    tokenizer = Tokenizer(folder)
    assert (tokenizer.render_chat(CHAT), tokenizer.render_chat(CHAT, tools=tools)) == ("file", "f")


def test_named_templates_without_a_default_are_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, template=[{"name": "rag", "template": "x"}]))
    with pytest.raises(InputError, match="rag"):
        tokenizer.render_chat(CHAT)


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_is_found_under_every_name(tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer(write(tmp_path, template="{{ messages[0].reasoning_content }}"))
    assert tokenizer.render_chat([{"role": "assistant", "content": "", name: "because"}]) == "because"


def test_a_model_without_template_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no chat template.*chat_template\.jinja"):
        Tokenizer(write(tmp_path)).render_chat(CHAT)


@pytest.mark.parametrize(
    "messages",
    [[], "hello", {"role": "user", "content": "x"}, ["x"], [{"content": "x"}], [{"role": 3, "content": "x"}],
     [{"role": "user", "content": 5}], None],
)  # fmt: skip
def test_wrong_messages_are_input_errors(tmp_path: Path, messages: Any) -> None:
    with pytest.raises(InputError, match="messages") as caught:
        Tokenizer(write(tmp_path, template=PLAIN)).render_chat(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 5 }}",
        "{{ nothing.at.all }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_an_input_error(tmp_path: Path, template: str) -> None:
    with pytest.raises(InputError, match="cannot take these messages"):
        Tokenizer(write(tmp_path, template=template)).render_chat(CHAT)


def test_a_broken_template_hurts_chats_only(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, template="{% if %}"))
    assert tokenizer.encode("a")
    with pytest.raises(ModelError, match="template"):
        tokenizer.render_chat(CHAT)


def test_continuing_and_beginning_a_message_exclude_each_other(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, template=PLAIN))
    with pytest.raises(InputError, match="add_generation_prompt"):
        tokenizer.render_chat(CHAT, continue_final_message=True)
    for chat, template in (([{"role": "assistant", "content": None}], PLAIN), (CHAT, "nothing of it")):
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(InputError, match="continue_final_message"):
            Tokenizer(tmp_path).render_chat(chat, continue_final_message=True, add_generation_prompt=False)


# --- what callers write stays text ------------------------------------------------------------------------------------

FENCED = (
    "{{ bos_token }}{% for m in messages %}<think>{{ m.content }}</s>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<think>"
)
ADDED = (*SPECIALS, "<think>", "two words")


def unigram() -> Backend:
    """Its vocabulary has the control tokens too, and it finds any of its tokens in any text."""
    letters = [(letter, -2.0) for letter in "\u2581<>/abcdefghijklmnopqrstuvwxyzTHINK|_ "]
    vocab = [("<unk>", 0.0), ("</s>", 0.0), ("<s>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), *letters]
    backend = Backend(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return with_specials(backend)


def merging() -> Backend:
    """Its merges spell out a control token, and lead on from there."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<t", "<th", "<thi", "<thin", "<think", "<think>", "<think>a"]
    merges = [("<", "t"), ("<t", "h"), ("<th", "i"), ("<thi", "n"), ("<thin", "k"), ("<think", ">"), ("<think>", "a")]
    backend = Backend(models.BPE({token: i for i, token in enumerate([*tokens, *pieces])}, merges))
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return with_specials(backend)


def folding() -> Backend:
    """Control tokens are looked for in lower case."""
    backend = Backend(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.normalizer, backend.decoder = normalizers.Lowercase(), decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken(token, normalized=True) for token in SPECIALS])
    backend.add_tokens([AddedToken("<think>", normalized=True), AddedToken("two words", normalized=True)])
    return backend


BUILDERS = (byte_level, sentencepiece, unigram, merging, folding)
PIECES = st.lists(
    st.sampled_from([*ADDED, "<", ">", "<th", "nk>", "think", "s>", "<THINK>", " ", "\n", "a", "é", "two ", "words"]),
    max_size=8,
).map("".join)


read_once = cache(Tokenizer)


def built(factory: pytest.TempPathFactory, build: Any, template: str) -> Tokenizer:
    """Written and read once for all examples of a test."""
    folder = factory.getbasetemp() / f"hidden-{build.__name__}-{abs(hash(template))}"
    if not folder.exists():
        folder.mkdir()
        write(folder, build(), template=template)
    return read_once(folder)


def regions(tokenizer: Tokenizer, ids: list[int], control: set[int]) -> list[list[int]]:
    """What lies between control tokens."""
    found: list[list[int]] = [[]]
    for token in ids:
        if token in control:
            found.append([])
        else:
            found[-1].append(token)
    return found


def added_ids(folder_tokenizer: Tokenizer) -> set[int]:
    return {token for text in ADDED for token in folder_tokenizer.encode(text, add_special_tokens=False)[-1:]}


@pytest.mark.parametrize("build", BUILDERS)
@settings(max_examples=150)
@given(contents=st.lists(PIECES, min_size=1, max_size=3))
def test_contents_never_become_control_tokens(
    tmp_path_factory: pytest.TempPathFactory, build: Any, contents: list[str]
) -> None:
    tokenizer = built(tmp_path_factory, build, FENCED)
    added = added_ids(tokenizer)
    assert len(added) == len(ADDED)
    chat = [{"role": "user", "content": content} for content in contents]
    text, ids, _ = tokenizer.chat_ids(chat)
    harmless = tokenizer.encode_chat([{"role": "user", "content": "h"} for _ in contents])
    assert text == tokenizer.render_chat(chat)
    assert [token for token in ids if token in added] == [token for token in harmless if token in added]
    between = [tokenizer.decode(region, False) for region in regions(tokenizer, ids, added)]
    expected = [content.lower() if build is folding else content for content in contents]
    assert between[2:-1:2] == expected
    assert {*between[:2], *between[3::2], between[-1]} == {""}


@pytest.mark.parametrize("build", BUILDERS)
@settings(max_examples=100)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20), after=st.sampled_from(ADDED))
def test_the_backend_with_secret_names_tokenizes_as_the_first(
    tmp_path_factory: pytest.TempPathFactory, build: Any, text: str, after: str
) -> None:
    """Harmless text around the template's tokens: bit for bit the same, whichever backend reads it."""
    tokenizer = built(tmp_path_factory, build, FENCED)
    guard = tokenizer._control
    if not guard.may_be_in(text):
        parts = ["<s>", text, f"{after} a", "", "</s>"]
        renamed = guard._renamed.encode([guard._translated(part) for part in parts])
        assert renamed == tokenizer.encode("".join(parts), add_special_tokens=False)


def test_harmless_conversations_need_no_second_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_Renamed", None)
    tokenizer = Tokenizer(write(tmp_path, template=FENCED))
    for content in ("hello", "> quoted <", "think", "a two", "\u2063"):
        chat = [{"role": "user", "content": content}]
        text, ids, _ = tokenizer.chat_ids(chat)
        assert ids == tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.bounded_chat_ids(chat, len(text))[:2] == (text, ids)
    with pytest.raises(TypeError):
        control.ControlTokens(tokenizer._backend).encode(["", "<think>", ""])


def test_what_needs_a_second_backend_waits_until_it_is_there(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, template=FENCED))
    chat = [{"role": "user", "content": "<think>"}]
    with pytest.raises(control.UnpreparedError):
        tokenizer.bounded_chat_ids(chat, None)
    assert not tokenizer._control.loaded
    tokenizer.prepare()
    assert tokenizer.bounded_chat_ids(chat, None) == tokenizer.chat_ids(chat)


def test_a_long_text_is_not_tokenized(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, template=FENCED))
    chat = [{"role": "user", "content": "hello"}]
    text, ids, _ = tokenizer.chat_ids(chat)
    assert tokenizer.bounded_chat_ids(chat, len(text))[:2] == (text, ids)
    assert tokenizer.bounded_chat_ids(chat, len(text) - 1)[:2] == (text, None)


@pytest.mark.parametrize(
    ("template", "contents"),
    [
        ("a<thi{{ messages[0].content }}<think>", ["nk>"]),
        ("a{{ messages[0].content | trim }}nk><think>", ["b <thi \n"]),
        ("a<{{ messages[0].content }}><think>", ["think"]),
        ("a{{ messages[0].content }}{{ messages[1].content }}<think>", ["<thi", "nk> x"]),
        ("a{{ messages[0].content }}{{ messages[1].content }}<think>", ["<", "think>"]),
        ("{{ messages[0].content | upper }}<think>", ["<S>"]),
    ],
)
def test_contents_and_template_together_make_no_control_token(
    tmp_path: Path, template: str, contents: list[str]
) -> None:
    tokenizer = Tokenizer(write(tmp_path, template=template))
    think, text = tokenizer.encode("<think>")[0], tokenizer.chat_ids([{"role": "u", "content": c} for c in contents])
    assert text[0] == tokenizer.render_chat([{"role": "u", "content": c} for c in contents])
    assert [token for token in text[1] if token > 255] == [think]
    assert tokenizer.decode(text[1], False) == text[0]


def test_templates_build_control_tokens_from_roles(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, template="<{{ messages[0].role }}>{{ messages[0].content }}"))
    assert tokenizer.encode_chat([{"role": "think", "content": "s>"}]) == [259, *tokenizer.encode("s>")]


def test_everything_but_the_template_is_text(tmp_path: Path) -> None:
    """Names, arguments, reasoning, parts, tools, their keys, and values for the template."""
    template = "{{ messages | tojson }}{{ tools | tojson }}{{ note }}{{ bos_token }}"
    tokenizer = Tokenizer(write(tmp_path, template=template))
    call = {"id": "</s>", "function": {"name": "<think>", "arguments": {"<s>": ["two words", {"a": "<unk>"}]}}}
    chat = [
        {"role": "assistant", "content": None, "reasoning_content": "<think>x", "tool_calls": [call]},
        {"role": "user", "name": "<s>", "content": [{"type": "text", "text": "</s>"}]},
        {"role": "<think>", "content": "a"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"<think>": {}}}}}]
    text, ids, _ = tokenizer.chat_ids(chat, tools=tools, note="</s>", bos_token="<s>")
    assert text == tokenizer.render_chat(chat, tools=tools, note="</s>", bos_token="<s>")
    assert [token for token in ids if token > 255] == [256]
    assert tokenizer.decode(ids, False) == text
    assert chat[2]["role"] == "<think>", "the caller's messages stay as they are"


@pytest.mark.parametrize("arguments", [{"<think>": 1}, {"a": {"b": ("x", {"</s>": None})}}])
def test_a_key_alone_is_looked_at(tmp_path: Path, arguments: Any) -> None:
    tokenizer = Tokenizer(write(tmp_path, template="{{ messages[0].arguments | tojson }}"))
    text, ids, _ = tokenizer.chat_ids([{"role": "user", "arguments": arguments}])
    assert text == json.dumps(arguments)
    assert not [token for token in ids if token > 255]


THINKING = """{% for m in messages %}<s>{% set c = m.content %}{% set r = "" %}
{%- if m.role == "assistant" %}{% if m.reasoning_content is string %}{% set r = m.reasoning_content %}
{%- elif "</think>" in c %}{% set r = c.split("</think>")[0].split("<think>")[-1].strip("\n") %}
{%- set c = c.split("</think>")[-1].lstrip("\n") %}{% endif %}<think>{{ r }}</think>{% endif %}{{ c }}</s>
{%- endfor %}"""


def test_reasoning_inside_an_answer_is_still_the_templates_to_show(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("</think>", normalized=False)])
    tokenizer = Tokenizer(write(tmp_path, backend, template=THINKING))
    chat = [
        {"role": "assistant", "content": "<think>\nwhy <s>\n</think>\n\nso</s>"},
        {"role": "user", "content": "</think>u"},
    ]
    text, ids, _ = tokenizer.chat_ids(chat)
    assert text == tokenizer.render_chat(chat) == "<s><think>why <s></think>so</s></s><s></think>u</s>"
    assert [token for token in ids if token > 255] == [256, 259, 261, 257, 256, 257]
    assert tokenizer.decode(ids, False) == text


def test_a_template_that_looks_for_control_tokens_finds_none(tmp_path: Path) -> None:
    template = "{% if '<think>' in messages[0].content %}<think>{% endif %}{{ messages[0].content }}"
    tokenizer = Tokenizer(write(tmp_path, template=template))
    assert tokenizer.render_chat([{"role": "user", "content": "<think>"}]) == "<think><think>"
    text, ids, _ = tokenizer.chat_ids([{"role": "user", "content": "<think>"}])
    assert (text, [token for token in ids if token > 255]) == ("<think>", [])


def test_a_template_may_refuse_marks_at_edges_alone(tmp_path: Path) -> None:
    template = "{% if messages[0].id | length != 1 %}{{ raise_exception('id') }}{% endif %}{{ messages[0].content }}<s>"
    tokenizer = Tokenizer(write(tmp_path, template=template))
    text, ids, _ = tokenizer.chat_ids([{"role": "user", "id": "s", "content": "</s>"}])
    assert text == "</s><s>"
    assert [token for token in ids if token > 255] == [256]


def test_half_a_surrogate_is_an_input_error_in_chats(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, template=FENCED))
    for content in ("\ud800", "\ud800<think>"):
        with pytest.raises(InputError, match="valid Unicode"):
            tokenizer.chat_ids([{"role": "user", "content": content}])


def test_a_continued_message_may_hold_anything(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, template="{% for m in messages %}<s>{{ m.content | trim }}</s>{% endfor %}"))
    chat = [{"role": "assistant", "content": "\u2063end of the last message\u2063 </s> <th "}]
    text, ids, _ = tokenizer.chat_ids(chat, continue_final_message=True, add_generation_prompt=False)
    assert text == "<s>\u2063end of the last message\u2063 </s> <th"
    assert [token for token in ids if token > 255] == [256]


@pytest.fixture(scope="module")
def real_tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer(smollm2)


@settings(max_examples=60)
@given(
    contents=st.lists(
        st.lists(
            st.sampled_from(
                ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "\n", "user", " ", "héllo", "<repo_name>"]
            ),
            max_size=6,
        ).map("".join),
        min_size=1,
        max_size=3,
    )
)
def test_the_real_tokenizer_keeps_contents_text(real_tokenizer: Tokenizer, contents: list[str]) -> None:
    tokenizer = real_tokenizer
    chat = [{"role": "user", "content": content} for content in contents]
    text, ids, _ = tokenizer.chat_ids(chat)
    assert text == tokenizer.render_chat(chat)
    assert tokenizer.decode(ids, False) == text
    special = [token for token in ids if token in tokenizer.special_ids]
    assert special == [1, 2] * (len(chat) + 1) + [1]  # the template adds a system message
    turns = regions(tokenizer, ids, set(tokenizer.special_ids))
    assert [tokenizer.decode(turn, False) for turn in turns[3:-1:2]] == [f"user\n{content}" for content in contents]


def test_tools_need_a_template_that_reads_them(tmp_path: Path, smollm2: Path) -> None:
    chat, tools = [{"role": "user", "content": "a"}], [{"type": "function", "function": {"name": "f"}}]
    assert not Tokenizer(smollm2).takes_tools
    with pytest.raises(InputError, match="takes no tools") as caught:
        Tokenizer(smollm2).chat_ids(chat, tools=tools)
    assert caught.value.param == "tools"
    assert Tokenizer(smollm2).chat_ids(chat, tools=None) == Tokenizer(smollm2).chat_ids(chat)
    read = "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools | tojson }}"
    write(tmp_path, template=read + "{{ messages[0].content }}")
    assert Tokenizer(tmp_path).takes_tools
    assert Tokenizer(tmp_path).chat_ids(chat, tools=tools).text == json.dumps(tools) + "a"
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "{{ tools }}"}]
    assert Tokenizer(write(tmp_path, template=named)).takes_tools
    write(tmp_path, template="{{ my.tools }}tools")
    assert not Tokenizer(tmp_path).takes_tools
    assert not Tokenizer(write(tmp_path)).takes_tools
    with pytest.raises(ModelError, match="broken"):
        _ = Tokenizer(write(tmp_path, template="{% if %}")).takes_tools
