"""The server over real sockets: its plain routes, methods, and what a client does to a connection."""

from __future__ import annotations

from engine.api.formats.base import ChatInput, PlainParser, PreparedChat
from engine.core.errors import RequestError
from engine.core.events import StepCommitted
from tests.api.harness import assert_idle, error_code, open_server, tokenizer
from tests.api.openai_server import PlainFormat


async def test_health_version_models_and_info_agree() -> None:
    async with open_server(info={"served_names": ("one", "org/two")}) as server:
        client = server.client
        health = await client.get("/health")
        assert (health.status_code, health.json()["ok"], health.json()["state"]) == (200, True, "ready")
        assert set(health.json()["actors"]) == {"scheduler", "worker-0"}
        assert (await client.get("/ping")).status_code == (await client.get("/health/ready")).status_code == 200
        assert (await client.get("/health/live")).json() == {"ok": True}
        info = (await client.get("/server_info")).json()
        models = (await client.get("/v1/models")).json()
        assert [entry["id"] for entry in models["data"]] == info["served_names"] == ["one", "org/two"]
        assert models["data"][0]["max_model_len"] == info["context_length"] == server.gateway.context_length
        assert (await client.get("/v1/models/org/two")).json() == models["data"][1]
        missing = await client.get("/v1/models/org/none")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert "version" in (await client.get("/version")).json()
        await assert_idle(server)


class Shouting(PlainFormat):
    """A format whose prompts are easily told."""

    def prepare(self, chat: ChatInput) -> PreparedChat:
        if not chat.messages:
            raise RequestError("messages is empty; needed: at least one", param="messages")
        text = "".join(str(message["content"]) for message in chat.messages).upper()
        return PreparedChat(prompt=text + (">" if chat.add_generation_prompt else ""), make_parser=PlainParser)


async def test_tokenize_and_back() -> None:
    async with open_server(chat_format=Shouting()) as server:
        post = server.client.post
        text = "Grüße 🐈!"
        answer = (await post("/tokenize", json={"prompt": text, "return_token_strs": True, "unknown": 1})).json()
        assert answer["tokens"] == tokenizer().encode(text)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == server.gateway.context_length
        assert (await post("/detokenize", json={"tokens": answer["tokens"], "model": "scripted"})).json() == {"prompt": text}
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await post("/tokenize", json=chat)).json()["tokens"] == tokenizer().encode("HI>")
        chat["add_generation_prompt"] = False  # type: ignore[assignment]
        assert (await post("/tokenize", json=chat)).json()["tokens"] == tokenizer().encode("HI")
        assert (await post("/tokenize", json={"prompt": "x" * 20_000})).json()["count"] == 20_000  # in a thread
        assert (await post("/tokenize", json={"prompt": ""})).json()["count"] == 0


async def test_what_tokenize_refuses() -> None:
    cases: list[tuple[str, object, int, str, str | None]] = [
        ("/tokenize", {}, 400, "prompt and messages", "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt and messages", "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages is empty", "messages"),
        ("/tokenize", {"messages": ["a"]}, 400, "expected `object`", "messages[0]"),
        ("/tokenize", {"prompt": 5}, 400, "prompt: expected `str | null`", "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, 400, "expected `bool`", "return_token_strs"),
        ("/tokenize", [], 400, "object", None),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "'other'", "model"),
        ("/detokenize", {"tokens": [-1]}, 400, "-1; allowed: integers from 0 to 999", "tokens"),
        ("/detokenize", {"tokens": [1000]}, 400, "0 to 999", "tokens"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens", "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens", "tokens[0]"),
        ("/detokenize", {"tokens": [1] * 201}, 400, "at most 200", "tokens"),
        ("/detokenize", {"tokens": "abc"}, 400, "tokens", "tokens"),
        ("/detokenize", {}, 400, "tokens", "tokens"),
    ]
    async with open_server(chat_format=Shouting()) as server:
        for path, body, status, reason, param in cases:
            answer = await server.client.post(path, json=body)
            assert answer.status_code == status, body
            assert error_code(answer.content)
            assert reason in answer.json()["error"]["message"], body
            assert answer.json()["error"]["param"] == param, body
        for raw in (b"", b"{", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt": NaN}'):
            answer = await server.client.post("/tokenize", content=raw)
            assert answer.status_code == 400, raw
            assert error_code(answer.content)


async def test_server_info_tells_of_drafts_where_there_are_any() -> None:
    async with open_server(info={"draft_tokens": 3}) as server:
        assert (await server.client.get("/server_info")).json()["drafts"]["acceptance_length"] is None
        server.context.metrics.drafts.add(StepCommitted(0.0, 0, 0.1, 16, 13, 4, (4, 4, 4), (4, 3, 2)))
        drafts = (await server.client.get("/server_info")).json()["drafts"]
        assert drafts == {
            "verified_items": 4,
            "draft_tokens": 12,
            "accepted_tokens": 9,
            "acceptance_length": 3.25,
            "draft_tokens_by_position": [4, 4, 4],
            "accepted_tokens_by_position": [4, 3, 2],
        }
    async with open_server() as server:
        info = (await server.client.get("/get_server_info")).json()
        assert "drafts" not in info
        assert info["stats"]["core"]["num_running"] == 0
        assert info["full_length_requests"] == info["kv_tokens"] // info["context_length"]
