"""/v1/completions: prompts in their four forms, several choices in one stream, echo, log-probabilities and their offsets."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from engine.actors.stream import Output
from engine.api.config import ApiConfig
from engine.api.errors import ApiError
from engine.api.logprobs import CompletionOffsets, TokenNames, chat_entries, finite
from engine.api.streams import OpenStreams
from engine.core.plan import TokenLogprobs
from tests.actors.harness import CACHE, engine_config, until
from tests.api.harness import Server, assert_idle, error_code, open_server, script_of, tokenizer
from tests.api.openai_server import COMPLETIONS, answer_script, begun, events, open_answering, post, streamed, whole

ANSWER = "The cat 🐈 sat on the mat."


def assembled(found: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Text, end and log-probabilities by choice, with the rules of the order checked."""
    result: dict[int, dict[str, Any]] = {}
    for chunk in found:
        for choice in chunk["choices"]:
            mine = result.setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": []})
            assert mine["finish_reason"] is None, "a chunk after the end"
            assert choice["text"] or choice["finish_reason"], "an empty chunk on the way"
            mine["text"] += choice["text"]
            mine["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"]:
                mine["logprobs"].append(choice["logprobs"])
    return result


def joined(parts: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [value for part in parts for value in part[name]] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}


async def test_chunks_and_the_whole() -> None:
    async with open_answering(ANSWER) as server:
        body = await whole(server, COMPLETIONS)
        assert body["object"] == "text_completion"
        choice = body["choices"][0]
        assert choice == {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        num_tokens = len(tokenizer().encode(ANSWER)) + 1
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (1, num_tokens)
        assert "completion_tokens_details" not in body["usage"]
        found = await streamed(server, COMPLETIONS, stream_options={"include_usage": True, "continuous_usage_stats": False})
        assert assembled(found)[0] == {"text": ANSWER, "finish_reason": "stop", "logprobs": []}
        assert (found[-1]["choices"], found[-1]["usage"]) == ([], body["usage"])
        assert all(chunk["usage"] is None for chunk in found[:-1])
        shown = await streamed(server, COMPLETIONS, stream_options={"continuous_usage_stats": True})
        counts = [chunk["usage"]["completion_tokens"] for chunk in shown]
        assert counts == sorted(counts)
        assert counts[-1] == num_tokens
        await assert_idle(server)


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("ab", 1), (["ab", "abc"], 2), ([97, 98], 1), ([[97], [97, 98], [97, 98, 99]], 3)],
)
async def test_forms_of_prompts(prompt: Any, num_prompts: int) -> None:
    async with open_server(script_of("The cat sat. ")) as server:
        body = await whole(server, COMPLETIONS, prompt=prompt, n=2, max_tokens=5)
        choices = body["choices"]
        assert [choice["index"] for choice in choices] == list(range(2 * num_prompts))
        found = await streamed(server, COMPLETIONS, prompt=prompt, n=2, max_tokens=5, stream_options={"include_usage": True})
        assert {index: choice["text"] for index, choice in assembled(found).items()} == {
            choice["index"]: choice["text"] for choice in choices
        }
        # Each prompt's own answer, for each of its samples.
        entries = [prompt] if num_prompts == 1 else prompt
        for number, entry in enumerate(entries):
            alone = await whole(server, COMPLETIONS, prompt=entry, max_tokens=5)
            assert choices[2 * number]["text"] == choices[2 * number + 1]["text"] == alone["choices"][0]["text"]
        lengths = [len(tokenizer().encode(entry)) if isinstance(entry, str) else len(entry) for entry in entries]
        for usage in (body["usage"], found[-1]["usage"]):
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(lengths), 5 * 2 * num_prompts)
        await assert_idle(server)


async def test_several_prompts_are_admitted_together_or_not_at_all() -> None:
    script = answer_script("word ", end=False, step_s=0.02)
    async with open_server(engine=engine_config(script, scheduler={"max_waiting": 2})) as server:
        async with begun(server, COMPLETIONS, n=8, max_tokens=100):
            refused = await post(server, COMPLETIONS, prompt=[[5], [6], [7]])
            assert (refused.status_code, error_code(refused.content)) == (429, "queue_full")
            await until(lambda: server.gateway.num_requests == 8)
        await assert_idle(server)
        never = await post(server, COMPLETIONS, prompt=[[5]] * 11)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")


