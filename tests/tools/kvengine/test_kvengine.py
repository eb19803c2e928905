"""``kvengine``: answers, statistics, formats and exit codes, on a small model over an embedded store and a daemon."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from kvstore import __version__
from kvstore.client import Client
from kvstore.daemon.config import Config
from kvstore.engine.weights import load_model
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.kvengine.main import main
from kvstore.v1 import admin_pb2
from tests.client.harness import daemon_thread
from tests.engine.families import Pair, build_pair
from tests.engine.test_gguf import write_gguf
from tests.engine.test_proving import Twice

CONTEXT = "ab" * 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_gguf(path, "llama")
    load_model(path)
    return path


@pytest.fixture(scope="module")
def pair() -> Pair:
    return build_pair("llama")


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def ask(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code, out, _ = run(capsys, *arguments, "--output", "json", "--ignore-eos", "-n", 6)
    assert code == 0
    return json.loads(out)


def test_prompts_of_a_file_after_a_shared_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, pair: Pair
) -> None:
    (tmp_path / "prompts").write_text("a1\n\nb2\n")
    (tmp_path / "context").write_text(CONTEXT)
    found = ask(capsys, model, "--file", tmp_path / "prompts", "--context", tmp_path / "context")
    codec = load_model(model).text
    assert codec is not None
    for answer, question in zip(found["answers"], ("a1", "b2"), strict=True):
        tokens = codec.encode(CONTEXT + question)
        assert answer["prompt_tokens"] == len(tokens) == 152
        assert tuple(answer["tokens"]) == pair.greedy(tokens, 6)
        assert answer["ended_by"] == "length"
        assert answer["text"] == codec.decode(answer["tokens"])
    assert found["counters"]["tokens_generated"] == 12


def test_an_ssd_folder_keeps_the_prefix_for_the_next_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    options = (model, "-p", CONTEXT, "--ssd", tmp_path / "ssd", "--ssd-mib", 64, "--device-mib", 4, "--host-mib", 8)
    cold, warm = ask(capsys, *options), ask(capsys, *options)
    assert sum(cold["answers"][0]["cached_tokens"].values()) == 0
    assert warm["answers"][0]["cached_tokens"]["ssd"] == 128
    assert warm["answers"][0]["tokens"] == cold["answers"][0]["tokens"]


def test_selected_attention_over_what_lies_in_storage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    tiers = ("--ssd", tmp_path / "ssd", "--ssd-mib", 64, "--device-mib", 0, "--host-mib", 8, "--host-share", 0)
    options = (model, "-p", CONTEXT, *tiers)
    ask(capsys, *options)
    exact = ask(capsys, *options)
    every = ask(capsys, *options, "--attention", "selected", "--mass", 1, "--max-share", 1)
    assert every["answers"][0]["tokens"] == exact["answers"][0]["tokens"]
    assert exact["counters"]["bytes_attended"]["hot"] == 0
    # The digests' pass, and the first choice of each layer, are read; the steps after it find them in memory.
    assert every["counters"]["bytes_attended"]["hot"] > every["counters"]["bytes_attended"]["ssd"] > 0
    none = ask(capsys, *options, "--attention", "selected", "--mass", 1, "--max-share", 1, "--hot-mib", 0)
    assert none["counters"]["bytes_attended"]["hot"] == 0
    assert none["answers"][0]["tokens"] == exact["answers"][0]["tokens"]


def test_over_a_daemon(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    with (
        TemporaryDirectory(prefix="kve-") as folder,
        DaemonProcess(Path(folder), {"device": "4 MiB", "host": "8 MiB", "ssd": "0"}) as daemon,
    ):
        daemon.start()
        options = (model, "-p", CONTEXT, "--socket", daemon.socket)
        cold, warm = ask(capsys, *options), ask(capsys, *options)
        assert sum(warm["answers"][0]["cached_tokens"].values()) == 128
        assert warm["answers"][0]["tokens"] == cold["answers"][0]["tokens"]
        salted = ask(capsys, *options, "--salt", "tenant")
        assert sum(salted["answers"][0]["cached_tokens"].values()) == 0


def test_mixed_precision_over_a_daemon_that_counts_what_it_saves(
    capsys: pytest.CaptureFixture[str], model: Path, pair: Pair
) -> None:
    with (
        TemporaryDirectory(prefix="kve-") as folder,
        DaemonProcess(Path(folder), {"device": "4 MiB", "host": "8 MiB", "ssd": "0"}) as daemon,
    ):
        daemon.start()
        mixed = ("--codec", "int8", "--raw-layers", "1", "--raw-first-tokens", 64, "--device-codec", "int8")
        options = (model, "-p", CONTEXT, "--socket", daemon.socket, "--lossless", "lz4", *mixed)
        cold, warm = ask(capsys, *options), ask(capsys, *options)
        assert warm["answers"][0]["cached_tokens"]["device"] == 128
        assert warm["answers"][0]["tokens"] == cold["answers"][0]["tokens"]
        with Client(daemon.socket) as client:
            status = admin_pb2.StatusResponse.FromString(client.connection()[0].call("kvstore.v1.Admin/Status", b"", 9))
            reply = client.connection()[0].call("kvstore.v1.Admin/ListNamespaces", b"", 9)
    (opened,) = admin_pb2.ListNamespacesResponse.FromString(reply).namespaces
    policy = opened.policy
    assert (list(opened.spec.raw_layers), policy.raw_first_tokens, policy.device_codec) == ([1], 64, "int8")
    assert policy.lossless == "lz4"
    device = status.tiers[0]
    # Two blocks, the first of them raw.
    assert (device.blocks, status.counters["device_blocks_encoded"]) == (2, 1)
    assert device.saved_bytes == device.raw_bytes - (device.used_bytes - device.reserved_bytes) > 0


def test_a_table_for_people(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    code, out, err = run(capsys, model, "-p", CONTEXT, "-n", 3, "--ignore-eos", "--temperature", 0.7, "--seed", 1)
    assert code == 0
    assert [word in out for word in ("computed", "device", "tokens/s", "length", "tokens generated")] == [True] * 5
    assert "loading" in err
    again = run(capsys, model, "-p", CONTEXT, "-n", 3, "--ignore-eos", "--temperature", 0.7, "--seed", 1)
    assert again[1].splitlines()[0] == out.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("-p", "a", "--temperature", "-1"), 2, "sampling.temperature is -1.0"),
        (("-p", "a", "--device-mib", "-1"), 2, "--device-mib is -1"),
        (("-p", "a", "--host-mib", "0"), 2, "--host-mib is 0"),
        (("-p", "a", "--raw-layers", "1"), 2, "spec.raw_layers"),
        (("-p", "a", "--codec", "int8", "--recent-raw-tokens", "-9"), 2, "recent_raw_tokens"),
        (("-p", "a", "--attention", "selected", "--mass", "0"), 2, "attention.mass"),
        (("-p", "a", "--host-share", "1.5"), 2, "config.host_share"),
        (("-p", "a", "--hot-mib", "-1"), 2, "config.hot_bytes"),
        (("-p", "a", "--cache-wait-s", "-1"), 2, "config.cache_wait_s"),
        ((), 2, "no prompt"),
        (("-p", "a", "--device", "tpu"), 2, "--device"),
        (("--file", "no/such/file"), 2, "no/such/file"),
        (("-p", "a", "--socket", "/no/such/socket"), 3, "/no/such/socket"),
    ],
)
def test_what_is_wrong_is_said_with_its_code(
    capsys: pytest.CaptureFixture[str], model: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    found, out, err = run(capsys, model, *arguments)
    assert (found, out) == (code, "")
    assert message in err


def test_a_gpu_is_refused_where_there_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = run(capsys, model, "-p", "a", "--device", "cuda")
    assert (code, out) == (2, "")
    assert "--device is cuda; expected auto or cpu, since torch has no CUDA device" in err
    assert "loading" not in err


def test_a_gpu_is_refused_where_device_lies_in_shared_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    code, out, err = run(capsys, model, "-p", "a", "--device", "cuda")
    assert (code, out) == (2, "")
    assert "config.device is cuda; expected auto or cpu, where DEVICE lies" in err


def test_the_cpu_can_be_named(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    named, left = (ask(capsys, model, "-p", "a1", *device)["answers"] for device in (("--device", "cpu"), ()))
    assert named[0]["tokens"] == left[0]["tokens"]


def test_a_folder_that_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, tmp_path, "-p", "a")
    assert code == 2
    assert "config.json" in err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version")[:2] == (0, f"{__version__}\n")


def test_a_model_that_can_not_be_served_has_an_exit_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_bytes(b"")
    code, out, err = run(capsys, tmp_path, "-p", "a")
    assert (code, out) == (4, "")
    assert "config.json" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("option", ["--file", "--context"])
def test_a_prompt_file_that_is_not_text_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path, option: str
) -> None:
    (tmp_path / "prompts").write_bytes(b"a\xff\xfe")
    code, _, err = run(capsys, model, "-p", "a", option, tmp_path / "prompts")
    assert code == 2
    assert option in err
    assert "UTF-8" in err


def test_an_interrupt_ends_quietly(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvstore.tools.kvengine.ask.serve", interrupt)
    code, _, err = run(capsys, model, "-p", "a")
    assert code == 130
    assert "Traceback" not in err


def test_a_family_that_attends_twice_a_layer_ends_with_its_own_code_and_stores_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaAttention", Twice)
    with daemon_thread(Config(socket=tmp_path / "s", device=0, host=1 << 24)):
        code, out, err = run(capsys, model, "-p", CONTEXT, "--socket", tmp_path / "s")
        with Client(tmp_path / "s") as client:
            status = admin_pb2.StatusResponse.FromString(client.connection()[0].call("kvstore.v1.Admin/Status", b"", 9))
        assert not [tier for tier in status.tiers if tier.blocks]
    assert (code, out) == (4, "")
    assert "writes them 2 times" in err


@pytest.mark.parametrize(
    "words",
    [
        ("-p", "\udc80"),
        ("-p", "a", "--salt", "\udc80"),
        ("-p", "a", "--threads", 10**12),
        ("-p", "a", "--ssd", __file__),
    ],
)
def test_values_that_no_text_or_path_can_be_are_usage_errors(
    capsys: pytest.CaptureFixture[str], model: Path, words: tuple[object, ...]
) -> None:
    code, out, err = run(capsys, model, *words)
    assert (code, out) == (2, "")
    assert "Traceback" not in err
