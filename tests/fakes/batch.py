"""A batch's engine without a model, and what tests of batches share."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from duetto.sampling.params import completion_seeds
from duetto.serve.jobs.batch.job import BatchOptions
from duetto.serve.jobs.batch.run import run_batch
from duetto.serve.llm.input_processor import InputProcessor
from duetto.serve.options.engine import EngineOptions
from duetto.serve.text.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

MODEL = {"model": "fake", "max_model_len": "64"}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tail }}{{ strftime_now('%f') }}"
)


def characters(template: str | None = TEMPLATE) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {}, template)


@dataclass
class FakeEngine:
    """Continues a prompt by a hash of it and the seed; finishes two requests a step, the latest first."""

    tokenizer: Tokenizer | None = field(default_factory=characters)
    longest: int = 64
    die_after: int | None = None
    on_step: object = None
    products: str | None = None  # as an accelerator's engine reports them
    steps: int = 0
    most: int = 0
    closed: bool = False
    ran: list[str] = field(default_factory=list)
    queue: list = field(default_factory=list)
    adapters: list = field(default_factory=list)  # that requests came with
    to_come: list = field(default_factory=list)  # as it was told before each step

    @property
    def longest_prompt(self) -> int:
        return self.longest

    def add_request(self, prompt, params, request_id, lora_request=None):
        if not 0 < len(prompt) <= self.longest:
            raise ValueError(f"the prompt has {len(prompt)} tokens, 1 to {self.longest} are allowed")
        self.queue.append((request_id, prompt, params))
        self.adapters.append(lora_request)
        self.most = max(self.most, len(self.queue))

    def step(self):
        if self.steps == self.die_after:
            raise RuntimeError("the device is gone")
        self.steps += 1
        if callable(self.on_step):
            self.on_step(self)
        return [self.output(*self.queue.pop()) for _ in range(min(2, len(self.queue)))]

    def output(self, request_id, prompt, params):
        self.ran.append(request_id)
        metrics = RequestMetrics(arrival=0.0, queued=0.1, ttft=0.2, tpot=0.01, e2e=0.5)
        outputs = [self.completion(i, prompt, params) for i in range(params.n)]
        return RequestOutput(
            request_id, None, prompt, outputs, finished=True, metrics=metrics, num_cached_tokens=self.steps
        )

    def completion(self, index, prompt, params):
        seed = completion_seeds(params.seed or 0, params.n)[index]
        digest = hashlib.sha256(f"{prompt} {seed}".encode()).hexdigest()
        ids = [ord(c) % 94 for c in digest][: params.max_tokens or 20]
        text = self.tokenizer.decode(ids, True) if self.tokenizer and params.detokenize else ""
        logprobs = None if params.logprobs is None else [self.scores(i, params.logprobs) for i in ids]
        return CompletionOutput(index, text, ids, None, logprobs, "length", None)

    def scores(self, token, top):
        found = {token: Logprob(float("-inf"), 3, self.tokenizer.decode_token(token))}
        return found | {i: Logprob(-float(i), i, self.tokenizer.decode_token(i)) for i in range(1, top + 1)}

    def expect(self, requests):
        self.to_come.append(requests)

    def report(self, explained=False):
        return {"steps": self.steps} | ({} if self.products is None else {"products": self.products})

    def close(self):
        self.closed = True


class CheckingEngine(FakeEngine):
    """It takes and refuses what an LLM with a vocabulary of `vocabulary` entries does."""

    def __init__(self, vocabulary: int = 256, **fields):
        super().__init__(**fields)
        self.intake = InputProcessor(vocabulary, 64, EngineOptions(), self.tokenizer, eos_ids=(0,))

    def add_request(self, prompt, params, request_id, lora_request=None):
        self.intake.make_subscription(prompt, params)
        super().add_request(prompt, params, request_id)


LINES = [{"prompt": f"p{i}", "id": i, "n": 1 + i % 3} for i in range(11)] + [{"bad": 1}, {"prompt": "z"}]


def runner(folder: Path):
    """Runs a batch of bytes or objects in a folder; gives exit code, answers as objects, and the engine."""

    def run(lines, engine=None, name="out.jsonl", model=MODEL, **options):
        content = (
            lines if isinstance(lines, bytes) else b"".join(json.dumps(x).encode() + b"\n" for x in lines)
        )
        source, out, engine = folder / "in.jsonl", folder / name, engine or FakeEngine()
        source.write_bytes(content)
        chosen = BatchOptions(progress=False, **options)
        code = run_batch(lambda: engine, str(source), str(out), chosen, model)
        found = [json.loads(x) for x in out.read_bytes().splitlines()] if code == 0 else []
        return SimpleNamespace(code=code, answers=found, engine=engine, out=out)

    return run


def body(url, **fields):
    return {"custom_id": fields.pop("id", "a"), "method": "POST", "url": url, "body": fields}


def completion(**fields):
    return body("/v1/completions", **{"prompt": "hi", "model": "any", **fields})


def chat(**fields):
    return body("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **fields})


def journal_of(out: Path) -> Path:
    return out.with_name(out.name + ".journal")


def report_of(out: Path) -> dict:
    return json.loads(out.with_name(out.name + ".report.json").read_bytes())
