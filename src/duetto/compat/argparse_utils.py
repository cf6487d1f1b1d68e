"""`FlexibleArgumentParser`: options with underscores or dashes, parts of JSON options, and options from a
file."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..serve.options.flags import parse_json_or_text


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Parser that accepts `--max_model_len` for `--max-model-len`, and the reverse.

    `--option.a.b VALUE` sets a part of a JSON option. `--config FILE` reads options from YAML or JSON; the
    command line has precedence.
    """

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(
            join_json_options(self._normalize_option(word) for word in self._expand_config(words)), namespace
        )

    def _normalize_option(self, word: str) -> str:
        """Return a word with its option spelled as the parser knows it, if it does."""
        name, equals, value = word.partition("=")
        name, dot, path = name.partition(".")
        if name.startswith("--"):
            spellings = name, "--" + name[2:].replace("_", "-"), "--" + name[2:].replace("-", "_")
            name = next((s for s in spellings if s in self._option_string_actions), name)
        return name + dot + path + equals + value

    def _expand_config(self, words: list[str]) -> list[str]:
        """Return the options of the file that `--config` names, followed by all other words."""
        if "--config" in self._option_string_actions:
            return words
        config_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        config_parser.add_argument("--config")
        options, rest = config_parser.parse_known_args(words)
        return rest if options.config is None else [*self._read_config_file(options.config), *rest]

    def _read_config_file(self, file: str) -> list[str]:
        """Return the options in a file as words of a command line. Exits with an error if it cannot be
        read."""
        import yaml

        try:
            options = yaml.safe_load(Path(file).read_text())
        except (OSError, UnicodeError, yaml.YAMLError) as error:
            self.error(f"--config {file}: {error}")
        if not isinstance(options, dict):
            self.error(f"--config {file}: expected options with their values")
        return [word for name, value in options.items() for word in self._as_words(str(name), value)]

    def _as_words(self, name: str, value: Any) -> list[str]:
        """Return an option of a file as words of a command line. False is dropped if there is no `--no-`
        flag."""
        name = name.replace("_", "-")
        if value is True:
            return [f"--{name}"]
        if value is False:
            return [f"--no-{name}"] if f"--no-{name}" in self._option_string_actions else []
        if isinstance(value, list):
            return [f"--{name}", *map(str, value)]
        return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def join_json_options(words: Iterable[str]) -> list[str]:
    """Join the parts of an option, `--option.a.b VALUE`, to one JSON object. Other words are kept."""
    kept = []
    parts = {}
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        option, *path = name.split(".")
        if not option.startswith("--") or not all(path) or not path:
            kept.append(word)
            continue
        node = parts.setdefault(option, {})
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = parse_json_or_text(value if equals else next(remaining, ""))
    return kept + [word for option, value in parts.items() for word in (option, json.dumps(value))]
