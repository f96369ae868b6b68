"""Chat formats: from messages to a prompt, and from generated text to an answer."""

from __future__ import annotations

from typing import Literal

from engine.core.errors import ConfigError
from engine.core.specs import V41Spec
from engine.launch import OpenedModel

from .base import ChatFormat
from .deepseek import DeepseekFormat
from .deepseek_parser import THINK_END
from .dsml import TAG
from .template import TemplateFormat

__all__ = ["choose_format"]


def choose_format(model: OpenedModel, thinking: Literal["auto", "on", "off"]) -> ChatFormat | None:
    """The format of a model's chats, None for a model without tokenizer or chat template. ``thinking`` is for requests that do not say;
    "auto" is the model's own way. Raises ConfigError for what the model cannot do.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        return None
    if isinstance(model.spec, V41Spec):
        end, tag = (_token(model, text) for text in (THINK_END, TAG))
        default = tokenizer.settings.get("thinking") is not False
        is_on = default if thinking == "auto" else thinking == "on"
        return DeepseekFormat(tokenizer.json_bytes, think_end_token=end, dsml_token=tag, thinking=is_on)
    if tokenizer.chat_template is None:
        return None
    return TemplateFormat(tokenizer, None if thinking == "auto" else thinking == "on")


def _token(model: OpenedModel, text: str) -> int:
    token = model.tokenizer.token_id(text) if model.tokenizer is not None else None
    if token is None:
        raise ConfigError(f"{model.spec.name}: the tokenizer has no token {text}, which the format of DeepSeek V4.1 needs")
    return token
