"""What the tests of the plugin share: two small checkpoints, and processes that have imported sglang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from ranks import Ranks


@pytest.fixture(scope="session")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM with indexer, experts and NextN, in bf16."""
    return tiny_models.write_glm(tmp_path_factory.mktemp("glm") / "bf16")


@pytest.fixture(scope="session")
def cpu_glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLM that the CPU engine can generate from, in bf16."""
    return tiny_models.write_cpu_glm(tmp_path_factory.mktemp("cpu_glm") / "bf16")


@pytest.fixture(scope="session")
def tp1(glm: Path) -> Iterator[Ranks]:
    ranks = Ranks(1, str(glm))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def tp2(glm: Path) -> Iterator[Ranks]:
    ranks = Ranks(2, str(glm))
    yield ranks
    ranks.close()
