"""Which DEVICE arena the daemon builds, and what it tells of it. The CUDA runtime is a fake one: no GPU is needed."""

from __future__ import annotations

import logging
import subprocess
import sys
from functools import partial

import pytest

from kvstore.core.clock import ManualClock
from kvstore.core.errors import InvalidArgument, TierError, Unavailable
from kvstore.core.types import Area
from kvstore.daemon import plan
from kvstore.daemon.build import build_store, build_tiers
from kvstore.daemon.config import Config, rough_size
from kvstore.daemon.memory import Room
from kvstore.tiers import device_cuda
from kvstore.tiers.device import MemfdDeviceArena
from kvstore.tiers.device_probe import DeviceChoice, choose_device
from tests.tiers.fake_cuda import FakeRuntime

CUDA = DeviceChoice("cuda", "torch can use CUDA device 1")


def never():
    raise AssertionError("torch was asked")


def no_cuda():
    raise Unavailable("torch.cuda.is_available() is False (look at nvidia-smi)")


@pytest.fixture
def nodes(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    return tmp_path / "dev"


@pytest.fixture
def runtime(monkeypatch):
    fake = FakeRuntime()
    monkeypatch.setattr(device_cuda, "load_runtime", lambda: fake)
    return fake


def cuda_config(folder, **changes):
    return Config(**{"socket": folder / "s", "device": "4 MiB", "host": "4 MiB", "device_index": 1, **changes})


class TestChoice:
    def test_auto_takes_the_gpu_that_torch_can_use(self, nodes):
        assert choose_device("auto", 1, devices=nodes, count=lambda: 2) == CUDA

    def test_without_a_node_torch_is_not_asked(self, tmp_path):
        choice = choose_device("auto", 0, devices=tmp_path, count=never)
        assert (choice.kind, choice.gpu_unused) == ("shared", False)
        assert "no NVIDIA device node" in choice.reason

    def test_shared_asks_nobody(self, nodes):
        assert choose_device("shared", 0, devices=nodes, count=never).kind == "shared"

    @pytest.mark.parametrize(
        ("count", "reason"),
        [(no_cuda, "look at nvidia-smi"), (lambda: 2, "device_index is 2 and torch sees 2 CUDA devices")],
    )
    def test_a_gpu_that_can_not_be_used_is_told(self, nodes, count, reason):
        choice = choose_device("auto", 2, devices=nodes, count=count)
        assert (choice.kind, choice.gpu_unused) == ("shared", True)
        assert reason in choice.reason
        with pytest.raises(InvalidArgument, match=reason) as caught:
            choose_device("cuda", 2, devices=nodes, count=count)
        assert caught.value.field == "device_kind"

    def test_cuda_without_a_node_is_refused(self, tmp_path):
        with pytest.raises(InvalidArgument, match="device_kind is cuda; expected auto or shared, since there is no"):
            choose_device("cuda", 0, devices=tmp_path, count=never)


class TestBuild:
    def test_a_daemon_without_a_gpu_does_not_load_torch(self, tmp_path):
        code = (
            "import sys; from functools import partial; from pathlib import Path\n"
            "from kvstore.core.clock import MonotonicClock; from kvstore.daemon.build import build_tiers\n"
            "from kvstore.daemon.config import Config; from kvstore.tiers.device_probe import choose_device\n"
            "import kvstore.daemon.main\n"
            "config = Config(device='1 MiB', host='1 MiB')\n"
            "build_tiers(config, MonotonicClock(), partial(choose_device, devices=Path(sys.argv[1]))).close()\n"
            "print('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"

    def test_cuda_is_exported_by_handle_and_host_is_pinned(self, tmp_path, runtime, caplog):
        caplog.set_level(logging.INFO)
        tiers = build_tiers(cuda_config(tmp_path), ManualClock(), lambda *_: CUDA)
        device, host = tiers.exports()
        assert (device.area, device.kind, device.fd, device.device) == (Area.DEVICE, "cuda-ipc", -1, 1)
        assert (device.nbytes, device.handle) == (4 << 20, bytes(range(64)))
        assert device.message().cuda_ipc_handle == bytes(range(64))
        assert (host.area, host.fd >= 0, host.writable) == (Area.HOST, True, False)
        assert runtime.registered == {tiers.host.address: tiers.host.mapped_bytes}
        assert "pinned" in tiers.host.backing
        assert "DEVICE is cuda memory: torch can use CUDA device 1" in caplog.text
        tiers.close()
        assert runtime.registered == {}
        assert runtime.calls.count("cudaFree") == 1

    def test_pinning_that_fails_is_a_warning_with_the_limit(self, tmp_path, runtime):
        runtime.fail = "cudaHostRegister"
        tiers = build_tiers(cuda_config(tmp_path), ManualClock(), lambda *_: CUDA)
        store = build_store(cuda_config(tmp_path), tiers, ManualClock(), lambda *_: None)
        (warning,) = [text for text in store.status().warnings if "pinned" in text]
        assert "cudaHostRegister answered 2" in warning
        assert "locked memory" in warning
        store.close()
        tiers.close()

    def test_auto_falls_back_and_cuda_does_not(self, tmp_path, runtime, caplog):
        runtime.fail = "cudaMalloc"
        tiers = build_tiers(cuda_config(tmp_path), ManualClock(), lambda *_: CUDA)
        assert isinstance(tiers.device, MemfdDeviceArena)
        assert runtime.registered == {}
        assert "cudaMalloc answered CUDA error 2" in caplog.text
        tiers.close()
        ssd = {"ssd": "32 MiB", "ssd_dir": tmp_path / "ssd", "ssd_free_floor": 0}
        with pytest.raises(TierError, match="cudaMalloc"):
            build_tiers(cuda_config(tmp_path, device_kind="cuda", **ssd), ManualClock(), lambda *_: CUDA)
        # The directory was given back.
        build_tiers(cuda_config(tmp_path, device_kind="shared", **ssd), ManualClock()).close()

    def test_without_device_nobody_is_asked(self, tmp_path):
        tiers = build_tiers(cuda_config(tmp_path, device=0), ManualClock(), lambda *_: never())
        assert [export.area for export in tiers.exports()] == [Area.HOST]
        tiers.close()

    def test_the_store_does_not_wait_a_second_time_after_the_drain(self, tmp_path):
        config = cuda_config(tmp_path, device_kind="shared")
        tiers = build_tiers(config, ManualClock())
        store = build_store(config, tiers, ManualClock(), lambda *_: None)
        assert store._state.config.close_flush_ms == 0
        store.close()


class TestPlan:
    def find(self, config, subject):
        return next(finding for finding in plan.make_plan(config) if finding.subject == subject)

    def test_shared_says_why(self, tmp_path, monkeypatch):
        monkeypatch.setattr(plan, "choose_device", partial(choose_device, devices=tmp_path))
        line = self.find(cuda_config(tmp_path), "device")
        assert (line.state, line.text.partition(":")[0]) == ("ok", "4 MiB of shared memory")
        assert "no NVIDIA device node" in line.text
        refused = self.find(cuda_config(tmp_path, device_kind="cuda"), "device")
        assert refused.state == "error"
        assert not plan.plan_text(cuda_config(tmp_path, device_kind="cuda"))[1]

    def test_a_gpu_that_is_not_used_is_a_warning(self, tmp_path, nodes, monkeypatch):
        monkeypatch.setattr(plan, "choose_device", partial(choose_device, devices=nodes, count=no_cuda))
        line = self.find(cuda_config(tmp_path), "device")
        assert (line.state, "nvidia-smi" in line.text) == ("warning", True)

    def test_cuda_takes_no_memory_of_the_host(self, tmp_path, monkeypatch):
        monkeypatch.setattr(plan, "choose_device", lambda *_: CUDA)
        config = cuda_config(tmp_path, device="900 TiB")
        assert self.find(config, "memory").state != "error"
        assert "GPU memory: torch can use CUDA device 1" in self.find(config, "device").text
        assert "not used" not in self.find(config, "pinning").text
        huge = self.find(cuda_config(tmp_path, host="900 TiB"), "pinning")
        assert huge.state == "ok" or "locked memory" in huge.text

    def test_sizes_are_for_people(self, tmp_path, monkeypatch):
        monkeypatch.setattr(plan, "meminfo", lambda name, **_: 0)
        monkeypatch.setattr(plan, "memory_room", lambda: Room(23302725632))
        text = self.find(cuda_config(tmp_path, device="64 MiB", host="256 MiB"), "memory").text
        assert text == (
            "arenas take 320 MiB and buffers of sessions up to 16 GiB of 21.7 GiB available; container limit none"
        )


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"), (900, "900 bytes"), (1536, "1.5 KiB"), (320 << 20, "320 MiB"), (75324 << 20, "73.6 GiB"),
        ((1 << 30) - 1, "1 GiB"), (22756568 << 10, "21.7 GiB"), (3 << 40, "3 TiB"),
    ],
)  # fmt: skip
def test_rough_sizes(nbytes, text):
    assert rough_size(nbytes) == text
