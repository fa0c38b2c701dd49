"""Write the model card of a candidate: quality, size and speed, compared with the original model, and its recipe."""

from __future__ import annotations

import textwrap
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from tasks.artifacts.results_schema import CONTROL_NAME
from tasks.data.hub_ids import hub_id
from tasks.data.packaged_datasets import PACKAGED
from tasks.nlp_tasks import kind_of
from tasks.report.provenance import provenance, recipes_yaml
from tasks.report.results import CandidateResults, Results
from tasks.report.runtimes import runtime_rows
from tasks.report.table import reference_rows, row
from tasks.runtime.templates import template


def card(results: Results, candidate: CandidateResults) -> str:
    """Return the model card: metadata for the hub, then Markdown. It contains no date and no machine name."""
    dense = {name for name, rank in candidate.decision.ranks.items() if rank is None} - candidate.decision.narrowed
    return template(Path(__file__).with_name("card.md.j2")).render(
        metadata=_metadata(results, candidate).to_yaml(),
        results=results,
        metric=results.metric,
        candidate=candidate,
        layers=sum(len(target.layers) for target in results.targets),
        changed=sum(len(target.layers) for target in results.targets if target.name not in dense),
        rows=[*reference_rows(results), row(results, candidate)],
        only_answer=results.only_answers.get(candidate.after),
        files=[file for file in runtime_rows(results) if file.name in ("dense", CONTROL_NAME, candidate.name)]
        if candidate.name in results.exports
        else [],
        written=[
            (of_dense.beginning, {"dense": of_dense.text, candidate.name: own.text})
            for of_dense, own in zip(results.dense.continuations, candidate.evaluation.continuations, strict=True)
        ],
        as_code=as_code,
        facts=provenance(results),
        kind=kind_of(results.task),
        prefix=results.settings.data.prefix,
        recipe=recipes_yaml(results, [candidate.recipe]),
    )


def as_code(text: str) -> str:
    """Format `text` as an indented Markdown code block, so that no markup in it takes effect."""
    lines = (part for line in text.splitlines() for part in textwrap.wrap(line, 100) or [""])
    return textwrap.indent("\n".join(lines), "    ", lambda _: True)


def _metadata(results: Results, candidate: CandidateResults) -> ModelCardData:
    data, model = results.settings.data, results.settings.model
    kind = kind_of(results.task)
    result = EvalResult(
        task_type=kind.pipeline,
        dataset_type=hub_id(data.source, PACKAGED) or "other",
        dataset_name=Path(data.source).name,  # of a local folder, only its name
        dataset_config=data.config,
        dataset_revision=data.revision,
        dataset_split="test",
        metric_type=results.task.metric,
        metric_value=candidate.recovered,
        verified=False,
    )
    return ModelCardData(
        base_model=hub_id(model.base),
        license=results.dense.license.get("license"),
        license_name=results.dense.license.get("license_name"),
        license_link=results.dense.license.get("license_link"),
        library_name=kind.library,
        pipeline_tag=kind.pipeline,
        tags=["eckart", "low-rank", "compression", candidate.recipe],
        datasets=[source] if (source := hub_id(data.source, PACKAGED)) else None,
        metrics=[results.task.metric],
        model_name=candidate.name,
        eval_results=[result],
    )
