"""Bursts in closed form give what single steps give, and no more is in memory than fits."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from agent.sizing.devices import DEVICES
from marketplace.matching.simulate.benchmark import LLAMA_8B_FP8
from marketplace.matching.simulate.engine import NEVER, Engine, Run
from marketplace.matching.simulate.fleet import NodeSpec, make_node
from marketplace.matching.simulate.traces import BLOCK_TOKENS
from marketplace.metering.pricing import Rates


def node(card: str = "RTX 4090", **more: Any) -> NodeSpec:
    return make_node(LLAMA_8B_FP8, DEVICES[card], name=card, rates=Rates(1, 1, 1), **more)


def run(number: int, prompt: int, output: int, at_s: float = 0.0, blocks: tuple[int, ...] = ()) -> Run:
    return Run(number, at_s, prompt, output, blocks)


def drive(engine: Engine, arrivals: list[Run]) -> None:
    """Let everything happen, arrivals at their times."""
    waiting = sorted(arrivals, key=lambda r: r.at_s)
    while waiting or engine.until_s != NEVER:
        if waiting and waiting[0].at_s < engine.until_s:
            arrived = waiting.pop(0)
            engine.submit(arrived, arrived.at_s)
            continue
        now_s = engine.until_s
        engine.advance()
        for started in engine.started:
            started.first_s = now_s
        for ended in engine.ended:
            ended.end_s = now_s
        engine.started.clear()
        engine.ended.clear()


class TestOneRequest:
    def test_alone_it_takes_what_the_formulas_say(self) -> None:
        spec = node()
        engine = Engine(0, spec, {})
        one = run(0, 200, 101)
        drive(engine, [one])
        assert one.first_s == pytest.approx(spec.model.prefill_s(200))
        steps = sum(spec.model.decode_step_s(1, 201 + i) for i in range(100))
        assert one.end_s - one.first_s == pytest.approx(steps)
        assert engine.busy_s == pytest.approx(one.end_s)
        assert engine.read_s == pytest.approx(one.first_s)

    def test_a_long_prompt_pays_for_attention_and_a_fixed_time_each_chunk(self) -> None:
        spec = node("H100 SXM")
        one = run(0, 100_000, 1)
        drive(Engine(0, spec, {}), [one])
        whole = spec.model.prefill_s(100_000)
        assert whole < one.first_s < 1.1 * whole
        assert one.end_s == one.first_s

    def test_with_arithmetic_binding_the_closed_form_still_holds(self) -> None:
        # A slow processor beside fast memory: compute binds at first, and memory as the context grows.
        spec = node("RTX 3090", power_fraction=0.3)
        runs = [run(n, 10, 400) for n in range(60)]
        drive(Engine(0, spec, {}), runs)
        model = spec.model
        last = max(r.first_s for r in runs)
        expected = last + sum(model.decode_step_s(60, 11 + i + 1) for i in range(399 - 1))
        assert runs[-1].end_s == pytest.approx(expected, rel=0.02)


class _Stepper:
    """The same engine, a step at a time: slow, and plain to see."""

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.cost = spec.model.step_cost(1)
        self.room = spec.kv_tokens
        self.queue: list[Run] = []
        self.running: list[list[Any]] = []
        """Request, tokens of context, tokens to come."""
        self.finishing: list[Run] = []
        self.admitted: set[int] = set()

    def replay(self, arrivals: list[Run]) -> None:
        pending = sorted(arrivals, key=lambda r: r.at_s)
        now = 0.0
        while pending or self.queue or self.running:
            if not self.queue and not self.running:
                now = max(now, pending[0].at_s)
            while pending and pending[0].at_s <= now:
                arrived = pending.pop(0)
                arrived.left = arrived.prompt
                self.queue.append(arrived)
            now += self.step()
            self.settle(now)

    def admit(self, one: Run) -> bool:
        if one.number in self.admitted:
            return True
        if one.prompt + one.output > self.room or len(self.running) + len(self.finishing) >= self.spec.slots:
            return False
        self.room -= one.prompt + one.output
        self.admitted.add(one.number)
        return True

    def step(self) -> float:
        """Seconds of one step."""
        self.finishing = []
        context = sum(entry[1] for entry in self.running)
        decode = self.cost.step_s(len(self.running), context) if self.running else 0.0
        if not self.queue or not self.admit(self.queue[0]):
            return decode
        head = self.queue[0]
        dearness = self.cost.sequence_s + self.cost.attention_s * (head.prompt - head.left)
        left, quad = max(0.0, self.spec.pace_s - self.cost.fixed_s - decode), self.cost.attention_s / 2
        # What takes all that is left: dearness C + quad C^2.
        budget = max(64, int((math.sqrt(dearness**2 + 4 * quad * left) - dearness) / (2 * quad)))
        duration = decode + self.cost.fixed_s
        while self.queue and budget > 0 and self.admit(self.queue[0]):
            head = self.queue[0]
            part = min(head.left, budget)
            before = head.prompt - head.left
            duration += self.cost.sequence_s * part
            duration += self.cost.attention_s / 2 * ((before + part) ** 2 - before**2)
            head.left -= part
            budget -= part
            if head.left:
                break
            self.finishing.append(self.queue.pop(0))
        return duration

    def settle(self, now: float) -> None:
        """Everybody who decodes has a token more."""
        for entry in self.running:
            entry[1] += 1
            entry[2] -= 1
        for one in self.finishing:
            one.first_s = now
            self.running.append([one, one.prompt + 1, one.output - 1])
        for entry in [entry for entry in self.running if entry[2] <= 0]:
            entry[0].end_s = now
            self.room += entry[0].prompt + entry[0].output
            self.running.remove(entry)


class TestManyRequests:
    @pytest.mark.parametrize("seed", range(4))
    def test_bursts_agree_with_single_steps(self, seed: int) -> None:
        rng = random.Random(seed)
        spec = node(rng.choice(["RTX 4090", "L40S"]), slots=rng.choice([4, 32]))
        made = [(rng.randint(20, 6000), rng.randint(1, 200), rng.uniform(0, 12)) for _ in range(40)]
        quick = [run(n, *sizes) for n, sizes in enumerate(made)]
        slow = [run(n, *sizes) for n, sizes in enumerate(made)]
        drive(Engine(0, spec, {}), quick)
        _Stepper(spec).replay(slow)
        for ours, theirs in zip(quick, slow, strict=True):
            # Chunks are sized anew a little less often than at every step: a prompt may end a step sooner or later.
            assert ours.first_s == pytest.approx(theirs.first_s, rel=0.02, abs=spec.pace_s)
            assert ours.end_s == pytest.approx(theirs.end_s, rel=0.02, abs=spec.pace_s)

    def test_pure_decoding_is_exact_to_the_step_when_somebody_comes_in_between(self) -> None:
        spec = node()
        first, second = run(0, 50, 300), run(1, 50, 50, at_s=1.0)
        drive(Engine(0, spec, {}), [first, second])
        model = spec.model
        at, steps = model.prefill_s(50), 0
        while at < 1.0:
            at += model.decode_step_s(1, 51 + steps)
            steps += 1
        assert second.first_s == pytest.approx(at + model.prefill_s(50) + model.decode_step_s(1, 51 + steps))

    def test_decoding_keeps_its_pace_beside_long_prompts(self) -> None:
        spec = node()
        talker = run(0, 100, 200)
        readers = [run(n, 30_000, 1, at_s=0.1) for n in (1, 2)]
        drive(Engine(0, spec, {}), [talker, *readers])
        assert (talker.end_s - talker.first_s) / 199 <= spec.pace_s * 1.05

    def test_what_does_not_fit_waits_until_somebody_ends(self) -> None:
        spec = node(slots=2)
        runs = [run(n, 100, 100) for n in range(3)]
        drive(Engine(0, spec, {}), runs)
        assert runs[2].first_s > min(runs[0].end_s, runs[1].end_s)
        big = node()
        half = big.kv_tokens // 2 + 1
        one, two = run(0, half - 10, 10), run(1, half - 10, 10)
        drive(Engine(0, big, {}), [one, two])
        assert two.first_s > one.end_s


class TestPrefixes:
    def test_a_block_once_read_is_not_read_again(self) -> None:
        holders: dict[int, int] = {}
        engine = Engine(3, node(), holders)
        first = run(0, 4 * BLOCK_TOKENS + 10, 5, blocks=(1, 2, 3, 4))
        second = run(1, 4 * BLOCK_TOKENS + 50, 5, at_s=5.0, blocks=(1, 2, 3, 9))
        drive(engine, [first, second])
        assert (first.cached, second.cached) == (0, 3 * BLOCK_TOKENS)
        assert second.first_s - 5.0 < (first.first_s - 0.0) / 2
        assert holders == dict.fromkeys((1, 2, 3, 4, 9), 1 << 3)

    def test_at_least_one_token_of_a_prompt_is_always_read(self) -> None:
        engine = Engine(0, node(), {})
        runs = [run(n, BLOCK_TOKENS, 2, at_s=float(n), blocks=(7,)) for n in range(2)]
        drive(engine, runs)
        assert runs[1].cached == BLOCK_TOKENS - 1

    def test_beginnings_outlive_what_hangs_on_them(self) -> None:
        spec = node()
        holders: dict[int, int] = {}
        cache = Engine(0, spec, holders).cache
        cache.use((1, 2, 3, 4), 4)
        cache.use((5, 6), 4)
        assert cache.hit((1, 2, 3, 4)) == 2
        cache.clear()
        assert holders == {}

    def test_a_node_that_goes_hands_everybody_back_and_forgets(self) -> None:
        holders: dict[int, int] = {}
        engine = Engine(0, node(slots=2), holders)
        runs = [run(n, 2000, 50, blocks=(n,)) for n in range(4)]
        for one in runs:
            engine.submit(one, 0.0)
        engine.advance()
        lost = engine.clear(engine.until_s / 2)
        assert {one.number for one in lost} == {0, 1, 2, 3}
        assert (holders, engine.until_s, engine.running) == ({}, NEVER, 0)
        drive(engine, [run(9, 100, 2, at_s=50.0)])
