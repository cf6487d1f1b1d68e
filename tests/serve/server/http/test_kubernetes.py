"""The manifests of examples/kubernetes agree with each other, and with a server: flags, routes, metrics."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from duetto.serve.cli.main import parse_command_line
from duetto.serve.server.router.main import OPEN_PATHS

FOLDER = Path(__file__).resolve().parents[4] / "examples" / "kubernetes"
PAGE = FOLDER.parents[1] / "docs" / "kubernetes.md"
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def documents() -> Iterator[dict[str, Any]]:
    for file in sorted(FOLDER.glob("*.yaml")):
        yield from yaml.safe_load_all(file.read_text())


MANIFESTS = {(one["kind"], one["metadata"]["name"]): one["spec"] for one in documents() if "kind" in one}
PODS = {
    name: spec["template"]
    for (kind, name), spec in MANIFESTS.items()
    if kind in ("Deployment", "StatefulSet")
}
ENGINES, ROUTER = (PODS[name]["spec"]["containers"][0] for name in ("duetto", "duetto-router"))
HPA = MANIFESTS["HorizontalPodAutoscaler", "duetto"]


def paths(container: dict[str, Any]) -> set[str]:
    return {container[probe]["httpGet"]["path"] for probe in PROBES if probe in container}


def ports(container: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


@pytest.mark.parametrize("container", [ENGINES, ROUTER], ids=["engines", "router"])
def test_flags_exist_and_the_port_is_the_servers(container):
    args = parse_command_line(container["args"])
    assert ports(container)["http"] == args.port and args.host == "0.0.0.0"
    probes = [container[probe]["httpGet"] for probe in PROBES if probe in container]
    assert {probe["port"] for probe in probes} == {"http"}


def test_events_go_to_the_port_that_is_named():
    assert parse_command_line(ENGINES["args"]).kv_events_endpoint == f"tcp://*:{ports(ENGINES)['kv-events']}"


def test_files_of_flags_are_mounted():
    for container in (ENGINES, ROUTER):
        args = vars(parse_command_line(container["args"]))
        mounts = [mount["mountPath"] + "/" for mount in container["volumeMounts"]]
        files = [args[name] for name in ("model", "compilation_cache", "api_key_file") if args.get(name)]
        assert files and all(any(file.startswith(mount) for mount in mounts) for file in files)


def test_selectors_find_pods():
    labels = {name: pod["metadata"]["labels"] for name, pod in PODS.items()}
    for (kind, name), spec in MANIFESTS.items():
        selector = spec.get("podSelector") or spec.get("selector")
        if selector is not None:
            assert selector.get("matchLabels", selector) == labels[name], kind
    (rule,) = MANIFESTS["NetworkPolicy", "duetto"]["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"] == labels["duetto-router"]


def test_the_router_names_every_engine_that_the_autoscaler_may_start():
    (service,) = MANIFESTS["Service", "duetto"]["ports"]
    host = f"duetto-{{}}.{MANIFESTS['StatefulSet', 'duetto']['serviceName']}:{service['port']}"
    expected = [f"http://{host.format(i)}" for i in range(HPA["maxReplicas"])]
    assert parse_command_line(ROUTER["args"]).replica == expected
    assert HPA["scaleTargetRef"]["name"] == "duetto"
    assert [port["number"] for port in MANIFESTS["InferencePool", "duetto"]["targetPorts"]] == [
        service["port"]
    ]


def test_probes_of_the_router_need_no_key():
    assert paths(ROUTER) <= set(OPEN_PATHS)


def test_a_server_answers_probes_and_has_the_metrics(server):
    """The server asks for keys, which probes do not have."""
    with server.http(key="none") as http:
        assert [http.get(path).status_code for path in sorted(paths(ENGINES))] == [200, 200]
    (monitored,) = MANIFESTS["PodMonitor", "duetto"]["podMetricsEndpoints"]
    with server.http() as http:
        text = http.get(monitored["path"]).text
    found = set(re.findall(r"^([\w:]+)[{ ]", text, re.MULTILINE))
    (rule,) = (rule for one in documents() if "rules" in one for rule in one["rules"]["custom"])
    (scaled,) = HPA["metrics"]
    assert re.findall(r'__name__="([^"]+)"', rule["seriesQuery"]) == ["duetto:tokens_in_flight"]
    assert "duetto:tokens_in_flight" in found
    assert rule["name"]["as"] == scaled["pods"]["metric"]["name"]
    assert (
        set(re.findall(r"`((?:vllm|duetto):\w+)`", PAGE.read_text())) - {"vllm:lora_requests_info"} <= found
    )
    assert all(label in text for label in ("block_size=", "num_gpu_blocks="))
