"""SGLang's own factory, host pools and file backend beside ours: pages are stored, found and read, and nothing raises.

SGLang's scheduler needs a GPU; what is run here is all that stands between it and a backend: the factory that loads it,
the pools of host memory whose pages move, and the backend that SGLang brings itself, whose answers ours must equal.
"""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest
import torch

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)
# PyPI's torchvision does not go with a torch for the CPU. SGLang imports it and calls none of it here.
_DECLARED = torch.library.Library("torchvision", "DEF")
for _name in (
    "nms", "qnms", "roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward", "ps_roi_align",
    "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward", "deform_conv2d", "_deform_conv2d_backward",
):  # fmt: skip
    _DECLARED.define(f"{_name}(Tensor a) -> Tensor")

from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

from kvstore.core.errors import InvalidArgument  # noqa: E402
from kvstore.tools.daemon_process import DaemonProcess  # noqa: E402

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
LAYERS, HEADS, DIM, PAGE, TOKENS = 3, 2, 8, 16, 512
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def pool_of(layout: str, dtype: torch.dtype = torch.float16) -> MHATokenToKVPoolHost:
    """SGLang's pool of host memory for a small model."""

    def device() -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros(PAGE, HEADS, DIM, dtype=dtype) for _ in range(LAYERS))

    def pointers(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.tensor([one.data_ptr() for one in tensors], dtype=torch.uint64)

    k, v = device(), device()
    buffers = KVBuffers(k=k, v=v, k_data_ptrs=pointers(k), v_data_ptrs=pointers(v), layout=next(iter(KVBufferLayout)))
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    pool = MHATokenToKVPoolHost(
        info, TOKENS / PAGE, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE, start_layer=0,
        end_layer=LAYERS,
    )  # fmt: skip
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(7)))
    return pool


def config_of(daemon: DaemonProcess | None, **changes) -> HiCacheStorageConfig:
    settings = {} if daemon is None else {"socket": str(daemon.socket), "buffer_bytes": 4 << 20, "revision": "1"}
    extra = {
        "backend_name": "kvstored",
        "module_path": "kvstore.adapters.sglang",
        "class_name": "TieredStorage",
        "interface_v1": changes.pop("interface_v1", 1),
        "kvstore": settings | changes.pop("settings", {}),
    }
    fields = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False,
        "model_name": "some/model", "extra_config": extra,
    }  # fmt: skip
    return HiCacheStorageConfig(**{**fields, **changes})


def backend_of(daemon: DaemonProcess, pool, **changes):
    """As the cache controller makes one."""
    made = StorageBackendFactory.create_backend("dynamic", config_of(daemon, **changes), pool)
    made.register_mem_pool_host(pool)
    made.register_mem_host_pool_v2(pool, PoolName.KV)
    made.on_host_pools_registered()
    return made


