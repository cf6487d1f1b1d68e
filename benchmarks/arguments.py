"""Values of command lines that are checked before a long run begins."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def number(kind: Callable[[str], float], least: float, but: float = math.nan) -> Callable[[str], float]:
    """Return a parser of finite numbers of at least `least`, other than `but`."""

    def parse(text: str) -> float:
        value = kind(text)
        if least <= value < math.inf and value != but:
            return value
        other = "" if math.isnan(but) else f", but not {but:g}"
        raise argparse.ArgumentTypeError(f"{text} is not allowed: a finite number from {least:g} on{other}")

    parse.__name__ = "number"
    return parse


def output(text: str) -> Path:
    """Return a path at which a file can be written."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no file can be written at {text}")
    return path


def existing(text: str) -> Path:
    """Return the path of a file."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def new_folder(text: str) -> Path:
    """Return a path at which there is no folder, or an empty one."""
    path = Path(text)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise argparse.ArgumentTypeError(f"{text} is not a new folder")
    return path
