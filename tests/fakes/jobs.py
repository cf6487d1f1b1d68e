"""Command lines in processes of their own that start with everything imported: half of such a process's time
is imports."""

import os
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(
    ["fakes.jobs", "duetto.serve.jobs.batch.run", "duetto.serve.jobs.batch.job", "duetto.serve.llm.llm"]
)


def start(*arguments: str) -> BaseProcess:
    """Starts `duetto` with these arguments, its standard error unseen."""
    process = FORKS.Process(target=run, args=(arguments,), daemon=True)
    process.start()
    return process


def run(arguments: Sequence[str]) -> None:
    from duetto.serve.cli.main import main

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raise SystemExit(main(arguments))
