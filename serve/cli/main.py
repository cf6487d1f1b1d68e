"""The command line: subcommands and exit codes. jax is imported by the subcommand that is called."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

from ...refusals import nearest_name
from ..host.streams import print_stderr
from ..runtime.multihost.supervisor import has_supervisor, supervise

INTERRUPTED_CODE, BROKEN_PIPE_CODE = 130, 141  # by the shell's convention, 128 + the signal's number


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
        args = parse_command_line(sys.argv[1:] if argv is None else list(argv))
        code = run_command(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        if sys.stdout is not None:  # or Python complains at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_CODE
    except KeyboardInterrupt:
        print_stderr("duetto: interrupted")
        return INTERRUPTED_CODE
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError is jax's: no such device, no memory
        print_stderr(f"duetto: {error_sentence(error)}")
        return 1


def run_command(args: argparse.Namespace) -> int:
    """Run a command in this process, or in several supervised processes for --nnodes."""
    if getattr(args, "nnodes", 1) == 1 or has_supervisor():
        return args.run(args)
    from .common import parse_engine_options

    parse_engine_options(args)  # a wrong option is reported once
    rank = getattr(args, "node_rank", None)
    return supervise(args.argv, args.nnodes, rank, args.progress_of(args))


def error_sentence(error: Exception) -> str:
    """Return an error as one sentence."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def parse_command_line(argv: list[str]) -> argparse.Namespace:
    """Parse a command line. Only the command that is called is imported: most of them need jax."""
    parser = argparse.ArgumentParser(
        "duetto", description="Generate text with large language models in JAX.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"duetto {version('duetto')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    called_name = next((word for word in argv if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            usage=" ".join(filter(None, ("duetto", name, command.arguments, "[flags]"))),
            help=command.help,
            description=f"{command.help[:1].upper()}{command.help[1:]}.",
            allow_abbrev=False,
        )
        if name == called_name:
            module = import_module(f"{__package__}.{name}")
            progress_of = getattr(module, "progress_of", lambda args: None)
            sub.set_defaults(run=module.run, usage_error=sub.error, argv=argv, progress_of=progress_of)
            module.add_flags(sub)
            parser.set_defaults(known_flags=lambda sub=sub: re.findall(r"--[a-z][\w-]*", sub.format_help()))
    args, left = parser.parse_known_args(argv)
    if left:
        getattr(args, "usage_error", parser.error)(unrecognized_error(left, args))
    return args


def unrecognized_error(unknown_words: Sequence[str], args: argparse.Namespace) -> str:
    """Return the error about arguments that a command does not have, with the flag nearest to the first."""
    flag = next((word.partition("=")[0] for word in unknown_words if word.startswith("--")), None)
    nearest_flag = nearest_name(flag, args.known_flags()) if flag and hasattr(args, "known_flags") else None
    return f"unrecognized arguments: {' '.join(unknown_words)}" + (
        f"; did you mean {nearest_flag}?" if nearest_flag else ""
    )


if __name__ == "__main__":
    raise SystemExit(main())
