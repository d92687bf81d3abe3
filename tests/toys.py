"""Toy engines with a closed formula, built by code, that keep the whole contract.

The target writes a real KV row per token (the token and its position) and says

    next = (token + history_weight * history + 1) mod modulus, from position ``fixed_from`` on 4
    history = sum of the tokens in KV rows 0 .. position

or, with a ``script``, ``next = script[position]``. So a KV that holds anything but the committed
prefix shows up in the tokens. ``Toy.plain`` is the same in plain Python. With a ``table`` the
probabilities of the next token are ``table[token]``, so that exact laws are known in closed form.
With ``shaped`` the shape of a run shows in the tokens, as in real engines in the last bits: rows,
``first_row`` and ``past_length`` are added, and there is no closed formula.

The MTP drafter drafts ``token + 1, token + 2, …`` (right for ``history_weight=0``), but only when
token, hidden row, length and KV belong together; otherwise everything it drafts is wrong. That is
its first candidate; the others are the tokens behind it, with logits ``drafter_logits`` that are
given in descending order::

    token[i] = token[i - 1] + 1 + argmax(drafter_logits + noise[i])  mod modulus
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tokenizers
from onnx import TensorProto, helper, numpy_helper
from tokenizers import decoders, models, pre_tokenizers

from specrun import contract
from specrun.contract import (
    DRAFT_ENGINE,
    MTP_DRAFTER_ENGINE,
    TARGET_ENGINE,
    DType,
    KvLayer,
    Role,
    TensorSpec,
)
from specrun.manifest import (
    FORMAT,
    MANIFEST,
    DrafterSpec,
    DraftMethod,
    EngineSpec,
    FileEntry,
    Generation,
    Manifest,
    MtpContract,
    Requires,
    Source,
    TokenizerSpec,
    dumps,
    sha256_of,
)
from specrun.response_format import ResponseFormat

LAYER = KvLayer(layer=0, heads=1, head_size=2, window=None)
HIDDEN_SIZE = 2
FIXED = 4  # the token from position ``fixed_from`` on
ONNX_TYPES = {
    DType.FLOAT32: TensorProto.FLOAT,
    DType.FLOAT16: TensorProto.FLOAT16,
    DType.BFLOAT16: TensorProto.BFLOAT16,
    DType.INT64: TensorProto.INT64,
    DType.INT32: TensorProto.INT32,
}


@dataclass(frozen=True)
class Toy:
    """A toy folder: formula, vocabulary and what its manifest declares."""

    modulus: int = 10
    history_weight: int = 0
    fixed_from: int = 1 << 30
    script: tuple[int, ...] | None = None
    vocabulary: tuple[str, ...] = tuple("0123456789")
    specials: tuple[str, ...] = ()
    padded_vocab: int = 0  # the target's vocabulary, where larger than the tokenizer's
    kv_dtype: DType = DType.FLOAT32
    max_context: int = 1024
    eos: tuple[int, ...] = ()
    bos: int | None = None
    add_bos: bool = False
    chat_template: str | None = None
    response: ResponseFormat | None = None
    drafter: bool = False
    drafter_logits: tuple[float, ...] = (10.0, 2.0, 1.0)
    max_num_draft: int = 16
    num_assistant_tokens: int = 3
    tokenizer: tokenizers.Tokenizer | None = None
    table: tuple[tuple[float, ...], ...] | None = None
    draft: Toy | None = None  # a second toy in the folder that drafts for this one
    shaped: bool = False
    defaults: tuple[tuple[str, Any], ...] = ()  # generation defaults of the checkpoint

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        size = self.tokenizer.get_vocab_size() if self.tokenizer else len(self.vocabulary)
        return max(size, self.padded_vocab)

    def next(self, tokens: Sequence[int]) -> int:
        """The token after ``tokens``."""
        position = len(tokens) - 1
        if self.table is not None:
            return int(np.argmax(self.table[tokens[-1]]))
        if self.script is not None:
            return self.script[min(position, len(self.script) - 1)]
        if position >= self.fixed_from:
            return FIXED
        return (tokens[-1] + self.history_weight * sum(tokens) + 1) % self.modulus

    def plain(self, prompt: Sequence[int], count: int) -> list[int]:
        """``count`` tokens after ``prompt``, one by one: the obviously correct twin."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.next(tokens))
        return tokens[len(prompt) :]


def scripted(tokens: Sequence[int], *, prompt_length: int = 1, **fields: Any) -> Toy:
    """A toy that answers a prompt of that length with ``tokens``, then repeats the last."""
    return Toy(script=(0,) * (prompt_length - 1) + tuple(tokens), **fields)


