"""Prometheus metrics of a server, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from specrun.batch import Step
from specrun.origin import ORIGINS
from specrun.pool import Ended, Pool, Ticket
from specrun.stats import Stats

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
SHARES = tuple(i / 10 for i in range(11))
PER_STEP = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 16)

COMPLETED = ("eos", "stop", "length")


class Metrics:
    """What a server has done. Counts of tokens hold what stayed in the texts."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, pool: Pool) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"specrun_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"specrun_{name}", text, labels, buckets=buckets, registry=registry)

        self.responses = counter("responses", "HTTP answers.", "path", "status")
        self._generations = counter("generations", "Texts that ended.", "method", "outcome")
        self._tokens = counter("tokens", "New tokens by where they came from.", "origin")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were read.")
        self._drafted = counter("drafted_tokens", "Tokens that were drafted.", "method")
        self._accepted = counter("accepted_tokens", "Drafts that stood.", "method")
        self._steps = counter("target_steps", "Verification runs of the target.", "method")
        self._acceptance = histogram(
            "acceptance", "Share of the drafts of a text that stood.", SHARES, "method"
        )
        self._per_step = histogram(
            "tokens_per_target_step", "Tokens per run of the target, by text.", PER_STEP, "method"
        )
        self._queue = histogram("queue_seconds", "From arrival to the first run.", SECONDS)
        self._first = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", SECONDS
        )
        self._each = histogram(
            "time_per_token_seconds",
            "Between tokens behind the first, on average of a text.",
            PER_TOKEN,
        )
        self._whole = histogram("generation_seconds", "From arrival to the end of a text.", SECONDS)
        for origin in ORIGINS:
            self._tokens.labels(origin)
        running = Gauge("specrun_running", "Texts at work.", registry=registry)
        waiting = Gauge("specrun_waiting", "Texts that wait.", registry=registry)
        running.set_function(lambda: pool.running)
        waiting.set_function(lambda: pool.waiting)

    def exposition(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)

    def step(self, step: Step) -> None:
        """A round gave tokens."""
        for origin in step.origins:
            self._tokens.labels(origin).inc()

    def end(self, ticket: Ticket, ended: Ended) -> None:
        """A text ended, however."""
        stats = ended.result.stats
        outcome: str = ended.result.finish_reason
        if ended.error is not None:
            outcome = "error"
        elif outcome in COMPLETED:
            outcome = "completed"
        self._generations.labels(stats.method, outcome).inc()
        self._count(stats)
        self._time(ticket, stats)

    def _count(self, stats: Stats) -> None:
        method = stats.method
        self._prompt_tokens.inc(stats.prompt_tokens if stats.emitted else 0)
        self._drafted.labels(method).inc(stats.drafted)
        self._accepted.labels(method).inc(stats.accepted)
        self._steps.labels(method).inc(stats.target_steps)
        if stats.drafted:
            self._acceptance.labels(method).observe(stats.acceptance)
        if stats.target_steps:
            self._per_step.labels(method).observe(stats.tokens_per_target_step)

    def _time(self, ticket: Ticket, stats: Stats) -> None:
        assert ticket.ended is not None, "this is the end"
        self._whole.observe(ticket.ended - ticket.arrived)
        if ticket.started is not None:
            self._queue.observe(ticket.started - ticket.arrived)
        if ticket.first_token is not None:
            self._first.observe(ticket.first_token - ticket.arrived)
            if stats.emitted > 1:
                self._each.observe((ticket.ended - ticket.first_token) / (stats.emitted - 1))
