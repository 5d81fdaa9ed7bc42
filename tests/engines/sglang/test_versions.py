"""The version map against sglang's own code: from argv to our loader in every release, and releases without a target.

Each release's wheel is downloaded alone and put first on the path of the environment of the newest one. The model is
not loaded there: a full load is tested on the newest release.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import servers
from releases import CACHE, unpacked

from weightprep.engines.sglang import source_names, versions
from weightprep.errors import EngineError

RELEASES = [str(version) for version in versions.KNOWN]


@pytest.fixture(scope="module")
def routes(glm: Path) -> dict[str, dict[str, Any] | str | None]:
    """What route.py printed in each release; its log where it failed; None where there is no wheel."""

    def run(version: str) -> dict[str, Any] | str | None:
        folder = unpacked(version)
        if folder is None:
            return None
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("route.py")), str(glm)]
        env = servers.environment(PYTHONPATH=str(folder), SGLANG_PLUGINS="weightprep")
        del env["SGLANG_USE_CPU_ENGINE"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
        return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stdout + done.stderr

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(RELEASES, pool.map(run, RELEASES), strict=True))


@pytest.mark.parametrize("version", RELEASES)
def test_route_reaches_our_loader(version: str, routes: dict[str, dict[str, Any] | str | None]) -> None:
    route = routes[version]
    if route is None:
        pytest.skip(f"no wheel of sglang {version}: its route from argv to the loader is not covered")
    assert isinstance(route, dict), route
    assert route["version"] == version
    assert route["from"] == str(CACHE / f"sglang-{version}" / "sglang")
    assert (route["asked"], route["draft"]) == ("weightprep", "weightprep")
    assert route["chosen"] == "WeightprepLoader"
    assert route["plain"] == "DefaultModelLoader"
    assert route["draft beside our target"] == "DefaultModelLoader"
    assert route["target beside our draft"] == "DefaultModelLoader"
    assert route["keys without the flag"].startswith("ValueError: Unexpected extra config keys for load format")
    assert route["unknown key"].startswith("EngineError: --model-loader-extra-config: nonsense: found no key of ")
    assert "weightprep's keys are canary, " in route["unknown key"]


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize(
    ("situation", "refusal"),
    [
        ("remote", "EngineError: --model-path s3://bucket/model: found a remote model"),
        ("ray", "EngineError: --use-ray: found Ray actors, in which sglang loads no plugins"),
        ("misspelt", "EngineError: --model-loader-extra-config: precison: found an unknown key; wanted 'precision', "),
    ],
    ids=["remote", "ray", "misspelt"],
)
def test_what_would_replace_the_loader_is_refused(
    situation: str, refusal: str, version: str, routes: dict[str, dict[str, Any] | str | None]
) -> None:
    route = routes[version]
    if route is None:
        pytest.skip(f"no wheel of sglang {version}: what it does with a {situation} model is not covered")
    assert isinstance(route, dict), route
    assert route[situation].startswith(refusal)


@pytest.mark.parametrize("version", RELEASES)
def test_copies_that_call_nothing_are_followed(version: str, routes: dict[str, dict[str, Any] | str | None]) -> None:
    route = routes[version]
    if route is None:
        pytest.skip(f"no wheel of sglang {version}: its direct weight updates are not covered")
    assert isinstance(route, dict), route
    prepared = ["post_load_weights with 7.0"]
    # a real model's load_weights calls post_load_weights itself
    wanted = {"None": ["load_weights"], "direct": prepared, "route._custom_weight_loader": prepared}
    assert route["updates"] == wanted


@pytest.mark.parametrize("version", ["0.5.12", "0.5.15"])
def test_modelopt_branch_of_old_releases_is_refused(
    version: str, routes: dict[str, dict[str, Any] | str | None]
) -> None:
    route = routes[version]
    if route is None:
        pytest.skip(f"no wheel of sglang {version}: its ModelOpt branch is not covered")
    assert isinstance(route, dict), route
    assert route["modelopt"].startswith("EngineError: --load-format weightprep: found sglang chose another loader")


@pytest.mark.parametrize("version", RELEASES)
def test_all_targets_of_known_releases_resolve(version: str) -> None:
    folder = unpacked(version)
    if folder is None:
        pytest.skip(f"no wheel of sglang {version}: its hook targets are not covered")
    assert versions.missing_targets(folder / "sglang") == ()


def test_installed_release_is_supported_without_a_notice() -> None:
    assert versions.installed_version() == versions.KNOWN[-1]
    assert versions.check_support() is None


def test_a_release_without_a_target_is_refused_with_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = versions.installed_root()
    assert root is not None
    copy = tmp_path / "sglang"
    for target in versions.TARGETS:
        for name in target.anywhere:
            relative = Path(*name.split(".")[1:])
            for file in (relative.parent.with_suffix(".py"), relative.parent.parent.with_suffix(".py")):
                if (root / file).is_file():
                    (copy / file).parent.mkdir(parents=True, exist_ok=True)
                    (copy / file).write_bytes((root / file).read_bytes())
    (copy / "srt/plugins").mkdir(parents=True, exist_ok=True)
    (copy / "srt/plugins/__init__.py").write_bytes((root / "srt/plugins/__init__.py").read_bytes())
    assert versions.missing_targets(copy) == ()
    loader = copy / "srt/models/deepseek_common/deepseek_weight_loader.py"
    loader.write_text(loader.read_text().replace("def post_load_weights", "def finish_weights"))
    source_names._parse.cache_clear()
    source_names.resolves.cache_clear()
    monkeypatch.setattr(versions, "installed_root", lambda: copy)
    with pytest.raises(EngineError, match="absorbed weights are made in one place") as refused:
        versions.check_support()
    assert versions.POST_LOAD_WEIGHTS in refused.value.found


@pytest.mark.parametrize("version", ["0.0.0.dev0", "0.0.0", "0.1.dev5+gabcdef0", "0.5.11.dev3"])
def test_a_version_that_names_no_release_is_judged_by_its_targets(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: versions.Version(version))
    wanted = f"sglang {version} names no release; all hook targets are there, the gates of 0.5.23 are assumed"
    assert versions.check_support() == wanted
    assert str(versions.gates_version()) == "0.5.23"
    monkeypatch.setattr(versions, "installed_root", lambda: tmp_path)
    with pytest.raises(EngineError) as refused:
        versions.check_support()
    assert refused.value.subject == f"sglang {version}"
    assert refused.value.found.startswith("without sglang.srt.plugins.load_plugins (plugins are loaded); ")
    assert versions.POST_LOAD_WEIGHTS in refused.value.found


@pytest.mark.parametrize("version", ["0.5.12", "0.5.21.dev7", "0.5.24.dev1", "0.9.0"])
def test_gates_are_those_of_the_version_that_is_installed(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: versions.Version(version))
    assert str(versions.gates_version()) == version


def test_a_newer_release_says_what_stays_with_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that the runtime replaces has another name there: nothing fails, so it has to be told."""
    root = versions.installed_root()
    assert root is not None
    assert versions.missing_runtime_targets(root) == ()
    (tmp_path / "srt").mkdir()
    for place in (root, root / "srt"):
        for entry in place.iterdir():
            if entry.name not in ("srt", "models"):
                (tmp_path / place.relative_to(root) / entry.name).symlink_to(entry)
    shutil.copytree(root / "srt" / "models", tmp_path / "srt" / "models")
    methods = tmp_path / "srt/models/deepseek_common/attention_forward_methods"
    for file in methods.glob("forward_mla*.py"):
        file.write_text(file.read_text().replace("rocm_absorb_v_bmm", "rocm_absorbed_v"))
    monkeypatch.setattr(versions, "installed_root", lambda: tmp_path)
    monkeypatch.setattr(versions, "installed_version", lambda: versions.Version("0.9.0"))
    notice = versions.check_support() or ""
    assert notice.startswith(
        "sglang 0.9.0 is newer than 0.5.23; all hook targets of the load format are there; without "
    )
    assert notice.endswith(f"left to sglang: absorbed products on ROCm ({versions.ROCM_ABSORB_V})")


@pytest.mark.parametrize(("version", "outcome"), [("0.5.10", "refused"), ("0.9.0", "notice")])
def test_versions_outside_the_map(version: str, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda: versions.Version(version))
    if outcome == "refused":
        with pytest.raises(EngineError, match="older releases have no plugin interface"):
            versions.check_support()
    else:
        assert "newer than 0.5.23" in (versions.check_support() or "")
