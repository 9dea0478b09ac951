"""Folders that have only the older files of a tokenizer: what is made of them, where, and what is refused."""

from __future__ import annotations

import base64
import json
import logging
import os
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer as Backend, models, pre_tokenizers, trainers

from specserve import LLM, SamplingParams
from specserve.checkpoint import catalog
from specserve.checkpoint.byte_alphabet import byte_alphabet
from specserve.checkpoint.installed import installed
from specserve.checkpoint.tokenizer_files import make_tokenizer, old_tokenizer
from specserve.cli.inspect import inspect
from specserve.doctor import examine
from specserve.errors import ModelError, NotFetchedError
from specserve.testing import tiny_tokenizer, write_tiny_model
from specserve.text.tokenizer import Tokenizer
from tests.checkpoint.sentencepiece_models import HOSTILE, SENTENCES, trained, write

TEXTS = [*HOSTILE, *SENTENCES, "it's 2024, IT'S 12.5", "a\r\n\r\n  b\n", "x  \t y", "<|endoftext|>a</s>"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def made(folder: Path) -> Tokenizer:
    make_tokenizer(old_tokenizer(folder), folder)
    return Tokenizer(folder)


# --- vocab.json and merges.txt ----------------------------------------------------------------------------------------


def byte_pairs() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*SENTENCES, "it's IT'S 2024 12.5"] * 4, trainer)
    return backend


