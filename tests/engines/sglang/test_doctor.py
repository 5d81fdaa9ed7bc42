"""`weightprep doctor` in real environments: complete, without sglang, with an old one, with aiter but no ROCm."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from releases import unpacked, wheel

from weightprep.engines.sglang.doctor import Finding, examine
from weightprep.engines.sglang.versions import installed_root

DOCTOR = "import sys; from weightprep.cli import app; app(['doctor', '--json'])"


def run(python: str = sys.executable, **env: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code, and findings by subject (the last of each)."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG", "WEIGHTPREP"))}
    done = subprocess.run([python, "-c", DOCTOR], env=inherited | env, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "weightprep.doctor/1"
    return done.returncode, {finding["subject"]: finding for finding in document["findings"]}


def test_complete_environment() -> None:
    code, findings = run()
    assert code == 0
    assert findings["sglang"]["status"] == "ok"
    assert findings["hook targets"]["status"] == "ok"
    assert findings["compressor hooks"]["status"] == "ok"
    assert "_compute_wkv_gate" in findings["compressor hooks"]["found"]
    assert findings["scale hooks"]["found"] == "6 call sites of aiter's quantizations"
    assert findings["entry point"]["status"] == "ok"


@pytest.mark.parametrize(
    ("plugins", "wanted"),
    [("another", "another,weightprep"), (",", "weightprep"), (" a, ,b,", "a,b,weightprep")],
    ids=["another", "none", "blanks"],
)
def test_left_out_by_the_environment(plugins: str, wanted: str) -> None:
    code, findings = run(SGLANG_PLUGINS=plugins)
    assert code == 1
    assert findings["SGLANG_PLUGINS"]["remedy"] == f"add it: SGLANG_PLUGINS={wanted}"


def environment_without(package: str, tmp_path: Path) -> str:
    """The Python of an environment that shares every installed package but those that begin with `package`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    (source,) = (Path(path) for path in site.getsitepackages() if path.endswith("site-packages"))
    links = tmp_path / "links"
    links.mkdir()
    for entry in source.iterdir():
        if not entry.name.startswith(package):
            (links / entry.name).symlink_to(entry)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "links.pth").write_text(f"import site; site.addsitedir({str(links)!r})\n")
    return str(tmp_path / "venv" / "bin" / "python")


def test_without_sglang(tmp_path: Path) -> None:
    code, findings = run(environment_without("sglang", tmp_path))
    assert code == 1
    assert findings["sglang"] == {
        "subject": "sglang",
        "status": "problem",
        "found": "not installed",
        "remedy": "pip install 'weightprep[sglang]'",
    }


def test_without_torch(tmp_path: Path) -> None:
    code, findings = run(environment_without("torch", tmp_path))
    assert code == 1
    assert findings["torch"] == {
        "subject": "torch",
        "status": "problem",
        "found": "not installed",
        "remedy": "install the build of it for this machine's GPU",
    }
    assert_all_but_torch(findings)


def test_with_a_torch_that_does_not_import(tmp_path: Path) -> None:
    """A build for a ROCm that this machine does not have."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libamdhip64.so.6: cannot open')\n")
    code, findings = run(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert findings["torch"]["status"] == "problem"
    assert findings["torch"]["found"].endswith(", whose import fails: ImportError: libamdhip64.so.6: cannot open")
    assert findings["torch"]["remedy"].startswith("install the build of it for this machine's ROCm or CUDA; ")
    assert_all_but_torch(findings)


def assert_all_but_torch(findings: dict[str, dict[str, Any]]) -> None:
    """Everything that asks for no torch was looked at."""
    assert [name for name, finding in findings.items() if finding["status"] == "problem"] == ["torch"]
    looked_up = ("hook targets", "product hooks", "compressor hooks", "scale hooks")
    for subject in ("python", "triton", "sglang", *looked_up, "entry point"):
        assert findings[subject]["status"] == "ok", findings[subject]
    assert findings["target"]["found"] == "unknown without torch"
    assert findings["aiter"]["found"] == "not installed"


@pytest.mark.parametrize("version", ["0.0.0.dev0", "0.5.11.dev3+g1234567"])
def test_a_build_from_source_is_judged_by_its_targets(version: str, tmp_path: Path) -> None:
    """What sglang's own build is named without git's tags."""
    root = installed_root()
    assert root is not None
    (tmp_path / "sglang").symlink_to(root)
    info = tmp_path / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    code, findings = run(PYTHONPATH=str(tmp_path))
    assert code == 0, findings
    assert findings["sglang"]["status"] == "note"
    assert findings["sglang"]["found"] == (
        f"{version}, which names no release: judged by its hook targets, with the gates of 0.5.23"
    )
    assert findings["hook targets"]["status"] == "ok"


def test_with_an_old_sglang(tmp_path: Path) -> None:
    zipfile.ZipFile(wheel("sglang==0.5.10")).extractall(tmp_path)
    code, findings = run(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert findings["sglang"]["found"] == "0.5.10, no plugin interface"


def test_with_the_oldest_known_sglang() -> None:
    folder = unpacked("0.5.12")
    if folder is None:
        pytest.skip("no wheel of sglang 0.5.12: doctor beside it is not covered")
    code, findings = run(PYTHONPATH=str(folder))
    assert code == 0
    assert findings["sglang"]["found"] == "0.5.12"
    # that release's GEMM writes float32 itself: there is nothing to spare
    assert findings["compressor hooks"]["status"] == "note"
    # and it transposes scales in its linear layer, where nothing can be hooked
    assert findings["scale hooks"]["status"] == "note"


def test_with_aiter_on_a_machine_without_rocm(tmp_path: Path) -> None:
    """aiter cannot be imported here; doctor must not try."""
    zipfile.ZipFile(wheel("amd-aiter")).extractall(tmp_path)
    code, findings = run(PYTHONPATH=str(tmp_path))
    assert code == 0
    assert findings["aiter"]["found"].startswith("0.1.7")
    assert findings["fused_flatten_fp8_group_quant"]["found"] == "has no transpose_scale"


def test_other_plugins_that_hook_the_same_target(tmp_path: Path) -> None:
    (tmp_path / "rival.py").write_text("TARGET = 'sglang...DeepseekV2WeightLoaderMixin.post_load_weights'\n")
    info = tmp_path / "rival-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nrival = rival:register\n")
    (info / "RECORD").write_text("rival.py,,\n")
    code, findings = run(PYTHONPATH=str(tmp_path))
    assert code == 0
    assert findings["plugin rival"]["found"] == "names post_load_weights too"


def test_a_forced_target_is_said() -> None:
    assert Finding("target", "note", "gfx950, from WEIGHTPREP_TARGET", "unset it to use this machine's own") in examine(
        {"WEIGHTPREP_TARGET": "gfx950"}
    )


def test_a_target_that_a_load_refuses_is_a_problem() -> None:
    code, findings = run(WEIGHTPREP_TARGET="gfx9")
    assert code == 1
    assert findings["target"]["status"] == "problem"
    assert findings["target"]["remedy"] == (
        "unset WEIGHTPREP_TARGET, or name one of auto, gfx950, gfx942, sm90, sm100, cpu"
    )


def test_a_gpu_without_gates_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    (target,) = (finding for finding in examine({}) if finding.subject == "target")
    assert (target.status, target.found) == ("problem", "sm120, a GPU without known gates")
    assert target.remedy == (
        "serve without --load-format weightprep, or name the gates that apply in WEIGHTPREP_TARGET: "
        "gfx950, gfx942, sm90, sm100"
    )
