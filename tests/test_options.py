"""Options: precedence, origins, bounds, unknown keys."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from engine.config import ENGINE_OPTIONS, SAMPLING_OPTIONS, SERVE_OPTIONS
from engine.core.errors import ConfigError
from engine.options import Option, Resolved, add_arguments, resolve


def parse(arguments: list[str], environment: dict[str, str] | None = None, config: str | None = None) -> Resolved:
    parser = argparse.ArgumentParser()
    add_arguments(parser, ENGINE_OPTIONS, "engine")
    return resolve(ENGINE_OPTIONS, vars(parser.parse_args(arguments)), environment or {}, config)


def test_command_line_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    config = tmp_path / "twinfer.toml"
    config.write_text("block-size = 16\nmax_running_requests = 3\nnum-threads = 1\n")
    environment = {"TWINFER_BLOCK_SIZE": "32", "TWINFER_NUM_THREADS": "2"}
    resolved = parse(["--block-size", "64"], environment, str(config))
    assert (resolved["block_size"], resolved.origins["block_size"]) == (64, "command line")
    assert (resolved["num_threads"], resolved.origins["num_threads"]) == (2, "environment TWINFER_NUM_THREADS")
    assert (resolved["max_running_requests"], resolved.origins["max_running_requests"]) == (3, f"file {config}")
    assert (resolved["draft_tokens"], resolved.origins["draft_tokens"]) == (0, "default")
    assert set(resolved.non_default()) == {"block_size", "num_threads", "max_running_requests"}
    assert "command line" in resolved.describe()


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--page-size", "64"], "block_size", 64),
        (["--max-num-seqs", "5"], "max_running_requests", 5),
        (["--max-model-len", "99"], "context_length", 99),
        (["--no-enable-prefix-caching"], "disable_radix_cache", True),
        (["--no-disable-radix-cache"], "disable_radix_cache", False),
        (["--speculative-num-draft-tokens", "3"], "draft_tokens", 3),
    ],
)
def test_aliases_users_type(arguments: list[str], key: str, value: object) -> None:
    assert parse(arguments)[key] == value


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--block-size", "0"], ("--block-size", "'0'", "1 to 65536")),
        (["--block-size", "9999999999999999999999"], ("--block-size", "1 to 65536")),
        (["--block-size", "1.5"], ("--block-size", "'1.5'")),
        (["--mem-fraction-static", "nan"], ("--mem-fraction-static", "'nan'")),
        (["--mem-fraction-static", "1.01"], ("--mem-fraction-static", "0.01 to 1")),
        (["--dtype", "float8"], ("--dtype", "'float8'", "bfloat16")),
    ],
)
def test_a_bad_value_is_refused_with_name_value_and_limit(arguments: list[str], parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    for part in parts:
        assert part in str(caught.value)


def test_bad_values_of_environment_and_file_name_their_origin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="environment TWINFER_BLOCK_SIZE"):
        parse([], {"TWINFER_BLOCK_SIZE": "many"})
    config = tmp_path / "c.toml"
    config.write_text("block_size = true\n")
    with pytest.raises(ConfigError, match="--block-size"):
        parse([], config=str(config))
    config.write_text("blok_size = 1\n")
    with pytest.raises(ConfigError, match="unknown keys blok_size"):
        parse([], config=str(config))
    config.write_text("= 1\n")
    with pytest.raises(ConfigError, match=r"c\.toml"):
        parse([], config=str(config))
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        parse([], config=str(tmp_path / "nowhere.toml"))


def test_switch_values() -> None:
    switch = Option("quick", bool, False, "x")
    assert switch.parse("on", "t") is True
    assert switch.parse("FALSE", "t") is False
    with pytest.raises(ConfigError, match="true or false"):
        switch.parse("2", "t")


def test_an_option_with_many_values() -> None:
    names = Option("names", str, (), "x", many=True)
    assert names.parse(["a,b", " c "], "command line") == ("a", "b", "c")
    assert names.parse("a,,b", "environment") == ("a", "b")
    with pytest.raises(ConfigError, match=r"--names.*is 5; needed: texts"):
        names.parse(5, "file")
    with pytest.raises(ConfigError, match="5000 entries; allowed: at most 4096"):
        names.parse(",".join("x" * 5000), "environment")
    parser = argparse.ArgumentParser()
    add_arguments(parser, [names], "t")
    given = vars(parser.parse_args(["--names", "a,b", "--names", "c"]))
    assert resolve([names], given, {}, None)["names"] == ("a", "b", "c")


def test_a_secret_is_never_shown() -> None:
    key = Option("key", str, (), "x", many=True, secret=True)
    resolved = resolve([key], {}, {"TWINFER_KEY": "sesame"}, None)
    assert resolved["key"] == ("sesame",)
    assert "sesame" not in f"{resolved.describe()} {resolved.shown()} {resolved.non_default()}"
    with pytest.raises(ConfigError) as caught:
        key.parse({"sesame": 1}, "file")
    assert "sesame" not in str(caught.value)


def test_a_switch_that_is_a_denial_has_a_way_back() -> None:
    option = Option("no-progress", bool, False, "x")
    parser = argparse.ArgumentParser()
    add_arguments(parser, [option], "t")
    for flags, value in ((["--no-progress"], True), (["--progress"], False)):
        assert resolve([option], vars(parser.parse_args(flags)), {"TWINFER_NO_PROGRESS": "1"}, None)["no_progress"] is value


def test_every_default_lies_within_its_own_bounds() -> None:
    for option in (*ENGINE_OPTIONS, *SAMPLING_OPTIONS, *SERVE_OPTIONS):
        if option.default is not None:
            assert option.parse(option.default, "default") == option.default
