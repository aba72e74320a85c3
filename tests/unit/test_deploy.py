"""What operators are handed names only what is there: metrics, settings, commands, filters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from marketplace.cli import COMMANDS
from marketplace.core.settings import Settings
from marketplace.gateway.metrics import GatewayMetrics
from marketplace.gateway.server import DRAIN_S

DEPLOY = Path(__file__).parents[2] / "deploy"
MONITORING = DEPLOY / "monitoring"
SUFFIXES = ("_total", "_bucket", "_count", "_sum", "")


def series() -> set[str]:
    return {family.name + suffix for family in GatewayMetrics().registry.collect() for suffix in SUFFIXES}


def expressions() -> Iterator[str]:
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def manifests() -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if each]


def containers() -> Iterator[dict[str, Any]]:
    for manifest in manifests():
        template = manifest.get("spec", {}).get("template")
        if template is not None:
            yield from template["spec"]["containers"]
    for service in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values():
        if str(service.get("image", "")).startswith("fallow"):
            yield service


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_what_is_watched_is_measured(expression: str) -> None:
    named = set(re.findall(r"\bfallow_[a-z_]+", expression))
    recorded = {"fallow:slots_busy:ratio"} & set(re.findall(r"fallow:[a-z_:]+", expression))
    assert named | recorded or "up{" in expression
    assert named <= series()


def test_every_alert_says_what_to_do() -> None:
    rules = [
        rule for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]
    alerts = [rule for rule in rules if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 10
    for rule in alerts:
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["action"]


def test_the_containers_run_commands_that_exist() -> None:
    commands = [container["command"] for container in containers() if "command" in container]
    assert len(commands) >= 7
    for command in commands:
        assert command[0] == "fallow"
        assert command[1] in COMMANDS


def test_the_environment_names_settings_that_exist() -> None:
    settings = {f"FALLOW_{name.upper()}" for name in Settings.model_fields} | {"DATABASE_URL", "VALKEY_URL"}
    text = (DEPLOY / "kubernetes.yaml").read_text() + (DEPLOY / "compose.yaml").read_text()
    named = set(re.findall(r"\bFALLOW_[A-Z_]+", text)) - {"FALLOW_DATABASE_PASSWORD"}
    assert named
    assert named <= settings


def test_a_gateway_has_longer_to_end_than_it_drains() -> None:
    (gateway,) = (
        each for each in manifests() if each["kind"] == "Deployment" and each["metadata"]["name"] == "gateway"
    )
    pod = gateway["spec"]["template"]["spec"]
    sleep_s = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > DRAIN_S + sleep_s
