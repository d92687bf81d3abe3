"""Early exit: a target in front, back and head computes what the whole one does, and drafts on
its own first layers without computing anything twice."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny_models
import torch
import traces
from drafting import Scripted, Wrong
from exported import forward, greedy, known_text, prompt_of, reference, same_tokens
from numpy.typing import NDArray
from transformers.generation.candidate_generator import EarlyExitCandidateGenerator

from specexport import engines
from specexport.datafile import DATA_FILE, DataFile
from specexport.made import Sources
from specexport.numbers import relative_error
from specexport.parts.base import Settings
from specexport.parts.early_exit import TargetInParts
from specexport.parts.target import causal_spec
from specexport.sources import Source, resolve
from specgraphs import experts, families
from specgraphs.formats import Formats
from specgraphs.split import plan_split, trace_head, trace_layers
from specgraphs.target import trace_target
from specgraphs.trace import build_fake
from specrun.contract import HEAD_ENGINE, TARGET_ENGINE
from specrun.drafters.base import Drafter
from specrun.drafters.early_exit import EarlyExitDrafter
from specrun.drafters.ngram import NgramDrafter
from specrun.drafters.none import NoDrafter
from specrun.judge import Judge
from specrun.loop import DraftPlan, Progress, Round, speculate
from specrun.manifest import EngineSpec
from specrun.ort import open_session
from specrun.runner import Session
from specrun.sampling import Sampler
from specrun.schedule import make_schedule
from specrun.split import SplitTarget
from specrun.stats import Meter
from specrun.stopping import Stopping
from specrun.target import Target
from specrun.text import Tokenizer

NEW = 24
CLOSE = 1e-5
CONTEXT = tiny_models.CONTEXT
SETTINGS = Settings("fp32", "fp32", CONTEXT, 8)
# Cuts of every family, those of a line on one data file. In gemma4-e2b layers 3 to 5 read KV of
# layers 1 and 2: the owners may be in front (3), or one of the two (2), or a reader too (5), or
# nothing is left for the back (6).
QUICK: tuple[tuple[str, tuple[int, ...]], ...] = (("llama", (1, 2)), ("gemma4-e2b", (2, 5)))
SLOW: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("gemma4-e2b", (1, 3, 6)),
    ("qwen3", (1,)),
    ("gemma3", (2,)),
    ("gemma4-dense", (2,)),
    ("gemma4-moe", (1,)),
    ("gemma4-unified", (1,)),
    ("deepseek-mtp1", (2,)),
    ("glm4-moe-mtp1", (2,)),
    ("mellum-mtp1", (1,)),
)


def params(*groups: tuple[str, tuple[int, ...]], slow: bool) -> list[Any]:
    """Model and cut; ``slow``: it takes more than ten seconds to trace the groups."""
    marks = (pytest.mark.slow,) if slow else ()
    return [
        pytest.param(name, cut, id=f"{name}-{cut}", marks=marks)
        for name, cuts in groups
        for cut in cuts
    ]


EVERY = params(*QUICK, slow=False) + params(*SLOW, slow=True)
MAIN = [("llama", 1), ("llama", 2), ("gemma4-e2b", 2), ("gemma4-e2b", 5)]


@dataclass(frozen=True)
class Folder:
    """Engines of one model on one data file: the whole target, and its parts by cut."""

    path: Path
    source: Source

    @property
    def config(self) -> Any:
        return self.source.config

    def parts(self, cut: int) -> dict[str, EngineSpec]:
        """Engine name -> its entry in the manifest; the head is the same for every cut."""
        specs = TargetInParts(self.source, cut).specs(SETTINGS)
        return {
            name: spec if name == HEAD_ENGINE else replace(spec, file=f"{name}-{cut}.onnx")
            for name, spec in specs.items()
        }

    def open(self, cut: int, **options: Any) -> SplitTarget:
        """The parts as one target."""
        specs = self.parts(cut)
        sessions = {name: self._session(spec) for name, spec in specs.items()}
        return SplitTarget(sessions, specs, **{"max_context": CONTEXT} | options)

    def open_whole(self) -> Target:
        """The target as one engine."""
        spec = causal_spec(TARGET_ENGINE, self.source, SETTINGS)
        return Target(self._session(spec), spec, max_context=CONTEXT)

    def _session(self, spec: EngineSpec) -> Session:
        return open_session(self.path / spec.file, spec, threads=1)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.path / "tokenizer.json")


def write(name: str, cuts: tuple[int, ...], folder: Path) -> None:
    """Trace and write the engines of the model ``name``, all on one data file."""
    source = resolve(tiny_models.save(name, folder))
    before = source.class_and_config()[1].to_json_string()
    fake = build_fake(*source.class_and_config(), "fp32")
    sizes: dict[str, Any] = {"precision": "fp32", "max_context": CONTEXT}
    with traces.anew():  # as the next lines look at what a trace leaves behind
        graphs = {
            f"{part}-{cut}": graph
            for cut in cuts
            for part, graph in trace_layers(fake, early_exit=cut, **sizes).items()
        }
    assert source.class_and_config()[1].to_json_string() == before
    assert fake.model.config.num_hidden_layers == len(fake.model.model.layers)
    graphs[HEAD_ENGINE] = trace_head(fake, "fp32", max_context=CONTEXT)
    graphs[TARGET_ENGINE] = trace_target(fake, "fp32", max_context=CONTEXT)
    with DataFile(folder / DATA_FILE) as data:
        for engine, graph in graphs.items():
            experts.expand(graph, {"target": Formats("fp32", "fp32", "fp32")})
            path = folder / f"{engine}.onnx"
            engines.write_engine(graph, path, data, Sources({"target": source.weights}))
    source.write_tokenizer(folder)


Made = Callable[[str, int], Folder]


@pytest.fixture(scope="module")
def made(once: Callable[..., Path]) -> Made:
    """``made(name, cut)``: the engines of a model that is cut there."""

    def get(name: str, cut: int) -> Folder:
        cuts = next(cuts for other, cuts in QUICK + SLOW if other == name and cut in cuts)
        path = once(f"split-{name}-{cuts}", lambda folder: write(name, cuts, folder))
        return Folder(path, resolve(path / name))

    return functools.cache(get)


def run(
    target: SplitTarget,
    drafter: Drafter,
    folder: Folder,
    prompt: list[int],
    k: int,
    sampler: Sampler | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> tuple[list[int], Meter]:
    """The loop itself, without an engine folder around it."""
    target.truncate(0)
    vocab = int(folder.config.vocab_size)
    meter = Meter(prompt_tokens=len(prompt))
    steps = speculate(
        Progress(target, list(prompt)),
        drafter,
        Judge(sampler or Sampler()),
        Stopping(folder.tokenizer, eos_token_ids=(), stop=(), max_tokens=NEW),
        DraftPlan(make_schedule("constant", k), vocab, frozenset()),
        meter,
        on_round,
    )
    return [token for step in steps for token in step.tokens], meter


def kv_rows(target: SplitTarget | Target, length: int) -> dict[str, NDArray[Any]]:
    return {name: array[:, :, :length].copy() for name, array in target.kv.arrays.items()}


def same_rows(got: dict[str, NDArray[Any]], want: dict[str, NDArray[Any]]) -> None:
    assert got.keys() == want.keys()
    for name, array in got.items():
        np.testing.assert_allclose(array, want[name], 1e-4, 1e-5, err_msg=name)


def exit_logits(name: str, tokens: list[int], cut: int) -> NDArray[np.float32]:
    """head(final_norm(h_cut)) of transformers, ``[len(tokens), vocabulary]``."""
    model = reference(name)
    if cut == model.config.num_hidden_layers:
        return forward(model, tokens)[0]
    with torch.no_grad():
        out = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        logits = model.lm_head(model.model.norm(out.hidden_states[cut]))[0]
        if (cap := families.softcap(model.config)) is not None:
            logits = torch.tanh(logits / cap) * cap
    values: NDArray[np.float32] = logits.float().numpy()
    return values


@pytest.mark.parametrize(("name", "cut"), EVERY)
def test_parts_are_the_whole(made: Made, name: str, cut: int) -> None:
    """Logits, hidden rows and KV: of transformers, and of the target as one engine."""
    folder, tokens = made(name, cut), prompt_of(30)
    want, want_hidden = forward(reference(name), tokens)
    whole = folder.open_whole()
    for chunk in (512, 3):
        target = folder.open(cut, prefill_chunk=chunk, initial_capacity=4)
        got = target.prefill(np.array([tokens[:13]]), want_logits=True)
        assert got.logits is not None and got.logits.shape[1] == got.hidden.shape[1] == 1
        assert relative_error(got.logits[0], want[12:13]) <= CLOSE
        assert relative_error(got.hidden[0], want_hidden[12:13]) <= CLOSE
        for start, rows in ((13, 1), (14, 9), (23, 7)):
            got = target.verify(np.array([tokens[start : start + rows]]), want_logits=True)
            assert got.logits is not None
            block = slice(start, start + rows)
            assert relative_error(got.logits[0], want[block]) <= CLOSE
            assert relative_error(got.hidden[0], want_hidden[block]) <= CLOSE
            assert got.argmax[0].tolist() == got.logits[0].argmax(1).tolist()
            target.check_integrity()
        whole.truncate(0)
        whole.prefill(np.array([tokens]))
        same_rows(kv_rows(target, 30), kv_rows(whole, 30))


@pytest.mark.parametrize(("name", "cut"), EVERY)
def test_drafts_are_the_first_layers(made: Made, name: str, cut: int) -> None:
    """Draft logits == head(final_norm(h_E)), and verification goes on from there."""
    folder, tokens = made(name, cut), prompt_of(20)
    want, early = forward(reference(name), tokens)[0], exit_logits(name, tokens, cut)
    target = folder.open(cut)
    target.prefill(np.array([tokens[:14]]))
    for position in range(14, 18):
        got = target.draft(tokens[position], want_logits=True)
        assert got.logits is not None and got.logits.shape[1] == 1
        assert relative_error(got.logits[0, 0], early[position]) <= CLOSE
        assert (target.length, target.front_length) == (14, position + 1)
        target.check_integrity()
    got = target.verify(np.array([tokens[14:]]), want_logits=True)
    assert got.logits is not None and relative_error(got.logits[0], want[14:]) <= CLOSE
    assert target.length == target.front_length == 20


@pytest.mark.parametrize(("name", "cut"), EVERY)
def test_same_text_for_every_number_of_drafts(made: Made, name: str, cut: int) -> None:
    """transformers' greedy text, KV of a fresh prefill after every round (I2), and everything is
    accepted where the exit is the end."""
    folder, prompt = made(name, cut), prompt_of(9)
    want = greedy(reference(name), prompt, NEW)
    target = folder.open(cut, initial_capacity=8)
    drafter = EarlyExitDrafter(target)
    fresh = folder.open(cut)
    fresh.prefill(np.array([[*prompt, *want.tokens]]))
    rows = kv_rows(fresh, fresh.length)

    def watch(done: Round) -> None:
        progress.check_integrity()
        length = done.committed_length - 1
        assert target.length == target.front_length == length
        same_rows(kv_rows(target, length), {n: a[:, :, :length] for n, a in rows.items()})

    progress = Progress(target, [])
    for k in range(9):
        progress.committed = [0] * (len(prompt) + 1)

        def on_round(done: Round) -> None:
            progress.committed = [0] * done.committed_length
            watch(done)

        got, meter = run(target, drafter, folder, prompt, k, on_round=on_round)
        same_tokens(got, want)
        drafted = sum(counts.drafted for counts in meter.rounds)
        accepted = sum(counts.accepted for counts in meter.rounds)
        assert (drafted > 0) == (k > 0)
        if cut == folder.config.num_hidden_layers:
            assert accepted == drafted


@pytest.mark.parametrize(("name", "cut"), MAIN)
@pytest.mark.parametrize("k", [1, 4])
def test_the_front_runs_once_per_token(
    made: Made, name: str, cut: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token that is drafted or committed passes the front once, whatever is rejected."""
    folder, prompt = made(name, cut), prompt_of(9)
    target = folder.open(cut, initial_capacity=CONTEXT)
    fed: list[int] = []
    feed = target._feed_front

    def count(tokens: NDArray[np.int64], start: int, first_row: int) -> None:
        fed.append(tokens.shape[1])
        feed(tokens, start, first_row)

    monkeypatch.setattr(target, "_feed_front", count)
    drafted: list[int] = []
    run(
        target,
        EarlyExitDrafter(target),
        folder,
        prompt,
        k,
        on_round=lambda done: drafted.append(len(done.proposal)),
    )
    assert fed[0] == len(prompt)
    # Per round: the last committed token and every draft, one by one.
    assert fed[1:] == [1] * sum(1 + count for count in drafted)


