"""A model is proven right before it serves: one short prompt by the library alone, and by the engine's own path.

Two things can go wrong without an error. A family may call attention twice in a layer, or not at all, and then what
lies in the blocks is not what the model attends to; and it may do something with K, V or the mask that the paged path
does not know. The first is counted, the second shows in the logits. The prompt is computed in two steps, so that the
second attends to what the first one wrote: in one step a layer that writes twice would overwrite, and look right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch

from kvstore.core.decoders import UnsupportedModel
from kvstore.core.namespace import BlockLayout, NamespaceSpec
from kvstore.core.types import Area
from kvstore.engine.attention import ATTENTION_NAME, Writer
from kvstore.engine.blocks import Block, BlockState
from kvstore.engine.memory import Region
from kvstore.engine.model import ModelRunner
from kvstore.engine.sampling import Sampler, SamplingParams
from kvstore.engine.scheduler import Share
from kvstore.engine.sequence import RequestId, Sequence
from kvstore.engine.step import build_step

STEPS: Final = (6, 3)
"""Tokens of the two steps: a run that is written through views, and one that is scattered."""

ERROR_MAX: Final = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.15}
"""Largest distance of a row of logits from the library's, as a share of that row's own spread.

Rounding of a deep model takes a tenth of this; another context takes several times as much.
"""


def prove(network: Any, spec: NamespaceSpec) -> tuple[int | None, ...]:
    """Raise UnsupportedModel unless the engine's path computes what the library alone does, and each layer writes its
    K and V once a token. Uses memory of its own: nothing is stored. ``network`` attends through ``attention.py`` after.

    Returns the sliding window of each layer, None where it attends to all tokens.
    """
    count = sum(STEPS)
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(0, int(network.config.vocab_size), (count,), generator=generator).tolist()
    expected = _rows("the library alone runs", spec, lambda: _alone(network, tokens))
    windows: dict[int, int | None] = {}
    found = _rows("the engine runs", spec, lambda: _through_the_engine(network, spec, tokens, windows))
    # Once more as it serves: of the last layer's rows only that of the last token.
    expected = torch.cat([expected, expected[-1:]])
    if not bool(torch.isfinite(expected).all()):
        raise UnsupportedModel("model", spec.model, f"one whose logits are finite in {spec.dtype}")
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    error = float(((found - expected).norm(dim=-1) / spread.clamp_min(1e-6)).max())
    if not error <= ERROR_MAX[spec.dtype]:
        raise UnsupportedModel(
            "model",
            spec.model,
            f"one whose logits through the engine are those of the library alone (off by {error:.1%})",
        )
    _check_windows(network.config, spec, windows)
    return tuple(windows.get(layer) for layer in range(spec.layers))


def _check_windows(config: Any, spec: NamespaceSpec, windows: dict[int, int | None]) -> None:
    """Raise UnsupportedModel where the configuration has a window and no layer says so: the family puts it into a mask
    that the engine does not see, and the prompt of the proof is too short to show it.
    """
    window, positions = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    if not window or "sliding_attention" not in kinds or not getattr(config, "use_sliding_window", True):
        return
    if not any(windows.values()) and (positions is None or window < positions):
        raise UnsupportedModel(
            "model", spec.model, f"one whose layers tell the engine of their window ({window} tokens)"
        )


def _rows(what: str, spec: NamespaceSpec, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    try:
        return compute()
    except UnsupportedModel:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a family's own code raises on this path is about the model
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UnsupportedModel("model", spec.model, f"one that {what} ({reason})") from error


@torch.inference_mode()
def _alone(network: Any, tokens: list[int]) -> torch.Tensor:
    """Logits fp32 [tokens, vocabulary] by the library's own attention, in one pass without a cache."""
    network.set_attn_implementation("eager")
    try:
        answer = network(input_ids=torch.tensor([tokens], device=network.device), use_cache=False)
    finally:
        network.set_attn_implementation(ATTENTION_NAME)
    logits: torch.Tensor = answer.logits[0]
    return logits.float().cpu()


def _through_the_engine(
    network: Any, spec: NamespaceSpec, tokens: list[int], windows: dict[int, int | None]
) -> torch.Tensor:
    """The same rows through the model runner, over blocks in memory of this call's own; then the last one again."""
    layout, device = BlockLayout.of(spec), network.device
    blocks = -(-len(tokens) // spec.block_tokens)
    region = Region(torch.zeros(blocks * layout.device_bytes, dtype=torch.uint8, device=device), layout.layers)
    params = SamplingParams()
    sequence = Sequence(RequestId(0), tokens, len(tokens), params, Sampler(params), 0)
    for index in range(blocks):
        sequence.table.append(Block(BlockState.PRIVATE, region, index * layout.device_bytes, Area.NONE))
    runner = ModelRunner(network, device)
    rows = []
    for count in STEPS:
        step = build_step([Share(sequence, count)], spec, device, all_rows=True)
        counted = _Counted(step.attention.writer, spec, count)
        wanted = torch.arange(count, device=device)
        rows.append(runner.run(replace(step, rows=wanted, attention=replace(step.attention, writer=counted))))
        counted.check()
        # As chunks of a prompt are computed, whose logits nobody wants: what follows attends to what this pass wrote.
        runner.run(replace(step, rows=wanted[:0]))
        windows.update(step.attention.windows)
        sequence.computed += count
    sequence.computed -= STEPS[-1]
    rows.append(runner.run(build_step([Share(sequence, STEPS[-1])], spec, device)))
    return torch.cat(rows)


class _Counted:
    """Hands on what is written, and counts the writes of each layer."""

    def __init__(self, writer: Writer, spec: NamespaceSpec, tokens: int) -> None:
        self._writer = writer
        self._model = spec.model
        self._shape = (spec.kv_heads, tokens, spec.head_dim)
        self._writes = [0] * spec.layers

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """As the writer's own. Raises UnsupportedModel for a layer or a shape that the configuration does not have."""
        if not 0 <= layer < len(self._writes):
            raise UnsupportedModel("model", self._model, f"one whose layers are {len(self._writes)}, without {layer}")
        for tensor in (key, value):
            if tuple(tensor.shape) != self._shape:
                shape = f"K and V of [heads, tokens, dim] {list(self._shape)}, not {list(tensor.shape)}"
                raise UnsupportedModel("model", self._model, f"one whose layers write {shape}")
        self._writes[layer] += 1
        self._writer.write(layer, key, value)

    def check(self) -> None:
        """Raise UnsupportedModel unless each layer wrote once."""
        for layer, writes in enumerate(self._writes):
            if writes != 1:
                found = f"layer {layer} writes them {writes} times"
                raise UnsupportedModel(
                    "model", self._model, f"one whose layers write K and V of a token exactly once ({found})"
                )
