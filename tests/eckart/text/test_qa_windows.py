"""A question's best answer in its windows. Laws of windows: tests/tasks/nlp_tasks/test_question_answering.py."""

from __future__ import annotations

import numpy as np
import pytest

from eckart.text.qa_windows import NOT_CONTEXT, Window, best_answers


@pytest.mark.parametrize(
    ("context", "letters", "answer"),
    [("यह साधु है", (3, 6), "साधु"), ("le cafe\u0301 noir", (3, 7), "cafe\u0301"), ("the plot", (3, 8), "plot")],
)
def test_an_answer_is_whole_words(context: str, letters: tuple[int, int], answer: str) -> None:
    """BERT's tokens end before combining marks, and SentencePiece's begin with the space before a word."""
    logits, offsets = np.array([0.0, 9.0]), np.array([(NOT_CONTEXT, NOT_CONTEXT), letters])
    (found,) = best_answers([Window(0, {}, offsets)], [logits], [logits], [context])
    assert found.text == answer