@pytest.mark.parametrize(("name", "cut"), MAIN)
def test_other_drafters_on_the_parts(made: Made, name: str, cut: int) -> None:
    """Verification is front, back and head; tokens other than the front's are fed anew."""
    folder, prompt = made(name, cut), prompt_of(7) * 3
    want = greedy(reference(name), prompt, NEW)
    target = folder.open(cut)
    same_tokens(run(target, NoDrafter(), folder, prompt, 0)[0], want)
    same_tokens(run(target, NgramDrafter(2), folder, prompt, 5)[0], want)
    text = known_text(name, tuple(prompt), NEW)
    scripted: Scripted = Wrong(text)
    same_tokens(run(target, scripted, folder, prompt, 3)[0], want)


@pytest.mark.parametrize(("name", "cut"), MAIN)
def test_tokens_that_differ_from_the_front(made: Made, name: str, cut: int) -> None:
    """The front is ahead by four tokens: by all, some or none of them the verification is the
    same; and so it is after a truncation, and when the buffers have moved."""
    folder, tokens = made(name, cut), prompt_of(20)
    want = forward(reference(name), tokens)[0]
    target = folder.open(cut, initial_capacity=12)
    for same in range(5):
        for rows in (1, 3, 6):
            target.truncate(0)
            target.prefill(np.array([tokens[:10]]))
            for at in range(4):
                wrong = (tokens[10 + at] + 1) % 256
                target.draft(tokens[10 + at] if at < same else wrong)
            got = target.verify(np.array([tokens[10 : 10 + rows]]), want_logits=True)
            assert got.logits is not None
            assert relative_error(got.logits[0], want[10 : 10 + rows]) <= CLOSE
    target.truncate(10)
    target.draft(1)
    target.truncate(10)
    assert target.front_length == 10
    with pytest.raises(ValueError, match="cannot truncate"):
        target.truncate(11)