class Graph:
    """A small graph builder: ``g.op("Add", a, b)`` returns the name of the result."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        """An initializer."""
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(np.asarray(value, dtype=dtype), name))
        return name

    def op(self, kind: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        """A node with one output."""
        name = out or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def top_two(self, value: str) -> tuple[str, str]:
        """The two largest of the last axis, which goes."""
        top = f"t{len(self.nodes)}"
        both = helper.make_node("TopK", [value, self.const([2])], [top, f"{top}.at"], axis=-1)
        self.nodes.append(both)
        first, second = (self.op("Gather", top, self.const(i), axis=-1) for i in (0, 1))
        return first, second

    def int64(self, value: str) -> str:
        """``value`` as int64."""
        return self.op("Cast", value, to=TensorProto.INT64)

    def save(self, path: Path, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        """Check and write the model."""

        def info(spec: TensorSpec) -> Any:
            return helper.make_tensor_value_info(
                spec.name, ONNX_TYPES[spec.dtype], list(spec.shape)
            )

        graph = helper.make_graph(
            self.nodes,
            path.stem,
            [info(spec) for spec in inputs],
            [info(spec) for spec in outputs],
            self.initializers,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        onnx.checker.check_model(model)
        path.write_bytes(model.SerializeToString())


def write_target(path: Path, toy: Toy) -> None:
    """Build the target of the module's formula."""
    g = Graph()
    kv = ONNX_TYPES[toy.kv_dtype]
    key = contract.past(0, contract.Part.KEY)
    shape = g.op("Shape", contract.TOKENS)
    batch = g.op("Gather", shape, g.const(0))
    rows = g.op("Gather", shape, g.const(1))
    zero, one = g.const(0), g.const(1)
    past = g.op("Unsqueeze", g.int64(contract.PAST_LENGTH), g.const([1]))
    position = g.op("Add", past, g.op("Range", zero, rows, one))  # [batch, rows]

    def column(value: str) -> str:
        return g.op("Unsqueeze", value, g.const([2]))

    sequence = g.op("Unsqueeze", g.op("Range", zero, batch, one), g.const([1]))
    sequence = g.op("Add", sequence, g.op("Mul", position, zero))
    head = g.op("Mul", position, zero)
    index = g.op("Concat", column(sequence), column(head), column(position), axis=2)
    pair = g.op("Concat", column(contract.TOKENS), column(position), axis=2)
    row = g.op("Cast", pair, to=kv)  # [batch, rows, 2]: token and position
    for part in contract.Part:
        g.op("ScatterND", contract.past(0, part), index, row, out=contract.present(0, part))

    # Behind the length there may be anything, so rows are selected, not multiplied by 0.
    present = contract.present(0, contract.Part.KEY)
    stored = g.op("Gather", g.op("Squeeze", present, g.const([1])), zero, axis=2)
    capacity = g.op("Gather", g.op("Shape", key), g.const(2))
    visible = g.op("LessOrEqual", g.op("Range", zero, capacity, one), column(position))
    stored = g.op("Unsqueeze", stored, g.const([1]))
    seen = g.op("Where", visible, g.int64(stored), zero)
    history = g.op("ReduceSum", seen, g.const([2]), keepdims=0)  # [batch, rows]

    if toy.table is not None:
        best = g.op("Gather", g.const(np.argmax(toy.table, axis=1)), contract.TOKENS, axis=0)
        answer = g.op("Add", best, g.op("Mul", history, zero))
    elif toy.script is None:
        weighted = g.op("Mul", history, g.const(toy.history_weight))
        total = g.op("Add", g.op("Add", contract.TOKENS, weighted), one)
        if toy.shaped:
            shape = g.op("Add", g.op("Add", past, rows), contract.FIRST_ROW)
            total = g.op("Add", total, shape)
        formula = g.op("Mod", total, g.const(toy.modulus))
        fixed = g.op("GreaterOrEqual", position, g.const(toy.fixed_from))
        answer = g.op("Where", fixed, g.const(FIXED), formula)
    else:
        last = g.const(len(toy.script) - 1)
        answer = g.op("Gather", g.const(toy.script), g.op("Min", position, last), axis=0)
        answer = g.op("Add", answer, g.op("Mul", history, zero))

    end, axis = g.const([1 << 40]), g.const([1])
    g.op("Slice", answer, contract.FIRST_ROW, end, axis, out=contract.ARGMAX)
    if toy.table is None:
        values = g.const([0.0, 10.0], np.float32)
        g.op("OneHot", contract.ARGMAX, g.const(toy.vocab_size), values, out=contract.LOGITS)
    else:
        wanted = g.op("Slice", contract.TOKENS, contract.FIRST_ROW, end, axis)
        with np.errstate(divide="ignore"):
            table = g.const(np.log(np.array(toy.table)), np.float32)
        g.op("Gather", table, wanted, out=contract.LOGITS, axis=0)
    best_two = g.top_two(contract.LOGITS)
    g.op("Sub", *best_two, out=contract.MARGIN)
    swapped = g.op("Concat", column(position), column(contract.TOKENS), axis=2)
    hidden = g.op("Cast", swapped, to=kv)
    g.op("Slice", hidden, contract.FIRST_ROW, end, axis, out=contract.HIDDEN)
    g.save(path, *_io(Role.TARGET, toy))


