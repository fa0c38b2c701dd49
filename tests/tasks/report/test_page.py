"""The page in a real browser: what its script does, what it leaves alone, and the page without it."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, Keys
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tasks import compare
from tests.tasks.report.test_compare import (
    HOSTILE,
    curve,
    make_benchmark,
    make_candidate,
    make_exports,
    make_study,
    size,
    write,
    write_dense,
)

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
TARGETS = ["h.0.query", "h.0.key", "h.1.query", "h.1.key", HOSTILE]
CANDIDATES = {  # as numbers they are in another order than as text
    ("svd", 0.5): {"metric": 9.5, "parameters": 400, "speed": 1.25},
    ("svd", 0.25): {"metric": 10.25, "parameters": 240, "speed": 10.5},
    ("kfac", 0.5): {"metric": 8.5, "parameters": 200, "speed": 9.5},
    ("kfac", 0.25): {"metric": 100.5, "parameters": 300, "speed": 2.5},
}
NAMES = ["kfac-0.5", "svd-0.5", "svd-0.25", "kfac-0.25"]  # keep by keep, the best first
COLUMNS = {"factorized": "factorized", "recovered": "recovered", "size": "bytes", "speed": "speedup"}

pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no browser: on Debian `apt-get install chromium chromium-driver`"
)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace with a page, of candidates that no two numbers of put in the same order."""
    folder = tmp_path_factory.mktemp("study")
    with contextlib.chdir(folder):
        make_study(["svd", "kfac"], [0.5, 0.25], TARGETS, "perplexity", dense=8.0)
        write_dense(8.0, control=7.5)
        settings = YAML(typ="safe").load(Path("params.yaml").read_text())
        write("params.yaml", {**settings, "export": {"recipes": ["svd"]}})
        make_exports("dense", 8.0, 8.25)
        for (recipe, keep), one in CANDIDATES.items():
            name = f"{recipe}-{keep}"
            rows = 3 if name == "kfac-0.25" else 0  # it has no score before recovery
            make_candidate(
                recipe, keep, TARGETS, one["metric"], rows=rows, searched=curve(5), factorized=2 * one["metric"]
            )
            evaluation = Path(f"reports/evaluate/{name}.json")
            write(str(evaluation), {**json.loads(evaluation.read_text()), "size": size(int(one["parameters"]))})
            ways = ("torch", "onnx", "int8") if recipe == "svd" else ("torch",)
            make_benchmark(name, dense=dict.fromkeys(ways, 1.0), candidate=dict.fromkeys(ways, one["speed"]))
            if recipe == "svd":
                make_exports(name, one["metric"], one["metric"] + 1)
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
    address = (study / compare.PAGE).as_uri()
    browser.get(address)
    yield browser
    assert browser.get_log("browser") == []
    assert asked_for(browser) == [address]


