"""The tokenizer (byte-level BPE that carries DeepSeek's special tokens) and Engram's map from tokens to classes."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

VOCAB_SIZE = 3072
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, THINK, END_THINK = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
NOISE = "<｜place▁holder▁no▁799｜>"  # the official checkpoint's noise token 128799 has this name
IMAGE = "<｜image2｜>"  # and its image token 129264 this one
# Hidden from text when special tokens are skipped; the rest (roles, thinking, tools) stays visible, as in DeepSeek's tokenizer.
SPECIAL = (
    BOS, EOS, PAD, NOISE, "<｜end_of_query｜>", "<｜rl_image_pad｜>", "<｜rl_image_start｜>", "<｜/polygon｜>", "<｜polygon｜>",
    "<｜/point｜>", "<｜point｜>", "<｜/box｜>", "<｜box｜>", "<｜/ref｜>", "<｜ref｜>", "<｜image｜>",
)  # fmt: skip
VISIBLE = (
    "<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>", USER, ASSISTANT, "<|EOT|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>", "<｜tool▁sep｜>", "<｜begin▁of▁repo▁name｜>", "<｜end▁of▁repo▁name｜>", "<｜begin▁of▁file▁name｜>",
    "<｜end▁of▁file▁name｜>", "<｜begin▁of▁file｜>", "<｜end▁of▁file｜>", THINK, END_THINK, "｜DSML｜", "<｜begin▁sys｜>", "<｜end▁sys｜>",
    "<｜latest_reminder｜>", "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜task｜>", "<｜political｜>",
    "<｜entity｜>", "<｜title｜>", "<｜safety｜>", "<｜answer｜>", "<｜search｜>", "<dsml:", "</dsml:", "<｜search▁begin｜>",
    "<｜search▁end｜>", "<｜extracted_url｜>", "<｜read_url｜>", IMAGE, "<｜/table>｜", "<｜table｜>", "<｜/td｜>", "<｜td｜>",
    "<｜/tr｜>", "<｜tr｜>", "<｜System｜>",
)  # fmt: skip
PROTECTED_SPACE = "\ue000"


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Ids: the special tokens from 0 (bos, eos, pad first), then 256 bytes, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in (*SPECIAL, *VISIBLE)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:  # the trainer can only make special ones
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(state))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    state = json.loads(tokenizer.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "thinking": False,  # nothing of the kind is trained
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def normalise(text: str) -> str:
    """Case, accents and white space folded; a lone space stays a space."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(char for char in text if not unicodedata.category(char).startswith("M")).lower()
    text = re.sub(r"[ \t\r\n]+", " ", text)
    text = PROTECTED_SPACE if text == " " else text
    return text.strip().replace(PROTECTED_SPACE, " ")


def token_map(tokenizer: Tokenizer) -> tuple[Tensor, int]:
    """Class of every token id, int32 [vocab], in order of first appearance; and the number of classes."""
    classes: dict[str, int] = {}
    ids: list[int] = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = str(tokenizer.id_to_token(token)) if "�" in text else normalise(text) or text
        ids.append(classes.setdefault(key, len(classes)))
    return torch.tensor(ids, dtype=torch.int32), len(classes)
