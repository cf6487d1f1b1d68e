"""The fleet: two services of real servers, each behind a router.

adapters: two engines with LoRA adapters, speculation and KV offload to a common folder
prefill: a prefill engine, and two that decode
"""

import asyncio
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import httpx

from benchmarks.soak.asks import NAME
from benchmarks.soak.models import ADAPTERS, RANK, WEIGHTS
from benchmarks.soak.server import Server, orphans
from duetto.serve.runtime.multihost.supervisor import free_port

PAGE = "16"  # tokens
SERVICES = {"adapters": ("replica-1", "replica-2"), "prefill": ("decode-1", "decode-2")}
ROUTERS = {service: f"router-{service}" for service in SERVICES}
ENGINES = ("replica-1", "replica-2", "prefill", "decode-1", "decode-2")
NEVER_KILLED = ("replica-1", "router-adapters")  # their growth is that of the whole run
KILLED = tuple(sorted({*ENGINES, *ROUTERS.values()} - {*NEVER_KILLED}))
SIZES = [
    "--max-num-seqs", "8", "--max-model-len", "768", "--max-prefill-tokens", "64", "--page-size", PAGE,
    "--max-batched-token-mem", "1280", "--max-queued", "4096", "--max-prefill-delay", "0",
    "--no-background-compilation", "--dtype", "float32", "--tool-call-parser", "hermes", "--quiet",
]  # fmt: skip
OFFLOAD = ["--swap-space", "0.02", "--kv-disk-space", "0.25"]
SPECULATION = {  # method of each engine; the others do not speculate
    "replica-1": "ngram",
    "replica-2": "suffix",
    "decode-1": "ngram",
}
DRAFTS = {"num_speculative_tokens": 7, "adaptive": False}  # also where they do not pay, as on a small model
CHANGE = 300.0  # seconds that a change of the weights may take


class Fleet:
    """Servers by their names, and the weights that they serve.

    allowed: the weights that an answer may follow from now: two sets during a replacement
    """

    def __init__(self, folder: Path):
        self.folder, self.weights = folder, next(iter(WEIGHTS))
        self.allowed = frozenset({self.weights})
        self.http = httpx.AsyncClient(timeout=CHANGE, limits=httpx.Limits(max_connections=None))
        self.orphans: list[asyncio.Task[int]] = []
        self._made: list[Server] = []
        self._door = f"127.0.0.1:{free_port()}"
        self._events = {name: f"tcp://127.0.0.1:{free_port()}" for name in ENGINES}
        for name in ("logs", "audit"):
            (folder / name).mkdir(exist_ok=True)
        self.servers = {name: self.server(name, partial(self._engine, name)) for name in ENGINES}
        for service, name in ROUTERS.items():
            self.servers[name] = self.server(name, partial(self._router, service))

    def server(self, name: str, words: Callable[[], list[str]]) -> Server:
        self._made.append(Server(name, words, self.folder / "logs" / f"{name}.log"))
        return self._made[-1]

    def url(self, service: str) -> str:
        return self.servers[ROUTERS[service]].url

    # ------------------------------------------------------------ commands

    def reference(self) -> list[str]:
        """Return the words of a server that stands alone: no speculation, no offload, one engine."""
        return [*self._model(), *self.adapters()]

    def adapters(self) -> list[str]:
        folders = [f"{name}={self.folder / 'adapters' / name}" for name in ADAPTERS]
        return ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK), "--lora-modules", *folders]

    def _model(self) -> list[str]:
        models = self.folder / "models"
        own = ["--served-model-name", NAME, "--weights-dir", str(models)]
        return ["serve", str(models / self.weights), *SIZES, *own]

    def _engine(self, name: str) -> list[str]:
        words = [*self._model(), "--audit-log", str(self.folder / "audit" / name)]
        words += ["--kv-events-endpoint", self._events[name]]
        if method := SPECULATION.get(name):
            words += ["--speculative-config", json.dumps(DRAFTS | {"method": method})]
        if name in SERVICES["adapters"]:
            return [*words, *OFFLOAD, "--kv-disk-path", str(self.folder / "pages"), *self.adapters()]
        role = "prefill" if name == "prefill" else "decode"
        words += ["--kv-role", role, "--kv-address", self._door]
        return [*words, *(["--swap-space", "0.05"] if role == "prefill" else ())]

    def _router(self, service: str) -> list[str]:
        words = ["route"]
        for name in SERVICES[service]:
            words += ["--replica", self.servers[name].url]
        if service == "adapters":
            return words
        words += ["--prefill", f"{self.servers['prefill'].url}={self._door}", "--page-size", PAGE]
        for name in (*SERVICES[service], "prefill"):
            words += ["--kv-events", self._events[name]]
        return [*words, "--tokenizer", str(self.folder / "models" / self.weights)]

    # ------------------------------------------------------------ all servers

    async def start(self) -> None:
        """Start all servers; engines of one kind after the other, so that each program is compiled once."""
        for wave in (("replica-1", "decode-1"), ("replica-2", "decode-2", "prefill"), ROUTERS.values()):
            await asyncio.gather(*(self.servers[name].start(self.http) for name in wave))

    async def stop(self) -> dict[str, int]:
        """Drain all servers, routers first, and return their exit codes."""
        codes = {}
        for wave in (ROUTERS.values(), ENGINES):
            found = await asyncio.gather(*(self.servers[name].stop() for name in wave))
            codes |= dict(zip(wave, found, strict=True))
        await self.http.aclose()
        return codes

    def end(self) -> None:
        """Kill what still runs, after an error."""
        for server in self._made:
            if server.process is not None and server.process.poll() is None:
                server.process.kill()

    # ------------------------------------------------------------ changes

    async def kill(self, name: str) -> None:
        """Kill a server and start it again."""
        children = await self.servers[name].kill()
        self.orphans.append(asyncio.create_task(orphans(children)))
        await self.servers[name].start(self.http)

    async def pause(self, name: str, seconds: float, clear: bool) -> None:
        """Pause an engine for some time; its requests wait. `clear`: forget its cache."""
        await self.post(name, f"/pause?mode=keep&clear_cache={str(clear).lower()}")
        await asyncio.sleep(seconds)
        await self.post(name, "/resume")

    async def replace(self, weights: str, mode: str) -> None:
        """Serve other weights, one engine after the other."""
        self.allowed = frozenset({self.weights, weights})
        for name in ENGINES:
            await self.post(name, "/update_weights", {"path": weights, "mode": mode})
        self.weights, self.allowed = weights, frozenset({weights})

    async def post(self, name: str, path: str, body: object = None) -> None:
        """Change a server. Raises RuntimeError if it refuses."""
        reply = await self.http.post(f"{self.servers[name].url}{path}", json=body)
        if reply.status_code != 200:
            raise RuntimeError(f"{name}{path}: {reply.status_code} {reply.text}")

    async def left(self) -> int:
        """Return the number of processes that killed ones have left behind."""
        return sum(await asyncio.gather(*self.orphans))


def traces(logs: Iterable[Path]) -> list[str]:
    """Return the logs with a traceback."""
    return [log.name for log in logs if "Traceback" in log.read_text(errors="replace")]
