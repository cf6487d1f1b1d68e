"""Models by their ids on the Hugging Face hub: snapshots of the files that are needed, in the cache of
`huggingface_hub`."""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .folders import DESCRIPTION_PATTERNS, MODELOPT_FILE, identify_foreign_format, suggest_folder
from .tensors import CheckpointError

MODEL_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
TEXT_PATTERNS = (*DESCRIPTION_PATTERNS, MODELOPT_FILE, "vocab.txt", "adapter_config.json")
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
IGNORED_PATTERNS = ("[!1]*/*", "consolidated*")  # folders but 1_Pooling/; copies of the weights
SHIPPED_FOLDER = Path(__file__).parent  # has demo-draft and demo-heads
LOG_IN_HINT = "give hf_token, set HF_TOKEN, or run `hf auth login`"


def resolve_model(
    model: str | Path,
    revision: str | None = None,
    *,
    download_dir: str | Path | None = None,
    token: str | bool | None = None,
    weights: bool = True,
) -> Path:
    """Return the folder of a model: the path `model`, or the snapshot of the hub's model that has this id.

    revision: branch, tag or commit.
    download_dir: folder that keeps snapshots; None is the hub's own cache.
    token: for gated and private models; None is `HF_TOKEN`, or the token of `hf auth login`.
    weights: False fetches only the files of tokenizers and configurations.

    If the hub does not answer, a cached snapshot is used and a line on standard error says so. A path that
    does not exist and cannot be an id is returned unchanged. Raises CheckpointError for a model that is
    neither on the hub nor in the cache, or has no supported weights.
    """
    path = Path(model).expanduser()
    if not isinstance(model, str) or path.exists() or not MODEL_ID.fullmatch(model):
        return path
    patterns = (*TEXT_PATTERNS, *WEIGHT_PATTERNS) if weights else TEXT_PATTERNS
    request = SnapshotRequest(model, revision, download_dir, token, patterns)
    try:
        commit, names = request.list_files()
    except CheckpointError as error:
        return request.use_cached(error)
    if weights:
        check_has_weights(model, names)
    return request.find_cached(commit, names) or request.download()


def resolve_draft(name: str, **options: Any) -> Path:
    """Return the folder of a draft model or of heads: a path, a name that ships with duetto, or a model on
    the hub.

    options: options of `resolve_model`.
    """
    if not Path(name).exists() and (SHIPPED_FOLDER / name).is_dir():
        return SHIPPED_FOLDER / name
    return resolve_model(name, **options)


@dataclass(frozen=True)
class SnapshotRequest:
    """Arguments of one download from the hub.

    model, revision: id of the repository, and its branch, tag or commit.
    download_dir: folder that keeps snapshots.
    token: access token.
    patterns: glob patterns of the files to fetch.
    """

    model: str
    revision: str | None
    download_dir: str | Path | None
    token: str | bool | None
    patterns: tuple[str, ...]

    def list_files(self) -> tuple[str, list[str]]:
        """Return the commit that the hub has now, and the names of its files. Raises CheckpointError with the
        reason."""
        from huggingface_hub import HfApi, constants

        api, timeout = HfApi(token=self.token), constants.HF_HUB_ETAG_TIMEOUT
        try:
            info = api.model_info(self.model, revision=self.revision, timeout=timeout)
        except Exception as error:  # the HTTP client raises errors of many types
            raise CheckpointError(self.explain_error(error)) from error
        return str(info.sha), [file.rfilename for file in info.siblings or ()]

    def fetch_snapshot(self, revision: str | None, **options: Any) -> Path:
        """Fetch the files of a revision, and return the snapshot's folder; `options` are options of
        `snapshot_download`."""
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            self.model,
            revision=revision,
            cache_dir=self.download_dir,
            token=self.token,
            allow_patterns=list(self.patterns),
            ignore_patterns=[*IGNORED_PATTERNS],
            **options,
        )
        return Path(folder)

    def find_cached(self, commit: str, names: list[str]) -> Path | None:
        """Return the cached snapshot of a commit if it has all files, or None."""
        try:
            folder = self.fetch_snapshot(commit, local_files_only=True)
        except OSError:
            return None
        return (
            folder if all((folder / name).exists() for name in match_patterns(names, self.patterns)) else None
        )

    def download(self) -> Path:
        """Download the snapshot, and return its folder. Raises CheckpointError."""
        try:
            return self.fetch_snapshot(self.revision)
        except Exception as error:
            raise CheckpointError(f"{self.model}: {self.explain_error(error)}") from error

    def use_cached(self, error: CheckpointError) -> Path:
        """Return the snapshot in the cache after the hub failed. Raises CheckpointError if it has none."""
        try:
            folder = self.fetch_snapshot(self.revision, local_files_only=True)
        except (OSError, ValueError):  # ValueError: the name cannot be an id
            missing = f"no such folder{suggest_folder(Path(self.model))}"
            raise CheckpointError(
                f"{self.model}: {missing}; as an id: {error}, and the cache has no snapshot"
            ) from error
        print(f"duetto: {self.model}: {error}; the snapshot in the cache is used: {folder}", file=sys.stderr)
        return folder

    def explain_error(self, error: Exception) -> str:
        """Explain why the hub failed, and what to do about it."""
        from huggingface_hub import constants, errors

        hub = constants.ENDPOINT
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.GatedRepoError):
            return f"it is gated: accept its terms at {hub}/{self.model}, then {LOG_IN_HINT}"
        if isinstance(error, errors.RevisionNotFoundError):
            return f"it has no revision {self.revision!r} at {hub}"
        if isinstance(error, errors.RepositoryNotFoundError):
            return f"there is none at {hub}, or it is private: then {LOG_IN_HINT}"
        if isinstance(error, errors.OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set"
        if status in (401, 403):
            return f"{hub} refuses the token ({status})"
        message = " ".join(str(error).split())
        return f"{hub} does not answer, or the download stopped ({type(error).__name__}: {message:.200})"


def match_patterns(names: Iterable[str], patterns: tuple[str, ...]) -> list[str]:
    """Return the names that match a pattern, without copies of the weights and folders such as
    `original/`."""

    def is_match(name: str, patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return [name for name in names if is_match(name, patterns) and not is_match(name, IGNORED_PATTERNS)]


def check_has_weights(model: str, names: Iterable[str]) -> None:
    """Raise CheckpointError, before a download, if a repository's file names show that it is no
    checkpoint."""
    names = [name for name in names if "/" not in name]
    for needed in ("config.json", "*.safetensors"):
        if not match_patterns(names, (needed,)):
            name, meaning = identify_foreign_format(names) or ("its repository", f"holds no {needed}")
            raise CheckpointError(f"{model}: {name}: {meaning}")
