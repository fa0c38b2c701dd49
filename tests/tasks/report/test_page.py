"""The page in a real browser, with its script and without it."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from tasks import compare
from tasks.artifacts.paths import COMPARISON_PAGE, COMPARISON_TABLE
from tests.tasks.report.test_compare import (
    HOSTILE,
    curve,
    edit,
    make_benchmark,
    make_candidate,
    make_exports,
    make_study,
    size,
    write_dense,
)

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
TARGETS = ["h.0.query", "h.0.key", "h.1.query", "h.1.key", HOSTILE]
CANDIDATES = {  # metric, parameters, speed: as numbers they are in another order than as text
    ("svd", 0.5): (9.5, 400, 1.25),
    ("svd", 0.25): (10.25, 240, 10.5),
    ("kfac", 0.5): (8.5, 200, 9.5),
    ("kfac", 0.25): (100.5, 300, 2.5),
}
REFERENCES = ["dense", "dense + recovery", "trivial baseline"]
NAMES = ["kfac-0.5", "svd-0.5", "svd-0.25", "kfac-0.25"]  # keep by keep, the best first
COLUMNS = {"before fine-tuning": "factorized", "speed": "speedup"}

pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no browser: on Debian `apt-get install chromium chromium-driver`"
)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace with a page. Each number sorts its candidates in another order."""
    folder = tmp_path_factory.mktemp("study")
    with contextlib.chdir(folder):
        make_study(["svd", "kfac"], [0.5, 0.25], TARGETS, "perplexity", dense=8.0)
        write_dense(8.0, control=7.5)
        edit("params.yaml", export={"recipes": ["svd"]})
        make_exports("dense", 8.0, 8.25)
        for (recipe, keep), (metric, parameters, speed) in CANDIDATES.items():
            name = f"{recipe}-{keep}"
            rows = 3 if name == "kfac-0.25" else 0  # it has no score before recovery
            make_candidate(recipe, keep, TARGETS, metric, rows=rows, searched=curve(5), factorized=2 * metric)
            edit(f"reports/evaluate/{name}.json", size=size(parameters))
            runtimes = ("torch", "onnx", "int8") if recipe == "svd" else ("torch",)
            make_benchmark(name, dense=dict.fromkeys(runtimes, 1.0), candidate=dict.fromkeys(runtimes, speed))
            if recipe == "svd":
                make_exports(name, metric, metric + 1)
        compare.compare()
        yield folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = BROWSER or ""
    quiet = ("background-networking", "component-update", "default-apps", "sync", "dev-shm-usage")
    for argument in ("headless=new", "no-first-run", "window-size=1280,1000", *(f"disable-{name}" for name in quiet)):
        options.add_argument(f"--{argument}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options, Service(DRIVER))
    driver.implicitly_wait(10)  # seconds: what a busy machine has not drawn yet
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Chrome, study: Path) -> Iterator[Chrome]:
    """Freshly opened. Whatever a test does: nothing is complained of, and nothing but the file is asked for."""
    asked_for(browser), browser.get_log("browser")
    address = (study / COMPARISON_PAGE).as_uri()
    browser.get(address)
    yield browser
    assert browser.get_log("browser") == []
    assert {url.partition("#")[0] for url in asked_for(browser)} == {address}


