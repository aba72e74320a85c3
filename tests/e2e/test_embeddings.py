"""Embeddings with the real engine: an agent at one gateway, a client with the official library at the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import openai
import pytest

from marketplace.catalog import importer
from marketplace.core.database import transaction
from tests.stack import Stack, until
from tests.vocabularies import smollm2_path
from tests.witness import assert_invariants

EMBEDDER = "smollm2-135m-embed"
NEAR = ["The cat sleeps on the sofa.", "A cat is sleeping on the couch."]
FAR = "Stock markets fell sharply on Monday."


def knows(client: openai.OpenAI) -> bool:
    return EMBEDDER in {model.id for model in client.models.list()}


@pytest.fixture(scope="module")
def embedding(stack: Stack) -> Iterator[Stack]:
    """The same file sold for its vectors too, and a node that offers them."""
    with transaction(stack.factory) as session:
        importer.import_gguf(session, smollm2_path(), EMBEDDER, "SmolLM2 vectors", task="embed")
    for name in ("gw-0", "gw-1"):
        client = stack.client(name, stack.renter())
        until(partial(knows, client), "the new model")
    stack.add_node(
        "embedder",
        "gw-0",
        engine="llama.cpp",
        model=EMBEDDER,
        slots=2,
        context_per_slot=512,
        keys={"threads": 1, "task": "embed"},
    )
    stack.wait_offered()
    yield stack
    stack.stop("embedder")
    del stack.parts["embedder"], stack.nodes["embedder"]


class TestEmbeddings:
    def test_of_sentences_alike_are_near_and_are_paid_by_input(self, embedding: Stack) -> None:
        stack = embedding
        client = stack.client("gw-1", stack.renter())
        made = client.embeddings.create(model=EMBEDDER, input=[*NEAR, FAR])
        vectors = [each.embedding for each in made.data]
        assert all(math.hypot(*vector) == pytest.approx(1.0, abs=1e-3) for vector in vectors)
        near, far = (sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors[1:])
        assert near > far
        ((tokens, output),) = stack.rows(
            "select input_uncached_tokens, output_visible_tokens from receipts r join variants v on v.id = r.variant_id"
            " where v.task = 'embed'"
        )
        assert (tokens, output) == (made.usage.prompt_tokens, 0)
        assert_invariants(stack)

    def test_stop_when_their_client_leaves(self, embedding: Stack) -> None:
        stack = embedding
        client = stack.client("gw-1", stack.renter(), timeout=1.5)
        with pytest.raises(openai.APITimeoutError):
            client.embeddings.create(model=EMBEDDER, input=["word " * 400] * 30)
        until(lambda: stack.at_rest("embedder"), "a free engine", within_s=15)
        assert_invariants(stack)
