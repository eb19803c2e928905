"""The three lines of the README are what runs here, with SmolLM2 and a daemon of the test's own."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstore.adapters.transformers import TieredStore
from kvstore.tools.daemon_process import DaemonProcess
from kvstore.tools.fetch_model import model_folder

ROOT = Path(__file__).resolve().parents[2]
SOCKET = "/run/kvstore/kvstored.sock"


def three_lines() -> str:
    """What the README says, as it stands there."""
    found = re.search(r"```python\n(from kvstore\.adapters.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    assert len([line for line in found[1].splitlines() if line]) == 3
    return found[1]


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_three_lines_of_the_readme_give_the_tokens_that_transformers_gives_alone():
    folder = model_folder(ROOT)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = AutoTokenizer.from_pretrained(folder)((ROOT / "README.md").read_text()[:2500], return_tensors="pt")
    alone = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    lines = three_lines()
    assert SOCKET in lines
    flags = {"device": "0", "host": "256 MiB"}
    with TemporaryDirectory(prefix="kva-") as short, DaemonProcess(Path(short), flags) as daemon:
        daemon.start()
        for _ in ("cold", "warm"):
            names = {"model": model, "inputs": inputs}
            exec(lines.replace(SOCKET, str(daemon.socket)), names)
            assert torch.equal(names["output"], alone)
            cache = names["store"].cache(**inputs)
            assert cache.loaded == (inputs.input_ids.shape[1] - 1) // 64 * 64
            assert names["store"].client.failures() == {}
            names["store"].close()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1200)
def test_ten_prompts_some_with_a_beginning_in_common():
    folder = model_folder(ROOT)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    whole = AutoTokenizer.from_pretrained(folder)((ROOT / "README.md").read_text()[:2500], return_tensors="pt")
    flags = {"device": "0", "host": "256 MiB"}
    with TemporaryDirectory(prefix="kva-") as short, DaemonProcess(Path(short), flags) as daemon:
        daemon.start()
        with TieredStore(model, daemon.socket) as store:
            for number in range(10):
                begin = number // 3 * 64
                prompt = {name: part[:, begin : begin + 130 + number] for name, part in whole.items()}
                alone = model.generate(**prompt, max_new_tokens=12, do_sample=False)
                for _ in ("cold or partly warm", "warm"):
                    cache = store.cache(**prompt)
                    assert torch.equal(model.generate(**prompt, cache=cache, max_new_tokens=12, do_sample=False), alone)
                assert cache.loaded == 128
