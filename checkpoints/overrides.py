"""A model's folder with other fields in its `config.json`."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .folders import read_config_json
from .tensors import CheckpointError


@contextmanager
def overridden(folder: Path, changes: Mapping[str, Any] | None) -> Iterator[Path]:
    """The folder, or one of links to its files whose config.json has these fields in place of its own.

    Raises CheckpointError for a folder without config.json.
    """
    if not changes:
        yield folder
        return
    raw = read_config_json(folder) | dict(changes)
    with TemporaryDirectory(prefix=f"{folder.name}-overridden-") as own:
        for file in folder.iterdir():
            if file.name != "config.json":
                Path(own, file.name).symlink_to(file.resolve())
        Path(own, "config.json").write_text(json.dumps(raw))
        try:
            yield Path(own)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(own, f"{folder}")) from error
