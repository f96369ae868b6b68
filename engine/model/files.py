"""What a model's files say beside its weights: spec, tokenizer, chat template. No torch, so that any process may read it.

A model is a folder (config.json, *.safetensors, tokenizer.json, chat_template.jinja or tokenizer_config.json) or one .gguf file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.core.errors import ConfigError
from engine.core.model_config import model_spec
from engine.core.specs import ModelSpec
from engine.model import registry
from engine.reading import read_bytes, read_text

MAX_JSON_BYTES = 256 << 20  # the largest tokenizer.json in use is about 35 MB
_SMALL_FILE_BYTES = 1 << 20
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """``path`` is the folder or the .gguf file; ``text_folder`` the folder of the tokenizer's files, the same but for presets.

    ``tokenizer_json`` is what ``tokenizers.Tokenizer.from_buffer`` reads, None where
    the model has no tokenizer; so is ``chat_template``, Jinja source."""

    path: Path
    text_folder: Path
    spec: ModelSpec
    config: dict[str, Any]
    tokenizer_json: bytes | None
    chat_template: str | None

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()


def read_model_files(name_or_path: str | Path) -> ModelFiles:
    """Resolve a packaged name or a path and read everything but the weights. Raises ConfigError naming the file at fault."""
    path = registry.resolve(name_or_path)
    if path.is_dir():
        return _read_folder(path, registry.text_folder(path))
    if path.suffix == ".gguf":
        from engine.model.gguf import GgufFile  # an optional package, needed for this format only

        file = GgufFile(path)
        config = file.config()
        return ModelFiles(path, path.parent, model_spec(config, path.stem), config, file.tokenizer_json(), file.chat_template())
    if path.suffix in PICKLE_SUFFIXES:
        raise pickle_refusal(path)
    raise ConfigError(f"{path}: not a model; needed: a folder with config.json, a .gguf file, or one of {', '.join(registry.names())}")


def fingerprint(path: Path) -> str:
    """SHA-256 over names and sizes of the model's files and the content of the small ones: weights are too long to read again."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file():
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            digest.update(file.read_bytes() if size <= _SMALL_FILE_BYTES else b"")
    return digest.hexdigest()


def pickle_refusal(path: Path) -> ConfigError:
    return ConfigError(f"{path}: pickle files can run code when they are read and are never loaded; convert the model to safetensors")


def read_json(path: Path) -> Any:
    """The parsed file. Raises ConfigError naming it where it is missing, too large or not JSON."""
    data = read_bytes(path, MAX_JSON_BYTES)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None


def _read_folder(folder: Path, text_folder: Path) -> ModelFiles:
    config = read_json(folder / "config.json")
    spec = model_spec(config, folder.resolve().name)
    tokenizer = text_folder / "tokenizer.json"
    if tokenizer.is_file():
        read_json(tokenizer)  # a broken one is named here, not in the middle of the start
    return ModelFiles(
        path=folder,
        text_folder=text_folder,
        spec=_with_generation_eos(spec, folder / "generation_config.json"),
        config=config,
        tokenizer_json=read_bytes(tokenizer, MAX_JSON_BYTES) if tokenizer.is_file() else None,
        chat_template=_chat_template(text_folder),
    )


def _with_generation_eos(spec: ModelSpec, path: Path) -> ModelSpec:
    """Chat models often name further end tokens in generation_config.json only."""
    if not path.is_file():
        return spec
    values = read_json(path)
    more = values.get("eos_token_id") if isinstance(values, dict) else None
    ids = more if isinstance(more, list) else [] if more is None else [more]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < spec.vocab_size:
            raise ConfigError(f"{path}: eos_token_id is {more!r}; allowed: ids from 0 to {spec.vocab_size - 1}")
    return msgspec.structs.replace(spec, eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *ids))))


def _chat_template(folder: Path) -> str | None:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return read_text(jinja, MAX_JSON_BYTES)
    if not (folder / "tokenizer_config.json").is_file():
        return None
    values = read_json(folder / "tokenizer_config.json")
    template = values.get("chat_template") if isinstance(values, dict) else None
    if isinstance(template, list):  # several named ones
        defaults = [entry.get("template") for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = defaults[0] if defaults else None
    return template if isinstance(template, str) else None
