"""A ``Cache`` of transformers that is backed by the store: ``generate()`` finds what was computed before.

``TieredStore`` is the session for one model, ``TieredCache`` what one ``generate()`` is given. Before, the K and V of
the prompt's blocks that the store has are loaded into it, so that the model computes the rest only; meanwhile, each
block of tokens that has become full goes to the store. Whoever asks with the same beginning, in this process or
another, before or after a restart of the daemon, finds it there.

A cache is told tensors and no tokens, but a block's key is made of tokens: a hook on the model's ``forward`` reads
them. What it can not key (embeddings, images, other positions) is computed as ever and not stored.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvstore.adapters.tensors import BlockCoder, weights_digest, weights_stamp
from kvstore.client import Client, ClientOptions, PutBlocks
from kvstore.core.decoders import Identity, UnsupportedModel, check_supported, spec_of
from kvstore.core.errors import InvalidArgument
from kvstore.core.keys import chain_keys, parents_of
from kvstore.core.namespace import NamespaceSpec, canonical_json
from kvstore.core.types import BATCH_KEYS_MAX, BlockKey, NamespaceId, Outcome

LOG: Final = logging.getLogger(__name__)

_BACKEND: Final = "transformers"
"""Part of the identity: other engines' K and V of the same weights differ in the last bits."""

