"""Errors say what to do. Only this test asserts wording.

The others assert an error's type and the parameter, file, number or command that it names, so that a message may be
worded better in one place. But an error is to say what to do, and here it does for one of each family of errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eckart.calibration.statistics import collect
from eckart.factorization.weightings import Inputs, weigh
from eckart.model.targets import Target
from eckart.published_recipes import PUBLISHED
from eckart.ranks.budget import allowance, ranked_allowance
from eckart.recovery.distillation import hidden_error, logits_error
from tasks.artifacts.errors import EckartError
from tasks.config.params_file import read
from tasks.config.validation import mistakes
from tasks.data.pypi_archives import member
from tasks.models.model_io import check_length
from tasks.multi_seed.study_file import load
from tests import tiny
from tests.eckart.calibration.test_statistics import MAP as ONE
from tests.eckart.calibration.test_statistics import TWO, Reshaped
from tests.workspace import merged, tiny_params

MAP = Target(name="map", out_features=4, in_features=4, input_of="map")
MODEL = torch.nn.Module()
STATE = torch.zeros(1, 2, 3)

ERRORS: dict[str, Callable[[], object]] = {
    "write a number above 0 and up to 1": lambda: allowance([MAP], 1.5),
    "raise keep or exclude targets": lambda: ranked_allowance([MAP], 0.01),
    "raise data.sizes.calibration": lambda: collect(MODEL, [], []),
    "add it to importance.statistics": lambda: weigh(Inputs(kind="inputs"), MAP, {}),
    "exclude this target": lambda: collect(Reshaped(lambda x: x[:, 1:].flatten(0, 1)[1:]), [{"x": TWO}], [ONE]),
    "set distillation.layers to 0": lambda: hidden_error([STATE], [STATE], torch.ones(1, 4)),
    "set distillation.logits to 0": lambda: logits_error(STATE[0], STATE[0, :, :1], None),
    "lower it": lambda: check_length(tiny.bert(), 10**6, "data.max_length"),
    "write pypi://NAME==VERSION/PATH": lambda: member("name/path").__enter__(),
    "run this in the root of a workspace": lambda: read(Path("absent/params.yaml")),
    "put it into studies/": lambda: load(Path("/elsewhere.yaml")),
}


@pytest.mark.parametrize("advice", ERRORS)
def test_an_error_says_what_to_do(advice: str) -> None:
    with pytest.raises((ValueError, EckartError), match=re.escape(advice)):
        ERRORS[advice]()


MISTAKES: dict[str, dict[str, Any]] = {
    f"study.recipes: there is no recipe absent; write one of {', '.join(PUBLISHED)}": {
        "study": {"recipes": ["absent"]}
    },
    "study.keeps: has 0.5 2 times; remove the repetition": {"study": {"keeps": [0.5, 0.5]}},
    "seed: is -1; write greater than or equal to 0": {"seed": -1},
    "teacher.colour: is unknown; remove it": {"teacher": {"colour": "red"}},
    "data.columns.label: is null, but classification learns from it; write the name of a column": {
        "data": {"columns": {"label": None}}
    },
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_of_the_parameters_is_a_line_with_what_to_write(line: str) -> None:
    assert mistakes(merged(tiny_params(), MISTAKES[line])) == [line]