def write_pairs(folder: Path, kind: str, config: dict[str, Any], *first: str) -> Path:
    """Files as GPT-2 has them, with these tokens first in the vocabulary."""
    folder.mkdir(exist_ok=True)
    state = json.loads(byte_pairs().to_str())["model"]
    vocab = [*first, *sorted(state["vocab"], key=state["vocab"].__getitem__)]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocab)}), "utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in state["merges"]), ""]
    (folder / "merges.txt").write_text("\n".join(lines), "utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def theirs(folder: Path, name: str, **options: Any) -> Any:
    import transformers

    kind = getattr(transformers, name)
    return kind(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"), **options)


def test_gpt2_is_as_in_transformers(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path, "gpt2", {"tokenizer_class": "GPT2Tokenizer"}, "<|endoftext|>")
    ours, other = made(folder), theirs(folder, "GPT2Tokenizer")
    for text in TEXTS:
        assert ours.encode(text) == other.encode(text)
        assert ours.decode(ours.encode(text), False) == text
    assert (ours.bos_id, ours.eos_ids) == (0, {0})


def test_opt_begins_with_its_end_token(tmp_path: Path) -> None:
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": {"content": "</s>"}, "eos_token": {"content": "</s>"}}
    folder = write_pairs(tmp_path, "opt", config, "<s>", "<pad>", "</s>", "<unk>")
    ours = made(folder)
    assert ours.encode("the")[0] == 2
    assert ours.encode("the", add_special_tokens=False) == ours.encode("the")[1:]
    assert ours.encode("a</s>")[-1] == 2
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": False}))
    assert made(folder).encode("the")[0] != 2


def test_qwen2_is_as_in_transformers(tmp_path: Path) -> None:
    added = {"420": {"content": "<|im_end|>", "special": True}, "421": {"content": "<think>", "special": False}}
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    folder = write_pairs(tmp_path, "qwen2", config)
    ours, other = made(folder), theirs(folder, "Qwen2Tokenizer")
    for text in TEXTS[:-1]:
        assert ours.encode(text) == other.encode(text)
    assert ours.encode("e\u0301") == ours.encode("\u00e9")
    assert ours.encode("<|im_end|><think>") == [420, 421]
    assert ours.special_ids == {420}


@pytest.mark.parametrize(
    ("kind", "apart"), [("gpt2", False), ("gpt_bigcode", True), ("starcoder2", True), ("granite", True)]
)
def test_models_that_say_gpt2_may_split_digits(tmp_path: Path, kind: str, apart: bool) -> None:
    ours = made(write_pairs(tmp_path, kind, {"tokenizer_class": "GPT2Tokenizer"}))
    assert (len(ours.encode("2024")) == 4) == apart


def test_pairs_that_do_not_fit_the_vocabulary_are_refused(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path, "gpt2", {})
    (folder / "merges.txt").write_text("nothing known\n")
    with pytest.raises(ModelError, match="do not fit together"):
        made(folder)


# --- tiktoken ---------------------------------------------------------------------------------------------------------

QWEN = {"tokenizer_class": "QWenTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]}}
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]


def ranks() -> dict[bytes, int]:
    alphabet = byte_alphabet()
    return {bytes(map(alphabet.__getitem__, token)): i for token, i in byte_pairs().get_vocab().items()}


def write_qwen(folder: Path, lines: list[bytes] | None = None, **generation: Any) -> Path:
    folder.mkdir(exist_ok=True)
    stated = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks().items()]
    (folder / "qwen.tiktoken").write_bytes(b"\n".join([*(stated if lines is None else lines), b""]))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen"}))
    (folder / "tokenizer_config.json").write_text(json.dumps(QWEN))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_qwens_ranks_split_as_tiktoken_does(tmp_path_factory: pytest.TempPathFactory) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ours, known = made(write_qwen(tmp_path_factory.mktemp("qwen"))), ranks()
    control = {text: len(known) + i for i, text in enumerate(CONTROL)}
    other = tiktoken.Encoding("qwen", pat_str=PATTERN, mergeable_ranks=known, special_tokens=control)

    def same(text: str) -> None:
        expected = other.encode(unicodedata.normalize("NFC", text), allowed_special="all")
        assert ours.encode(text) == expected
        assert ours.decode(expected, False) == other.decode(expected)

    letters = "abcdefthes'SſK \n\r\t日é👩\u0301ﬁ０１,.<|>12\u00a0\u2028\x00"

    @settings(max_examples=300)
    @given(text=st.text(max_size=30) | st.text(st.sampled_from(letters), max_size=30))
    def check(text: str) -> None:
        same(text.encode(errors="ignore").decode())

    check()
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|><|extra_204|>"]:
        same(text)
    for start in range(0, 0x3000, 8):  # letters, digits and blanks of many kinds beside one another
        same("a".join(map(chr, range(start, start + 8))) + " 1")


def test_qwens_chats_have_their_format_and_end(tmp_path: Path) -> None:
    chat = made(write_qwen(tmp_path / "chat", chat_format="chatml"))
    end = len(ranks())
    assert chat.eos_ids == {end + 2}
    text = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert chat.render_chat([{"role": "user", "content": "hi"}]) == text + "<|im_start|>assistant\n"
    assert chat.encode_chat([{"role": "user", "content": "hi<|im_end|>"}]).count(end + 2) == 2
    base = made(write_qwen(tmp_path / "base", chat_format="raw"))
    assert (base.eos_ids, base.info()["chat_template"]) == ({end}, None)


@pytest.mark.parametrize(
    "lines", [[b"YQ== 0", b"Yg== 1", b"YWJj 2"], [b"YQ== 0", b"Yg== 2"], [b"YQ=="], [b"YQ== x"], [b"!! 0"], [b"\xff 0"]]
)
def test_ranks_that_are_damaged_are_refused(tmp_path: Path, lines: list[bytes]) -> None:
    with pytest.raises(ModelError, match=r"qwen\.tiktoken is damaged"):
        made(write_qwen(tmp_path, lines))


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        ({"auto_map": {"AutoTokenizer": ["tokenization_chatglm.ChatGLMTokenizer", None]}}, "chatglm",
         "the class ChatGLMTokenizer, Python code.*runs none.*trust_remote_code"),
        ({"tokenizer_class": "XGLMTokenizer"}, "xglm", "of the class XGLMTokenizer.*save_pretrained"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "llama", "says no class that its other files are read by"),
        ({}, "strange", "says no class"),
        ({}, "qwen2", r"no vocab\.json and merges\.txt to make it of.*Qwen2Tokenizer"),
        ({"tokenizer_class": "GPT2TokenizerFast"}, "gpt2", "to make it of for its class GPT2Tokenizer"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused_with_advice(tmp_path: Path, config: Any, kind: str, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.model").write_bytes(b"not looked at")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json.*" + words) as caught:
        old_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_only_tokenizer_json_says_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="which alone says how OLMo 2 splits text"):
        made(write_pairs(tmp_path, "olmo2", {"tokenizer_class": "GPT2Tokenizer"}))


@pytest.mark.parametrize("name", ["baichuan", "internlm", "internlm2"])
def test_code_of_tokenizers_that_are_known_is_not_needed(tmp_path: Path, name: str) -> None:
    kinds = {"baichuan": "BaichuanTokenizer", "internlm": "InternLMTokenizer", "internlm2": "InternLM2Tokenizer"}
    config = {"auto_map": {"AutoTokenizer": [f"tokenization_{name}.{kinds[name]}", None]}, "add_bos_token": False}
    ours = made(write(tmp_path, trained("bpe", True), name, tokenizer_config=config))
    assert b"".join(map(ours.token_bytes, ours.encode("日本 the 👩"))) == " 日本 the 👩".encode()
    assert "auto_map" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


# --- a model's folder -------------------------------------------------------------------------------------------------


def write_model(folder: Path) -> Path:
    """A tiny model whose tokenizer is a SentencePiece model."""
    model = trained("bpe", True)
    write_tiny_model(folder, "llama", vocab_size=512, num_hidden_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    config = {"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenizer.model").write_bytes(model)
    return folder


def test_a_folder_is_served_with_what_was_made(
    tmp_path: Path, home: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    folder = write_model(tmp_path / "model")
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(NotFetchedError, match=r"the first start makes one of its tokenizer\.model"):
        catalog.resolve(str(folder), convert=False)
    assert not home.exists()
    os.chmod(folder, 0o555)
    found = catalog.resolve(str(folder), progress=False)
    assert found.is_relative_to(home)
    assert "made of tokenizer.model, read as LlamaTokenizer" in caplog.text
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert (found / "model.safetensors").is_symlink()
    assert catalog.resolve(str(folder), convert=False) == found
    assert [(model.folder, model.num_bytes < 10**6) for model in installed()] == [(found, True)]
    inspect(str(folder))
    said = " ".join(capsys.readouterr().out.split())
    assert "SentencePiece BPE with bytes for other characters, made of tokenizer.model; chat template" in said
    rows = dict(examine(str(folder))[-1].rows)
    assert "made of tokenizer.model" in rows["tokenizer"]
    with LLM(str(folder), max_model_len=128) as llm:
        (answer,) = llm.generate(["the cat"], SamplingParams(max_tokens=8, ignore_eos=True))
        assert len(answer.outputs[0].token_ids) == 8


def test_another_file_is_another_tokenizer(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    first = catalog.resolve(str(folder), progress=False)
    (folder / "tokenizer.model").write_bytes(trained("unigram", True))
    second = catalog.resolve(str(folder), progress=False)
    assert first != second
    assert "unigram" in Tokenizer(second).describe()


def test_inspect_says_why_there_is_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "XGLMTokenizer"}))
    inspect(str(folder))
    assert "XGLMTokenizer" in capsys.readouterr().out
    with pytest.raises(ModelError, match="XGLMTokenizer"):
        catalog.resolve(str(folder))


def test_special_tokens_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    name = next(token.content for token in tiny_tokenizer().get_added_tokens_decoder().values())
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": name}}))
    assert Tokenizer(tmp_path).eos_id == tiny_tokenizer().token_to_id(name)


def test_random_vocabularies_of_ranks_need_no_order(tmp_path: Path) -> None:
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks().items()]
    random.Random(0).shuffle(lines)
    assert made(write_qwen(tmp_path / "a", lines)).encode("the cat") == made(write_qwen(tmp_path / "b")).encode(
        "the cat"
    )
