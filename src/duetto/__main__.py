"""The process `duetto`, also `python -m duetto`: signals and streams are set before other imports."""

import sys

from .serve.host.signals import leave_on_interrupt
from .serve.host.streams import keep_numbers


def main() -> int:
    """Run this process's command line and return its exit code (see `serve.cli.main.main`)."""
    keep_numbers()
    leave_on_interrupt()
    from .serve.cli.main import main

    try:
        return main()
    finally:
        leave_on_interrupt()


if __name__ == "__main__":
    sys.exit(main())