@pytest.mark.parametrize(("name", "cut"), MAIN)
def test_drafting_up_to_the_end_of_the_context(made: Made, name: str, cut: int) -> None:
    folder, prompt = made(name, cut), prompt_of(9)
    target = folder.open(cut, max_context=len(prompt) + 5)
    drafter = EarlyExitDrafter(target)
    drafter.begin(prompt)
    target.prefill(np.array([prompt]))
    drafter.observe([1], np.zeros((1, 1)))
    assert len(drafter.propose(9, Sampler()).tokens) == 4
    target.prefill(np.array([[1, 2, 3, 4, 5]]))
    drafter.observe([2, 3, 4, 5, 6], np.zeros((5, 1)))
    assert drafter.propose(9, Sampler()).tokens == []


def test_hidden_rows_of_the_prompt(made: Made) -> None:
    """For drafters that need them, where every layer owns its KV."""
    tokens = prompt_of(20)
    want = forward(reference("llama"), tokens)[1]
    for cut in (1, 2):
        target = made("llama", cut).open(cut, prefill_chunk=6)
        seen: list[tuple[int, NDArray[Any]]] = []

        def keep(start: int, hidden: NDArray[Any], seen: Any = seen) -> None:
            seen.append((start, hidden.copy()))

        rows = target.prefill(np.array([tokens]), on_rows=keep)
        assert [start for start, _ in seen] == [0, 5, 10, 15]  # as even as they can be
        assert relative_error(np.concatenate([x for _, x in seen]), want) <= CLOSE
        assert rows.hidden.shape[1] == 1
        assert relative_error(rows.hidden[0, 0], want[-1]) <= CLOSE


