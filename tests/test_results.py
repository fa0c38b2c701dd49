"""The results pages, README's numbers and the charts are those of the CSV files in docs/results."""

import re
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import charts, result_files, results
from tasks.multi_seed import seeds_table
from tasks.report.rounding import rounded
from tests.workspace import REPOSITORY

RESULTS = REPOSITORY / "docs/results"
STUDIES = sorted(file.name.removesuffix(".pairs.csv") for file in RESULTS.glob("*.pairs.csv"))


def test_numbers_are_rounded_as_on_paper() -> None:
    assert rounded(100 * 0.8325) == "83.3"  # exactly between two numbers in binary: Python's format has 83.2
    assert rounded(100 * 0.8285) == "82.9"  # 82.84999… in binary
    assert [rounded(value, sign=True) for value in (-0.05, -0.04, 0.04, 0.05)] == ["-0.1", "0.0", "0.0", "+0.1"]
    assert rounded(1234.5, 0) == "1,235"
    assert rounded(1.525, 2) == "1.53"
    assert rounded(float("nan")) == "nan"


def test_pages_have_what_the_generator_writes() -> None:
    assert [*results.stale(), *charts.stale()] == [], "run `python -m benchmarks.results`"


def test_each_text_stands_on_a_page_and_under_each_table_its_command() -> None:
    pages = {name: (REPOSITORY / name).read_text() for name in results.PAGES}
    text = "".join(pages.values())
    for name in {*results.TEXTS} - {"readme"}:
        assert text.count(f"<!-- results: {name} -->") == 1
    for name, own in pages.items():
        by_hand = re.sub(r"<!-- results: .*?<!-- end of results -->", "", own, flags=re.DOTALL)
        if name.startswith("docs/results") and name != "docs/results/papers.md":  # it lists commands, not numbers
            assert not re.search(r"^\|[ :-]+-\|", by_hand, re.MULTILINE), f"{name} has a table that is written by hand"


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_s_page_has_the_tables_of_its_files(name: str) -> None:
    rows = pd.read_csv(RESULTS / f"{name}.csv", dtype={"keep": str})
    rows = rows if "trivial" in rows else rows.assign(trivial=float("nan"))  # older files have none
    text = (RESULTS / f"{name}.md").read_text()
    tables = [seeds_table.cells(own) for _, own in rows.groupby("task" if "task" in rows else "metric")]
    if "task" in rows:
        tables.append(seeds_table.combined(rows, dict(zip(rows.task, rows.metric, strict=True))))
    for table in tables:
        for line in table.to_markdown(index=False, disable_numparse=True).splitlines()[2:]:
            assert re.sub(" +", " ", line) in re.sub(" +", " ", text)


def test_differences_are_candidate_minus_reference() -> None:
    there, back = (result_files.pair("fair-reviews", *names) for names in (("svd", "kfac"), ("kfac", "svd")))
    assert there[:3] == (-back.mean, -back.high, -back.low)
    mean = [result_files.rows("fair-reviews", recipe).recovered.mean() for recipe in ("svd", "kfac")]
    assert there.mean == pytest.approx(mean[0] - mean[1])
    assert there.points.startswith("-")


def test_the_table_of_files_is_that_of_the_rows() -> None:
    table = pd.read_csv(RESULTS / "ship-linear-layers.runtimes.csv")
    own = table[(table.model == "anchored-0.33") & (table.runtime == "int8")]
    accuracy = (
        f"{rounded(100 * own.metric.mean())}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{rounded(100 * own.metric.std())}"
    )
    (line,) = [line for line in results.ship().splitlines() if line.startswith("| keep 0.33 |")]
    assert line.startswith(f"| keep 0.33 | {rounded(own.bytes.mean() / 1e6)} | {accuracy} |")
    assert f"| {rounded(own['8x64.of_same'].median(), 2)} to " in line


def test_a_number_within_a_sentence_is_replaced_and_a_wrong_name_is_named() -> None:
    page = "It is <!-- results: fair.anchored.from-control -->1<!-- end of results --> MB."
    assert results.filled(page) == page.replace("-->1<", f"-->{results.claims()['fair.anchored.from-control']}<")
    with pytest.raises(KeyError, match=r"fair\.nothing"):
        results.filled(page.replace("fair.anchored.from-control", "fair.nothing"))


def test_the_control_has_a_row_and_a_mark_after_the_original() -> None:
    for table in (results.ship(), results.readme()):
        (line,) = [line for line in table.splitlines() if "fine-tuned like Eckart's" in line]
        assert "1.00 ×" in line
        assert table.index("original, Eckart's int8") < table.index("fine-tuned like") < table.index("keep 0.33")
    assert "fine-tuned like" in charts.svg("ship", "dark")


@pytest.mark.parametrize("theme", charts.THEMES)
def test_charts_are_small_transparent_and_the_same_each_time(theme: str) -> None:
    for name in charts.CHARTS:
        text = charts.svg(name, theme)
        assert len(text) < 50_000
        assert "fill: #ffffff" not in text
        assert charts.digest(charts.CHARTS[name][0]()) in text
    assert text == charts.svg(name, theme)


def test_the_command_prints_writes_and_checks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["results", "methods"])
    results.main()
    assert capsys.readouterr().out.strip() == results.TEXTS["methods"]()
    page = tmp_path / "page.md"
    page.write_text("<!-- results: fair.anchored.from-control -->1<!-- end of results -->\n")
    monkeypatch.setattr(results, "REPOSITORY", tmp_path)
    monkeypatch.setattr(results, "PAGES", ("page.md",))
    monkeypatch.setattr(charts, "IMAGES", tmp_path)
    monkeypatch.setattr("sys.argv", ["results", "--check"])
    with pytest.raises(SystemExit, match=r"page\.md"):
        results.main()
    monkeypatch.setattr("sys.argv", ["results"])
    results.main()
    assert "1<" not in page.read_text()
    assert len([*tmp_path.glob("*.svg")]) == len(charts.CHARTS) * len(charts.THEMES)
    monkeypatch.setattr("sys.argv", ["results", "--check"])
    with pytest.raises(SystemExit) as ended:
        results.main()
    assert not ended.value.code
