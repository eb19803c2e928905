"""The HTTP service through the real ``openai`` client: answers equal transformers alone, and what they say is true."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from kvstore.engine.weights import Model
from tests.engine.families import Pair, build_pair
from tests.engine.service.harness import Served, serving, tiny_model

CONTEXT = "ab" * 150
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair() -> Pair:
    return build_pair("llama")


@pytest.fixture(scope="module")
def served(model: Model) -> Iterator[Served]:
    with serving(model) as found:
        yield found


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return served.openai()


def expected(model: Model, pair: Pair, tokens: list[int], count: int) -> str:
    assert model.text is not None
    return model.text.decode(list(pair.greedy(tokens, count)))


def test_a_chat_says_what_transformers_alone_says_and_the_second_time_from_the_cache(
    client: OpenAI, model: Model, pair: Pair
) -> None:
    assert model.text is not None
    said = [{"role": "user", "content": [{"type": "text", "text": CONTEXT}, {"type": "text", "text": "1"}]}]
    tokens = model.text.chat([{"role": "user", "content": CONTEXT + "1"}])
    for cached in (0, 128):
        answer = client.chat.completions.create(messages=said, max_completion_tokens=6, **GREEDY)
        (choice,) = answer.choices
        assert choice.message.content == expected(model, pair, tokens, 6)
        assert (choice.message.role, choice.finish_reason, answer.model) == ("assistant", "length", "tiny")
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == cached
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(tokens), 6)
        assert answer.usage.total_tokens == len(tokens) + 6


def test_a_stream_brings_the_same_text_in_pieces_and_its_usage_at_the_end(
    client: OpenAI, model: Model, pair: Pair
) -> None:
    assert model.text is not None
    said = [{"role": "user", "content": "stream" * 20}]
    tokens = model.text.chat(said)
    stream = client.chat.completions.create(
        messages=said, max_tokens=9, stream=True, stream_options={"include_usage": True}, n=2, **GREEDY
    )
    texts, reasons, usage = ["", ""], [None, None], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [expected(model, pair, tokens, 9)] * 2
    assert reasons == ["length", "length"]
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(tokens), 18)


def test_completions_of_texts_and_of_token_ids(client: OpenAI, model: Model, pair: Pair) -> None:
    assert model.text is not None
    prompts = ["ab1", "xyz" * 30]
    answer = client.completions.create(prompt=prompts, max_tokens=5, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.text == expected(model, pair, model.text.encode(prompt), 5)
    ids = model.text.encode(prompts[0])
    assert client.completions.create(prompt=ids, max_tokens=5, **GREEDY).choices[0].text == answer.choices[0].text
    streamed = client.completions.create(prompt=prompts[0], max_tokens=5, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    whole = client.completions.create(prompt="ab1", max_tokens=12, **GREEDY).choices[0]
    stop = whole.text[4:6]
    short = client.completions.create(prompt="ab1", max_tokens=12, stop=[stop], **GREEDY).choices[0]
    assert short.text == whole.text[: whole.text.find(stop)]
    assert (whole.finish_reason, short.finish_reason) == ("length", "stop")


def test_seeds_repeat_an_answer_and_choices_differ(client: OpenAI) -> None:
    drawn = {"model": "tiny", "prompt": "ab", "temperature": 1.5, "max_tokens": 12, "n": 3, "seed": 7}
    texts = [[choice.text for choice in client.completions.create(**drawn).choices] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3
    other = client.completions.create(**{**drawn, "seed": 99}).choices
    assert [choice.text for choice in other] != texts[0]


def test_logprobs_are_those_of_the_model(client: OpenAI, model: Model, pair: Pair) -> None:
    assert model.text is not None
    tokens = model.text.encode("ab1")
    drawn = pair.greedy(tokens, 3)
    rows = pair.logits([*tokens, *drawn]).log_softmax(-1)[len(tokens) - 1 : -1]
    wanted = [float(row[token]) for row, token in zip(rows, drawn, strict=True)]
    plain = client.completions.create(prompt="ab1", max_tokens=3, logprobs=2, **GREEDY).choices[0].logprobs
    assert plain is not None
    assert plain.token_logprobs == pytest.approx(wanted, abs=1e-3)
    assert plain.top_logprobs is not None
    assert [len(top) for top in plain.top_logprobs] == [2, 2, 2]
    said = [{"role": "user", "content": "ab1"}]
    chat = client.chat.completions.create(messages=said, max_tokens=2, logprobs=True, top_logprobs=3, **GREEDY)
    told = chat.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    for token in told.content:
        assert token.logprob == token.top_logprobs[0].logprob
        assert len(token.top_logprobs) == 3
        assert bytes(token.bytes or []).decode() == token.token
    pieces = client.chat.completions.create(
        messages=said, max_tokens=2, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    streamed = [t for c in pieces for x in c.choices if x.logprobs for t in x.logprobs.content or []]
    assert streamed == told.content


def test_the_model_is_listed(client: OpenAI, model: Model) -> None:
    assert [card.id for card in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").model_dump()["max_model_len"] == model.positions_max
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, None),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**9}, "max_tokens"),
        ({"prompt": "a", "n": 17}, "n"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "attention": "some"}, "attention"),
        ({"prompt": "a", "attention": {"mass": 0}}, "attention"),
        ({"prompt": "a", "attention": {"share": 0.5}}, "attention"),
        ({"prompt": "a", "logit_bias": {"1": 5}}, "logit_bias"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "guided_json": {}}, "guided_json"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(served: Served, body: dict[str, Any], param: str | None) -> None:
    answer = httpx2.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param


@pytest.mark.parametrize("attention", ["exact", "selected", {"mass": 0.9, "max_share": 1}, {}])
def test_attention_is_this_servers_own_field(client: OpenAI, attention: Any) -> None:
    """Nothing lies in storage here, so the answer is that of exact attention."""
    plain = client.completions.create(prompt="ab", max_tokens=4, **GREEDY)
    more = {**GREEDY, "extra_body": {**GREEDY["extra_body"], "attention": attention}}
    asked = client.completions.create(prompt="ab", max_tokens=4, **more)
    assert asked.choices[0].text == plain.choices[0].text


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "a list of messages"),
        ([{"role": "user"}], "must be a text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "must be texts"),
        (["hi"], "role and content"),
    ],
)
def test_messages_that_are_none_are_refused(client: OpenAI, messages: list[Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(messages=messages, model="tiny")


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here"):
        client.completions.create(model="gpt-9", prompt="a")


@pytest.mark.parametrize("body", [b"{", b"[1]", b"[" * 100_000, b"\xff"])
def test_a_body_that_is_no_request_is_refused(served: Served, body: bytes) -> None:
    answer = httpx2.post(f"{served.url}/v1/completions", content=body, timeout=60)
    assert answer.status_code == 400
    assert "the body is no JSON" in answer.json()["error"]["message"]


def test_whoever_goes_away_ends_his_request(served: Served, client: OpenAI) -> None:
    before = served.metric("kvengine_requests_total", {"outcome": "cancelled"})
    stream = client.completions.create(prompt="ab", max_tokens=3900, stream=True, **GREEDY)
    next(iter(stream))
    stream.close()
    waiting = httpx2.Client()
    with pytest.raises(httpx2.ReadTimeout):
        waiting.post(
            f"{served.url}/v1/completions",
            json={"prompt": "ab", "max_tokens": 3900, "ignore_eos": True},
            timeout=httpx2.Timeout(30, read=0.3),
        )
    waiting.close()
    while served.get("/health").json()["running"] or served.service.driver.open_requests:
        continue
    assert served.metric("kvengine_requests_total", {"outcome": "cancelled"}) == before + 2


def test_health_and_metrics_move(served: Served, client: OpenAI, root: Path) -> None:
    names = ("kvengine_generated_tokens_total", "kvengine_first_token_seconds_count", "kvengine_prompt_tokens_total")
    before = [served.metric(name) for name in names]
    count = served.metric("kvengine_inter_token_seconds_count")
    client.completions.create(prompt="metrics" * 20, max_tokens=5, **GREEDY)
    assert [served.metric(name) - old for name, old in zip(names, before, strict=True)] == [5, 1, 140]
    assert served.metric("kvengine_inter_token_seconds_count") == count + 4
    assert served.metric("kvengine_requests_total", {"outcome": "length"}) > 0
    client.completions.create(prompt="metrics" * 20, max_tokens=5, **GREEDY)
    assert served.metric("kvengine_cached_tokens_total", {"source": "device"}) >= 128
    page = served.get("/metrics").text
    assert "kvengine_cache_up 1.0" in page
    told = set(re.findall(r"`(kvengine_\w+)`", (root / "docs/engine.md").read_text()))
    assert len(told) == 20
    assert {name for name in told if f"# TYPE {name.removesuffix('_total')}" not in page} == set()
    health = served.get("/health")
    assert (health.status_code, health.json()["status"], health.json()["cache"]) == (200, "ok", "up")


def test_a_long_prompt_tells_how_far_it_is(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.engine.service.driver.PROGRESS_S", 0.0)
    with serving(model) as served:
        body = {"prompt": "ab1" * 100, "max_tokens": 1, "temperature": 0, "stream": True}
        lines = httpx2.post(f"{served.url}/v1/completions", json=body, timeout=60).text.splitlines()
    told = [line for line in lines if line.startswith(":")]
    assert ": prompt 64 of 200 tokens" in told
    assert json.loads(lines[-4].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert lines[-2] == "data: [DONE]"


def test_keys_and_bounds(model: Model) -> None:
    with serving(model, keys=("one", "two"), requests_max=2, body_max=2000) as served:
        for key in ("", "three", "on", "one two"):
            with pytest.raises(openai.AuthenticationError):
                served.openai(key or "x").models.list()
        client = served.openai("two")
        assert client.completions.create(prompt="a", max_tokens=2, **GREEDY).choices[0].finish_reason == "length"
        with pytest.raises(openai.RateLimitError, match="as many as are taken"):
            client.completions.create(prompt="a", n=3, **GREEDY)
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(prompt="a" * 4000, **GREEDY)
        assert caught.value.status_code == 413
        assert served.get("/health").status_code == 200
        while served.service.driver.open_requests:
            continue
        client.completions.create(prompt="a", n=2, max_tokens=1, **GREEDY)
