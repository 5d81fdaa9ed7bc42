"""The report in a real browser, headless Chromium: its plots are drawn, nothing is fetched and nothing goes wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from typer.testing import CliRunner

from weightprep.cli import app
from weightprep.synth import synthesize

LAYERS = 4
# name of a plot -> modules that have a point in it
LAYER_PLOTS = [
    "Relative error",
    "SQNR, dB",
    "Largest magnitude (amax)",
    "Scale",
    "Largest over smallest head amax",
]


@dataclass
class Visit:
    """A page that was opened, and what the browser told meanwhile."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        missing = "no Chromium here (apt-get install chromium): the report is not looked at in a browser"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        # Chromium's own sandbox does not work for root, and the page is ours.
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    synthesize(root / "src", layers=LAYERS, encoding="mxfp4_experts")
    converted = CliRunner().invoke(app, ["convert", str(root / "src"), str(root / "dst"), "--json"])
    (root / "run.json").write_text(converted.stdout)
    arguments = ["report", str(root / "dst"), "-o", str(root / "r.html"), "--run", str(root / "run.json")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    return root / "r.html"


def visit(browser: Browser, path: Path, width: int) -> Visit:
    made = Visit(browser.new_page(viewport={"width": width, "height": 900}))
    made.page.on("request", lambda request: made.requests.append(request.url))
    made.page.on("pageerror", lambda error: made.complaints.append(str(error)))
    made.page.on("console", lambda message: made.complaints.append(message.text))
    made.page.goto(path.as_uri())
    made.page.wait_for_load_state("networkidle")
    return made


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_fetched_and_nothing_goes_wrong(browser: Browser, report: Path, width: int) -> None:
    seen = visit(browser, report, width)
    assert seen.requests == [report.as_uri()]
    assert seen.complaints == []
    assert seen.page.evaluate("document.compatMode") == "CSS1Compat"
    # tables and plots scroll inside the page, which itself does not
    assert seen.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    seen.page.close()


def test_a_fetch_or_a_script_error_would_be_noticed(browser: Browser, report: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "r.html"
    more = "<img src='missing.png'><script>nowhere()</script></body>"
    spoiled.write_text(report.read_text().replace("</body>", more))
    seen = visit(browser, spoiled, 1280)
    assert len(seen.requests) == 2
    assert any("nowhere" in complaint for complaint in seen.complaints)
    seen.page.close()


def test_plots_are_drawn(browser: Browser, report: Path) -> None:
    page = visit(browser, report, 1280).page
    modules = json.loads((report.parent / "dst" / "weightprep.json").read_text())["modules"]
    assert len(modules) == LAYERS + 1
    for name in LAYER_PLOTS:
        plot = page.get_by_role("img", name=name, exact=True)
        box = plot.bounding_box()
        assert box is not None
        assert box["width"] > 600
        assert box["height"] > 100
        # a marker in the legend for each of the two groups, and one for each module, inside the plot
        markers = plot.locator("use[style*='stroke: #4477aa'], use[style*='stroke: #ee8866']")
        assert markers.count() == len(modules) + 2
        assert all(inside(marker.bounding_box(), box) for marker in markers.all())
        assert {"decoder", "nextn", "layer", name} <= set(plot.locator("text").all_text_contents())
    maps = page.get_by_role("img", name="Dtypes by layer before and after").locator("text").all_text_contents()
    assert {"Before", "After", "self_attn.kv_b_proj", "BF16", "F8_E4M3"} <= set(maps)
    bars = page.get_by_role("img", name="Bytes by dtype before and after").locator("text").all_text_contents()
    assert {"before", "after", "GB", "BF16", "F8_E4M3"} <= set(bars)
    page.close()


def inside(inner: dict[str, float] | None, outer: dict[str, float]) -> bool:
    return (
        inner is not None
        and outer["x"] <= inner["x"]
        and inner["x"] + inner["width"] <= outer["x"] + outer["width"] + 1
        and outer["y"] <= inner["y"]
        and inner["y"] + inner["height"] <= outer["y"] + outer["height"] + 1
    )


def test_the_text_is_there(browser: Browser, report: Path) -> None:
    page = visit(browser, report, 1280).page
    text = page.inner_text("body")
    manifest = json.loads((report.parent / "dst" / "weightprep.json").read_text())
    assert f"{LAYERS} decoder module(s) bf16 to fp8_tensor; 1 nextn module(s) bf16 to fp8_tensor" in text
    for record in manifest["modules"]:
        assert record["module"] in text
    page.get_by_text("were on the checkpoint's own exclude list").click()
    shown = page.locator("details").inner_text()
    assert all(record["overrides_exclude"] in shown for record in manifest["modules"])
    page.close()
