"""What host and device do, recorded by a server."""

from pathlib import Path


def test_a_profile_is_recorded(starting, keys, tmp_path):
    server = starting("--profile-dir", str(tmp_path / "profiles"), "--api-key-file", str(keys))
    with server.http() as http, server.http("no key") as other:
        assert other.post("/start_profile").status_code == 401
        refused = http.post("/stop_profile")
        assert refused.status_code == 409 and "No profile started" in refused.json()["error"]["message"]
        assert http.post("/start_profile").status_code == 200
        refused = http.post("/start_profile")
        assert refused.status_code == 409 and "already been started" in refused.json()["error"]["message"]
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        assert http.post("/stop_profile").status_code == 200
    assert recorded(tmp_path / "profiles")
    assert server.stop() == 0


def test_profile_routes_are_absent_without_a_folder(server):
    with server.http() as http:
        for path in ("/start_profile", "/stop_profile", "/pause", "/resume", "/update_weights"):
            assert http.post(path).status_code == 404


def recorded(folder: Path) -> list[Path]:
    return list(folder.rglob("*.xplane.pb"))
