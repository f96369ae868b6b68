"""generation_config.json: what is taken from it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.core.errors import ConfigError
from engine.core.sampling import SamplingParams
from engine.sampling_defaults import describe, read_sampling_defaults


def folder(tmp_path: Path, text: str) -> Path:
    (tmp_path / "generation_config.json").write_text(text)
    return tmp_path


def test_the_makers_values_else_openais(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingParams(temperature=1.0)
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": -1, "repetition_penalty": 1.1, "min_p": None, "eos_token_id": 5, "max_length": 9}
    defaults = read_sampling_defaults(folder(tmp_path, json.dumps(values)))
    assert defaults == SamplingParams(temperature=0.6, top_p=0.95, repetition_penalty=1.1)
    assert describe(defaults) == {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1}
    assert describe(SamplingParams(temperature=1.0)) == {"temperature": 1.0}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"temperature": -1}', "temperature is -1"),
        ('{"top_p": 0}', "top_p is 0"),
        ('{"top_k": "many"}', "top_k is many"),
        ('{"temperature": NaN}', "temperature"),
        ("[1]", "not a JSON object"),
        ("{", "generation_config.json"),
        ("[" * 100_000, "generation_config.json"),
    ],
)
def test_bad_values_are_the_operators(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_sampling_defaults(folder(tmp_path, text))
