"""`FlexibleArgumentParser`: argparse with names in underscores or dashes, JSON by parts, and options from a
file."""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes `--max_model_len` for `--max-model-len` and the other way round, `--config FILE` (YAML or JSON,
    from option to value; what the command line says counts more), and `--option.a.b VALUE` for a part of an
    option that is JSON."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(
            joined(self._spelled(word) for word in self._configured(given)), namespace
        )

    def _spelled(self, word: str) -> str:
        """An option's name as it was added, if one of its spellings was."""
        name, equals, value = word.partition("=")
        name, dot, path = name.partition(".")
        if name.startswith("--"):
            spellings = name, "--" + name[2:].replace("_", "-"), "--" + name[2:].replace("-", "_")
            name = next((s for s in spellings if s in self._option_string_actions), name)
        return name + dot + path + equals + value

    def _configured(self, words: list[str]) -> list[str]:
        """The options of a file that `--config` names, before the words beside it."""
        if "--config" in self._option_string_actions:
            return words
        for i, word in enumerate(words):
            name, _, file = word.partition("=")
            if name == "--config":
                file, rest = (
                    (file, words[i + 1 :]) if file else ("".join(words[i + 1 : i + 2]), words[i + 2 :])
                )
                return [*self._read(file), *words[:i], *rest]
        return words

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
        """An option of a file as the command line would have it; one that is false is left out where nothing
        says no."""
        name = name.replace("_", "-")
        if value is False:
            return [word for word in [f"--no-{name}"] if word in self._option_string_actions]
        if value is True:
            return [f"--{name}"]
        if isinstance(value, list):
            return [f"--{name}", *map(str, value)]
        return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def joined(words: Iterable[str]) -> list[str]:
    """Words in which the parts of an option, `--option.a.b VALUE`, are one JSON object."""
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
        place[path[-1]] = parsed(value if equals else next(given, ""))
    return kept + [word for option, value in parts.items() for word in (option, json.dumps(value))]


def parsed(text: str) -> Any:
    """A value of JSON, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