def hashes(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [chance.randbytes(32).hex() for _ in range(count)]


def page_of(pool, first: int) -> torch.Tensor:
    return pool.get_data_page(first, flat=True).clone()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_as_they_were_to_other_places_and_in_another_process_of_the_engine(daemon, layout):
    pool, names = pool_of(layout), hashes(6)
    backend = backend_of(daemon, pool)
    source, target = pool.alloc(6 * PAGE), pool.alloc(6 * PAGE)
    wanted = [page_of(pool, int(source[i * PAGE])) for i in range(6)]
    assert backend.batch_exists(names) == 0
    assert backend.batch_set_v1(names, source) == [True] * 6
    assert backend.batch_exists(names) == 6
    backend.close()
    again = backend_of(daemon, pool)
    for first in target[::PAGE].tolist():
        pool.set_from_flat_data_page(first, torch.full_like(wanted[0], float("nan")))
    assert again.batch_exists([*names[:4], "0" * 64, names[5]]) == 4
    assert again.batch_get_v1([*names[:5], "0" * 64], target) == [True] * 5 + [False]
    for i in range(5):
        assert torch.equal(page_of(pool, int(target[i * PAGE])), wanted[i])
    again.close()


def test_pages_are_found_on_ssd_after_a_restart(daemon):
    pool, names = pool_of("page_first"), hashes(4)
    backend = backend_of(daemon, pool)
    source, target = pool.alloc(4 * PAGE), pool.alloc(4 * PAGE)
    assert all(backend.batch_set_v1(names, source, HiCacheStorageExtraInfo(prefix_keys=[])))
    daemon.stop()
    daemon.start()
    assert backend._client.wait_ready(20)
    assert backend.batch_exists(names) == 4
    assert all(backend.batch_get_v1(names, target))
    assert all(
        torch.equal(page_of(pool, int(target[i * PAGE])), page_of(pool, int(source[i * PAGE]))) for i in range(4)
    )
    backend.close()


def test_the_generic_interface_answers_as_sglangs_own_file_backend(daemon, tmp_path):
    pool = pool_of("layer_first")
    ours = backend_of(daemon, pool, interface_v1=0)
    files = HiCacheFile(config_of(None), file_path=str(tmp_path))
    files.register_mem_pool_host(pool)
    chance, names = random.Random(3), hashes(12)
    pages = {name: torch.randn(pool.get_dummy_flat_data_page().shape, dtype=pool.dtype) for name in names}
    for _ in range(60):
        some = chance.sample(names, chance.randrange(1, 5))
        match chance.randrange(4):
            case 0:
                one = [pages[name] for name in some]
                assert ours.batch_set(some, one) == files.batch_set(some, one)
            case 1:
                assert ours.set(some[0], pages[some[0]]) == files.set(some[0], pages[some[0]])
            case 2:
                assert ours.batch_exists(some) == files.batch_exists(some)
                assert ours.exists(some[0]) == files.exists(some[0])
            case _:
                found = [b.batch_get(some, [torch.zeros_like(pages[n]) for n in some]) for b in (ours, files)]
                for mine, theirs in zip(*found, strict=True):
                    assert (mine is None) == (theirs is None)
                    assert mine is None or torch.equal(mine, theirs)
    ours.close()


def test_policies_of_other_pools_answer_as_sglangs_own_file_backend(daemon, tmp_path):
    kv, state = pool_of("page_first"), pool_of("page_first", torch.float32)
    ours = backend_of(daemon, kv)
    files = HiCacheFile(config_of(None), file_path=str(tmp_path))
    for backend in (ours, files):
        backend.register_mem_pool_host(kv)
        backend.register_mem_host_pool_v2(kv, PoolName.KV)
        backend.register_mem_host_pool_v2(state, PoolName.MAMBA)
    chance = random.Random(5)
    for seed in range(8):
        names, indices = hashes(6, seed), kv.alloc(6 * PAGE)
        stored, states = names[: chance.randrange(1, 7)], chance.sample(names, 3)
        told = [
            PoolTransfer(PoolName.KV, keys=stored, host_indices=indices[: len(stored) * PAGE]),
            PoolTransfer(PoolName.MAMBA, keys=states, host_indices=indices[: 3 * PAGE]),
        ]
        assert ours.batch_set_v2(told) == files.batch_set_v2(told)
        for policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
            asked = [PoolTransfer(PoolName.MAMBA, keys=names[:1], hit_policy=policy)]
            assert ours.batch_exists_v2(names, asked) == files.batch_exists_v2(names, asked)
        read = [PoolTransfer(PoolName.MAMBA, keys=[*states, "0" * 64], host_indices=state.alloc(4 * PAGE))]
        assert ours.batch_get_v2(read) == files.batch_get_v2(read)
        kv.free(indices)
    with pytest.raises(ValueError, match="hit policy"):
        ours.batch_exists_v2(names, [PoolTransfer(PoolName.MAMBA, hit_policy=PoolHitPolicy.BLOCK_GROUPS)])
    short = [PoolTransfer(PoolName.MAMBA, keys=names, host_indices=torch.arange(PAGE))]
    assert ours.batch_set_v2(short) == files.batch_set_v2(short) == {PoolName.MAMBA: [False] * 6}
    ours.close()


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "another/model"},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"interface_v1": 0},
        {"settings": {"revision": "2"}},
        {"settings": {"salt": "tenant"}},
    ],
    ids=["model", "shard", "stage", "form", "weights", "tenant"],
)
def test_what_is_other_bytes_shares_nothing(daemon, other):
    pool, names = pool_of("page_first"), hashes(3)
    backend = backend_of(daemon, pool)
    assert all(backend.batch_set_v1(names, pool.alloc(3 * PAGE)))
    stranger = backend_of(daemon, pool, **other)
    assert stranger.batch_exists(names) == 0
    assert backend_of(daemon, pool_of("page_first", torch.bfloat16)).batch_exists(names) == 0
    assert backend_of(daemon, pool_of("layer_first")).batch_exists(names) == 0


