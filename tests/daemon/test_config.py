"""One file, unknown keys refused, flags on top, every key told."""

from __future__ import annotations

import tomllib

import pytest
from typer.testing import CliRunner

from kvstore.core.errors import InvalidArgument
from kvstore.core.sizes import parse_size
from kvstore.daemon.config import Config, describe, format_size, load, print_config
from kvstore.daemon.main import make_app

run = CliRunner().invoke


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("64 MiB", 64 << 20),
        ("64MiB", 64 << 20),
        ("1.5 GiB", 3 << 29),
        ("2 GB", 2 * 10**9),
        ("1 tib", 1 << 40),
        ("0", 0),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes
    assert parse_size(format_size(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 MB of memory", "1 ZiB", None, 1.5, True])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="64 MiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"hots": "1 GiB"}, "hots"),
        ({"host": "much"}, "host"),
        ({"host": 1}, "host"),
        ({"ssd": "1 GiB"}, "ssd_dir"),
        ({"low_watermark": 0.99}, "low_watermark"),
        ({"high_watermark": 1.5}, "high_watermark"),
        ({"listen": "0.0.0.0:7070"}, "listen"),
        ({"listen": "127.0.0.1:65536"}, "listen"),
        ({"listen": "[::1]:99999999999"}, "listen"),
        ({"socket_mode": "999"}, "socket_mode"),
        ({"log_level": "loud"}, "log_level"),
        ({"sessions_max": 0}, "sessions_max"),
        ({"ssd_recovery": "lax"}, "ssd_recovery"),
        ({"ssd_fragmentation": 0}, "ssd_fragmentation"),
        ({"ssd_io_deadline_s": 0}, "ssd_io_deadline_s"),
        ({"ssd_segment": 100_000}, "ssd_segment"),
        ({"host_eviction": "by chance"}, "host_eviction"),
        ({"guarantees": ["a host"]}, "guarantees"),
        ({"guarantees": ["a tape 1 MiB"]}, "guarantees"),
        ({"guarantees": ["a host many"]}, "guarantees"),
        ({"guarantees": ["a host 0"]}, "guarantees"),
        ({"guarantees": ["a host 1 MiB", "a host 2 MiB"]}, "guarantees"),
        ({"host": "64 MiB", "guarantees": ["a host 30 MiB", "b host 30 MiB"]}, "guarantees"),
        ({"guarantees": ["a ssd 1 MiB"]}, "guarantees"),
    ],
)
def test_a_wrong_key_is_named(values, field):
    with pytest.raises(InvalidArgument) as caught:
        load(None, values)
    assert caught.value.field == field
    assert caught.value.expected


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"high_watermark": 2.0}, "high_watermark is 2.0; expected at most 1.0"),
        ({"sessions_max": 0}, "sessions_max is 0; expected at least 1"),
        ({"sessions_max": 1.5}, "sessions_max is 1.5; expected a whole number"),
        ({"high_watermark": 0}, "high_watermark is 0; expected more than 0"),
        ({"high_watermark": "x"}, "high_watermark is 'x'; expected a number"),
        ({"high_watermark": float("nan")}, "high_watermark is nan; expected"),
        ({"host_eviction": 3}, "host_eviction is 3; expected a text in quotes"),
        ({"host_eviction": "mru"}, "host_eviction is 'mru'; expected "),
        ({"sessions_max": "x"}, "sessions_max is 'x'; expected a whole number"),
        ({"grpc": "x"}, "grpc is 'x'; expected true or false"),
        ({"socket_mode": "999"}, "socket_mode is '999'; expected octal text such as '600'"),
        ({"log_level": "loud"}, "log_level is 'loud'; expected one of debug, info, warning, error"),
        ({"hots": "1 GiB"}, "hots is no key; expected one of socket, "),
    ],
)
def test_a_wrong_value_is_told_in_words_of_the_configuration(values, words):
    with pytest.raises(InvalidArgument) as caught:
        load(None, values)
    assert str(caught.value).startswith(words)


def test_flags_override_the_file(tmp_path):
    file = tmp_path / "kvstored.toml"
    file.write_text('device = "8 MiB"\nhost = "32 MiB"\n')
    loaded = load(file, {"host": "64 MiB"})
    assert (loaded.device, loaded.host) == (8 << 20, 64 << 20)


@pytest.mark.parametrize("text", ["device = ", "device = 1\ndevice = 2\n"])
def test_a_file_that_is_no_toml_is_refused(tmp_path, text):
    file = tmp_path / "kvstored.toml"
    file.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        load(file, {})
    assert caught.value.field == "config"
    with pytest.raises(InvalidArgument):
        load(tmp_path / "missing.toml", {})


def test_the_printed_configuration_is_the_configuration(tmp_path):
    config = load(None, {"ssd": "1 GiB", "ssd_dir": str(tmp_path / 'odd "name"'), "admin_uids": [1, 2]})
    text = print_config(config)
    file = tmp_path / "kvstored.toml"
    file.write_text(text)
    assert load(file, {}) == config
    unset = {name for name in Config.model_fields if getattr(config, name) is None}
    assert set(tomllib.loads(text)) | unset == set(Config.model_fields)
    assert all(f'# {name} = ""' in text for name in unset)


def test_every_key_has_one_text_for_help_and_file():
    result = run(make_app(), ["--help"], env={"COLUMNS": "1000", "TERMINAL_WIDTH": "1000"})
    assert result.exit_code == 0
    shown = " ".join(result.stdout.split())
    printed = print_config(Config())
    for name in Config.model_fields:
        assert f"--{name.replace('_', '-')}" in shown
        assert f"# {describe(name)}\n" in printed
        assert describe(name)[:40] in shown


def test_check_prints_the_plan_and_starts_nothing(tmp_path):
    flags = [f"--socket={tmp_path / 'k.sock'}", "--host=16 MiB", "--ssd=1 GiB", f"--ssd-dir={tmp_path / 'ssd'}"]
    result = run(make_app(), [*flags, "--check"])
    assert result.exit_code == 0, result.output
    for word in ("device", "host", "memory", "huge pages", "pinning", "ssd", "sockets", "limits"):
        assert word in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_check_fails_where_the_daemon_would(tmp_path):
    result = run(make_app(), [f"--socket={tmp_path / 'k.sock'}", "--host=900 TiB", "--check"])
    assert result.exit_code == 1
    assert "make host, device or buffers_max smaller" in result.stdout


def test_a_wrong_flag_is_exit_code_2_and_one_line():
    result = run(make_app(), ["--host", "much"])
    assert result.exit_code == 2
    assert "host is 'much'" in result.output
    assert result.output.count("\n") == 1
