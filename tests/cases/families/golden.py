"""Small checkpoints of every family that a seed draws, and what Transformers computed with them:
`golden.json`.

For each case it holds a `config.json` in the style of transformers 5, the names and shapes of the tensors,
logits and greedy tokens. `cd tests; python -m cases.families.golden` makes it anew.
"""

import json
import re
import sys
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from cases.families import classic, dense, latent, mixtures, pictured, recurrent
from safetensors.numpy import load_file, save_file

FILE = Path(__file__).with_name("golden.json")
GOLDEN = json.loads(FILE.read_text()) if FILE.exists() else {}
PROMPTS, NEW, MARGIN = (5, 23), 6, 0.01
LENGTH = max(PROMPTS) + NEW
BASE = {
    "vocab_size": 53,
    "hidden_size": 30,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
NEAR_ONE = r"(norm|norm_\d|norms\.\d+|ln_\w)\.weight|layer_scalar|router\.(per_expert_)?scale"
THEIRS = {"kimi_k2": "deepseek_v3"}  # families that Transformers reads as others
# families whose cases name all their sizes
OWN_SIZES = "gpt2", "gptj", "codegen", "gpt_bigcode", "dbrx", "mpt"
CASES: dict[str, dict[str, Any]] = (
    dense.CASES | classic.CASES | mixtures.CASES | latent.CASES | recurrent.CASES
)


def hub_config(name: str) -> dict[str, Any]:
    kind = CASES[name].get("model_type", name)
    base = {"vocab_size": 53, "torch_dtype": "float32"} if kind in OWN_SIZES else BASE
    return {"model_type": kind, **base, **CASES[name]}


def weights(name: str, shape: tuple[int, ...], seed: int, kind: str) -> np.ndarray:
    """One tensor's numbers, wide of what is neutral; the stream of RandomState is frozen for ever."""
    noise = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode())).standard_normal(shape)
    if re.search(NEAR_ONE, name):
        around_zero = kind.startswith(("gemma", "nemotron")) and not kind.startswith("gemma4")
        noise = 0.2 * noise + (0.0 if around_zero else 1.0)
    elif len(shape) < 2 or "bias" in name:
        noise *= 0.3
    elif "embed" in name or re.search(r"w[tp]e", name):
        noise *= 0.2 if kind.startswith("gemma") else 0.7
    else:
        noise *= 1.7 / shape[-2 if kind == "gpt2" or len(shape) == 3 else -1] ** 0.5
    return np.asarray(noise, np.float32)


def write_folder(folder: Path, config: dict[str, Any], shapes: dict[str, list[int]], seed: int) -> None:
    kind = config["model_type"]
    tensors = {name: weights(name, tuple(shape), seed, kind) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def prompts() -> list[list[int]]:
    random = np.random.RandomState(7)
    return [random.randint(0, BASE["vocab_size"], n).tolist() for n in PROMPTS]


def case_folder(name: str, folder: Path) -> dict[str, Any]:
    """Writes a case's checkpoint; returns what is known of it."""
    golden = GOLDEN[name]
    write_folder(folder, hub_config(name), golden["shapes"], golden["seed"])
    return golden


def optional(package: str) -> Any:
    """A package that the type checker need not find: most machines do not have it."""
    return import_module(package)


def their_config(folder: Path) -> Any:
    """A folder's `config.json` as Transformers understands it."""
    raw = json.loads((folder / "config.json").read_text())
    kind = THEIRS.get(raw["model_type"], raw["model_type"])
    return optional("transformers").CONFIG_MAPPING[kind].from_dict(raw | {"model_type": kind})


def expected_outputs(
    folder: Path, new: int = NEW, margin: float = 0.0
) -> tuple[list[list[float]], list[list[int]]]:
    """Last logits and greedy tokens as Transformers computes them; nothing where two tokens are likely within
    `margin`."""
    torch, transformers = optional("torch"), optional("transformers")
    options = {
        "dtype": torch.float32,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
        "output_loading_info": True,
    }
    raw = json.loads((folder / "config.json").read_text())
    if raw["model_type"] in pictured.OUTER:
        model, report = pictured.load_whole(transformers, raw, folder, **options)
    else:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=their_config(folder), **options
        )
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    last, greedy = [], []
    for prompt in prompts():
        ids = list(prompt)
        for _ in range(max(1, new)):
            with torch.no_grad():
                found = model.eval()(torch.tensor([ids]), use_cache=False).logits[0, -1].double().numpy()
            if len(ids) == len(prompt):
                last.append([round(float(x), 5) for x in found])
            best = np.sort(found)[-2:]
            if best[1] - best[0] < margin:
                return [], []
            ids.append(int(found.argmax()))
        greedy.append(ids[len(prompt) :])
    return last, greedy


def make_golden(name: str, folder: Path) -> dict[str, Any]:
    """The first seed whose continuations have clear margins and are not one token again and again."""
    transformers = optional("transformers")
    raw = hub_config(name)
    (folder / "config.json").write_text(json.dumps(raw))
    if raw["model_type"] in pictured.OUTER:
        v5 = pictured.draw_text(transformers, raw, folder)
    else:
        transformers.AutoModelForCausalLM.from_config(their_config(folder)).save_pretrained(folder)
        v5 = json.loads((folder / "config.json").read_text())
    v5 |= {"model_type": raw["model_type"]}
    shapes = {n: list(x.shape) for n, x in sorted(load_file(folder / "model.safetensors").items())}
    for seed in range(200):
        write_folder(folder, hub_config(name), shapes, seed)
        last, greedy = expected_outputs(folder, margin=MARGIN)
        if greedy and all(len(set(ids)) > 2 for ids in greedy):
            return {"seed": seed, "logits": last, "greedy": greedy, "shapes": shapes, "v5": v5}
    raise SystemExit(f"{name}: no seed of 200 fits")


def main() -> None:
    from tempfile import TemporaryDirectory

    transformers = optional("transformers")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = dict(GOLDEN)
    for name in sys.argv[1:] or CASES:
        with TemporaryDirectory() as folder:
            found[name] = make_golden(name, Path(folder))
        print(name, "seed", found[name]["seed"], flush=True)
        lines = (f"{json.dumps(n)}: {json.dumps(g, separators=(',', ':'))}" for n, g in found.items())
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
