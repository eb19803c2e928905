"""docs/models.md: every decoder family that transformers can build small, run by the engine and by transformers alone.

Each family is a tiny random model. It is served, and then the greedy tokens of two prompts that share a start are those
of the library alone, cold and from the cache; or it is refused in one line. Anything else is a fault (exit code 1).
Run with ``python -m kvstore.engine.model_table`` (some minutes), or with the names of families.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvstore.core.decoders import Identity, UnsupportedModel
from kvstore.engine.config import EngineConfig
from kvstore.engine.engine import Engine
from kvstore.engine.sampling import SamplingParams
from kvstore.engine.weights import Model, adopt_model
from kvstore.store.embedded import build_store

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "models.md"
MARKS: Final = ("<!-- families -->\n", "<!-- end of families -->\n")

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 211, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.25, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 1, "head_dim": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "ffn_dim": 96, "word_embed_proj_dim": 64, "rotary_dim": 8, "n_group": 1, "topk_group": 1, "moe_num_experts": 4,
    "moe_k": 2, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 16,
    "sliding_window": 50, "n_inner": 96, "is_decoder": True, "n_shared_experts": 1, "num_shared_experts": 1,
}  # fmt: skip
"""Of every family, as far as its configuration has them."""

WITHOUT_WINDOW: Final = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
MLA: Final = ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "sarvam_mla", "youtu")

OWN: Final[dict[str, dict[str, Any]]] = {
    **{name: {"num_key_value_heads": 4, "head_dim": 8} for name in MLA},
    **{name: {"sliding_window": None} for name in WITHOUT_WINDOW},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 50},
    "bloom": {"n_head": 4},
    "zaya": {"num_experts_per_tok": 1},
    "granite_swa": {"sliding_window": 50},
}
"""Fields of single families, on top."""

ENCODERS_AND_PARTS: Final = "its configuration is of an encoder and a decoder, or holds those of several models"
PROMPT: Final = 200
ANSWER: Final = 6
PARAMETERS_MAX: Final = 20_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one family: served, refused (``why``), not built (``why``), or wrong (``why``)."""

    family: str
    state: str
    why: str = ""


def try_family(family: str) -> Row:
    """Build the family's tiny model and run it both ways."""
    try:
        reference = _build(family)
    except Exception as error:  # noqa: BLE001 - whatever a family's own code raises on a small configuration
        return Row(family, "not built", _line(f"{type(error).__name__}: {error}"))
    if reference is None:
        return Row(family, "not built", ENCODERS_AND_PARTS)
    try:
        _alone(reference, _prompt(1), 1)
    except Exception as error:  # noqa: BLE001 - as above
        return Row(family, "not built", _line(f"transformers alone does not run it: {type(error).__name__}: {error}"))
    try:
        model = adopt_model(copy.deepcopy(reference), Identity(family, "random"), "float32")
    except UnsupportedModel as error:
        return Row(family, "refused", _line(str(error)))
    return Row(family, "wrong", fault) if (fault := _compare(model, reference)) else Row(family, "served")


def _build(family: str) -> Any | None:
    made = CONFIG_MAPPING[family]
    fresh = made()
    if getattr(fresh, "is_encoder_decoder", False) or getattr(made, "sub_configs", None):
        return None
    known = set(fresh.to_dict()) | set(getattr(made, "attribute_map", {}))
    config = made(**{name: value for name, value in {**SIZES, **OWN.get(family, {})}.items() if name in known})
    torch.manual_seed(7)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > PARAMETERS_MAX:
        raise ValueError(f"{count:,} parameters after all")
    network = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        # Norms and biases at their initial 1 and 0 would hide one that is left out.
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return network


def _compare(model: Model, reference: Any) -> str:
    """What differs, or nothing: two prompts with a common start, each cold and again by another engine."""
    prompts = [_prompt(1), [*_prompt(1)[:140], *_prompt(2)[:30]]]
    expected = [_alone(reference, prompt, ANSWER) for prompt in prompts]
    store = build_store(host_bytes=8 << 20, device_bytes=8 << 20)
    try:
        for attempt in ("cold", "warm"):
            cache = store.open_session("model_table", buffer_bytes=1 << 20)
            engine = Engine(model, cache, EngineConfig(token_budget=96))
            answers = engine.generate(prompts, SamplingParams(tokens_max=ANSWER, ignore_eos=True))
            engine.close()
            cache.close()
            for answer, tokens in zip(answers, expected, strict=True):
                if list(answer.tokens) != tokens:
                    return f"{attempt}: {list(answer.tokens)}, and {tokens} by the library alone"
            if attempt == "warm" and not all(sum(answer.cached_tokens.values()) >= 128 for answer in answers):
                return "nothing was found in the cache"
    finally:
        store.close()
    return ""


@torch.inference_mode()
def _alone(reference: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each from a pass over all tokens: no cache of the library's takes part."""
    tokens = list(prompt)
    for _ in range(count):
        logits = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def _prompt(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, SIZES["vocab_size"], (PROMPT,), generator=generator).tolist()


def _line(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "/")[:160]


def table(rows: Sequence[Row]) -> str:
    """The part of the page between its marks."""
    served = sorted(row.family for row in rows if row.state == "served")
    refused = sorted((row for row in rows if row.state == "refused"), key=lambda row: row.family)
    apart = sorted((row for row in rows if row.state == "not built"), key=lambda row: row.family)
    lines = [
        f"transformers {transformers.__version__} names {len(rows)} families of decoders: {len(served)} are served, "
        f"{len(refused)} refused, {len(apart)} could not be built small.",
        "",
        "**Served**, with equal tokens cold and warm: " + ", ".join(f"`{name}`" for name in served) + ".",
        "",
        "| refused | in these words |",
        "|---|---|",
        *(f"| `{row.family}` | {row.why.removeprefix(f'model is {row.family}; expected ')} |" for row in refused),
        "",
        "| not tried | why |",
        "|---|---|",
        *(f"| `{row.family}` | {row.why} |" for row in apart),
    ]
    return "\n".join(lines) + "\n"


def main(families: Sequence[str]) -> int:
    """Run the families named, or all and write the page; returns the exit code."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for family in families or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows.append(try_family(family))
        print(f"{family:28} {rows[-1].state:9} {rows[-1].why}", flush=True)
    if not families:
        begin, end = MARKS
        page = PAGE.read_text()
        head, rest = page.split(begin)
        PAGE.write_text(head + begin + table(rows) + end + rest.split(end)[1])
    return 1 if any(row.state == "wrong" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
