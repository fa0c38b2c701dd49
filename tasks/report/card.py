"""The model card of a candidate: what it is, how good, large and fast beside the dense model, and how it was made."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from tasks.config import schema, yaml_edit
from tasks.data.hub_ids import hub_id
from tasks.data.packaged_datasets import PACKAGED
from tasks.nlp_tasks import kind_of
from tasks.report.continuations import as_code, beginnings, written
from tasks.report.provenance import provenance
from tasks.report.results import CandidateResults, Results
from tasks.report.runtimes import runtime_rows
from tasks.report.summary import parameters
from tasks.report.table import dense_rows, row, trivial_row
from tasks.runtime.templates import template


def card(results: Results, one: CandidateResults) -> str:
    """Markdown under the hub's metadata; no times and no machine but what was measured, as on the page."""
    return template(Path(__file__).with_name("card.md.j2")).render(
        metadata=_metadata(results, one).to_yaml(),
        results=results,
        metric=results.metric,
        parameters=parameters(results),
        one=one,
        rows=[*dense_rows(results), trivial_row(results), row(results, one)],
        only_answer=results.only_answers.get(one.after),
        files=[each for each in runtime_rows(results) if each.name in ("dense", one.name)]
        if one.name in results.exports
        else [],
        beginnings=beginnings(results),
        written=written(results, [one]),
        as_code=as_code,
        facts=provenance(results).facts,
        auto=kind_of(results.task).auto.__name__,
        recipe=_yaml({one.recipe: schema.section(f"recipes.{one.recipe}", dict[str, Any])}),
    )


def _metadata(results: Results, one: CandidateResults) -> ModelCardData:
    data, model = schema.section("data", schema.Data), schema.section("model", schema.Model)
    pipeline = kind_of(results.task).pipeline
    found = EvalResult(
        task_type=pipeline,
        dataset_type=hub_id(data.source, PACKAGED) or "other",
        dataset_name=Path(data.source).name,  # of a folder here, no path
        dataset_config=data.config,
        dataset_revision=data.revision,
        dataset_split="test",
        metric_type=results.task.metric,
        metric_value=one.recovered,
        verified=False,
    )
    return ModelCardData(
        base_model=hub_id(model.base),
        license=results.dense.licence.get("license"),
        license_name=results.dense.licence.get("license_name"),
        license_link=results.dense.licence.get("license_link"),
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=["eckart", "low-rank", "compression", one.recipe],
        datasets=[source] if (source := hub_id(data.source, PACKAGED)) else None,
        metrics=[results.task.metric],
        model_name=one.name,
        eval_results=[found],
    )


def _yaml(content: dict[str, Any]) -> str:
    text = io.StringIO()
    yaml_edit.yaml().dump(content, text)
    return text.getvalue()
