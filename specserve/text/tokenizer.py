"""Text to token ids and back, and chat messages to text, from the files of a model folder. Imports neither torch nor
transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend

from specserve import files
from specserve.checkpoint.byte_alphabet import byte_alphabet
from specserve.checkpoint.folder import MADE_OF, read_json
from specserve.errors import InputError, ModelError
from specserve.text.chat import OWN_TEMPLATE, ChatTemplate, TemplateOptions, with_reasoning_apart
from specserve.text.control import ControlTokens, StandIns
from specserve.text.conversation import Rendered
from specserve.text.encoding import decode, encode, not_unicode
from specserve.text.longest import Bound, bound
from specserve.text.reasoning import Beginning, Reasoning, markers, with_header
from specserve.text.tools import CallFormat, call_format

Message = Mapping[str, Any]

_SPACE = "\u2581"  # how sentencepiece writes a space
_DEFAULTS: Mapping[str, Any] = {"add_generation_prompt": True, "continue_final_message": False, "tools": None}
_MOST_BYTES = 2**28  # of tokenizer.json; the largest published ones have 35 MB
_LARGEST_ID = 2**31 - 1
_MARK_TO_SPACE = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}  # as a part of a decoder
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ChatPrompt(NamedTuple):
    """A conversation as a prompt, and what the chat template does not read of it by name, such as
    "messages.tool_calls.id"."""

    text: str
    ids: list[int]
    unread: tuple[str, ...] = ()


class Tokenizer:
    """The tokenizer of a model folder: tokenizer.json, with the special tokens, end ids and chat template that its
    other files state.

    `vocab_size` counts tokens, added ones included; `eos_ids` is every id that ends a text by itself, `eos_id` the
    usual one; that and `bos_id` may be None; `added_tokens` are ids by spelling, and `special_ids` those of them that
    `skip_special_tokens` skips. Raises ModelError for a file that is missing or broken and for a tokenizer that is
    neither byte-level nor sentencepiece.
    """

    def __init__(self, folder: Path, template: TemplateOptions = OWN_TEMPLATE) -> None:
        with files.reading(folder):
            self._read(folder, template)

    def _read(self, folder: Path, template: TemplateOptions) -> None:
        self._backend = _load(folder / "tokenizer.json")
        config = _optional_json(folder / "tokenizer_config.json")
        special = {**_special_tokens(_optional_json(folder / "special_tokens_map.json")), **_special_tokens(config)}
        added = self._backend.get_added_tokens_decoder()
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self.bos_id = self._id(special.get("bos_token"))
        self.eos_id = self._id(special.get("eos_token"))
        self.eos_ids = _eos_ids(folder, self.eos_id)
        self._special = special
        self._kind = str(config.get("tokenizer_class", "PreTrainedTokenizerFast"))
        self._made_of = config.get(MADE_OF)
        self._chat = ChatTemplate(folder, config, special, template)
        self._response_template = _template_of_responses(config, folder)
        self._to_bytes = _byte_decoder(self._backend, folder)
        self._bytes: dict[int, bytes] = {}
        self._num_stripped = _num_stripped(_decoder_parts(self._backend))
        # Prompts of one question each that were rendered elsewhere; None where the template fails.
        self.questions: dict[str, list[int] | None] = {}

    def eos_ids_below(self, size: int) -> frozenset[int]:
        """Those of `eos_ids` that an LM head of `size` rows can give; files may state others."""
        return frozenset(token for token in self.eos_ids if token < size)

    @cached_property
    def bound(self) -> Bound | None:
        """What says how many tokens a text has at least; None where nothing can be said."""
        return bound(self._backend, self.longest_spelling)

    def fewest_tokens(self, text: str) -> int | None:
        """As `bound` says."""
        return None if self.bound is None else self.bound.fewest_tokens(text)

    @cached_property
    def longest_spelling(self) -> int:
        """Characters of the longest token, at least 1."""
        return max([1, *map(len, self._backend.get_vocab(with_added_tokens=True))])

    def describe(self) -> str:
        """What it is, for people: how many tokens of what kind, and the older files that it was made of, if it was."""
        parts = [part["type"] for part in _decoder_parts(self._backend)]
        model = {"BPE": "BPE", "Unigram": "unigram"}.get(type(self._backend.model).__name__, "others")
        fallback = " with bytes for other characters" if "ByteFallback" in parts else ""
        kind = "byte-level BPE" if "ByteLevel" in parts else f"SentencePiece {model}{fallback}"
        made = f", made of {self._made_of}" if isinstance(self._made_of, str) else ""
        template = "chat template" if self._chat.source is not None else "no chat template"
        return f"{self.vocab_size:,} tokens, {kind}{made}; {template}"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; `add_special_tokens` puts bos and eos around it where the model wants them. Control tokens
        written out in the text become their ids."""
        return encode(self._backend, text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8 come out as U+FFFD, ids beyond the vocabulary as nothing."""
        text = decode(self._backend, ids, skip_special_tokens)
        if "\ufffd" not in text or self._num_stripped is None:
            return text
        # tokenizers makes U+FFFD of each byte of a run in which one is wrong; streams show those that are characters.
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        text = b"".join(self.token_bytes(token) for token in ids if token not in skipped).decode("utf-8", "replace")
        return text[min(self._num_stripped, len(text) - len(text.lstrip(" "))) :]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for inside a text; empty for an id beyond the vocabulary (a padded LM head)."""
        if token_id not in self._bytes:
            token = self._backend.id_to_token(token_id)
            self._bytes[token_id] = b"" if token is None else self._to_bytes(token)
        return self._bytes[token_id]

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_values: Any,
    ) -> str:
        """The messages as one text, by the model's chat template; `template_values` are handed to the template.

        Raises InputError for messages that the template cannot take, and when the model has no template.
        """
        return self._chat.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **template_values,
        )

    def chat_ids(self, messages: Sequence[Message], **options: Any) -> ChatPrompt:
        """The prompt of a conversation: `render_chat(messages, **options)`, in which nothing is missing in silence, and
        its ids. Control tokens that the template writes become their ids; what messages, tools and template values
        spell is text, whatever it spells.

        A template that looks into messages for control tokens finds none there, but for reasoning that an assistant's
        message begins with. Raises InputError as `render_chat` does, for texts, calls and results that the
        prompt cannot have, and for tools that the template does not read.
        """
        text, ids, unread = self._chat_ids(messages, None, options, may_load=True)
        assert ids is not None, "any length will do"
        return ChatPrompt(text, ids, unread)

    def prepare(self) -> None:
        """Make what texts with control tokens need: a second backend, which takes a second or more, once."""
        self._control.load()

    def bounded_chat_ids(
        self, messages: Sequence[Message], most: int | None, **options: Any
    ) -> tuple[str, list[int] | None, tuple[str, ...]]:
        """As `chat_ids`, but no ids for a text of more than `most` characters. Raises UnpreparedError for one that
        needs `prepare`."""
        return self._chat_ids(messages, most, options, may_load=False)

    def _chat_ids(
        self, messages: Sequence[Message], most: int | None, options: Mapping[str, Any], may_load: bool
    ) -> tuple[str, list[int] | None, tuple[str, ...]]:
        if options.get("tools") and not self.takes_tools:
            raise InputError("tools: this model's chat template takes no tools. Leave them out.", "tools")
        messages, text, unread = self._render_whole(messages, options)
        theirs = {name: value for name, value in options.items() if not name.endswith("_token")}
        try:
            if most is not None and len(text) > most:
                return text, None, unread
            if not self._control.may_be_in([messages, theirs]):
                return text, self.encode(text, add_special_tokens=False), unread
            parts = self._render_hidden(text, messages, options, theirs)
            return "".join(parts), self._control.encode(parts, may_load), unread
        except (TypeError, UnicodeEncodeError) as error:
            raise not_unicode(error) from error

    def _render_whole(self, messages: Sequence[Message], options: Mapping[str, Any]) -> Rendered:
        style = None if self.call_format is None else self.call_format.style
        return self._chat.render_whole(messages, style, **{**_DEFAULTS, **options})

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The ids of `chat_ids(messages, **options)`; the template has written the special tokens already."""
        return self.chat_ids(messages, **options).ids

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template reads `tools`."""
        return self._chat.takes_tools

    @cached_property
    def call_format(self) -> CallFormat | None:
        """How the model writes calls of tools; None for one that nobody here knows."""
        special = (token.content for token in self._backend.get_added_tokens_decoder().values() if token.special)
        return call_format(self._response_template, self._chat.tool_source, special)

    @cached_property
    def markers(self) -> Reasoning | None:
        """The tokens around the model's reasoning; None for one that does not reason. Runs no chat template, so nothing
        is known of where the model's turn begins."""
        return markers(self, self._response_template, self._chat.tool_source + (self._chat.source or ""))

    @cached_property
    def reasoning(self) -> Reasoning | None:
        """As `markers`, and where the model's turn begins, which the chat template says."""
        return None if self.markers is None else with_header(self, self.markers)

    def beginning(self, prompt_ids: Sequence[int]) -> Beginning:
        """Where the answer to a prompt begins; as `reasoning`, runs the chat template once."""
        return "after" if self.reasoning is None else self.reasoning.beginning(prompt_ids)

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self._backend)

    def _render_hidden(
        self, text: str, messages: Sequence[Message], options: Mapping[str, Any], theirs: Mapping[str, Any]
    ) -> list[str]:
        """Text of the template and text that must stay text, in turn. Marks may keep a template from recognising what
        it looks for: the first way of placing them that still gives `text` is taken, else whole control tokens alone
        are marked."""

        def parts(chat: Any, edges: bool) -> list[str]:
            marks = StandIns()
            chat, values = self._control.hidden([chat, theirs], marks, edges)
            return marks.split(self.render_chat(chat, **{**options, **values}))

        for chat in (messages, *with_reasoning_apart(messages)):
            for edges in (True, False):
                try:
                    found = parts(chat, edges)
                except InputError:  # the template refuses a mark, as in the id of a call
                    continue
                if "".join(found) == text:
                    return found
        return parts(messages, edges=False)

    def info(self) -> dict[str, Any]:
        """What a client needs to build prompts itself, under the names of tokenizer_config.json."""
        tokens = {role: self._special.get(role) for role in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return {"tokenizer_class": self._kind, **tokens, "chat_template": self._chat.source}

    def _id(self, token: str | None) -> int | None:
        token_id: int | None = None if token is None else self._backend.token_to_id(token)
        return token_id


def _load(path: Path) -> Backend:
    if not path.exists():
        raise ModelError(f"{path} is missing. Save it with transformers.AutoTokenizer's save_pretrained.")
    try:
        backend = Backend.from_buffer(files.read_bytes(path, _MOST_BYTES))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ModelError(f"{path} cannot be read: {error}.") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like; each is a string or an object with `content`."""
    tokens = {}
    for role, value in config.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if role.endswith("_token") and isinstance(content, str):
            tokens[role] = content
    return tokens


def _eos_ids(folder: Path, named: int | None) -> frozenset[int]:
    """generation_config.json says it best, config.json where that is silent; the tokenizer's own end token on top.
    Raises ModelError for what is no id."""
    for name in ("generation_config.json", "config.json"):
        stated = _optional_json(folder / name).get("eos_token_id")
        if stated is not None:
            break
    ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if any(type(each) is not int or not 0 <= each <= _LARGEST_ID for each in ids):
        raise ModelError(f"{folder / name} gives eos_token_id as {stated!r}; it must be a token id or a list of them.")
    return frozenset(ids if named is None else [*ids, named])


def _template_of_responses(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any] | None:
    stated = config.get("response_template")
    if stated is not None and not isinstance(stated, Mapping):
        raise ModelError(
            f"{folder / 'tokenizer_config.json'} gives response_template as a {type(stated).__name__}; it must be an "
            "object."
        )
    return stated


def _byte_decoder(backend: Backend, folder: Path) -> Callable[[str], bytes]:
    """How a token's spelling becomes bytes, told by the parts of the decoder in tokenizer.json."""
    parts = _decoder_parts(backend)
    if any(part["type"] == "ByteLevel" for part in parts):
        alphabet = byte_alphabet()
        return lambda token: _from_byte_alphabet(token, alphabet)
    fallback = any(part["type"] == "ByteFallback" for part in parts)
    if fallback or any(part["type"] == "Metaspace" or part == _MARK_TO_SPACE for part in parts):
        return lambda token: _from_sentencepiece(token, fallback)
    kinds = ", ".join(part["type"] for part in parts) or "none"
    raise ModelError(
        f"{folder / 'tokenizer.json'} has the decoder {kinds}. Byte-level and sentencepiece tokenizers are supported."
    )


def _num_stripped(parts: Sequence[Mapping[str, Any]]) -> int | None:
    """How many blanks at its beginning a decoded text is without; None where the decoder knows no tokens for bytes."""
    if not any(part["type"] == "ByteFallback" for part in parts):
        return None
    return sum(int(part["start"]) for part in parts if part["type"] == "Strip" and part["content"] == " ")


def _decoder_parts(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())  # its JSON; the file itself can have 30 MB
    parts: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return parts


def _from_byte_alphabet(token: str, alphabet: Mapping[str, int]) -> bytes:
    """A token that uses any other character (an added one) is plain text."""
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()


def _from_sentencepiece(token: str, fallback: bool) -> bytes:
    if fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(byte[1], 16)])
    return token.replace(_SPACE, " ").encode()
