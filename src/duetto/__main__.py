"""The process `duetto`, also `python -m duetto`: signals and streams are set before other imports."""

import sys

from .serve.host.signals import install_exit_handler
from .serve.host.streams import fill_closed_streams


def main() -> int:
    """Run this process's command line and return its exit code (see `serve.cli.main.main`)."""
    fill_closed_streams()
    install_exit_handler()
    from .serve.cli.main import main

    try:
        return main()
    finally:
        install_exit_handler()


if __name__ == "__main__":
    sys.exit(main())
