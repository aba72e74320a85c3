"""`python -m tests.fakes.stripe --port 12111`: the stand-in on this machine, on real time, until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading

from tests.fakes.stripe import StandInStripe


def main() -> int:
    """Print what a program needs to use the stand-in as one JSON line, then serve."""
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.stripe", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="port of 127.0.0.1; 0 takes a free one")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same keys and ids")
    parser.add_argument("--webhook", metavar="URL", action="append", default=[], help="told of the platform's events")
    parser.add_argument("--connect-webhook", metavar="URL", action="append", default=[], help="told of owners' events")
    options = parser.parse_args()
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with StandInStripe(seed=options.seed, follows_wall=True, port=options.port) as standin:
        secrets = {url: standin.add_endpoint(url).secret for url in options.webhook}
        connect = {url: standin.add_endpoint(url, connect=True).secret for url in options.connect_webhook}
        told = {"url": standin.url, "secret_key": standin.secret_key, "account": standin.account_id}
        print(json.dumps({**told, "webhook_secrets": secrets, "connect_webhook_secrets": connect}), flush=True)
        standin.send_in_background()
        ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
