"""The server over real sockets: its plain routes, methods, and what a client does to a connection."""

from __future__ import annotations

from tests.api.harness import assert_idle, open_server


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