def write_drafter(path: Path, toy: Toy) -> None:
    """Build the MTP drafter of the module's formula."""
    g = Graph()
    zero, one = g.const(0), g.const(1)
    past = g.op("Unsqueeze", g.int64(contract.PAST_LENGTH), g.const([1]))  # [batch, 1]
    last = g.op("Sub", past, one)
    key = g.op("Squeeze", contract.past(0, contract.Part.KEY), g.const([1]))
    index = g.op("Unsqueeze", last, g.const([2]))
    row = g.op("GatherND", key, index, batch_dims=1)  # [batch, 1, 2]: token, position
    row = g.int64(row)
    hidden = g.int64(contract.HIDDEN)  # [batch, 1, 2]: position, token

    def item(value: str, place: int) -> str:
        return g.op("Gather", value, g.const(place), axis=2)

    same_position = g.op("Equal", item(hidden, 0), last)
    same_row = g.op("Equal", item(row, 1), last)
    same_token = g.op("Equal", item(row, 0), item(hidden, 1))
    follows = g.op("Add", item(hidden, 1), one)
    follows = g.op("Equal", g.op("Mod", follows, g.const(toy.modulus)), contract.TOKEN)
    right = g.op("And", g.op("And", same_position, same_row), g.op("And", same_token, follows))
    off = g.op("Where", right, one, g.const(3))

    # The first num_draft slices of the noise; more of them than there are is an error.
    steps = g.op("Range", zero, contract.NUM_DRAFT, one)
    noise = g.op("Gather", contract.NOISE, steps, axis=1)
    with np.errstate(invalid="ignore"):  # -inf alone: no candidate exists
        below = np.array(toy.drafter_logits) - toy.drafter_logits[0]
    scores = g.op("Add", noise, g.const(below, np.float32))
    choice = g.op("ArgMax", scores, axis=2, keepdims=0)  # [batch, drafts]
    # Counted from the token: what the first step is off by, 1 more per step, and the choices.
    chosen = g.op("CumSum", choice, one)
    first = g.op("Add", g.op("Add", contract.TOKEN, off), steps)
    modulus = g.const(toy.modulus)
    g.op("Mod", g.op("Add", first, chosen), modulus, out=contract.DRAFT_TOKENS)
    before = g.op("Add", first, g.op("Sub", chosen, choice))
    places = g.const(np.arange(len(toy.drafter_logits)))
    candidates = g.op("Add", g.op("Unsqueeze", before, g.const([2])), places)
    g.op("Mod", candidates, modulus, out=contract.DRAFT_CANDIDATES)
    shape = g.op("Shape", candidates)
    logits = g.const(toy.drafter_logits, np.float32)
    g.op("Expand", logits, shape, out=contract.DRAFT_LOGITS)
    g.save(path, *_io(Role.MTP_DRAFTER, toy))


def _io(role: Role, toy: Toy) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    layers = (LAYER,)
    if role is Role.TARGET:
        return (
            contract.target_inputs(layers, toy.kv_dtype),
            contract.target_outputs(
                layers, toy.kv_dtype, toy.vocab_size, HIDDEN_SIZE, all_hidden=False
            ),
        )
    return (
        contract.mtp_drafter_inputs(layers, toy.kv_dtype, HIDDEN_SIZE, len(toy.drafter_logits)),
        contract.mtp_drafter_outputs(len(toy.drafter_logits)),
    )


