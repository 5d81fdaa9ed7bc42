"""What the tests of the plugin share: two small checkpoints, and processes that have imported sglang."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_models
from ranks import Ranks
from typer.testing import CliRunner

from weightprep.cli import app


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


def convert(source: Path, destination: Path, layout: str) -> Path:
    result = CliRunner().invoke(app, ["convert", str(source), str(destination), "--layout", layout])
    assert result.exit_code == 0, result.output
    return destination


@pytest.fixture(scope="session")
def sidecar_of() -> Callable[[Path, Path], Path]:
    """Converts a checkpoint with a sidecar: (source, destination) -> destination."""
    return lambda source, destination: convert(source, destination, "sidecar")


@pytest.fixture(scope="session")
def inline_of() -> Callable[[Path, Path], Path]:
    """Converts a checkpoint inline: (source, destination) -> destination."""
    return lambda source, destination: convert(source, destination, "inline")


@pytest.fixture(scope="session")
def sidecar(glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`glm` with a sidecar; tests that change it do so in a copy."""
    return convert(glm, tmp_path_factory.mktemp("sidecar") / "model", "sidecar")


@pytest.fixture(scope="session")
def inline(glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`glm` converted inline; tests that change it do so in a copy."""
    return convert(glm, tmp_path_factory.mktemp("inline") / "model", "inline")