def asked_for(browser: Chrome) -> list[str]:
    """Addresses, since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [one["params"]["request"]["url"] for one in messages if one["method"] == "Network.requestWillBeSent"]


def all_of(page: Chrome, selector: str) -> list[WebElement]:
    return page.find_elements(By.CSS_SELECTOR, selector)


def one_of(page: Chrome, selector: str) -> WebElement:
    return page.find_element(By.CSS_SELECTOR, selector)


def rows(page: Chrome, table: int = 0) -> list[str]:
    """Return the names of the visible rows."""
    heads = all_of(page, "table.sortable")[table].find_elements(By.CSS_SELECTOR, "tbody th")
    return [head.text for head in heads if head.is_displayed()]


def head(page: Chrome, name: str, table: int = 0) -> WebElement:
    heads = all_of(page, "table.sortable")[table].find_elements(By.CSS_SELECTOR, "thead th")
    return next(one for one in heads if one.text == name)


def sort_by(page: Chrome, name: str, table: int = 0) -> str | None:
    """Click, and what the head says of the order then."""
    head(page, name, table).find_element(By.TAG_NAME, "button").click()
    return head(page, name, table).get_attribute("aria-sort")


def marks(page: Chrome) -> dict[str, WebElement]:
    """Those that are shown."""
    found = {str(one.get_attribute("data-model")): one for one in all_of(page, ".mark")}
    return {name: one for name, one in found.items() if one.is_displayed()}


def across(page: Chrome) -> dict[str, float]:
    """Candidate → where its mark is, in pixels."""
    return {name: one.rect["x"] + one.rect["width"] / 2 for name, one in marks(page).items()}


def numbers(study: Path, column: str) -> dict[str, float | None]:
    """Candidate → its number in the CSV; None where it has none."""
    lines = list(csv.DictReader((study / compare.TABLE).read_text().splitlines()))[1:]
    return {f"{one['recipe']}-{one['keep']}": float(one[column]) if one[column] else None for one in lines}


def ordered(found: dict[str, float | None], sign: int) -> list[str]:
    return sorted(found, key=lambda name: (found[name] is None, sign * (found[name] or 0)))


class TestTables:
    @pytest.mark.parametrize("column", COLUMNS)
    def test_a_head_sorts_by_numbers_the_better_end_first(self, page: Chrome, study: Path, column: str) -> None:
        """Then the other end, then as it was; dense models stay on top, and a dash at the end."""
        found = numbers(study, COLUMNS[column])
        signs = {"ascending": 1, "descending": -1}
        first, second = sorted(signs, reverse=column == "speed")  # of a perplexity the better end is the lower
        for expected in (first, second):
            assert sort_by(page, column) == expected
            assert rows(page) == ["dense", "dense + recovery", "trivial baseline", *ordered(found, signs[expected])]
        assert sort_by(page, column) is None
        assert rows(page)[3:] == NAMES

    def test_the_order_is_that_of_one_head(self, page: Chrome) -> None:
        sort_by(page, "size")
        sort_by(page, "recovered")
        assert len(all_of(page, "[aria-sort]")) == 1
        assert rows(page)[3:] == ["kfac-0.5", "svd-0.5", "svd-0.25", "kfac-0.25"]

    def test_files_to_ship_are_sorted_too(self, page: Chrome) -> None:
        assert sort_by(page, "size", table=1) == "ascending"
        assert rows(page, table=1)[0] != "dense"
        sizes = [one.text.split() for one in all_of(page, "table.sortable:not(:has(.fixed)) td:nth-child(4)")]
        found = [float(number) * {"B": 1, "kB": 1000}[unit] for number, unit in sizes]
        assert len(found) == 9
        assert found == sorted(found)

    def test_the_keyboard_sorts(self, page: Chrome) -> None:
        head(page, "size").find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
        assert rows(page)[3:] == ["kfac-0.5", "svd-0.25", "kfac-0.25", "svd-0.5"]

    @pytest.mark.parametrize(
        ("choice", "left"),
        [
            ({"name": "KFAC"}, ["kfac-0.5", "kfac-0.25"]),
            ({"name": "0.5 svd"}, ["svd-0.5"]),
            ({"recipe": "svd"}, ["svd-0.5", "svd-0.25"]),
            ({"keep": "0.25"}, ["svd-0.25", "kfac-0.25"]),
            ({"recipe": "kfac", "keep": "0.25"}, ["kfac-0.25"]),
            ({"name": "nothing"}, []),
        ],
    )
    def test_a_filter_holds_for_tables_and_plot(self, page: Chrome, choice: dict[str, str], left: list[str]) -> None:
        filter_by(page, **choice)
        assert rows(page) == ["dense", "dense + recovery", "trivial baseline", *left]
        exported = [name for name in ("svd-0.5", "svd-0.25") if name in left for _ in range(3)]
        assert rows(page, table=1) == [*["dense"] * 3, *exported]
        assert {*marks(page)} == {"dense", "dense + recovery", *left}
        lines = [str(one.get_attribute("points")).split() for one in all_of(page, "[data-trace]")]
        assert sum(map(len, lines)) == len(left)

    def test_a_filter_that_is_taken_back_shows_all(self, page: Chrome) -> None:
        filter_by(page, name="svd", keep="0.5")
        one_of(page, "#filter [name=name]").send_keys(*[Keys.BACKSPACE] * 3)
        filter_by(page, keep="all")
        assert rows(page)[3:] == NAMES


def filter_by(page: Chrome, **choice: str) -> None:
    """By typing, which chooses in a list, too."""
    for name, value in choice.items():
        one_of(page, f"#filter [name={name}]").send_keys(value)


class TestPlot:
    @pytest.mark.parametrize(
        ("axis", "column", "sign"),
        [("bytes", "bytes", 1), ("macs", "macs_per_token", 1), ("latency-8x16", "speedup", -1)],
    )
    def test_marks_stand_where_the_chosen_cost_says(
        self, page: Chrome, study: Path, axis: str, column: str, sign: int
    ) -> None:
        one_of(page, f"#across [value={axis}]").click()
        found = across(page)
        assert sorted(NAMES, key=lambda name: found[name]) == ordered(numbers(study, column), sign)
        assert found["dense"] == found["dense + recovery"] == max(found.values())
        shown = [one.get_attribute("data-axis") for one in all_of(page, "[data-axis]") if one.is_displayed()]
        assert shown == [axis]

    def test_a_mark_that_is_pointed_at_says_what_it_is(self, page: Chrome) -> None:
        tip = one_of(page, ".tip")
        assert not tip.is_displayed()
        for name, mark in marks(page).items():
            ActionChains(page).move_to_element(mark.find_element(By.CSS_SELECTOR, ".shape")).perform()
            assert tip.find_element(By.TAG_NAME, "strong").text == name
        point_at(page, "svd-0.5")
        assert {"9.500", "1.60", "1.25"} <= {*tip.text.split()}
        ActionChains(page).move_to_element(one_of(page, "#across")).perform()
        assert not tip.is_displayed()

    def test_a_mark_that_the_keyboard_reaches_says_what_it_is(self, page: Chrome) -> None:
        one_of(page, "#across :checked").send_keys(Keys.TAB)
        for name in ("dense", "dense + recovery", "svd-0.5"):
            assert one_of(page, ".tip strong").text == name
            page.switch_to.active_element.send_keys(Keys.TAB)

    def test_a_mark_that_was_clicked_says_nothing_once_its_candidate_is_closed(self, page: Chrome) -> None:
        open_from_plot(page, "svd-0.5")
        one_of(page, ".close").click()
        assert not one_of(page, ".tip").is_displayed()


def point_at(page: Chrome, name: str) -> None:
    ActionChains(page).move_to_element(marks(page)[name].find_element(By.CSS_SELECTOR, ".shape")).perform()


def open_from_table(page: Chrome, name: str) -> None:
    one_of(page, f"tr[data-candidate='{name}'] button").click()


def open_from_files(page: Chrome, name: str) -> None:
    all_of(page, f"tr[data-candidate='{name}'] button")[-1].click()


def open_from_plot(page: Chrome, name: str) -> None:
    point_at(page, name)
    ActionChains(page).click().perform()


def open_by_keyboard(page: Chrome, name: str) -> None:
    page.execute_script("arguments[0].focus()", marks(page)[name])
    page.switch_to.active_element.send_keys(Keys.ENTER)


WAYS = (open_from_table, open_from_files, open_from_plot, open_by_keyboard)


class TestCandidate:
    @pytest.mark.parametrize("way", WAYS)
    def test_it_opens_from_everywhere_and_closes(self, page: Chrome, way: Callable[[Chrome, str], None]) -> None:
        dialog = one_of(page, "dialog")
        assert not dialog.is_displayed()
        for close in (
            lambda: one_of(page, ".close").click(),
            lambda: page.switch_to.active_element.send_keys(Keys.ESCAPE),
        ):
            way(page, "svd-0.25")
            assert one_of(page, "dialog h2").text == "svd-0.25"
            assert not one_of(page, ".tip").is_displayed()
            close()
            assert not dialog.is_displayed()

    @pytest.mark.parametrize("name", NAMES)
    def test_it_has_the_rank_of_every_target(self, page: Chrome, study: Path, name: str) -> None:
        """Dense, 2, 1, 2, 1 of ten; kfac-0.25 has three sparse rows beside each."""
        open_from_table(page, name)
        evaluation = json.loads((study / f"reports/evaluate/{name}.json").read_text())
        cells = {
            str(one.get_attribute("title")).rpartition(",")[0]: one.text for one in all_of(page, "dialog td[title]")
        }
        assert [*cells] == TARGETS
        for target, text in cells.items():
            size = evaluation["targets"][target]
            first, *others = text.split()
            assert first == ("dense" if size["rank"] is None else str(size["rank"]))
            assert (str(size["rows"]) in others) == (size["rows"] > 0)
            assert f"{size['parameters']}.0" in others  # of 100

    def test_its_ranks_stand_in_the_row_of_their_layer(self, page: Chrome) -> None:
        open_from_table(page, "svd-0.5")
        lines = [one.find_elements(By.CSS_SELECTOR, "th, td") for one in all_of(page, "dialog tr")]
        firsts = [[cell.text.partition("\n")[0] for cell in line] for line in lines]
        assert firsts == [
            ["layer", "query", "key", HOSTILE],
            ["0", "dense", "2", ""],
            ["1", "1", "2", ""],
            ["", "", "", "1"],
        ]

    def test_it_has_its_commands_and_card(self, page: Chrome, study: Path) -> None:
        open_from_table(page, "kfac-0.5")
        assert "eckart reproduce kfac-0.5" in [one.text for one in all_of(page, "dialog code")]
        one_of(page, "dialog summary").click()
        card = (study / compare.CARDS / "kfac-0.5.md").read_text()
        assert one_of(page, "dialog pre").get_attribute("textContent") == card

    def test_one_after_the_other_leaves_nothing_of_the_first(self, page: Chrome) -> None:
        seen = []
        for name in ("svd-0.5", "kfac-0.25", "svd-0.5"):
            open_from_table(page, name)
            seen.append(one_of(page, "dialog").get_attribute("textContent"))
            one_of(page, ".close").click()
        assert seen[0] == seen[2] != seen[1]


def test_without_its_script_the_page_shows_all_that_it_says(browser: Chrome, study: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get((study / compare.PAGE).as_uri())
        assert rows(browser)[3:] == NAMES
        assert len(rows(browser, table=1)) == 9
        assert {*NAMES} < {*marks(browser)}
        assert all(one.is_displayed() for one in all_of(browser, "figure svg"))
        assert not any(one.is_displayed() for one in all_of(browser, "#filter, #across, dialog, button, .tip"))
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_no_script_runs_but_the_page_s_own(browser: Chrome, study: Path, tmp_path: Path) -> None:
    """As if a name had not been escaped."""
    text = (study / compare.PAGE).read_text()
    foreign = tmp_path / "foreign.html"
    foreign.write_text(text.replace("<main>", "<main><script>document.title = 'foreign'</script>", 1))
    browser.get(foreign.as_uri())
    assert browser.title == "made-up: comparison"
    assert sort_by(browser, "size") == "ascending"  # its own does


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_is_as_wide_as_the_window(page: Chrome, width: int) -> None:
    """Wider parts scroll by themselves."""
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        open_from_table(page, "svd-0.5")
        for selector in ("html", "dialog"):
            assert page.execute_script(
                "const one = document.querySelector(arguments[0]); return one.scrollWidth <= one.clientWidth", selector
            )
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