def asked_for(browser: Chrome) -> list[str]:
    """Addresses, since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    return [params["request"]["url"] for params in sent]


def rows(page: Chrome, table: int = 0) -> list[str]:
    """Return the names of the visible rows."""
    heads = page.find_elements(By.CSS_SELECTOR, "table.numbers")[table].find_elements(By.CSS_SELECTOR, "tbody th")
    return [head.text for head in heads if head.is_displayed()]


def sort_by(page: Chrome, name: str) -> str | None:
    """Press a head of the first table, and return the order that it states then."""
    heads = page.find_element(By.CSS_SELECTOR, "table.numbers").find_elements(By.CSS_SELECTOR, "thead th")
    head = next(head for head in heads if head.text == name)
    head.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    return head.get_attribute("aria-sort")


@pytest.mark.parametrize(("head", "column"), COLUMNS.items())
def test_a_head_sorts_by_numbers(page: Chrome, study: Path, head: str, column: str) -> None:
    """Upwards, downwards, then as it was; references stay on top, and a dash at the end."""
    lines = list(csv.DictReader((study / COMPARISON_TABLE).read_text().splitlines()))[1:]
    numbers = {f"{line['recipe']}-{line['keep']}": float(line[column] or "nan") for line in lines}
    sort_by(page, "vs. original")  # which the next head replaces
    for order, sign in {"ascending": 1, "descending": -1}.items():
        assert sort_by(page, head) == order
        assert len(page.find_elements(By.CSS_SELECTOR, "[aria-sort]")) == 1
        expected = sorted(numbers, key=lambda name: (math.isnan(numbers[name]), sign * numbers[name]))
        assert rows(page) == [*REFERENCES, *expected]
    assert sort_by(page, head) is None
    assert rows(page) == [*REFERENCES, *NAMES]


@pytest.mark.parametrize(("words", "left"), [("KFAC", NAMES[::3]), ("0.5 svd", ["svd-0.5"])])
def test_a_filter_holds_for_all_tables_until_it_is_cleared(page: Chrome, words: str, left: list[str]) -> None:
    field = page.find_element(By.CSS_SELECTOR, ".filter input")
    field.send_keys(words)
    assert rows(page) == [*REFERENCES, *left]
    assert rows(page, table=1) == ["dense"] * 3 + ["dense + recovery"] * 3 + [
        name for name in left if "svd" in name for _ in range(3)
    ]
    field.send_keys(*[Keys.BACKSPACE] * len(words))
    assert rows(page) == [*REFERENCES, *NAMES]


def test_without_its_script_the_page_shows_all_that_it_says(browser: Chrome, study: Path) -> None:
    """Names and marks lead to a candidate's commands and card."""
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get((study / COMPARISON_PAGE).as_uri())
        assert rows(browser) == [*REFERENCES, *NAMES]
        assert len(rows(browser, table=1)) == 12
        assert all(plot.is_displayed() for plot in browser.find_elements(By.CSS_SELECTOR, "figure > svg:not(.narrow)"))
        assert not any(shown.is_displayed() for shown in browser.find_elements(By.CSS_SELECTOR, ".filter, button"))
        for link in ("tr[data-candidate='svd-0.25'] a", "figure a[href='#kfac-0.5'] .mark"):
            (name,) = [name for name in NAMES if name in link]
            browser.find_element(By.CSS_SELECTOR, link).click()
            section = browser.find_element(By.ID, name)
            assert section.is_displayed()
            assert f"eckart reproduce {name}" in section.text
            card = section.find_element(By.TAG_NAME, "pre").get_attribute("textContent")
            assert card == (study / compare.CARDS / f"{name}.md").read_text()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_no_script_runs_but_the_page_s_own(browser: Chrome, study: Path, tmp_path: Path) -> None:
    """As if a name had not been escaped."""
    text = (study / COMPARISON_PAGE).read_text()
    foreign = tmp_path / "foreign.html"
    foreign.write_text(text.replace("<main>", "<main><script>document.title = 'foreign'</script>", 1))
    browser.get(foreign.as_uri())
    assert browser.title == "made-up: comparison"
    assert sort_by(browser, "size") == "ascending"  # its own does


@pytest.fixture(params=[390, 1400])
def sized(page: Chrome, request: pytest.FixtureRequest) -> Iterator[Chrome]:
    """In a window of this width."""
    metrics = {"width": request.param, "height": 844, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    yield page
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_is_as_wide_as_the_window(sized: Chrome) -> None:
    """Wider tables scroll by themselves, and their first column stays."""
    sized.find_element(By.CSS_SELECTOR, "tr[data-candidate='svd-0.5'] a").click()
    root = "document.documentElement"
    assert sized.execute_script(f"return {root}.scrollWidth <= {root}.clientWidth")
    table = sized.find_element(By.CSS_SELECTOR, ".wide")
    name = table.find_element(By.CSS_SELECTOR, "tbody th")
    before = name.rect["x"]
    sized.execute_script("arguments[0].scrollLeft = 1000", table)
    assert name.rect["x"] == before


def test_no_mark_and_no_label_lies_on_another(sized: Chrome) -> None:
    boxes = """
        return [...document.querySelectorAll('.chart svg')].filter((svg) => svg.checkVisibility()).map((svg) =>
          [...svg.querySelectorAll('.mark, text')].map((part) => {
            const box = part.getBoundingClientRect();
            return [part.textContent, box.left, box.top, box.right, box.bottom];
          }));
    """
    charts = sized.execute_script(boxes)
    assert len(charts) == 2  # against size and time
    for parts in charts:
        assert {"original", "control"} <= {part[0] for part in parts}
        for (one, *a), (other, *b) in itertools.combinations(parts, 2):
            apart = (
                a[2] <= b[0] + 1 or b[2] <= a[0] + 1 or a[3] <= b[1] + 3 or b[3] <= a[1] + 3
            )  # boxes of text are high
            assert apart, (one, other)
