"""The bodies of /tokenize and /detokenize, both ways, as vLLM has them. Whoever has a tokenizer turns the text of
`TokenizeTextRequest`, or the messages of `TokenizeChatRequest`, into ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias, cast

from pydantic import AfterValidator, BeforeValidator, ValidationInfo, WithJsonSchema

from specserve.errors import InputError
from specserve.server.wire.fields import ID, Limits, Name, Wire, check_ids, limits_of, well_formed
from specserve.server.wire.json.pieces import LazyList, LongString
from specserve.server.wire.json.text import json_object
from specserve.server.wire.openai.bodies import DetokenizeReply, TokenizeReply
from specserve.server.wire.openai.requests import TemplateFields, checked
from specserve.server.wire.sentences import shown

_AT_ONCE = 4096  # ids that are written at once


class TokenizeTextRequest(Wire):
    """POST /tokenize with a prompt. `return_token_strs` asks for the tokens' spelling too."""

    model: Name | None = None
    """The model's name in /v1/models; null is the one served."""
    prompt: Annotated[str, AfterValidator(well_formed)]
    """The text, of at most as many characters as the server's --max-tokenize-characters says."""
    add_special_tokens: bool = True
    """Put the tokens around the text that the model wants there."""
    return_token_strs: bool = False
    """Send the tokens' spelling too."""


class TokenizeChatRequest(TemplateFields):
    """POST /tokenize with messages. The template has written the special tokens, so none are added by default."""

    model: Name | None = None
    """The model's name in /v1/models; null is the one served."""
    add_special_tokens: bool = False
    """Put the tokens around the text that the model wants there; the chat template has written its own already."""
    return_token_strs: bool = False
    """Send the tokens' spelling too."""


TokenizeRequest: TypeAlias = TokenizeTextRequest | TokenizeChatRequest


def read_tokenize(body: bytes, limits: Limits) -> TokenizeRequest:
    """The request that `body` holds. Raises InputError."""
    fields = json_object(body)
    if fields.get("messages") is None:
        return checked(TokenizeTextRequest, fields, limits)
    if fields.get("prompt") is not None:
        raise InputError("prompt and messages were both sent. Send one of them.", "prompt")
    return checked(TokenizeChatRequest, fields, limits)


def tokenize_body(ids: Sequence[int], max_model_len: int, spell: Callable[[int], str] | None = None) -> TokenizeReply:
    """The response of /tokenize; `spell` is how a token is spelled, if that was asked for. Long lists are made
    when they are written."""
    strings = None if spell is None else LazyList(ids, spell, _AT_ONCE)
    return cast(
        TokenizeReply,
        {
            "count": len(ids),
            "max_model_len": max_model_len,
            "tokens": LazyList(ids, int, _AT_ONCE),
            "token_strs": strings,
        },
    )


def _tokens(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, list):
        raise ValueError(f"is {shown(value)}; it must be a list of token ids.")
    check_ids(value, limits_of(info).vocab_size)
    return value


_TOKENS = {"type": "array", "items": ID}


class DetokenizeRequest(Wire):
    """POST /detokenize; no tokens are an empty text."""

    model: Name | None = None
    """The model's name in /v1/models; null is the one served."""
    tokens: Annotated[list[int], BeforeValidator(_tokens), WithJsonSchema(_TOKENS)]
    """Token ids."""


def detokenize_body(text: str) -> DetokenizeReply:
    """The response of /detokenize. The text is a LongString."""
    return cast(DetokenizeReply, {"prompt": LongString(text)})
