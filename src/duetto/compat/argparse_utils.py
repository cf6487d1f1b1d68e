"""`FlexibleArgumentParser`: argparse with names in underscores or dashes, JSON by parts, and options from a
file."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..serve.options.flags import json_or_text


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Accepts `--max_model_len` for `--max-model-len` and the reverse, and `--option.a.b VALUE` for a part of
    a JSON option. `--config FILE` reads options from YAML or JSON; the command line has precedence."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(
            joined(self._spelled(word) for word in self._configured(given)), namespace
        )

    def _spelled(self, word: str) -> str:
        """Return a word with its option spelled as it was added, if it was."""
        name, equals, value = word.partition("=")
        name, dot, path = name.partition(".")
        if name.startswith("--"):
            spellings = name, "--" + name[2:].replace("_", "-"), "--" + name[2:].replace("-", "_")
            name = next((s for s in spellings if s in self._option_string_actions), name)
        return name + dot + path + equals + value

    def _configured(self, words: list[str]) -> list[str]:
        """Return the options of the file that `--config` names, then all other words."""
        if "--config" in self._option_string_actions:
            return words
        own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        own.add_argument("--config")
        found, rest = own.parse_known_args(words)
        return rest if found.config is None else [*self._read(found.config), *rest]

    def _read(self, file: str) -> list[str]:
        import yaml

        try:
            found = yaml.safe_load(Path(file).read_text())
        except (OSError, UnicodeError, yaml.YAMLError) as error:
            self.error(f"--config {file}: {error}")
        if not isinstance(found, dict):
            self.error(f"--config {file}: expected options with their values")
        return [word for name, value in found.items() for word in self._as_words(str(name), value)]

    def _as_words(self, name: str, value: Any) -> list[str]:
        """Return a file's option as words of a command line; False is left out without a `--no-` flag."""
        name = name.replace("_", "-")
        if value is True:
            return [f"--{name}"]
        if value is False:
            return [f"--no-{name}"] if f"--no-{name}" in self._option_string_actions else []
        if isinstance(value, list):
            return [f"--{name}", *map(str, value)]
        return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def joined(words: Iterable[str]) -> list[str]:
    """Return words with the parts of an option, `--option.a.b VALUE`, joined to one JSON object."""
    kept = []
    parts = {}
    given = iter(words)
    for word in given:
        name, equals, value = word.partition("=")
        option, *path = name.split(".")
        if not option.startswith("--") or not all(path) or not path:
            kept.append(word)
            continue
        place = parts.setdefault(option, {})
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = json_or_text(value if equals else next(given, ""))
    return kept + [word for option, value in parts.items() for word in (option, json.dumps(value))]
