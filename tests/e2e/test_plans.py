"""Demand for a model that nobody serves, at a node that may: the planner has it loaded, and a request is answered."""

from __future__ import annotations

import openai
import pytest

from marketplace.jobs.plan_round import plan_once
from tests.stack import running_stack, until
from tests.vocabularies import MODEL_ID, smollm2_path
from tests.witness import stream

OTHER = "b" * 64
SECOND = f"""
[[models]]
engine = "simulated"
sha256 = "{OTHER}"
load = "plan"
[models.ask_usd_per_mtok]
input = "0.05"
output = "0.20"
[models.simulation]
model_path = "{smollm2_path()}"
"""


def test_demand_for_another_model_has_it_loaded_and_answered() -> None:
    with running_stack("fallow-plans-") as stack:
        stack.sell()
        stack.sell("other", OTHER)
        stack.add_gateways("gw-0")
        stack.add_node("swing", "gw-0", edit=lambda text: text.replace("accept = false", "accept = true") + SECOND)
        stack.wait_offered()
        renter = stack.renter()
        client = stack.client("gw-0", renter)
        assert stream(client, "Of the first model.", max_tokens=4).complete
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(model="other", messages=[{"role": "user", "content": "Anyone?"}])
        until(lambda: stack.rows("select 1 from refused_minutes"), "a note of the refusal")
        until(lambda: stack.rows("select 1 from node_abilities"), "what the node could run")
        made = plan_once(stack.factory, stack.valkey())
        assert made is not None
        assert made.steps == 1
        until(lambda: stack.seen_nodes("gw-0", "other") == 1, "an offer of the other model")
        assert stack.seen_nodes("gw-0", MODEL_ID) == 1, "there was room for both"
        answer = client.chat.completions.create(
            model="other", messages=[{"role": "user", "content": "Anyone now?"}], max_tokens=4
        )
        assert answer.choices[0].message.content
        until(lambda: stack.rows("select 1 from plan_steps where state = 'accepted'"), "the node's answer")
        ((reason,),) = stack.rows("select reason from plan_steps")
        status = stack.status("swing")
        assert status is not None
        assert reason in {offer.why for offer in status.offers}