_HARMLESS: Final = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position", "labels"})
"""Tensors that ``forward`` may be given without K and V being of more than the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredOptions:
    """Settings of a ``TieredStore``."""

    codec: str = "raw"
    """``"raw"`` keeps the bytes; ``"int8"`` stores half of them or less, and answers may differ slightly."""
    block_tokens: int = 64
    """What is shared is whole blocks of this many tokens."""
    salt: bytes = b""
    """Sets tenants apart: nothing is shared between two salts."""
    revision: str = ""
    """Taken as the name of the weights, instead of reading them: two sets of weights must never share one."""
    client: ClientOptions = field(default_factory=lambda: ClientOptions(name="transformers", device=False))


class TieredStore:
    """A session with ``kvstored`` for one model; owns the connection and hooks on the model, until ``close``.

    ``target`` is the path of the session socket, or ``grpc://host:port``. The model is named by the bytes of its
    weights in memory, which are read once, and again after they were changed. Raises ``UnsupportedModel`` for a model
    whose K and V are not a function of the tokens before, and ``InvalidArgument`` for settings that do not fit. That
    there is no daemon raises nothing: everything is a miss then.
    """

    def __init__(self, model: Any, target: str | Path, options: TieredOptions | None = None) -> None:
        self.model = model
        self.options = options or TieredOptions()
        self._stamp: object = None
        self._known: _Known | None = None
        _check_model(model)
        self._spec("")  # Refuses settings that do not fit before there is a connection.
        self.client = Client(target, self.options.client)
        """The connection; its ``failures()`` say what was answered as a miss, and why."""
        self._hooks = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        )

    def cache(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: object) -> TieredCache:
        """The cache for one ``generate()`` over this prompt, with what the store has of it, one token less at most.

        ``input_ids`` is [batch, tokens]; ``attention_mask`` of the same shape says which are padding, on the left.
        Other inputs of a tokenizer are taken and not looked at. Raises ``InvalidArgument`` for another shape, for
        padding elsewhere, and for a model in training mode.
        """
        if input_ids.ndim != 2 or not input_ids.numel():
            raise InvalidArgument("input_ids", f"shape {tuple(input_ids.shape)}", "[batch, tokens], one token or more")
        if self.model.training:
            raise InvalidArgument("model", "training mode", "model.eval(): dropout would be stored")
        padding = _left_padding(input_ids, attention_mask)
        rows = [row[pad:] for row, pad in zip(input_ids.tolist(), padding, strict=True)]
        cache = TieredCache(self, self._namespace(), rows, padding)
        cache.load()
        return cache

    def close(self) -> None:
        """Take the hooks off the model and end the session. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _namespace(self) -> _Known:
        """The namespace of the weights as they are now: named again if they were changed or others were put in."""
        stamp = weights_stamp(self.model)
        if self._known is None or stamp != self._stamp:
            spec = self._spec(self.options.revision or weights_digest(self.model))
            opened = self.client.open_namespace(spec)
            self._known, self._stamp = _Known(opened.namespace_id, BlockCoder(spec)), stamp
        return self._known

    def _spec(self, revision: str) -> NamespaceSpec:
        config, options = self.model.config, self.options
        spec = spec_of(
            config,
            Identity(type(self.model).__name__, revision),
            str(self.model.dtype).removeprefix("torch."),
            block_tokens=options.block_tokens,
            codec=options.codec,
            salt=options.salt,
        )
        return replace(spec, extra=canonical_json({"backend": _BACKEND, "config": spec.extra}))

    def _before(self, _: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        cache = self._cache_of(arguments, named)
        if cache is not None:
            cache.begin_step(arguments, named)

    def _after(self, _: Any, arguments: tuple[Any, ...], named: dict[str, Any], __: Any) -> None:
        cache = self._cache_of(arguments, named)
        if cache is not None:
            cache.end_step()

    def _cache_of(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> TieredCache | None:
        """The cache of this store that ``forward`` is given, whatever a release of transformers calls it."""
        given = (*arguments, *named.values())
        return next((one for one in given if isinstance(one, TieredCache) and one.store is self), None)


@dataclass(frozen=True, slots=True)
class _Known:
    """An open namespace, and how its blocks are made of tensors."""

    namespace_id: NamespaceId
    coder: BlockCoder


@dataclass(slots=True)
class _Row:
    """One sequence of the batch: its tokens so far without padding, and how many of their blocks were dealt with."""

    tokens: list[int]
    padding: int
    blocks: int = 0
    parent: tuple[BlockKey, ...] = ()


class TieredCache(DynamicCache):  # type: ignore[misc]
    """What one ``generate()`` computes and was computed before; made by ``TieredStore.cache``.

    It behaves as a ``DynamicCache`` that was filled with a part of the prompt. ``loaded`` is how many columns of the
    batch were found, ``stored`` how many blocks went to the store. Beam search, several sequences a prompt and whatever
    else reorders or multiplies the rows raise ``InvalidArgument``.
    """

    def __init__(self, store: TieredStore, known: _Known, rows: list[list[int]], padding: list[int]) -> None:
        super().__init__(config=store.model.config)
        self.store = store
        self.loaded = 0
        self.stored = 0
        self._known = known
        self._rows = [_Row(row, pad) for row, pad in zip(rows, padding, strict=True)]
        self._length = 0
        """Columns that were computed or loaded, as the hook has seen them; tokens are known for more at first."""
        self._pending: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.layers]
        self._pending_begin = 0
        """The column at which the tensors of ``_pending`` begin."""
        self._stopped = ""
        """Why nothing is stored any more."""

    # ------------------------------------------------------------ before

    def load(self) -> None:
        """Fill the cache with what the store has of the prompt. Called once, by the store."""
        size = self.store.options.block_tokens
        found: list[tuple[_Row, list[BlockKey]]] = []
        for row in self._rows:
            keys = chain_keys(self._known.namespace_id, row.tokens[:-1], size)
            found.append((row, keys[: self._matched(keys)]))
        # All rows begin to compute at one column, so no more is loaded than the row that has least can use.
        end = min(row.padding + len(keys) * size for row, keys in found)
        wanted = {key: None for row, keys in found for key in keys[: -(-max(end - row.padding, 0) // size)]}
        blocks = self._get(list(wanted))
        for row, keys in found:
            row.blocks = next((i for i, key in enumerate(keys) if key not in blocks), len(keys))
        end = min(row.padding + row.blocks * size for row in self._rows)
        if not any(end > row.padding for row in self._rows):
            end = 0
        for row, keys in found:
            row.blocks = -(-max(end - row.padding, 0) // size)
            row.parent = tuple(keys[row.blocks - 1 : row.blocks]) if row.blocks else ()
        if end:
            self._fill(end, found, blocks)
        self.loaded = self._length = end
        self._pending_begin = end

    def _matched(self, keys: list[BlockKey]) -> int:
        total = 0
        for begin in range(0, len(keys), BATCH_KEYS_MAX):
            part = keys[begin : begin + BATCH_KEYS_MAX]
            matched = self.store.client.match(self._known.namespace_id, part).matched
            total += matched
            if matched < len(part):
                break
        return total

    def _get(self, keys: list[BlockKey]) -> dict[BlockKey, torch.Tensor]:
        """Payloads of the blocks that are there, each raw as [layers, bytes of a slice]."""
        found: dict[BlockKey, torch.Tensor] = {}
        step = self._known.coder.blocks_of_a_part
        for begin in range(0, len(keys), step):
            part = keys[begin : begin + step]
            got = self.store.client.get(self._known.namespace_id, part)
            for key, payload, codec in zip(part, got.payloads, got.codecs, strict=True):
                if payload is not None:
                    found[key] = self._known.coder.raw(payload, codec)
        return found

    def _fill(self, end: int, found: list[tuple[_Row, list[BlockKey]]], blocks: dict[BlockKey, torch.Tensor]) -> None:
        coder, device = self._known.coder, self.store.model.device
        for layer in range(len(self.layers)):
            keys, values = coder.empty(len(found), end), coder.empty(len(found), end)
            for index, (row, chain) in enumerate(found):
                for number, column in enumerate(range(row.padding, end, coder.block_tokens)):
                    k, v = coder.split(blocks[chain[number]], layer)
                    width = min(coder.block_tokens, end - column)
                    keys[index, :, column : column + width] = k[:, :width]
                    values[index, :, column : column + width] = v[:, :width]
            super().update(keys.to(device), values.to(device), layer)

    # ------------------------------------------------------------ meanwhile

    def begin_step(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """The hook before ``forward``: learn its tokens. Raises InvalidArgument where the loaded part does not fit."""
        if self._stopped:
            return
        input_ids = named.get("input_ids", arguments[0] if len(arguments) == 1 else None)
        if not isinstance(input_ids, torch.Tensor) or self.get_seq_length() != self._length:
            self._stop("the tokens of a step are not known")
            return
        if len(input_ids) != len(self._rows):
            raise InvalidArgument(
                "cache", f"a cache of {len(self._rows)} rows for {len(input_ids)}",
                "a row a sequence: no beam search, and prompts repeated for several answers",
            )  # fmt: skip
        other = [name for name, value in named.items() if isinstance(value, torch.Tensor) and name not in _HARMLESS]
        if other:
            self._stop(f"forward was given {', '.join(other)}")
            return
        self._check_step(input_ids, named)
        begin, self._length = self._length, self._length + input_ids.shape[1]
        for row, ids in zip(self._rows, input_ids.tolist(), strict=True):
            del row.tokens[max(begin - row.padding, 0) :]
            row.tokens += ids[max(row.padding - begin, 0) :]

    def _check_step(self, input_ids: torch.Tensor, named: dict[str, Any]) -> None:
        """Raise InvalidArgument unless padding and positions are those that the keys stand for."""
        width = input_ids.shape[1]
        columns = torch.arange(self._length + width)
        padding = torch.tensor([row.padding for row in self._rows])[:, None]
        real = columns >= padding
        mask, positions = named.get("attention_mask"), named.get("position_ids")
        if mask is None and bool(padding.any()):
            raise InvalidArgument("attention_mask", "absent", "the mask that the cache was made with")
        if mask is not None and (mask.ndim != 2 or not torch.equal(mask.cpu() != 0, real.expand(len(mask), -1))):
            raise InvalidArgument("attention_mask", "another", "that of the prompt, padded on the left, and ones")
        if positions is None and not padding.any():
            return
        expected, real = (columns - padding)[:, -width:], real[:, -width:]
        given = expected - 1 if positions is None else positions.cpu()
        if given.shape[-1] != width or bool(((given != expected) & real).any()):
            raise InvalidArgument("position_ids", "others", "positions counted from the first token after the padding")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Cache``. What is new is kept aside until its block is full: windowed layers forget it."""
        if not self._stopped:
            self._pending[layer_idx].append((key_states, value_states))
        updated: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return updated

    def end_step(self) -> None:
        """The hook after ``forward``: blocks that have become full go to the store."""
        size = self.store.options.block_tokens
        if self._stopped or all(len(row.tokens) // size <= row.blocks for row in self._rows):
            return
        layers = [
            (torch.cat([k for k, _ in new], 2), torch.cat([v for _, v in new], 2)) for new in self._pending if new
        ]
        if len(layers) != len(self.layers) or any(not self._known.coder.fits(k, v) for k, v in layers):
            self._stop("K or V have a shape or dtype that the configuration does not tell")
            return
        self._store(layers)
        begin = min(self._length, *(row.padding + row.blocks * size for row in self._rows))
        drop, self._pending_begin = begin - self._pending_begin, begin
        self._pending = [[(k[:, :, drop:].clone(), v[:, :, drop:].clone())] for k, v in layers]

    def _store(self, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        size, coder = self.store.options.block_tokens, self._known.coder
        new: dict[BlockKey, tuple[BlockKey, int, int, list[int]]] = {}
        for index, row in enumerate(self._rows):
            tokens = row.tokens[row.blocks * size : len(row.tokens) // size * size]
            root = row.parent[0] if row.parent else None
            keys = chain_keys(self._known.namespace_id, tokens, size, *filter(None, [root]))
            for number, (key, parent) in enumerate(zip(keys, parents_of(keys, *filter(None, [root])), strict=True)):
                column = row.padding + (row.blocks + number) * size - self._pending_begin
                new.setdefault(key, (parent, index, column, tokens[number * size : (number + 1) * size]))
            row.blocks += len(keys)
            row.parent = tuple(keys[-1:]) or row.parent
        found = list(new.items())
        for begin in range(0, len(found), coder.blocks_of_a_part):
            part = found[begin : begin + coder.blocks_of_a_part]
            blocks = PutBlocks(
                keys=[key for key, _ in part],
                parents=[parent for _, (parent, _, _, _) in part],
                payloads=[coder.payload(layers, index, column) for _, (_, index, column, _) in part],
                token_ids=[token for _, (_, _, _, tokens) in part for token in tokens],
            )
            outcomes = self.store.client.put(self._known.namespace_id, blocks).outcomes
            self.stored += sum(outcome is Outcome.HIT for outcome in outcomes)

    def _stop(self, reason: str) -> None:
        LOG.info("nothing more of this generation is stored: %s", reason)
        self._stopped = reason
        self._pending = [[] for _ in self.layers]

    # ------------------------------------------------------------ what changes rows

    def crop(self, tokens_to_remove: int) -> None:
        """See ``Cache``. What follows is not stored."""
        self._stop("the cache was cropped")
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """See ``Cache``. What follows is not stored."""
        self._stop("the cache was reset")
        super().reset()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refused: rows are sequences."""
        raise InvalidArgument("num_beams", "beam search", "1: rows of a TieredCache are not reordered")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: rows are sequences."""
        raise InvalidArgument("cache", "rows repeated", "prompts repeated before the cache is made")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused: rows are sequences."""
        raise InvalidArgument("cache", "rows selected", "the rows that the cache was made with")


def _check_model(model: Any) -> None:
    """Raise UnsupportedModel, naming the field, unless the model is a decoder of text with K and V a layer."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel("config.is_encoder_decoder", True, "a decoder")
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedModel("config", type(config).__name__, "that of a model of text alone")
    check_supported(config)
    layers: list[Any] = DynamicCache(config=config).layers
    wrong = [type(layer).__name__ for layer in layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)]
    if wrong or len(layers) != config.num_hidden_layers:
        kinds = ", ".join(sorted(set(wrong))) or f"{len(layers)} layers of K and V"
        raise UnsupportedModel("config.layer_types", kinds, "full or sliding-window attention in each layer")


def _left_padding(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    """Columns of padding before each row's first token."""
    if mask is None:
        return [0] * len(input_ids)
    if mask.shape != input_ids.shape:
        raise InvalidArgument("attention_mask", f"shape {tuple(mask.shape)}", f"{tuple(input_ids.shape)}")
    seen = mask != 0
    padding: list[int] = (~seen).sum(dim=1).tolist()
    columns = torch.arange(seen.shape[1], device=seen.device)
    if not torch.equal(seen, columns >= torch.tensor(padding, device=seen.device)[:, None]) or not bool(
        seen[:, -1].all()
    ):
        raise InvalidArgument("attention_mask", "padding after tokens", "padding on the left (padding_side='left')")
    return padding
