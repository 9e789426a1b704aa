"""Generates the stubs beside the proto files: `python -m protos.generate [--check]`."""

import filecmp
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

HERE = Path(__file__).parent


def generate(target: Path) -> None:
    """Writes `protos/*_pb2*.py[i]` below `target`. Raises RuntimeError when protoc fails."""
    from grpc_tools import protoc  # a build-time package

    include = str(files("grpc_tools") / "_proto")
    sources = sorted(f"protos/{path.name}" for path in HERE.glob("*.proto"))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    # The plugins lie beside the interpreter, which need not be on PATH.
    scripts = Path(sys.executable).parent
    plugins = [f"--plugin={scripts}/protoc-gen-{kind}" for kind in ("mypy", "mypy_grpc")]
    paths = [f"-I{HERE.parent}", f"-I{include}"]
    if protoc.main(["protoc", *paths, *plugins, *outputs, *sources]):
        raise RuntimeError("protoc failed")


def main() -> int:
    if "--check" not in sys.argv:
        generate(HERE.parent)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "protos"
        names = sorted(path.name for path in fresh.iterdir())
        _, stale, missing = filecmp.cmpfiles(fresh, HERE, names, shallow=False)
    if stale or missing:
        print(f"stubs are not current, run `make protos`: {', '.join(stale + missing)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
