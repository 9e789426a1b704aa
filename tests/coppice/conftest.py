"""The real default model, converted once per test run."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from coppice.models.hub import DEFAULT_MODEL, resolve_model

    return resolve_model(DEFAULT_MODEL, tmp_path_factory.mktemp("models"))
