"""Models by their ids on the Hugging Face hub: snapshots of what is needed of them, in the cache of
`huggingface_hub`.
"""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .folders import DESCRIBING, named, near
from .tensors import CheckpointError

ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
TEXT_FILES = (*DESCRIBING, "vocab.txt", "adapter_config.json")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
LEFT_OUT = ("[!1]*/*", "consolidated*")  # folders such as original/, not 1_Pooling/; copies of the weights
SHIPPED = Path(__file__).parent  # demo-draft and demo-heads may be called by their names
LOG_IN = "give hf_token, set HF_TOKEN, or run `hf auth login`"


def resolve(
    model: str | Path,
    revision: str | None = None,
    *,
    download_dir: str | Path | None = None,
    token: str | bool | None = None,
    weights: bool = True,
) -> Path:
    """The folder of a model: the one at this path, or a snapshot of the model that has this id on the hub.

    `revision` is a branch, a tag or a commit; `download_dir` is where snapshots are kept (default: the hub's
    own cache); `token` is for gated and private models (default: `HF_TOKEN`, or that of `hf auth login`).
    Without `weights` only what tokenizers and configurations need is fetched. Where the hub cannot be asked a
    snapshot in the cache is used, which is said on standard error. A path that is not there, and cannot be an
    id, comes back as it is.

    Raises CheckpointError for a model that is neither on the hub nor in the cache, or that has no weights
    that are read.
    """
    path = Path(model).expanduser()
    if not isinstance(model, str) or path.exists() or not ID.fullmatch(model):
        return path
    patterns = (*TEXT_FILES, *WEIGHTS) if weights else TEXT_FILES
    asked = SnapshotRequest(model, revision, download_dir, token, patterns)
    try:
        commit, names = asked.listed()
    except CheckpointError as error:
        return asked.offline(error)
    if weights:
        require_weights(model, names)
    return asked.whole(commit, names) or asked.downloaded()


def resolve_draft(name: str, **where: Any) -> Path:
    """The folder of a draft model or of heads: a path, one that ships, or a model on the hub. `where` are
    options of `resolve`."""
    if not Path(name).exists() and (SHIPPED / name).is_dir():
        return SHIPPED / name
    return resolve(name, **where)


@dataclass(frozen=True)
class SnapshotRequest:
    """A snapshot that was asked for: whose, of which revision, kept where, and the patterns of its files."""

    model: str
    revision: str | None
    download_dir: str | Path | None
    token: str | bool | None
    patterns: tuple[str, ...]

    def listed(self) -> tuple[str, list[str]]:
        """The commit that the hub has now, and the names of its files. Raises CheckpointError with why there
        is no answer.
        """
        from huggingface_hub import HfApi, constants

        api, patience = HfApi(token=self.token), constants.HF_HUB_ETAG_TIMEOUT
        try:
            info = api.model_info(self.model, revision=self.revision, timeout=patience)
        except Exception as error:  # the library's HTTP client has errors of its own
            raise CheckpointError(self.why(error)) from error
        return str(info.sha), [file.rfilename for file in info.siblings or ()]

    def snapshot(self, revision: str | None, **how: Any) -> Path:
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            self.model,
            revision=revision,
            cache_dir=self.download_dir,
            token=self.token,
            allow_patterns=list(self.patterns),
            ignore_patterns=[*LEFT_OUT],
            **how,
        )
        return Path(found)

    def whole(self, commit: str, names: list[str]) -> Path | None:
        """The snapshot of a commit, if the cache has all of its files."""
        try:
            folder = self.snapshot(commit, local_files_only=True)
        except OSError:
            return None
        return folder if all((folder / name).exists() for name in matching(names, self.patterns)) else None

    def downloaded(self) -> Path:
        try:
            return self.snapshot(self.revision)
        except Exception as error:
            raise CheckpointError(f"{self.model}: {self.why(error)}") from error

    def offline(self, error: CheckpointError) -> Path:
        """Return the snapshot in the cache after the hub failed. Raises CheckpointError if it has none."""
        try:
            folder = self.snapshot(self.revision, local_files_only=True)
        except (OSError, ValueError):  # the latter for what cannot be an id
            missing = f"no such folder{near(Path(self.model))}"
            raise CheckpointError(
                f"{self.model}: {missing}; as an id: {error}, and the cache has no snapshot"
            ) from error
        print(f"duetto: {self.model}: {error}; the snapshot in the cache is used: {folder}", file=sys.stderr)
        return folder

    def why(self, error: Exception) -> str:
        """Explain why the hub failed, and what to do about it."""
        from huggingface_hub import constants, errors

        hub = constants.ENDPOINT
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.GatedRepoError):
            return f"it is gated: accept its terms at {hub}/{self.model}, then {LOG_IN}"
        if isinstance(error, errors.RevisionNotFoundError):
            return f"it has no revision {self.revision!r} at {hub}"
        if isinstance(error, errors.RepositoryNotFoundError):
            return f"there is none at {hub}, or it is private: then {LOG_IN}"
        if isinstance(error, errors.OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set"
        if status in (401, 403):
            return f"{hub} refuses the token ({status})"
        said = " ".join(str(error).split())
        return f"{hub} does not answer, or the download stopped ({type(error).__name__}: {said:.200})"


def matching(names: Iterable[str], patterns: tuple[str, ...]) -> list[str]:
    def match(name: str, patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return [name for name in names if match(name, patterns) and not match(name, LEFT_OUT)]


def require_weights(model: str, names: Iterable[str]) -> None:
    """Raise CheckpointError, before anything is fetched, for a repository that is no checkpoint, with what it
    is.
    """
    names = [name for name in names if "/" not in name]
    for needed in ("config.json", "*.safetensors"):
        if not matching(names, (needed,)):
            name, what = named(names) or ("its repository", f"holds no {needed}")
            raise CheckpointError(f"{model}: {name}: {what}")