class Recorded(EarlyExitCandidateGenerator):  # type: ignore[misc]
    """transformers' generator, with what it proposed behind how many tokens."""

    proposals: list[tuple[int, list[int]]] = []  # noqa: RUF012

    def get_candidates(self, input_ids: torch.Tensor, **options: Any) -> Any:
        found = super().get_candidates(input_ids, **options)
        length = input_ids.shape[1]
        self.proposals.append((length, found[0][0, length:].tolist()))
        return found


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    from transformers.generation import utils

    monkeypatch.setattr(utils, "EarlyExitCandidateGenerator", Recorded)
    Recorded.proposals.clear()
    return Recorded.proposals


@pytest.mark.parametrize(
    ("name", "cut"),
    params(("llama", (1,)), slow=False)
    + params(*(group for group in SLOW if not group[0].startswith("gemma4")), slow=True),
)
def test_proposals_are_those_of_transformers(
    made: Made, name: str, cut: int, recorded: list[tuple[int, list[int]]]
) -> None:
    """Behind the same tokens the same drafts as ``generate(assistant_early_exit=E)``, which does
    not run on a Gemma 4 (its config refuses fewer layers). It drafts the first token too."""
    prompt = prompt_of(9)
    model = tiny_models.build(name)
    settings = model.generation_config
    settings.eos_token_id = None
    settings.num_assistant_tokens = 4
    settings.num_assistant_tokens_schedule = "constant"
    settings.assistant_confidence_threshold = 0.0
    ids = torch.tensor([prompt])
    with torch.no_grad():
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            assistant_early_exit=cut,
        )[0].tolist()
    target = made(name, cut).open(cut)
    drafter = EarlyExitDrafter(target)
    assert recorded[0][0] == len(prompt) and len(recorded) > 3
    for length, proposal in recorded:
        if not proposal:
            continue
        target.truncate(0)
        target.prefill(np.array([text[: length - 1]]))
        drafter.begin(text[: length - 1])
        drafter.observe(text[length - 1 : length], np.zeros((1, 1)))
        assert drafter.propose(len(proposal), Sampler()).tokens == proposal


