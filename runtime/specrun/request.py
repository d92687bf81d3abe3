"""One generation, ready to run: options that are decided, and who draws, drafts and watches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

from specrun import processors
from specrun.cancel import CancelToken, EarlyEnd
from specrun.constraint import Constraint
from specrun.drafters.base import Drafter
from specrun.drafters.forced import ForcedDrafter
from specrun.drafters.guard import GuardedDrafter
from specrun.drafters.model import Reader
from specrun.drafters.none import NoDrafter
from specrun.errors import EngineError, SpecrunError, UsageError
from specrun.grammar import Grammar
from specrun.judge import Judge
from specrun.lane import Lane
from specrun.loop import Commit, DraftPlan, OnRound, Progress, Round, speculate
from specrun.options import GenerateOptions
from specrun.processors import Logits, Prefix
from specrun.resources import Resources
from specrun.response import ResponseReader
from specrun.sampling import Sampler
from specrun.schedule import Schedule
from specrun.stats import Meter
from specrun.stopping import Stopping

OnWarning = Callable[[str], None]
LogitsProcessor = Callable[[Prefix, Logits], Any]
LogitsProcessors = LogitsProcessor | Sequence[LogitsProcessor]


@dataclasses.dataclass(frozen=True)
class Request:
    """``options``: resolved. ``drafter``: one of the caller's own in place of the method's.
    ``make_schedule``: given the options and the tokens of context to expect, in the middle of the
    text; ``grammar``: what that must be; ``sequence``: its place in a batch."""

    options: GenerateOptions
    bad_words_ids: tuple[tuple[int, ...], ...]
    drafter: Drafter | None
    logits_processors: tuple[LogitsProcessor, ...]
    make_schedule: Callable[[GenerateOptions, int], Schedule]
    on_round: OnRound | None
    on_warning: OnWarning
    cancel: CancelToken | None = None
    grammar: Grammar | None = None
    sequence: int = 0

    @property
    def method(self) -> str:
        """What drafts, as the statistics name it."""
        return "custom" if self.drafter is not None else self.options.method

    def in_batch(self, index: int) -> Request:
        """The same for row ``index`` of a batch, with a seed of its own."""
        seed = self.options.seed
        options = dataclasses.replace(self.options, seed=None if seed is None else seed + index)
        return dataclasses.replace(self, options=options, sequence=index)

    def early_end(self) -> EarlyEnd:
        """What ends this generation, or all rows of a batch, before the text ends."""
        return EarlyEnd(self.cancel, self.options.timeout)

    def stopping(self, resources: Resources, most: int) -> Stopping:
        """Where a text of at most ``most`` tokens ends."""
        options = self.options
        return Stopping(
            resources.tokenizer,
            eos_token_ids=options.eos_token_ids or (),
            stop=options.stop,
            max_tokens=most,
        )

    def rounds(
        self, lane: Lane, progress: Progress, meter: Meter, most: int, check: Callable[[], None]
    ) -> Generator[Commit, None, None]:
        """Continue ``progress`` on ``lane`` by at most ``most`` tokens; see :func:`speculate`."""
        options, resources = self.options, lane.resources
        stopping = self.stopping(resources, most)
        vocab_size = resources.manifest.target_engine.vocab_size
        length = len(progress.committed)
        constraint = self._constraint(progress.committed, resources)
        sampler = self._sampler(length, vocab_size, constraint)
        if not sampler.needs_logits and resources.options.fixed_width is None:
            meter.tie_below = resources.width_noise
        judge = Judge(
            sampler,
            ensemble_weight=options.ensemble_weight,
            logprobs=options.logprobs,
            constraint=constraint,
        )
        schedule = self.make_schedule(options, length + most // 2)
        ends = frozenset(options.eos_token_ids or ())
        plan = DraftPlan(schedule, resources.manifest.tokenizer.vocab_size, ends, constraint)
        drafter = self._guarded(lane, meter, check)
        if constraint is not None:
            drafter = ForcedDrafter(drafter, constraint)
        return speculate(progress, drafter, judge, stopping, plan, meter, self._watcher(), check)

    def _constraint(self, prompt: Sequence[int], resources: Resources) -> Constraint | None:
        """What the text behind ``prompt`` must be. Raises UsageError inside of a thought."""
        if self.grammar is None:
            return None
        manifest = resources.manifest
        reader = ResponseReader(resources.tokenizer, manifest.tokenizer.response, prompt)
        if reader.channel == "thinking":
            raise UsageError(
                f"{self.grammar.name}: the prompt has begun a thought, which would have to follow"
                " the grammar",
                hint="give enable_thinking=False (--no-thinking), or a prompt that ends it",
            )
        ends = self.options.eos_token_ids or ()
        return self.grammar.constraint(len(prompt), ends, manifest.target_engine.vocab_size)

    def _sampler(
        self, prompt_length: int, vocab_size: int, constraint: Constraint | None
    ) -> Sampler:
        given = self.options
        made = processors.build(
            vocab_size=vocab_size,
            prompt_length=prompt_length,
            end_ids=given.eos_token_ids or (),
            do_sample=bool(given.do_sample),
            logit_bias=given.logit_bias,
            repetition_penalty=_or(given.repetition_penalty, 1.0),
            no_repeat_ngram_size=given.no_repeat_ngram_size or 0,
            bad_words_ids=self.bad_words_ids,
            min_new_tokens=given.min_new_tokens or 0,
            logits_processors=self.logits_processors,
            constraint=constraint,
            temperature=_or(given.temperature, 1.0),
            top_k=given.top_k or 0,
            top_p=_or(given.top_p, 1.0),
            min_p=given.min_p or 0.0,
            typical_p=_or(given.typical_p, 1.0),
        )
        return Sampler(
            do_sample=bool(given.do_sample),
            seed=given.seed,
            processors=made.processors,
            warpers=made.warpers,
            confidence_threshold=given.assistant_confidence_threshold or 0.0,
            keep_q=given.ensemble_weight < 1,
        )

    def _watcher(self) -> OnRound | None:
        watch, index = self.on_round, self.sequence
        if watch is None or index == 0:
            return watch

        def in_batch(done: Round) -> None:
            watch(dataclasses.replace(done, sequence=index))

        return in_batch

    def _guarded(self, lane: Lane, meter: Meter, check: Callable[[], None]) -> Drafter:
        """The drafter of this generation. Its failure is a warning, or an error when strict."""
        options = self.options

        def on_failure(error: Exception) -> None:
            name = "" if isinstance(error, SpecrunError) else f"{type(error).__name__}: "
            cause = f"the drafter failed: {name}{error}"
            if options.strict:
                hint = "without strict, decoding goes on without it"
                raise EngineError(cause, hint=hint) from error
            meter.mode = "fallback"
            self.on_warning(f"{cause}; going on with plain decoding")

        if options.num_assistant_tokens == 0:
            return NoDrafter()
        meter.mode = "speculative"
        try:
            found = self.drafter if self.drafter is not None else lane.drafter(options)
            engine = lane.resources.manifest.target_engine
            if isinstance(reader := getattr(found, "reader", None), Reader):
                reader.between_chunks = check  # it may read a long prompt, too
            if getattr(found, "needs_prompt_rows", False) and not engine.all_hidden:
                raise EngineError(f"{engine.file} returns no hidden states of the prompt")
        except Exception as error:  # whatever it is, the target can go on without a drafter
            on_failure(error)
            return NoDrafter()
        return GuardedDrafter(found, on_failure, vocab_size=engine.vocab_size)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
