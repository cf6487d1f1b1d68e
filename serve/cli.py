"""The command line: `duetto generate`, `batch`, `plan`, `bench`, `convert`. jax is imported once a command
has work to do."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .commands.report import render, save
from .host.signals import raise_on_interrupt
from .host.streams import tell
from .options.engine import EngineOptions
from .options.flags import add_flags, given, positive

if TYPE_CHECKING:
    from ..sampling.params import SamplingParams
    from .api.llm import LLM

T = TypeVar("T")
GENERATE_MAX_TOKENS = 256
INTERRUPTED, BROKEN_PIPE = 130, 141  # by the shell's convention, 128 + the signal's number
NOT_STREAMED = ("n", "logprobs", "prompt_logprobs", "detokenize", "spaces_between_special_tokens")


@dataclass(frozen=True)
class Command:
    """A subcommand: its arguments and its line in the help, how it adds its flags, and what runs it."""

    arguments: str
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the exit code is 0, 1 (refused or failed, one sentence says why), 2 (usage), 130
    (Ctrl-C), or 141 (whoever read standard output has left)."""
    try:
        args = parse(sys.argv[1:] if argv is None else list(argv))
        code = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        if sys.stdout is not None:  # or Python complains at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        tell("duetto: interrupted")
        return INTERRUPTED
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError is jax's: no such device, no memory
        tell(f"duetto: {sentence(error)}")
        return 1


def sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def parse(argv: list[str]) -> argparse.Namespace:
    """Flags are only made for the command that is called, since most of them need jax."""
    parser = argparse.ArgumentParser(
        "duetto", description="Generate text with large language models in JAX.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"duetto {version('duetto')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    called = next((word for word in argv if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            usage=" ".join(filter(None, ("duetto", name, command.arguments, "[flags]"))),
            help=command.help,
            description=f"{command.help[:1].upper()}{command.help[1:]}.",
            allow_abbrev=False,
        )
        sub.set_defaults(run=command.run, usage_error=sub.error)
        if name == called:
            command.add_flags(sub)
    return parser.parse_args(argv)


# ---------------------------------------------------------------- flags that commands share


def model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="MODEL",
        help="a Hugging Face folder, or an id on the hub such as Qwen/Qwen3-0.6B "
        "(default: the small model that ships)",
    )  # fmt: skip
    parser.add_argument("--revision", help="branch, tag or commit of a model on the hub")
    parser.add_argument("--dtype", default="auto", help="auto (default), float32, bfloat16 or float16")
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="another folder or id to take the tokenizer from"
    )
    parser.add_argument("--tokenizer-revision", help="branch, tag or commit of the tokenizer")
    parser.add_argument(
        "--download-dir", metavar="DIR", help="where models of the hub are kept (default: the hub's cache)"
    )
    parser.add_argument(
        "--compilation-cache", default="auto", metavar="DIR",
        help='where compiled programs are kept (default: in your cache directory); "none" keeps none',
    )  # fmt: skip


def engine_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, EngineOptions, "engine", leave_out=("seed",))


def sampling_flags(parser: argparse.ArgumentParser, whose: str, leave_out: Sequence[str]) -> None:
    from ..sampling.params import SamplingParams

    add_flags(parser, SamplingParams, f"sampling, {whose}", leave_out)


def report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quiet", action="store_true", help="say nothing of the start, and show no report at the end"
    )
    parser.add_argument("--report", metavar="FILE", help="write the closing report as JSON")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="add to the report what each compiled program did beside its floor",
    )


def checked(args: argparse.Namespace, make: Callable[[], T]) -> T:
    """What `make` makes of flags; a value that is not allowed ends the program as a usage error."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        args.usage_error(str(error))
        raise


def engine_options(args: argparse.Namespace) -> EngineOptions:
    return checked(args, lambda: EngineOptions(**given(EngineOptions, args, leave_out=("seed",))))


def sampling_params(args: argparse.Namespace, defaults: "SamplingParams") -> "SamplingParams":
    """The defaults with what the command line says."""
    return checked(args, lambda: replace(defaults, **given(type(defaults), args)))


def start(args: argparse.Namespace, options: EngineOptions) -> "LLM":
    from .api.llm import LLM

    raise_on_interrupt()
    kept = None if args.compilation_cache == "none" else args.compilation_cache
    options = replace(options, use_tqdm_on_load=not args.quiet and getattr(args, "progress", True))
    return LLM(
        args.model, dtype=args.dtype, tokenizer=args.tokenizer, revision=args.revision,
        tokenizer_revision=args.tokenizer_revision, download_dir=args.download_dir, compilation_cache=kept,
        **asdict(options),
    )  # fmt: skip


def resolve_once(args: argparse.Namespace, options: EngineOptions) -> tuple[Path, EngineOptions]:
    """Puts folders in the place of ids, so that all that follows reads the same files; the model's, and options without ids."""
    from .loading.origin import Origin

    names = ("revision", "tokenizer_revision", "download_dir")
    origin = Origin.of(args.model, args.tokenizer, **{name: vars(args)[name] for name in names})
    args.model = str(origin.model)
    args.tokenizer = None if origin.tokenizer == origin.model else str(origin.tokenizer)
    return origin.model, origin.settled(options, download_dir=args.download_dir)


