"""Where a running server is, for the commands that talk to one."""

from __future__ import annotations

import argparse
import os
from urllib.parse import urlsplit

from engine.core.errors import ConfigError
from engine.reading import read_text

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
MAX_KEY_BYTES = 1 << 16


def add_key_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key-file", metavar="FILE", help="a file with the key; env OPENAI_API_KEY")
    parser.add_argument("--api-key", metavar="KEY", help="the key itself: every user of this machine can see it in the process list")


def check_base_url(text: str) -> str:
    """With a scheme and without a trailing /v1. Raises ConfigError."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or any(ord(character) <= 32 or ord(character) == 127 for character in url):
        raise ConfigError(f"--base-url is {text[:80]!r}; needed: like {DEFAULT_BASE_URL}")
    return url.rstrip("/").removesuffix("/v1")


def read_api_key(arguments: argparse.Namespace) -> str | None:
    """From the file, the command line or OPENAI_API_KEY."""
    key = arguments.api_key
    if arguments.api_key_file is not None:
        lines = read_text(arguments.api_key_file, MAX_KEY_BYTES).split()
        if not lines:
            raise ConfigError(f"{arguments.api_key_file}: no key in it")
        key = lines[0]
    key = key or os.environ.get("OPENAI_API_KEY") or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key has characters that no HTTP header can carry")
    return key