@pytest.mark.parametrize(("name", "cut"), EVERY)
def test_nothing_is_stored_or_prepacked_twice(made: Made, name: str, cut: int) -> None:
    """Parts and whole are on the same bytes, and each matrix is in one part only."""
    folder = made(name, cut)
    whole = places(folder.path / "target.onnx")
    seen: set[tuple[int, int]] = set()
    for spec in folder.parts(cut).values():
        assert engines.declared_io(folder.path / spec.file) == (spec.inputs, spec.outputs)
        found = matrices(folder.path / spec.file)
        assert not found & seen
        seen |= found
    assert seen == matrices(folder.path / "target.onnx") <= whole


def matrices(path: Path) -> set[tuple[int, int]]:
    """Places of the weights that ONNX Runtime packs anew when it opens an engine: all of two and
    more axes that are not only looked up."""
    graph = ir.load(path).graph
    looked_up = {node.inputs[0] for node in graph if node.op_type == "Gather"}
    multiplied = {value for node in graph if "MatMul" in node.op_type for value in node.inputs}
    return {
        (tensor.offset or 0, tensor.length or 0)
        for value in graph.initializers.values()
        if isinstance(tensor := value.const_value, ir.ExternalTensor) and len(tensor.shape) > 1
        if value in multiplied or value not in looked_up
    }


def places(path: Path) -> set[tuple[int, int]]:
    tensors = [value.const_value for value in ir.load(path).graph.initializers.values()]
    return {(t.offset or 0, t.length or 0) for t in tensors if isinstance(t, ir.ExternalTensor)}


@pytest.mark.parametrize("early_exit", [0, -1, 3])
def test_exits_out_of_range(early_exit: int) -> None:
    config = tiny_models.build("llama").config
    with pytest.raises(ValueError, match=rf"early_exit must be in 1\.\.2, got {early_exit}"):
        plan_split(config, early_exit)


def test_sampled_drafts_carry_what_they_were_drawn_from(made: Made) -> None:
    folder, prompt = made("llama", 1), prompt_of(9)
    target = folder.open(1)
    drafter = EarlyExitDrafter(target)
    drafter.begin(prompt)
    target.prefill(np.array([prompt]))
    drafter.observe([1], np.zeros((1, 1)))
    sampler = Sampler(do_sample=True, seed=3)
    tokens, q = drafter.propose(4, sampler)
    early = exit_logits("llama", [*prompt, 1, *tokens], 1)
    assert q is not None and len(tokens) == len(q) == 4
    for slot, distribution in enumerate(q):
        logits = early[len(prompt) + slot].astype(np.float64)
        want = np.exp(logits - logits.max())
        np.testing.assert_allclose(
            distribution.dense(len(want)), want / want.sum(), rtol=1e-4, atol=1e-9
        )
    assert run(target, drafter, folder, prompt, 4, Sampler(do_sample=True, seed=5))[0]


def test_drafting_stops_where_it_is_not_confident(made: Made) -> None:
    folder, prompt = made("llama", 1), prompt_of(9)
    target = folder.open(1)
    drafter = EarlyExitDrafter(target)
    drafter.begin(prompt)
    target.prefill(np.array([prompt]))
    drafter.observe([1], np.zeros((1, 1)))
    assert len(drafter.propose(4, Sampler(confidence_threshold=1.0)).tokens) == 1
    assert target.front_length == target.length + 1