async def test_a_client_of_several_prompts_that_leaves_frees_them_all() -> None:
    async with open_server(engine=engine_config(answer_script("word ", end=False, step_s=0.01))) as server:
        async with begun(server, COMPLETIONS, prompt=[[5], [6], [7]]):
            assert server.gateway.num_requests == 3
        await assert_idle(server)


async def test_a_worker_that_dies_ends_all_choices_with_one_error() -> None:
    config = engine_config(answer_script("word " * 20, end=False, step_s=0.01, kill_at_step=12), on_worker_death="restart")
    async with open_server(engine=config) as server:
        response = await post(server, COMPLETIONS, prompt=[[5], [6]], stream=True, max_tokens=100)
        data = [value for _, value in events(response.text)]
        assert [value for value in data if "error" in value] == data[-1:]
        assert data[-1]["error"]["code"] == "engine_unavailable"
        assert not any(choice["finish_reason"] for chunk in data[:-1] for choice in chunk["choices"])
        await until(lambda: server.gateway.health.ok)
        await assert_idle(server)


async def test_echo() -> None:
    async with open_server(script_of("abc")) as server:
        for prompt, echoed in (("x🐈y", "x🐈y"), (tokenizer().encode("x🐈y"), "x🐈y"), (["a", "b"], None)):
            plain = (await whole(server, COMPLETIONS, prompt=prompt, max_tokens=4))["choices"]
            body = await whole(server, COMPLETIONS, prompt=prompt, max_tokens=4, echo=True)
            for index, choice in enumerate(body["choices"]):
                text = echoed if echoed is not None else prompt[index]
                assert choice["text"] == f"{text}{plain[index]['text']}"
            found = await streamed(server, COMPLETIONS, prompt=prompt, max_tokens=4, echo=True)
            assert {index: mine["text"] for index, mine in assembled(found).items()} == {
                choice["index"]: choice["text"] for choice in body["choices"]
            }


async def test_logprobs_and_offsets() -> None:
    answer = "zé🐈b"
    async with open_answering(answer) as server:
        body = await whole(server, COMPLETIONS, logprobs=0)
        logprobs = body["choices"][0]["logprobs"]
        tokens = tokenizer().encode(answer)
        assert len(logprobs["tokens"]) == len(tokens) + 1
        assert logprobs["token_logprobs"] == [-0.5] * len(logprobs["tokens"])
        assert [list(top.values()) for top in logprobs["top_logprobs"]] == [[-0.5]] * len(logprobs["tokens"])
        assert logprobs["tokens"][0] == "z"
        # A token's offset: the characters complete before it.
        decoder, expected, num_chars = tokenizer().decoder((5,)), [], 0
        for token in [*tokens, 1]:
            expected.append(num_chars)
            num_chars += len(decoder.push(token))
        assert logprobs["text_offset"] == expected
        assert expected[-1] == len(answer)
        assert (await whole(server, COMPLETIONS, logprobs=None))["choices"][0]["logprobs"] is None
        found = await streamed(server, COMPLETIONS, logprobs=0)
        assert joined(assembled(found)[0]["logprobs"]) == logprobs
        with_top = await whole(server, COMPLETIONS, logprobs=20)
        assert with_top["choices"][0]["logprobs"]["top_logprobs"] == logprobs["top_logprobs"]  # the script has one alternative


def test_logprobs_are_finite_and_named() -> None:
    assert [finite(value) for value in (-0.5, float("-inf"), float("nan"), -1e9)] == [-0.5, -9999.0, -9999.0, -9999.0]
    values = [TokenLogprobs(float("-inf"), (3, 4), (-0.1, float("-inf")))]
    entry = chat_entries(TokenNames(None), [7], values, 5)[0]
    assert (entry.token, entry.logprob, entry.bytes) == ("token_id:7", -9999.0, None)
    assert [(top.token, top.logprob) for top in entry.top_logprobs] == [("token_id:3", -0.1), ("token_id:4", -9999.0)]
    offsets = CompletionOffsets(None, (), skip_special_tokens=True, first_offset=2)
    found = offsets.entries([7], values, 1)
    assert found.top_logprobs == [{"token_id:3": -0.1, "token_id:7": -9999.0}]  # the chosen one is there beside the likeliest
    assert found.text_offset == [2]


