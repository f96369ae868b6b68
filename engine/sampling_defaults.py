"""What a model's makers recommend for sampling: ``generation_config.json`` beside the weights, else OpenAI's temperature of 1."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from engine.core.errors import ConfigError, RequestError
from engine.core.sampling import SamplingParams
from engine.reading import read_text

MAX_FILE_BYTES = 1 << 20
KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
OPENAI = SamplingParams(temperature=1.0)


def read_sampling_defaults(model: Path) -> SamplingParams:
    """The defaults of a model folder (or file, which has none). Raises ConfigError for a value that no request might have."""
    path = model / "generation_config.json"
    if not path.is_file():
        return OPENAI
    try:
        values = json.loads(read_text(path, MAX_FILE_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a JSON object")
    given = {key: values[key] for key in KEYS if values.get(key) is not None}
    if given.get("top_k") == -1:  # how some files say: no limit
        given["top_k"] = 0
    defaults = msgspec.structs.replace(OPENAI, **given)
    try:
        defaults.validate(vocab_size=1)
    except RequestError as error:
        raise ConfigError(f"{path}: {error}") from None
    return defaults


def describe(defaults: SamplingParams) -> dict[str, float]:
    """The values that are not those of plain sampling, the temperature always."""
    plain = SamplingParams()
    return {key: getattr(defaults, key) for key in KEYS if key == "temperature" or getattr(defaults, key) != getattr(plain, key)}
