"""config.toml: what it may say, and what it says when it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config import ConfigError, Initial, load, nano_usd_per_mtok, parse, render


class TestAmounts:
    @pytest.mark.parametrize(
        ("text", "nano"),
        [("0", 0), ("0.05", 50_000_000), ("0.000000001", 1), ("19.99", 19_990_000_000), ("1000000", 10**15)],
    )
    def test_are_exact(self, text: str, nano: int) -> None:
        assert nano_usd_per_mtok(text) == nano

    def test_pass_for_each_price_in_cents_up_to_a_hundred(self) -> None:
        for cents in range(1, 10_001):
            assert nano_usd_per_mtok(f"{cents // 100}.{cents % 100:02}") == cents * 10_000_000

    @pytest.mark.parametrize(
        "text", ["", "-1", "1e3", "NaN", "Infinity", "1.0000000001", "1,5", "0x1", "1000000.01", "٣"]
    )
    def test_that_are_not_plain_decimals_are_refused(self, text: str) -> None:
        with pytest.raises(ConfigError):
            nano_usd_per_mtok(text)


class TestAConfiguration:
    def test_written_by_enroll_says_what_was_asked(self) -> None:
        text = render(
            Initial(
                weights='/models/a "b".gguf',
                slots=3,
                context_per_slot=4096,
                threads=2,
                idle_watts=30.0,
                load_watts=90.5,
            )
        )
        config = parse(text)
        model = config.models[0]
        assert (model.weights, model.slots, model.context_per_slot) == ('/models/a "b".gguf', 3, 4096)
        assert (model.threads, config.power.idle_watts, config.power.load_watts) == (2, 30.0, 90.5)
        ask = model.ask_usd_per_mtok.parse()
        assert (ask.input, ask.cached_input, ask.output) == (50_000_000, 10_000_000, 200_000_000)

    def test_written_by_enroll_for_a_server_of_the_owner_says_where_it_answers(self) -> None:
        model = parse(render(Initial(engine="openai", engine_url="http://127.0.0.1:8000"))).models[0]
        assert (model.engine, model.url) == ("openai", "http://127.0.0.1:8000")
        with pytest.raises(ConfigError, match="needs url"):
            render(Initial(engine="openai"))

    def test_explains_every_setting(self) -> None:
        lines = render(Initial()).splitlines()
        settings = [index for index, line in enumerate(lines) if "=" in line and not line.startswith("#")]
        assert settings
        for index in settings:
            above = "\n".join(lines[max(0, index - 4) : index])
            assert "#" in above, f"no comment above {lines[index]!r}"

    def test_without_cached_price_asks_the_full_input_price(self) -> None:
        ask = parse(_model('input = "0.2"\noutput = "1"')).models[0].ask_usd_per_mtok.parse()
        assert ask.cached_input == ask.input == 200_000_000

    @pytest.mark.parametrize(
        ("text", "word"),
        [
            ("slotz = 3", "slotz"),
            ("[owner]\ngrace_s = -1", "grace_s"),
            ("[owner]\ngrace_s = nan", "grace_s"),
            ("[[models]]\nengine = 'magic'\nask_usd_per_mtok = {input='1', output='1'}", "magic"),
            ("[[models]]\nweights = 'x'\nslots = 0\nask_usd_per_mtok = {input='1', output='1'}", "slots"),
            ("[[models]]\nask_usd_per_mtok = {input='1', output='1'}", "weights"),
            (
                "[[models]]\nengine='openai'\nsha256='" + "a" * 64 + "'\nask_usd_per_mtok = {input='1', output='1'}",
                "url",
            ),
            ("[[models]]\nweights = 'x'\nask_usd_per_mtok = {input=0.05, output='1'}", "input"),
            ("[[models]]\nweights = 'x'\nask_usd_per_mtok = {input='1', cached_input='2', output='1'}", "cached_input"),
            ("[power]\nidle_watts = 50.0\nload_watts = 20.0", "load_watts"),
            ("this is not toml", "TOML"),
        ],
    )
    def test_that_cannot_be_is_refused_by_name(self, text: str, word: str) -> None:
        with pytest.raises(ConfigError, match=word):
            parse(text)

    def test_that_is_missing_says_what_to_do(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="enroll"):
            load(tmp_path)

    def test_that_is_not_text_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "config.toml").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="cannot be read"):
            load(tmp_path)


def _model(ask: str) -> str:
    return f"[[models]]\nweights = 'x'\n[models.ask_usd_per_mtok]\n{ask}\n"


class TestAModelThatEmbeds:
    HEAD = '[[models]]\ntask = "embed"\nweights = "/m.gguf"\n'
    ASK = '[models.ask_usd_per_mtok]\ninput = "0.01"\n'

    def test_asks_for_input_alone(self) -> None:
        (model,) = parse(self.HEAD + self.ASK).models
        ask = model.ask_usd_per_mtok.parse()
        assert (model.task, model.pooling, ask.input, ask.output) == ("embed", None, 10_000_000, 0)

    def test_is_not_started_in_an_engine_that_is_not_known_for_it(self) -> None:
        with pytest.raises(ConfigError, match="start it yourself"):
            parse(self.HEAD + 'engine = "llama-server"\n' + self.ASK)

    def test_that_chats_needs_a_price_for_output(self) -> None:
        with pytest.raises(ConfigError, match="needs output"):
            parse('[[models]]\nweights = "/m.gguf"\n' + self.ASK)