def toy_tokenizer(toy: Toy) -> tokenizers.Tokenizer:
    """One token per entry of the vocabulary; texts are split into characters."""
    vocabulary = {text: id_ for id_, text in enumerate(toy.vocabulary)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=toy.vocabulary[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(toy.specials))
    return tokenizer


def _engine(role: Role, toy: Toy, mtp: MtpContract | None, name: str) -> EngineSpec:
    inputs, outputs = _io(role, toy)
    return EngineSpec(
        role=role,
        file=f"{name}.onnx",
        backend="onnxruntime",
        precision="fp32",
        hidden_size=HIDDEN_SIZE,
        vocab_size=toy.vocab_size,
        kv_dtype=toy.kv_dtype,
        kv=(LAYER,),
        all_hidden=False,
        inputs=inputs,
        outputs=outputs,
        requires=Requires(onnxruntime="1.20.0", opset=20, ir_version=10),
        step_bytes=1000,
        weights=None,
        mtp=mtp,
    )


def entry(folder: Path, name: str) -> FileEntry:
    """A file of the folder as the manifest lists it."""
    path = folder / name
    return FileEntry(path=name, size=path.stat().st_size, sha256=sha256_of(path))


def write_folder(folder: Path, toy: Toy) -> Path:
    """Write a complete engine folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = toy.tokenizer or toy_tokenizer(toy)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = ["target.onnx", "tokenizer.json"]
    write_target(folder / "target.onnx", toy)
    engines = {TARGET_ENGINE: _engine(Role.TARGET, toy, None, TARGET_ENGINE)}
    source = Source(id="toy", revision=None, model_type="toy", architecture="Toy")
    drafters: dict[DraftMethod, DrafterSpec] = {}
    target_sha256 = sha256_of(folder / "target.onnx")
    tokenizer_sha = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    if toy.chat_template is not None:
        (folder / "chat_template.jinja").write_text(toy.chat_template, encoding="utf-8")
        names.append("chat_template.jinja")
    if toy.drafter:
        write_drafter(folder / "mtp_drafter.onnx", toy)
        names.append("mtp_drafter.onnx")
        mtp = MtpContract(
            concat_order=("embedding", "hidden"),
            position="past_length",
            hidden_row="last_committed_kv_row",
            kv_map={"full_attention": 0},
            windows={"full_attention": None},
            head="plain",
            candidates=len(toy.drafter_logits),
        )
        engines[MTP_DRAFTER_ENGINE] = _engine(Role.MTP_DRAFTER, toy, mtp, MTP_DRAFTER_ENGINE)
        drafters["mtp-drafter"] = DrafterSpec(
            source=dataclasses.replace(source, id="toy-drafter"),
            engines=(MTP_DRAFTER_ENGINE,),
            max_num_draft=toy.max_num_draft,
            num_assistant_tokens=toy.num_assistant_tokens,
            schedule="constant",
            target_sha256=target_sha256,
            tokenizer_sha256=tokenizer_sha,
        )
    if toy.draft is not None:
        write_target(folder / "draft.onnx", toy.draft)
        names.append("draft.onnx")
        engines[DRAFT_ENGINE] = _engine(Role.TARGET, toy.draft, None, DRAFT_ENGINE)
        drafters["draft"] = DrafterSpec(
            source=dataclasses.replace(source, id="toy-draft"),
            engines=(DRAFT_ENGINE,),
            max_num_draft=None,
            num_assistant_tokens=toy.num_assistant_tokens,
            schedule="constant",
            target_sha256=target_sha256,
            tokenizer_sha256=tokenizer_sha,
            max_context=toy.draft.max_context,
        )
    bos = {"bos_token": tokenizer.id_to_token(toy.bos) or ""} if toy.bos is not None else {}
    manifest = Manifest(
        format=FORMAT,
        target=source,
        drafters=drafters,
        tokenizer=TokenizerSpec(
            file="tokenizer.json",
            sha256=tokenizer_sha,
            vocab_size=tokenizer.get_vocab_size(),
            add_bos=toy.add_bos,
            chat_template="chat_template.jinja" if toy.chat_template is not None else None,
            special_tokens=bos,
            response=toy.response,
        ),
        generation=Generation(
            eos_token_ids=toy.eos,
            bos_token_id=toy.bos,
            pad_token_id=None,
            max_context=toy.max_context,
            defaults=dict(toy.defaults),
        ),
        engines=engines,
        files=tuple(entry(folder, name) for name in names),
        versions={},
        parity=None,
        quality=None,
        notes=(),
    )
    (folder / MANIFEST).write_text(dumps(manifest), encoding="utf-8")
    return folder


Change = Callable[[dict[str, Any]], object]


def agree(folder: Path) -> None:
    """Let the manifest agree with the files as they are, as if they had been exported so."""
    file = folder / MANIFEST
    data = json.loads(file.read_text(encoding="utf-8"))
    hashes: dict[str, str] = {}
    for listed in data["files"]:
        path = folder / listed["path"]
        listed["size"] = path.stat().st_size
        hashes[listed["sha256"]] = sha256_of(path)
    text = re.sub("|".join(hashes), lambda found: hashes[found[0]], json.dumps(data))
    file.write_text(text, encoding="utf-8")


def change(folder: Path, edit: Change) -> None:
    """Edit the manifest of a folder as JSON."""
    path = folder / MANIFEST
    data = json.loads(path.read_text(encoding="utf-8"))
    edit(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def put(*path: Any, value: Any) -> Change:
    """An edit that sets one field."""

    def edit(data: dict[str, Any]) -> None:
        place: Any = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return edit
