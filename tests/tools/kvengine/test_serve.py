"""``kvengine serve``: a process that answers and ends in order, what it refuses to open, and what its help loads."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from kvstore.tools.kvengine.serve_options import parse
from tests.engine.test_gguf import write_gguf

COMMAND = (sys.executable, "-m", "kvstore.tools.kvengine", "serve")


def test_it_serves_until_sigterm(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", "llama")
    options = ("--port", "0", "--device-mib", "4", "--host-mib", "8", "--name", "tiny", tmp_path / "tiny.gguf")
    process = subprocess.Popen([*COMMAND, *map(str, options)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if line.startswith("serving "))
        url = line.split()[-1]
        body = {"prompt": "ab1", "max_tokens": 3, "ignore_eos": True}
        answer = httpx2.post(f"{url}/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["model"] == "tiny"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "0.0.0.0", "m"), "can be reached by others"),
        (("--host", "::", "m"), "can be reached by others"),
        (("--host", "example.org", "m"), "can be reached by others"),
        (("--port", "70000", "m"), "--port is 70000"),
        (("--timeout-s", "0", "m"), "limits.timeout_s"),
        (("--api-keys", "/no/such/file", "m"), "/no/such/file"),
        ((), "model"),
    ],
)
def test_wrong_words_are_usage_errors(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_beyond_loopback_with_keys_or_on_ones_own_word(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("one\n\ntwo\n")
    assert parse(("--host", "0.0.0.0", "--api-keys", str(tmp_path / "keys"), "m")).keys == ("one", "two")
    assert parse(("--host", "0.0.0.0", "--insecure", "m")).host == "0.0.0.0"
    assert parse(("--host", "::1", "m")).keys == ()


def test_an_empty_file_of_keys_opens_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keys").write_text(" \n")
    with pytest.raises(SystemExit):
        parse(("--host", "0.0.0.0", "--api-keys", str(tmp_path / "keys"), "m"))
    assert "at least one key" in capsys.readouterr().err


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*COMMAND, "--port", port, "/no/model"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"127.0.0.1:{port}" in done.stderr
    assert "loading" not in done.stderr


def test_options_are_read_without_torch_and_transformers() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'tokenizers', 'starlette', 'uvicorn'}"
    code = f"import sys, kvstore.tools.kvengine.main; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
