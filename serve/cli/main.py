"""The command line: subcommands and exit codes. jax is imported by the subcommand that is called."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

from ...refusals import nearest
from ..host.streams import tell
from ..runtime.multihost.supervisor import is_supervised, supervise

INTERRUPTED, BROKEN_PIPE = 130, 141  # by the shell's convention, 128 + the signal's number


@dataclass(frozen=True)
class Command:
    """A subcommand: its arguments and its line in the help.

    Its module has `add_flags(parser)` and `run(args)`. If a lost run can resume, it also has
    `progress_of(args)`, which returns a counter of kept results.
    """

    arguments: str
    help: str


COMMANDS = {
    "generate": Command("PROMPT", "continue one prompt and stream the text"),
    "batch": Command("INPUT OUTPUT", "answer a file of prompts; a killed job resumes where it stopped"),
    "serve": Command("[MODEL]", "serve OpenAI's API over HTTP"),
    "verify": Command("LOG", "verify an audit log: run its requests again and compare bits"),
    "route": Command("--replica URL ...", "route requests to several servers, by their cached prefixes"),
    "plan": Command("", "show shapes, memory and roofline without running a model"),
    "doctor": Command("", "check this machine: device, kernels, rates, and what would make it faster"),
    "bench": Command("", "measure decode, prefill and startup on this machine"),
    "buckets": Command("INPUT", "find the best prefill buckets for a workload"),
    "convert": Command("SOURCE TARGET", "convert a model's folder to the format of Orbax or Hugging Face"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    0: done. 1: refused or failed, with one sentence on standard error. 2: usage. 75: a process of a group was
    lost. 130: Ctrl-C. 141: the reader of standard output is gone. 143: SIGTERM, if the command handles it.
    """
    try:
        args = parse(sys.argv[1:] if argv is None else list(argv))
        code = run(args)
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


def run(args: argparse.Namespace) -> int:
    """Run a command in this process, or in several supervised processes for --nnodes."""
    if getattr(args, "nnodes", 1) == 1 or is_supervised():
        return args.run(args)
    from .common import engine_options

    engine_options(args)  # a wrong option is reported once
    rank = getattr(args, "node_rank", None)
    return supervise(args.argv, args.nnodes, rank, args.progress_of(args))


def sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line. Only the command that is called is imported: most of them need jax."""
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
        if name == called:
            module = import_module(f"{__package__}.{name}")
            progress_of = getattr(module, "progress_of", lambda args: None)
            sub.set_defaults(run=module.run, usage_error=sub.error, argv=argv, progress_of=progress_of)
            module.add_flags(sub)
            parser.set_defaults(known_flags=lambda own=sub: re.findall(r"--[a-z][\w-]*", own.format_help()))
    args, left = parser.parse_known_args(argv)
    if left:
        getattr(args, "usage_error", parser.error)(unrecognized(left, args))
    return args


def unrecognized(left: Sequence[str], args: argparse.Namespace) -> str:
    """Return the error about arguments that a command does not have, with the flag nearest to the first."""
    flag = next((word.partition("=")[0] for word in left if word.startswith("--")), None)
    near = nearest(flag, args.known_flags()) if flag and hasattr(args, "known_flags") else None
    return f"unrecognized arguments: {' '.join(left)}" + (f"; did you mean {near}?" if near else "")


if __name__ == "__main__":
    raise SystemExit(main())
