"""``generate()`` gives the same tokens with the store as without: cold, warm, in another process, after a restart."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import DynamicCache, T5Config

from kvstore.adapters.transformers import TieredOptions, TieredStore
from kvstore.core.decoders import UnsupportedModel
from kvstore.core.errors import InvalidArgument
from kvstore.tools.daemon_process import DaemonProcess
from tests.adapters.models import FAMILIES, build, prompt

ROOT = Path(__file__).resolve().parents[2]
SMALL = TieredOptions(block_tokens=16)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory) -> Iterator[DaemonProcess]:
    """A daemon on a short path: those of Unix sockets are bounded."""
    disk = tmp_path_factory.mktemp("ssd")
    flags = {"device": "0", "host": "32 MiB", "ssd": "128 MiB", "ssd-dir": str(disk), "ssd-free-floor": "0"}
    with TemporaryDirectory(prefix="kva-") as folder, DaemonProcess(Path(folder), flags) as found:
        found.start()
        yield found


def generate(model, ids, cache=None, **named):
    """Tokens of a greedy answer."""
    named = {"max_new_tokens": 24, "do_sample": False, **named}
    return model.generate(ids, cache=cache, **named)


def aligned(tokens: int) -> int:
    return tokens // 16 * 16


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_cold_warm_and_in_another_process_after_a_restart(daemon, family):
    model, ids = build(family), prompt(1, 150)
    alone = generate(model, ids)
    with TieredStore(model, daemon.socket, SMALL) as store:
        cold = store.cache(ids)
        assert cold.loaded == 0
        assert torch.equal(generate(model, ids, cold), alone)
        warm = store.cache(ids)
        assert warm.loaded == aligned(149)
        assert torch.equal(generate(model, ids, warm), alone)
        # The answer was stored too: a conversation that goes on finds it.
        longer = torch.cat([alone, prompt(2, 30)], dim=1)
        following = store.cache(longer)
        assert following.loaded == aligned(150 + 23)
        expected = generate(model, longer)
        assert torch.equal(generate(model, longer, following), expected)
        assert store.client.failures() == {}
    daemon.stop()
    daemon.start()
    command = [sys.executable, "-m", "tests.adapters.worker", family, str(daemon.socket)]
    prompts = json.dumps([ids[0].tolist(), longer[0].tolist()])
    done = subprocess.run([*command, prompts], cwd=ROOT, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert [row["loaded"] for row in told["rows"]] == [aligned(149), aligned(150 + 54 - 1)]
    assert [row["answer"] for row in told["rows"]] == [alone[0].tolist(), expected[0].tolist()]
    assert told["failures"] == {}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_ten_prompts_of_which_each_shares_a_part_with_others(daemon, family):
    model, stems = build(family), [prompt(200, 90), prompt(201, 47)]
    with TieredStore(model, daemon.socket, SMALL) as store:
        for number in range(10):
            ids = torch.cat([stems[number % 2], prompt(300 + number // 3, 20), prompt(400 + number, number * 7)], 1)
            alone = generate(model, ids, max_new_tokens=12)
            for loaded in (None, aligned(ids.shape[1] - 1)):
                cache = store.cache(ids)
                assert loaded in (None, cache.loaded)
                assert number < 2 or cache.loaded >= aligned(47)
                assert torch.equal(generate(model, ids, cache, max_new_tokens=12), alone)
        assert store.client.failures() == {}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_what_was_loaded_is_what_was_computed(daemon, family):
    model, ids = build(family), prompt(3, 100)
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :96], cache=plain)
    with TieredStore(model, daemon.socket, SMALL) as store:
        generate(model, ids, store.cache(ids))
        warm = store.cache(ids)
        assert warm.loaded == 96
        for mine, theirs in zip(warm.layers, plain.layers, strict=True):
            assert torch.allclose(mine.keys, theirs.keys, atol=1e-4)
            assert torch.allclose(mine.values, theirs.values, atol=1e-4)
            assert mine.get_seq_length() == theirs.get_seq_length()
        # Zeros in its place change the answer: what is loaded is really used.
        with torch.no_grad():
            expected = model(ids).logits[:, 96:]
            assert torch.allclose(model(ids[:, 96:], cache=store.cache(ids)).logits, expected, atol=1e-3)
            for layer in warm.layers:
                layer.keys.zero_()
                layer.values.zero_()
            assert not torch.allclose(model(ids[:, 96:], cache=warm).logits, expected, atol=0.1)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_batches_padded_on_the_left(daemon, family):
    model, stem = build(family), prompt(4, 70)
    rows = [torch.cat([stem, prompt(5, 50)], 1)[0], torch.cat([stem, prompt(6, 13)], 1)[0], prompt(4, 100)[0]]
    ids, mask = torch.zeros(3, 120, dtype=torch.long), torch.zeros(3, 120, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, -len(row) :], mask[index, -len(row) :] = row, 1
    alone = generate(model, ids, attention_mask=mask)
    with TieredStore(model, daemon.socket, SMALL) as store:
        # The first row can load least: computing begins at the same column in each, inside of a block of the others.
        for loaded in (0, 112):
            cache = store.cache(ids, mask)
            assert cache.loaded == loaded
            assert torch.equal(generate(model, ids, cache, attention_mask=mask), alone)
            assert not store.client.failures()
        # A row of the batch by itself: its blocks do not depend on padding.
        single = store.cache(rows[1][None])
        assert single.loaded == aligned(82)
        assert torch.equal(generate(model, rows[1][None], single)[0, -24:], alone[1, -24:])


def test_int8_is_close(daemon):
    model, ids = build("llama"), prompt(7, 130)
    with TieredStore(model, daemon.socket, TieredOptions(block_tokens=16, codec="int8")) as store:
        exact = store.cache(ids)
        generate(model, ids, exact)
        coded = store.cache(ids)
        assert coded.loaded == 128
        for layer, mine in zip(exact.layers, coded.layers, strict=True):
            error = (layer.keys[:, :, :128] - mine.keys).norm() / layer.keys[:, :, :128].norm()
            assert 0 < error < 0.02
        with torch.no_grad():
            told = model(ids[:, 128:], cache=coded).logits
            expected = model(ids).logits[:, 128:]
        assert (told - expected).norm() / expected.norm() < 0.15


def test_other_weights_dtypes_and_salts_share_nothing(daemon):
    ids = prompt(8, 64)
    model = build("llama")
    with TieredStore(model, daemon.socket, SMALL) as store:
        generate(model, ids, store.cache(ids))
        assert store.cache(ids).loaded == 48
        with TieredStore(model, daemon.socket, TieredOptions(block_tokens=16, salt=b"tenant")) as salted:
            assert salted.cache(ids).loaded == 0
        for other in (build("llama", seed=4), build("llama").to(torch.bfloat16)):
            with TieredStore(other, daemon.socket, SMALL) as theirs:
                assert theirs.cache(ids).loaded == 0
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        assert store.cache(ids).loaded == 0


def test_no_daemon_is_a_cache_without_anything(tmp_path):
    model, ids = build("llama"), prompt(9, 60)
    with TieredStore(model, tmp_path / "nobody.sock", SMALL) as store:
        cache = store.cache(ids)
        assert torch.equal(generate(model, ids, cache), generate(model, ids))
        assert (cache.loaded, cache.stored) == (0, 0)
        assert store.client.failures()


def test_a_daemon_killed_on_the_way_changes_no_token(daemon):
    model, ids = build("llama"), prompt(10, 60)
    with TieredStore(model, daemon.socket, SMALL) as store:
        generate(model, ids, store.cache(ids))
        cache = store.cache(ids)
        assert cache.loaded == 48
        daemon.kill()
        try:
            assert torch.equal(generate(model, ids, cache), generate(model, ids))
            assert store.cache(ids).loaded == 0
        finally:
            daemon.start()


@pytest.mark.parametrize("named", [{"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
def test_what_multiplies_rows_is_refused_in_words(daemon, named):
    model, ids = build("llama"), prompt(11, 40)
    with TieredStore(model, daemon.socket, SMALL) as store, pytest.raises(InvalidArgument, match="no beam search"):
        generate(model, ids, store.cache(ids), **named)


def test_padding_on_the_right_another_mask_and_training_are_refused(daemon):
    model, ids = build("llama"), prompt(12, 40)
    mask = torch.ones_like(ids)
    mask[:, -3:] = 0
    with TieredStore(model, daemon.socket, SMALL) as store:
        with pytest.raises(InvalidArgument, match="padding on the left"):
            store.cache(ids, mask)
        with pytest.raises(InvalidArgument, match="attention_mask"):
            generate(model, ids, store.cache(ids), attention_mask=mask.flip(1))
        with pytest.raises(InvalidArgument, match="position_ids"):
            model(ids, cache=store.cache(ids), position_ids=torch.arange(40)[None] + 7)
        model.train()
        with pytest.raises(InvalidArgument, match="training"):
            store.cache(ids)


def test_models_without_k_and_v_of_a_prefix_are_refused(tmp_path):
    class Model:
        config = T5Config()

    with pytest.raises(UnsupportedModel, match="is_encoder_decoder"):
        TieredStore(Model(), tmp_path / "none.sock")


def test_embeddings_are_computed_and_not_stored(daemon):
    model, ids = build("llama"), prompt(13, 48)
    with TieredStore(model, daemon.socket, SMALL) as store, torch.no_grad():
        cache = store.cache(ids)
        model(inputs_embeds=model.get_input_embeddings()(ids), cache=cache)
        assert (cache.get_seq_length(), cache.stored) == (48, 0)
        assert store.cache(ids).loaded == 0


def test_a_prompt_that_is_computed_in_steps_is_stored_as_blocks_become_full(daemon):
    model, ids = build("llama"), prompt(14, 90)
    with TieredStore(model, daemon.socket, SMALL) as store:
        cache = store.cache(ids)
        with torch.no_grad():
            for begin in range(0, 90, 7):
                model(ids[:, begin : begin + 7], cache=cache)
        assert cache.stored == 5
        assert store.cache(ids).loaded == 80


def test_assisted_generation_works_cold_and_is_refused_where_a_part_was_loaded(daemon):
    """transformers computes the whole prompt again then, behind the part that the cache has already."""
    model, ids = build("llama"), prompt(15, 60)
    with TieredStore(model, daemon.socket, SMALL) as store:
        assisted = generate(model, ids, store.cache(ids), prompt_lookup_num_tokens=3)
        assert torch.equal(assisted, generate(model, ids))
        with pytest.raises(InvalidArgument, match="position_ids"):
            generate(model, ids, store.cache(ids), prompt_lookup_num_tokens=3)


def test_hooks_are_gone_after_close(daemon):
    model = build("llama")
    with TieredStore(model, daemon.socket, SMALL):
        assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
