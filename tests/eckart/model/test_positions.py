"""Positions of a model: those that a text can have, not those that a table has."""

import pytest

from eckart.model.positions import longest_text
from tests import tiny


@pytest.mark.parametrize(
    ("family", "options", "longest"),
    [
        ("RobertaModel", {"pad_token_id": 1}, 62),  # the first position is 2
        ("BertModel", {"pad_token_id": 1}, 64),
        ("LlamaModel", {"pad_token_id": 20, "num_key_value_heads": 2}, 64),  # as many words as positions
    ],
)
def test_positions_that_belong_to_padding_do_not_count(family: str, options: dict[str, int], longest: int) -> None:
    model = tiny.build(family, **tiny.LAYERS, vocab_size=64, max_position_embeddings=64, **options)
    assert longest_text(model) == longest


def test_a_model_may_state_none() -> None:
    assert longest_text(tiny.build("XLNetModel", vocab_size=64, d_model=16, n_layer=1, n_head=2, d_inner=24)) is None
