"""A short measured run, remembered by device, variant and engine version; what can run here, and what it would earn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from decimal import Decimal
from pathlib import Path

import pytest
from aiohttp import web

from agent.calibration import Calibrator, SpeedBook, Speeds
from agent.engines.port import Done, EngineError, EngineEvent, EngineFacts, EngineRequest, Piece, Usage
from agent.errors import ConfigError
from agent.protocol import DeviceReport
from agent.runnable import Candidate, Price, candidates, judge, prices
from agent.sizing.shape import ModelShape
from tests.agent_doubles import VARIANT, ScriptedEngine

FACTS = EngineFacts("scripted", "1", 2, 1024, False, 0.0, None)
GIB = 1 << 30
SHAPE = ModelShape(
    weight_bytes=5 * GIB,
    parameters=8_000_000_000,
    active_parameters=8_000_000_000,
    layers=32,
    hidden=4096,
    feed_forward=14336,
    vocabulary=128_256,
    kv_elements_per_token=65_536,
    context_train=131_072,
)


async def paced(engine: ScriptedEngine, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
    await asyncio.sleep(0.1)
    for _ in range(5):
        yield Piece("x")
        await asyncio.sleep(0.02)
    yield Done("length", Usage(150, 30, 5, 0))


async def broken(engine: ScriptedEngine, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
    raise EngineError("engine_error", "no")
    yield Done("")


class TestCalibration:
    def test_is_measured_once_and_remembered(self, tmp_path: Path) -> None:
        async def act() -> None:
            engine = ScriptedEngine(script=paced)
            calibrator = Calibrator(SpeedBook(tmp_path / "speeds.json"))
            first = await calibrator.speeds(engine, FACTS, "cpu", VARIANT)
            assert first.prefill_tokens_per_s == pytest.approx(1_200, rel=0.5)
            assert first.decode_tokens_per_s == pytest.approx(50, rel=0.5)
            again = await Calibrator(SpeedBook(tmp_path / "speeds.json")).speeds(engine, FACTS, "cpu", VARIANT)
            assert again == first
            assert len(engine.requests) == 1
            await calibrator.speeds(engine, FACTS, "GPU-1", VARIANT)
            assert len(engine.requests) == 2, "another device is measured for itself"

        asyncio.run(act())

    def test_that_fails_costs_nothing_but_its_figures(self, tmp_path: Path) -> None:
        calibrator = Calibrator(SpeedBook(tmp_path / "speeds.json"))
        found = asyncio.run(calibrator.speeds(ScriptedEngine(script=broken), FACTS, "cpu", VARIANT))
        assert (found.prefill_tokens_per_s, found.decode_tokens_per_s) == (None, None)
        assert not (tmp_path / "speeds.json").exists()

    def test_of_a_simulated_engine_is_not_made(self, tmp_path: Path) -> None:
        engine = ScriptedEngine(script=paced)
        calibrator = Calibrator(SpeedBook(tmp_path / "speeds.json"))
        assert asyncio.run(calibrator.speeds(engine, engine.facts_now, "cpu", VARIANT)) == Speeds()
        assert engine.requests == []


def card(free: int, name: str = "NVIDIA GeForce RTX 4090", **changes: object) -> DeviceReport:
    total = 24 * GIB
    return DeviceReport("GPU-0", name, "gpu", total, total - free, **changes)  # type: ignore[arg-type]


class TestWhatCanRun:
    CANDIDATE = Candidate("llama", Path("llama.gguf"), VARIANT, SHAPE)

    def test_fits_with_room_and_does_not_without(self, tmp_path: Path) -> None:
        book = SpeedBook(tmp_path / "speeds.json")
        roomy = judge(self.CANDIDATE, card(20 * GIB), slots=4, context=8_192, book=book, price=None)
        assert (roomy.fits, roomy.measured, roomy.usd_per_hour) == (True, False, None)
        assert roomy.slots > 4
        tight = judge(self.CANDIDATE, card(7 * GIB), slots=4, context=8_192, book=book, price=None)
        assert (tight.fits, tight.slots) == (False, 0)

    def test_is_faster_or_slower_than_predicted_once_measured(self, tmp_path: Path) -> None:
        book = SpeedBook(tmp_path / "speeds.json")
        predicted = judge(self.CANDIDATE, card(20 * GIB), slots=4, context=2_048, book=book, price=None)
        assert predicted.decode_tokens_per_s is not None
        book.note("GPU-0", VARIANT, "llama.cpp 1", Speeds(900.0, 40.0, 5.0))
        measured = judge(self.CANDIDATE, card(20 * GIB), slots=4, context=2_048, book=book, price=None)
        assert measured.measured
        assert measured.decode_tokens_per_s is not None
        assert 0 < measured.decode_tokens_per_s < predicted.decode_tokens_per_s

    def test_would_earn_what_its_tokens_bring_at_todays_prices(self, tmp_path: Path) -> None:
        price = Price(Decimal("0.05"), Decimal("0.20"))
        found = judge(
            self.CANDIDATE, card(20 * GIB), slots=4, context=2_048, book=SpeedBook(tmp_path / "s.json"), price=price
        )
        assert found.decode_tokens_per_s is not None
        assert found.usd_per_hour is not None
        # Two tokens of input come with each of output.
        expected = found.decode_tokens_per_s * 3600 * 0.30 / 1e6
        assert float(found.usd_per_hour) == pytest.approx(expected, rel=1e-3)

    def test_of_an_unknown_device_is_not_guessed(self, tmp_path: Path) -> None:
        found = judge(
            self.CANDIDATE,
            card(20 * GIB, "Strange GPU"),
            slots=4,
            context=2_048,
            book=SpeedBook(tmp_path / "s.json"),
            price=None,
        )
        assert found.decode_tokens_per_s is None

    def test_on_a_lost_card_is_nothing(self, tmp_path: Path) -> None:
        found = judge(
            self.CANDIDATE,
            card(20 * GIB, state="lost"),
            slots=1,
            context=512,
            book=SpeedBook(tmp_path / "s.json"),
            price=None,
        )
        assert not found.fits

    def test_names_files_that_are_no_models(self, tmp_path: Path) -> None:
        (tmp_path / "broken.gguf").write_bytes(b"not a model")
        found, problems = candidates([tmp_path], {})
        assert found == []
        assert "broken.gguf is no model" in problems[0]


class TestPrices:
    def answer(self, body: object, status: int = 200) -> dict[str, Price]:
        async def act() -> dict[str, Price]:
            async def models(request: web.Request) -> web.Response:
                assert request.headers["Authorization"] == "Bearer sk"
                return web.json_response(body, status=status)

            app = web.Application()
            app.router.add_get("/v1/models", models)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            try:
                return await prices(f"http://127.0.0.1:{runner.addresses[0][1]}", "sk")
            finally:
                await runner.cleanup()

        return asyncio.run(act())

    def test_come_from_the_marketplaces_list_of_models(self) -> None:
        listed = {
            "data": [
                {"id": "m", "weights_sha256": VARIANT, "pricing": {"input": "0.05", "output": "0.2"}},
                {"id": "n", "weights_sha256": "b" * 64, "pricing": None},
            ]
        }
        assert self.answer(listed) == {VARIANT: Price(Decimal("0.05"), Decimal("0.2"))}

    def test_that_are_not_to_be_had_are_a_sentence(self) -> None:
        with pytest.raises(ConfigError, match="answers 401"):
            self.answer({}, 401)
        with pytest.raises(ConfigError, match="does not tell its prices"):
            self.answer([1])
