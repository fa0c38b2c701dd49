"""What counts as a difference between a model and the same one after it was saved and loaded."""

import torch
from torch import nn

from eckart.model.module_context import eval_mode, frozen
from eckart.model.round_trip import without_constants


def test_a_constant_of_the_head_hides_no_difference() -> None:
    """BigBird subtracts a million from the logits of the question's tokens, Splinter the largest number."""
    one, other = (torch.tensor([[-1e6, small, -3.4e38]]) for small in (0.5, 0.9))
    shown = without_constants(one, other)
    torch.testing.assert_close(torch.cat(shown), torch.tensor([[0.0, 0.5, 0.0], [0.0, 0.9, 0.0]]))


def test_large_numbers_that_differ_stay() -> None:
    one, other = torch.tensor([-2e5, 3e5, -1e6]), torch.tensor([-4e5, 3e5, 1.0])
    assert all(torch.equal(*pair) for pair in zip(without_constants(one, other), (one, other), strict=True))


def test_a_module_may_have_a_config_of_any_type() -> None:
    """As modules beside transformers have."""
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].config = {"a": 1}
    with eval_mode(model), frozen(model):
        assert not model.training
    assert model[0].config == {"a": 1}
