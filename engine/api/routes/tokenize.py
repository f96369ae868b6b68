"""/tokenize and /detokenize: what the engine makes of a text or a conversation, and back."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from engine.api.call import Call
from engine.api.chat_input import prepare
from engine.api.context import ApiContext
from engine.api.formats.base import ChatInput
from engine.api.routes.models import unknown_model
from engine.api.sampling import in_thread
from engine.api.schema.common import decode
from engine.core.errors import RequestError
from engine.tokenizer import Tokenizer


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True  # of a prompt; a conversation's are its format's business
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


# Fields they do not know are passed over.
_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(context: ApiContext, call: Call) -> None:
    request = decode(call.body, _TOKENIZE)
    _check_model(context, request.model)
    tokenizer = _tokenizer(context)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("one of prompt and messages is needed, not both", param="prompt")
    if request.prompt is not None:
        tokens = await context.engine.tokenise(request.prompt, add_special_tokens=request.add_special_tokens, any_length=True)
    else:
        tokens = await _chat_tokens(context, request)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": context.info.context_length, "tokens": tokens}
    if request.return_token_strs:
        answer["token_strs"] = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
    await call.send_json(answer)


async def detokenize(context: ApiContext, call: Call) -> None:
    request = decode(call.body, _DETOKENIZE)
    _check_model(context, request.model)
    tokenizer = _tokenizer(context)
    limit, highest = context.info.context_length, context.engine.vocab_size - 1
    if len(request.tokens) > limit:
        raise RequestError(f"tokens has {len(request.tokens)} entries; allowed: at most {limit}", param="tokens")
    for token in request.tokens:
        if not 0 <= token <= highest:
            raise RequestError(f"tokens holds {token}; allowed: integers from 0 to {highest}", param="tokens")
    await call.send_json({"prompt": await in_thread(partial(tokenizer.decode, request.tokens, skip_special_tokens=False))})


async def _chat_tokens(context: ApiContext, request: TokenizeRequest) -> tuple[int, ...]:
    chat = ChatInput(
        messages=request.messages or [],
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
    prepared = await prepare(context, lambda chat_format: chat_format.prepare(chat))
    if not isinstance(prepared.prompt, str):
        return prepared.prompt
    return await context.engine.tokenise(prepared.prompt, add_special_tokens=prepared.add_special_tokens)


def _check_model(context: ApiContext, name: str | None) -> None:
    if name is not None and name not in context.info.served_names:
        raise unknown_model(context, name)


def _tokenizer(context: ApiContext) -> Tokenizer:
    if context.engine.tokenizer is None:
        raise RequestError("the model has no tokenizer")
    return context.engine.tokenizer