MISTAKES: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "other"}, 404, "model"),
    ({"prompt": ...}, 400, "prompt"),
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": [[5], []]}, 400, "prompt"),
    ({"prompt": ["a", 5]}, 400, "prompt"),
    ({"prompt": [[5], "a"]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": [1000]}, 400, "prompt"),
    ({"prompt": [2**63]}, 400, "prompt"),
    ({"prompt": [True]}, 400, "prompt[0]"),
    ({"prompt": [1.5]}, 400, "prompt[0]"),
    ({"prompt": [5] * CACHE.context_length}, 400, "prompt"),
    ({"prompt": [[5]] * 257}, 400, "prompt"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": CACHE.context_length}, 400, "max_tokens"),
    ({"n": 0}, 400, "n"),
    ({"best_of": 2}, 400, "best_of"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"echo": True, "logprobs": 0}, 400, "echo"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"logprobs": -1}, 400, "logprobs"),
    ({"logprobs": True}, 400, "logprobs"),
    ({"messages": []}, 400, "messages"),
    ({"max_completion_tokens": 3}, 400, "max_completion_tokens"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    ({"structured_outputs": {"grammar": "x", "regex": "y"}}, 400, "structured_outputs"),
]


async def test_mistakes_have_the_same_answer_in_both_modes() -> None:
    async with open_answering("ok") as server:
        for fields, status, param in MISTAKES:
            answers: list[httpx.Response] = [await post(server, COMPLETIONS, stream=stream, **fields) for stream in (False, True)]
            error_code(answers[0].content)
            error = answers[0].json()["error"]
            assert (answers[0].status_code, error["param"]) == (status, param), (str(fields)[:200], error)
            assert (answers[1].status_code, answers[1].json()) == (status, answers[0].json()), str(fields)[:200]
        zero = (await post(server, COMPLETIONS, max_tokens=0)).json()["error"]["message"]
        assert "not implemented" in zero
        await assert_idle(server)


async def test_context_error_has_all_the_numbers() -> None:
    async with open_answering("ok") as server:
        context = CACHE.context_length
        error = (await post(server, COMPLETIONS, prompt=[5] * 7, max_tokens=context - 6)).json()["error"]
        assert error["code"] == "context_length_exceeded"
        for number in (7, context - 6, context + 1, context, context - 7):
            assert str(number) in error["message"].replace(",", "").replace(";", "").replace(":", "").split(), number
        assert (await whole(server, COMPLETIONS, prompt=[5] * 7, max_tokens=context - 7))["usage"]["prompt_tokens"] == 7


async def test_prompts_have_a_bound() -> None:
    async with open_answering("ok", config=ApiConfig(port=0, max_prompts=2)) as server:
        await served(server, [[5], [5]])
        response = await post(server, COMPLETIONS, prompt=[[5], [5], [5]])
        assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


async def served(server: Server, prompt: Any) -> None:
    assert [choice["text"] for choice in (await whole(server, COMPLETIONS, prompt=prompt))["choices"]] == ["ok"] * len(prompt)


async def test_a_request_that_fails_alone_is_an_error_in_both_modes() -> None:
    async with open_server(engine=engine_config(answer_script("word ", end=False, error_token=9))) as server:
        for stream in (False, True):
            for prompt in ([9], [[5], [9]]):
                response = await post(server, COMPLETIONS, prompt=prompt, stream=stream, max_tokens=50)
                if response.status_code == 200:  # the other prompt's text had begun
                    assert stream
                    assert len(prompt) == 2
                    data = [value for _, value in events(response.text)]
                    assert data[-1]["error"]["message"]
                    assert "[DONE]" not in data
                    assert not any(choice["finish_reason"] for chunk in data[:-1] for choice in chunk["choices"])
                else:
                    assert (response.status_code, error_code(response.content)) == (500, "generation_failed")
        assert (await whole(server, COMPLETIONS, max_tokens=2))["usage"]["completion_tokens"] == 2
        await assert_idle(server)


def test_a_sample_that_the_engine_gave_up_is_an_error() -> None:
    with pytest.raises(ApiError, match="gave this request up"):
        OpenStreams([], 1).count(Output(0, "", (), finish_reason="abort"))