def test_ranks_share_latent_pages_and_no_others(daemon):
    pool, names = pool_of("page_first"), hashes(3)
    first, second = (backend_of(daemon, pool, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in (0, 1))
    first.register_mem_host_pool_v2(pool, PoolName.MAMBA)
    second.register_mem_host_pool_v2(pool, PoolName.MAMBA)
    indices = pool.alloc(3 * PAGE)
    assert all(first.batch_set_v1(names, indices))
    assert all(first.batch_set_v2([PoolTransfer(PoolName.MAMBA, keys=names, host_indices=indices)])[PoolName.MAMBA])
    assert second.batch_exists(names) == 3
    assert second.batch_exists_v2(names, [PoolTransfer(PoolName.MAMBA)]).kv_hit_pages == 0


def test_a_chain_longer_than_host_and_buffer_goes_through(daemon):
    pool = pool_of("layer_first")
    backend = backend_of(daemon, pool, settings={"buffer_bytes": 64 << 10})
    names, indices, prefix = hashes(400), pool.alloc(8 * PAGE), []
    for begin in range(0, 400, 8):
        some = names[begin : begin + 8]
        assert all(backend.batch_set_v1(some, indices, HiCacheStorageExtraInfo(prefix_keys=list(prefix))))
        prefix += some
    assert backend.batch_exists(names[:128]) == 128


def test_a_daemon_that_dies_or_is_not_there_is_a_miss_and_raises_nothing(daemon):
    pool, names = pool_of("page_first"), hashes(3)
    backend = backend_of(daemon, pool)
    indices = pool.alloc(3 * PAGE)
    assert all(backend.batch_set_v1(names, indices))
    daemon.kill()
    assert backend.batch_exists(names) == 0
    assert backend.batch_get_v1(names, indices) == [False] * 3
    assert backend.batch_set_v1(names, indices) == [False] * 3
    assert backend.get(names[0], pool.get_dummy_flat_data_page()) is None
    assert backend.exists(names[0]) is False
    backend.close()
    never = backend_of(daemon, pool, settings={"connect_s": 0.1})
    assert never.batch_exists(names) == 0
    never.close()


def test_under_sglangs_own_failure_injector_what_is_read_is_right(daemon, monkeypatch):
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    pool, names = pool_of("layer_first"), hashes(4)
    backend = backend_of(daemon, pool)
    assert isinstance(backend, HiCacheStorageFailureInjector)
    source, target = pool.alloc(4 * PAGE), pool.alloc(4 * PAGE)
    read = 0
    for _ in range(40):
        backend.batch_set_v1(names, source)
        if all(backend.batch_get_v1(names, target)):
            read += 1
            for i in range(4):
                assert torch.equal(page_of(pool, int(target[i * PAGE])), page_of(pool, int(source[i * PAGE])))
    assert read > 0


def test_wrong_settings_are_named(daemon):
    with pytest.raises(InvalidArgument, match="sockett"):
        backend_of(daemon, pool_of("page_first"), settings={"sockett": "x"})
    with pytest.raises(InvalidArgument, match="tensor parallelism"):
        backend_of(daemon, pool_of("page_first"), should_split_heads=True)
    backend = backend_of(daemon, pool_of("page_first"))
    assert backend.batch_set(["a"], [torch.zeros(3), torch.zeros(4)]) is False
    assert backend.batch_get(["a"], [torch.zeros(2, 4).t()]) == [None]
    assert backend.clear() is False
