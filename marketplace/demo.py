"""`fallow demo`: the main job with real parts. A stranger's prompt earns an owner money, and the books agree.

Every figure that is printed comes out of the running system: the API's answers, the database, the statement.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, cast
from uuid import UUID

import openai
import typer
from openai.types.chat import ChatCompletionChunk
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from marketplace.accounts import service as accounts
from marketplace.billing import owners, payouts, reconciliation
from marketplace.billing import service as billing
from marketplace.billing.desk import Desk
from marketplace.billing.payments import minor
from marketplace.billing.payments.factory import claim_books, make_payments
from marketplace.children import ChildFailed
from marketplace.core import logs
from marketplace.core.clock import utcnow
from marketplace.core.database import SessionFactory, make_engine, make_session_factory
from marketplace.core.settings import Settings
from marketplace.finance import service as finance
from marketplace.finance.summary import usd
from marketplace.local import (
    MODEL,
    OWNER,
    RENTER,
    LocalStack,
    Running,
    StartFailed,
    directory_lock,
    free_port,
    stop_on_signals,
)

app = typer.Typer(add_completion=False)

DEFAULT_FOLDER: Final = Path("fallow-demo")
JOBS: Final = 10
SETTLED_WITHIN_S: Final = 60.0
JOBS_WITHIN_S: Final = 120.0
QUESTION: Final = "In two sentences: why does an idle computer cost its owner money?"
TOPICS: Final = ("rivers", "bread", "glass", "maps", "clocks", "salt", "wool", "bridges", "ink", "copper")
DEMO_TOP_UP_CENTS: Final = 2_500
DEMO_BONUS_CENTS: Final = 100
T = TypeVar("T")


class DemoFailed(Exception):
    """A step of the story did not come true; the message says which and why."""


@dataclass
class Story:
    """What the steps share."""

    console: Console
    running: Running
    client: openai.OpenAI
    factory: SessionFactory
    owner_id: UUID
    renter_id: UUID
    started_at: datetime
    settings: Settings

    def step(self, title: str) -> None:
        self.console.print(f"\n[bold]{title}[/bold]", soft_wrap=True)

    def fact(self, name: str, value: object) -> None:
        self.console.print(f"  {name:<26} {value}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def demo(
    folder: Annotated[
        Path, typer.Option("--dir", help="Where the state, logs and statement go; emptied first.")
    ] = DEFAULT_FOLDER,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API; 0 takes a free one.")] = 0,
) -> None:
    """Tell the main job with real data: PostgreSQL, Valkey, a gateway, a worker, an agent and a real model."""
    logs.configure("console", "ERROR")
    console = Console()
    stop_on_signals()
    began = time.monotonic()
    state = folder.resolve() / "state"
    try:
        with directory_lock(folder.resolve()):
            shutil.rmtree(state, ignore_errors=True)
            stack = LocalStack(state, port=port or free_port(), say=lambda text: console.print(f"  {text}..."))
            try:
                console.print("[bold]Starting a marketplace on this machine[/bold]")
                tell(console, stack.start(), folder.resolve())
            finally:
                stack.stop()
    except KeyboardInterrupt:
        console.print("\nStopped.")
        raise typer.Exit(130) from None
    except (StartFailed, ChildFailed, DemoFailed, openai.OpenAIError) as error:
        text = f"\nThe demo failed: {error}\nLogs of all parts: {state / 'logs'}"
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(f"\nDone in {time.monotonic() - began:.0f} s. Everything was stopped. To keep it running: fallow up")


@contextmanager
def _story(console: Console, running: Running) -> Iterator[Story]:
    settings = Settings(database_url=running.stores.database_url, valkey_url=running.stores.valkey_url)
    engine = make_engine(settings, application_name="fallow-demo")
    factory = make_session_factory(engine)
    with factory() as session:
        owner_id = accounts.find_organisation(session, OWNER).id
        renter_id = accounts.find_organisation(session, RENTER).id
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=running.renter_key, timeout=120.0) as client:
        try:
            yield Story(console, running, client, factory, owner_id, renter_id, utcnow(), settings)
        finally:
            engine.dispose()


def tell(console: Console, running: Running, folder: Path) -> None:
    """The whole story. Raises DemoFailed where it does not come true."""
    with _story(console, running) as story:
        owner_offers(story)
        renter_asks_the_price(story)
        renter_chats(story)
        renter_asks_again(story)
        jobs_wait_in_the_queue(story)
        a_stream_is_cancelled(story)
        everything_settles(story)
        the_bill(story)
        the_payout(story)
        the_statement(story, folder / "yield-statement.csv")
        the_books(story)


def owner_offers(story: Story) -> None:
    story.step("1. An owner enrolled a machine, and its offer is live")
    for model in story.client.models.list():
        facts: dict[str, Any] = model.model_dump()
        story.fact("model", model.id)
        for name in ("quantisation", "context_per_slot", "nodes", "pricing"):
            if facts.get(name) is not None:
                story.fact(name.replace("_", " "), _plain(facts[name]))


def renter_asks_the_price(story: Story) -> None:
    story.step("2. A renter with credit asks the price before sending")
    with story.factory() as session:
        story.fact("credit", usd(billing.balance(session, story.renter_id).available_nano))
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 80}
    quote = _post(story, "/quote", body)
    story.fact("prompt tokens", quote["prompt_tokens"])
    story.fact("cost", f"at least ${quote['cost']['at_least']}, at most ${quote['cost']['at_most']}")
    story.fact("capacity now", "yes" if quote["capacity"]["available"] else quote["capacity"]["refused"])


def renter_chats(story: Story) -> None:
    story.step("3. The renter streams a chat through the official openai client")
    _stream(story, QUESTION, max_tokens=80)


def renter_asks_again(story: Story) -> None:
    story.step("4. The same question again: the node still has the prompt in its cache, and that costs less")
    _stream(story, QUESTION, max_tokens=20)


def _stream(story: Story, question: str, *, max_tokens: int) -> None:
    began = time.monotonic()
    first: float | None = None
    usage: dict[str, Any] | None = None
    story.console.print("  ", end="")
    stream = story.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if text := _text(chunk):
            first = first or time.monotonic()
            story.console.print(text, end="", markup=False, highlight=False, soft_wrap=True)
        if chunk.usage is not None:
            usage = chunk.usage.model_dump()
    story.console.print()
    if first is None or usage is None:
        raise DemoFailed("the answer had no token, or no usage at its end")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    seconds = max(time.monotonic() - first, 1e-6)
    story.fact("first token after", f"{(first - began) * 1000:.0f} ms")
    story.fact("speed", f"{usage['completion_tokens'] / seconds:.0f} tokens/s")
    story.fact("usage", f"{usage['prompt_tokens']} in ({cached} cached), {usage['completion_tokens']} out")
    story.fact("cost", f"${usage['cost']}")


def _text(chunk: ChatCompletionChunk) -> str:
    return (chunk.choices[0].delta.content or "") if chunk.choices else ""


def jobs_wait_in_the_queue(story: Story) -> None:
    story.step(f"5. {JOBS} jobs that can wait go through the queue")
    ids = [_submit_job(story, topic) for topic in TOPICS[:JOBS]]
    waiting = set(ids)
    limit = time.monotonic() + JOBS_WITHIN_S
    columns = (TextColumn("  jobs done"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=story.console) as progress:
        task = progress.add_task("jobs", total=len(ids))
        while waiting:
            for job_id in sorted(waiting):
                job = _get(story, f"/jobs/{job_id}")
                if job["status"] in ("completed", "failed", "cancelled", "expired"):
                    if job["status"] != "completed":
                        raise DemoFailed(f"job {job_id} ended as {job['status']}: {job.get('error')}")
                    waiting.discard(job_id)
                    progress.advance(task)
            if time.monotonic() > limit:
                raise DemoFailed(f"{len(waiting)} jobs were not done within {JOBS_WITHIN_S:.0f} s")
            time.sleep(0.2)


def _submit_job(story: Story, topic: str) -> str:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Name one use of {topic}, in one short sentence."}],
        "max_tokens": 24,
    }
    return str(_post(story, "/jobs", {"request": body, "deadline_s": 300})["id"])


def _post(story: Story, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return cast("dict[str, Any]", story.client.post(path, body=body, cast_to=object))


def _get(story: Story, path: str) -> dict[str, Any]:
    return cast("dict[str, Any]", story.client.get(path, cast_to=object))


def a_stream_is_cancelled(story: Story) -> None:
    story.step("6. A stream is cancelled half-way: only what was delivered is paid")
    wanted, taken = 200, 0
    with story.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell a long story about a lighthouse."}],
        max_tokens=wanted,
        temperature=0,
        stream=True,
    ) as stream:
        for chunk in stream:
            taken += bool(_text(chunk))
            if taken == 30:
                break
    story.fact("asked for", f"up to {wanted} tokens")
    story.fact("read before leaving", f"{taken} pieces")
    line = _wait_for(lambda: _last_cancelled(story), "the cancelled request's receipt")
    story.fact("paid for", f"{line.input_tokens} in, {line.output_tokens} out: {usd(line.charge_nano)}")


@dataclass(frozen=True)
class _Cancelled:
    input_tokens: int
    output_tokens: int
    charge_nano: int


def _last_cancelled(story: Story) -> _Cancelled | None:
    with story.factory() as session:
        receipt = finance.last_receipt(session, story.renter_id, outcome="cancelled")
    if receipt is None:
        return None
    return _Cancelled(
        receipt.input_uncached_tokens + receipt.input_cached_tokens,
        receipt.output_visible_tokens + receipt.output_reasoning_tokens,
        receipt.charge_nano,
    )


def _wait_for(look: Callable[[], T | None], what: str, within_s: float = SETTLED_WITHIN_S) -> T:
    limit = time.monotonic() + within_s
    while (found := look()) is None:
        if time.monotonic() > limit:
            raise DemoFailed(f"{what} did not appear within {within_s:.0f} s")
        time.sleep(0.1)
    return found


def everything_settles(story: Story) -> None:
    def settled() -> bool | None:
        with story.factory() as session:
            return True if finance.unsettled_receipts(session) == 0 else None

    _wait_for(settled, "settlement of all receipts")
    # The statement covers whole seconds of offered time: let the last of them pass.
    time.sleep(1.0)


def the_bill(story: Story) -> None:
    story.step("7. The renter's bill: three levers")
    with story.factory() as session:
        bill = finance.renter_bill(session, story.renter_id, story.started_at - timedelta(hours=1), utcnow())
    table = Table("lever", "tokens", "per million", "amount", box=None, pad_edge=True)
    for line in bill.lines:
        table.add_row(line.lever, f"{line.tokens:,}", f"${line.rate_usd}", usd(line.amount_nano))
    story.console.print(table)
    story.fact("total", f"{usd(bill.total_nano)} for {bill.requests} requests")


def the_payout(story: Story) -> None:
    story.step("8. The owner is paid, through the sandbox: every step is real, but no money moves")
    hold_days = story.settings.payout_hold_days_new
    # Days do not pass in a demo, and a few cents are no payout: only these three settings are other than the defaults.
    eased = {"payout_hold_days": 0, "payout_hold_days_new": 0, "payout_minimum_cents": 1}
    settings = story.settings.model_copy(update=eased)
    payments = make_payments(settings, story.factory)
    claim_books(story.factory, payments)
    desk = Desk(settings, story.factory, payments)
    story.fact("changed for the demo", f"hold of {hold_days} days and minimum of $10 set to nothing")
    paid = desk.checkout(story.renter_id, DEMO_TOP_UP_CENTS, save_card=False)
    story.fact("renter tops up", f"{usd(minor.from_minor(paid.amount_minor, paid.currency))}, {paid.state} (sandbox)")
    account, _ = desk.onboard(story.owner_id, "US", None)
    story.fact("owner's account", f"{account.state} (sandbox)")
    bonus_nano = minor.from_minor(DEMO_BONUS_CENTS, paid.currency)
    why = "a welcome: the answers of a demo earn less than a cent, and only cents can leave"
    desk.write(lambda session: owners.grant_bonus(session, story.owner_id, bonus_nano, why, key="demo", by="demo"))
    story.fact("bonus from the platform", f"{usd(bonus_nano)} ({why})")
    plans = [plan for plan in desk.run_payouts("demo", "demo") if plan.owner_id == story.owner_id]
    with story.factory() as session:
        found = payouts.status(session, owner_id=story.owner_id)
    if not found or found[0].state != "paid":
        blocked = plans[0].blocked if plans else "it earned nothing"
        raise DemoFailed(f"the owner was not paid: {found[0].failure if found else blocked}")
    for name, amount in payouts.statement_lines(found[0]):
        story.fact(name, f"-${amount[1:]}" if amount.startswith("-") else f"${amount}")
    report = reconciliation.reconcile(story.factory, payments, utcnow())
    if not report.clean:
        raise DemoFailed(f"ledger and processor differ: {report.breaks[0].story}")
    story.fact("reconciled", "ledger and sandbox agree line by line")


def the_statement(story: Story, path: Path) -> None:
    story.step("9. The owner's yield statement, the payout on it")
    with story.factory() as session:
        statement = finance.yield_statement(
            session, story.owner_id, story.started_at - timedelta(hours=1), utcnow(), "UTC"
        )
    for name, value in finance.summary(statement):
        story.fact(name, value)
    for line in statement.account.lines:
        if line.nano:
            story.fact(f"of these: {line.name}", usd(line.nano))
    for state in statement.account.states:
        if state.closing_nano:
            story.fact(f"now {state.state.value}", usd(state.closing_nano))
    finance.write_csv(statement, path)
    story.fact("as CSV", path)


def the_books(story: Story) -> None:
    story.step("10. The books")
    with story.factory() as session:
        trial = finance.trial_balance(session)
        problems = finance.check(session)
    story.fact("trial balance", usd(trial.sum_nano))
    if trial.sum_nano or problems:
        raise DemoFailed(f"the books do not balance: {problems}")
    story.fact("checks", "every balance recomputed from its postings agrees")


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {item}" for key, item in value.items())
    return str(value)