def finish(report: dict[str, Any], args: argparse.Namespace) -> None:
    """Shows an engine's report on standard error, and writes it where --report says."""
    if not args.quiet:
        tell(f"\n{render(report)}")
    if args.report:
        save(report, args.report)


# ---------------------------------------------------------------- generate


def generate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help='the text to continue; "-" reads standard input')
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message to a chat model")
    model_flags(parser)
    report_flags(parser)
    sampling_flags(
        parser,
        f"beside the model's own defaults; max-tokens is {GENERATE_MAX_TOKENS} where they say nothing",
        NOT_STREAMED,
    )
    engine_flags(parser)


def generate(args: argparse.Namespace) -> int:
    from ..sampling.params import SamplingParams
    from .loading.start import checked_defaults

    sampling_params(args, SamplingParams())  # what is wrong is said before a model is loaded
    folder, options = resolve_once(args, engine_options(args))
    stated = options.recommended(checked_defaults(folder).sampling)
    checked(args, lambda: SamplingParams.from_dict(stated))
    if sys.stdout is None or (args.prompt == "-" and sys.stdin is None):
        raise ValueError(f"standard {'output' if sys.stdout is None else 'input'} is closed")
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    with start(args, options) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": text}]) if args.chat else text
        longest = stated.get("max_tokens", GENERATE_MAX_TOKENS)
        defaults = replace(llm.get_default_sampling_params(), max_tokens=longest)
        for piece in llm.stream(prompt, sampling_params(args, defaults)):
            print(piece.text, end="", flush=True)
        print(flush=True)
        finish(llm.report(args.explain), args)
    return 0


# ---------------------------------------------------------------- batch


def batch_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help='JSON lines in OpenAI\'s batch format or plain; "-" is standard input')
    parser.add_argument(
        "output", help='where the answers go, in the order of the input; "-" is standard output'
    )
    parser.add_argument("--seed", type=int, default=0, help="seeds lines that bring no seed (default: 0)")
    parser.add_argument(
        "--in-flight", type=positive, metavar="INT", help="lines in the engine (default: 4 max-num-seqs)"
    )
    parser.add_argument(
        "--model-name",
        default="duetto",
        help="the model's name in answers to lines that name none (default: duetto)",
    )
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="say what the start is doing, and show a bar",
    )
    model_flags(parser)
    report_flags(parser)
    sampling_flags(parser, "for lines that do not say otherwise", ("seed", "spaces_between_special_tokens"))
    engine_flags(parser)


def batch(args: argparse.Namespace) -> int:
    from ..sampling.params import SamplingParams
    from .batch.fingerprint import fingerprint
    from .batch.job import BatchOptions
    from .batch.run import run_batch
    from .loading.start import checked_defaults

    options = engine_options(args)
    if options.speculation.acceptance == "rejection":
        args.usage_error(
            "--speculative-config: acceptance=rejection is not allowed in a batch: which tokens are drawn depends "
            "on what runs beside a line, so that a resumed job would not write the same answers; leave it out"
        )
    sampling = given(SamplingParams, args, leave_out=("seed",))
    checked(args, lambda: SamplingParams.from_dict(sampling))
    folder, options = resolve_once(args, options)
    sampling = options.recommended(checked_defaults(folder).sampling) | sampling
    job = BatchOptions(
        in_flight=args.in_flight or 4 * options.max_num_seqs,
        seed=args.seed,
        sampling=sampling,
        model_name=args.model_name,
        progress=args.progress,
        explain=args.explain,
    )
    tokenizer = None if args.tokenizer is None else Path(args.tokenizer)
    return run_batch(
        lambda: start(args, options),
        args.input,
        args.output,
        job,
        fingerprint(folder, tokenizer, args.dtype, options),
        lambda report: finish(report, args),
        args.report,
    )


# ---------------------------------------------------------------- plan, bench and convert


def plan_flags(parser: argparse.ArgumentParser) -> None:
    from .commands.plan import add_plan_flags

    model_flags(parser)
    add_plan_flags(parser)
    engine_flags(parser)


def plan(args: argparse.Namespace) -> int:
    from .commands.plan import run_plan

    raise_on_interrupt()
    return run_plan(args, engine_options(args))


def bench_flags(parser: argparse.ArgumentParser) -> None:
    from .commands.bench import add_bench_flags

    model_flags(parser)
    add_bench_flags(parser)
    engine_flags(parser)


def bench(args: argparse.Namespace) -> int:
    from .commands.bench import run_bench

    raise_on_interrupt()
    return run_bench(args, engine_options(args))


def convert_flags(parser: argparse.ArgumentParser) -> None:
    from .commands.convert import add_convert_flags

    add_convert_flags(parser)


def convert(args: argparse.Namespace) -> int:
    from .commands.convert import run_convert

    raise_on_interrupt()
    return run_convert(args)


COMMANDS = {
    "generate": Command(
        "PROMPT", "continue one prompt and show the text as it comes", generate_flags, generate
    ),
    "batch": Command(
        "INPUT OUTPUT", "answer a file of prompts; a killed job goes on where it stopped", batch_flags, batch
    ),
    "plan": Command("", "show shapes, memory and roofline before anything runs", plan_flags, plan),
    "bench": Command("", "measure decode, prefill and startup on this machine", bench_flags, bench),
    "convert": Command(
        "SOURCE TARGET", "write a model's folder as an Orbax or a Hugging Face one", convert_flags, convert
    ),
}

if __name__ == "__main__":
    raise SystemExit(main())
