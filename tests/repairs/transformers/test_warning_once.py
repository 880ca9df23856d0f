"""A model that warns in forward: one graph, and the warning is still given, once."""

from __future__ import annotations

import logging

import pytest
import torch

import patches

pytest.importorskip("transformers")
from transformers.utils import logging as transformers_logging

ID = "transformers-warning-once"
pytestmark = pytest.mark.skipif(
    patches.report(ID)[ID].status is patches.Status.NOT_AFFECTED, reason="Dynamo's source is not the one of torch 2.13"
)


@pytest.fixture
def logger():
    """A logger of transformers whose records are kept, under a name of its own."""
    logger = transformers_logging.get_logger("transformers.bnb_patches_test")
    logger.records = []
    handler = logging.Handler()
    handler.emit = lambda record: logger.records.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)  # whatever verbosity another test has left
    type(logger).warning_once.cache_clear()
    yield logger
    logger.removeHandler(handler)


def test_one_graph_and_one_warning(logger):
    def forward(x):
        logger.warning_once(f"{x.shape[0]} is few")
        return x.sin()

    x = torch.randn(3)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(forward, fullgraph=True, backend="eager")(x)
    assert logger.records == []
    with patches.applied(ID):
        compiled = torch.compile(forward, fullgraph=True, backend="eager")
        for _ in range(3):
            assert torch.equal(compiled(x), x.sin())
        forward(x)
    assert logger.records == ["3 is few"]


def test_what_is_not_known_while_tracing_is_left_out(logger):
    def forward(x):
        logger.warning_once("the sum is %s", x.sum())
        return x.sin()

    x = torch.randn(3)
    with patches.applied(ID):
        assert torch.equal(torch.compile(forward, fullgraph=True, backend="eager")(x), x.sin())
    assert logger.records == []


def test_other_methods_of_a_logger_break_the_graph_as_before(logger):
    def forward(x):
        logger.warning("always")
        return x.sin()

    with patches.applied(ID), pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(forward, fullgraph=True, backend="eager")(torch.randn(3))
