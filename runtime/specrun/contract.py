"""The contract between exporter and runtime: names, dtypes and symbolic sizes of every engine.

Standard library only. The exporter writes engines from these names and the runtime reads them by
the same names, so each name stands here once and nowhere else.

Sizes (symbolic dimensions)
    ``batch``     sequences in a call; each has its own length
    ``rows``      tokens fed per sequence in this call (1: plain decoding, 1 + k: verification)
    ``wanted``    rows whose logits are returned: ``rows - first_row``
    ``capacity``  rows that the KV buffers hold; at least ``max(past_length) + rows``
    ``drafts``    tokens drafted in a call, at most the exported maximum

The target engine, in formulas, for sequence b and row r::

    position[b, r]   = past_length[b] + r
    KV row position  <- key/value of tokens[b, r]        (written in place into the bound buffers)
    attends to       KV rows max(0, position - window + 1) .. position
    logits[b, i]     = head(final_norm(h[b, first_row + i]))
    argmax[b, i]     = first index of the largest logits[b, i]
    margin[b, i]     = largest of logits[b, i] less the second largest
    hidden[b, r]     = final_norm(h[b, r]); where layers share KV only for the wanted rows,
                       hidden[b, i] = final_norm(h[b, first_row + i])

The MTP drafter engine (Gemma 4 assistant) reads the target's KV rows ``0 .. past_length - 1``
and never writes::

    x = [embedding(token), hidden]       token: the last committed one, not in the KV
    logits, candidates, hidden = step(x)  at position past_length; the most likely candidates
    token = candidates[argmax(logits - logits[0] + noise)],  repeated ``num_draft`` times

With zero noise that is the most likely token; with ``temperature * Gumbel`` noise an exact sample
of ``softmax(logits / temperature)`` over the candidates.

The engine of MTP layer k (DeepSeek-V3, GLM-4.5) owns KV rows; its row r belongs to the target's row
i = past_length + r, whose hidden state (layer 0) or that of layer k - 1 it is given::

    tokens[b, r]      = the token at position i + 1 + k
    x[b, r]           = project([norm(embedding(tokens[b, r])), norm(hidden[b, r])])
    next_hidden[b, r] = block(x)[b, r]  at position i + 1 + k, attending to its own rows 0 .. i
    logits[b, j]      = head(next_hidden[b, first_row + j]), of the token at position i + 2 + k
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from specrun.limits import (
    MAX_CONTEXT,
    MAX_DRAFTS,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_LAYERS,
    check_all,
)


class DType(StrEnum):
    """Element types that cross the border of an engine.

    NumPy has no ``BFLOAT16``: on the host it is its bits, moved and never computed with.
    """

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT64 = "int64"
    INT32 = "int32"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}[self.value]

    @property
    def numpy(self) -> str:
        """Name of the dtype of arrays that hold it."""
        return "uint16" if self is DType.BFLOAT16 else self.value


class Role(StrEnum):
    """What an engine is for. ``TARGET``: any whole causal model, so also one that drafts.

    ``FRONT``, ``BACK``, ``HEAD``: a target in three parts, for early exit. ``MTP_DRAFTER``: a
    Gemma 4 assistant. ``MTP_LAYER``: one MTP layer of the target's own checkpoint.
    """

    TARGET = "target"
    FRONT = "front"
    BACK = "back"
    HEAD = "head"
    MTP_DRAFTER = "mtp_drafter"
    MTP_LAYER = "mtp_layer"


# Names of engines in a folder. A target is one engine or three parts.
TARGET_ENGINE = "target"
FRONT_ENGINE, BACK_ENGINE, HEAD_ENGINE = "front", "back", "head"
TARGET_ENGINES = (TARGET_ENGINE, FRONT_ENGINE, BACK_ENGINE, HEAD_ENGINE)
MTP_DRAFTER_ENGINE = "mtp_drafter"
DRAFT_ENGINE = "draft"
UNIVERSAL_ENGINE = "universal"


def mtp_layer_engine(layer: int) -> str:
    """Name of the engine of the checkpoint's MTP layer ``layer``, counted from 0."""
    return f"mtp.{layer}"


class Part(StrEnum):
    """The two halves of a layer's KV cache."""

    KEY = "key"
    VALUE = "value"


# Symbolic dimensions.
BATCH = "batch"
ROWS = "rows"
WANTED = "wanted"
CAPACITY = "capacity"
DRAFTS = "drafts"

# Inputs of the target.
TOKENS = "tokens"  # int64 [batch, rows]
PAST_LENGTH = "past_length"  # int32 [batch], valid KV rows before this call
FIRST_ROW = "first_row"  # int64 [1], first row whose logits and hidden state are wanted
# Instead of first_row in the dialect of TensorRT, where no size depends on the value of an input.
WANTED_ROWS = "wanted_rows"  # int64 [wanted], first_row .. rows - 1


# Outputs of the target.
LOGITS = "logits"  # float32 [batch, wanted, vocabulary]
ARGMAX = "argmax"  # int64 [batch, wanted]
MARGIN = "margin"  # float32 [batch, wanted]
HIDDEN = "hidden"  # KV dtype [batch, rows or wanted, hidden size]; an input of MTP engines

# An MTP layer: inputs as the target's and hidden [batch, rows, hidden size]; logits and argmax too.
NEXT_HIDDEN = "next_hidden"  # KV dtype [batch, rows, hidden size]

# The MTP drafter: inputs besides past_length, hidden [batch, 1, hidden size] and the KV buffers.
TOKEN = "token"  # int64 [batch, 1], the last committed token
NUM_DRAFT = "num_draft"  # int64 scalar (shape []), steps of this call, at most ``drafts``
NOISE = "noise"  # float32 [batch, drafts, candidates], added to the logits before the choice

# Outputs of the MTP drafter.
DRAFT_TOKENS = "draft_tokens"  # int64 [batch, drafts]
DRAFT_LOGITS = "draft_logits"  # float32 [batch, drafts, candidates], descending, without noise
DRAFT_CANDIDATES = "draft_candidates"  # int64 [batch, drafts, candidates], their tokens

# A target in three parts: hidden states on their way, before the final norm, KV dtype.
EXIT_ROWS = "exit_rows"  # [batch, rows or wanted, hidden size], behind the front's last layer
LAST_ROWS = "last_rows"  # [batch, rows or wanted, hidden size], behind the last layer
HEAD_ROWS = "head_rows"  # [batch, rows, hidden size], either of the two
FED = (TOKENS, EXIT_ROWS, HEAD_ROWS)  # of an engine with rows one is an input
ROWS_AXIS = 1  # of these
PER_LAYER = "per_layer"  # [batch, rows or wanted, layers, size], per-layer embeddings (Gemma 4)

# Rollback is a length, so buffers carry no mark of what is valid in them.
KV_AXIS = 2  # the capacity axis of [batch, heads, capacity, head size]


def past(layer: int, part: Part) -> str:
    """Name of the input that holds a layer's KV buffer."""
    return f"past.{layer}.{part}"


def present(layer: int, part: Part) -> str:
    """Name of the output bound to the same buffer as :func:`past`."""
    return f"present.{layer}.{part}"


Dim = int | str


@dataclass(frozen=True)
class TensorSpec:
    """One input or output: its name, dtype and shape, with symbolic sizes by name."""

    name: str
    dtype: DType
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class KvLayer:
    """The KV buffers that one target layer owns: ``[batch, heads, capacity, head_size]`` each.

    ``window``: the layer attends to this many last rows, itself included (None: to all).
    """

    layer: int
    heads: int
    head_size: int
    window: int | None

    def __post_init__(self) -> None:
        check_all(
            vars(self),
            {
                "layer": (0, MAX_LAYERS),
                "heads": (1, MAX_HEADS),
                "head_size": (1, MAX_HEAD_SIZE),
                "window": (1, MAX_CONTEXT),
            },
        )

    def spec(self, name: str, dtype: DType) -> TensorSpec:
        """The buffer as a tensor called ``name``."""
        return TensorSpec(name, dtype, (BATCH, self.heads, CAPACITY, self.head_size))


@dataclass(frozen=True)
class FixedSizes:
    """What is fixed in an engine of the TensorRT dialect: rows of the KV buffers, and tokens that
    an MTP drafter drafts in each call (None: no drafter)."""

    capacity: int
    drafts: int | None = None

    def __post_init__(self) -> None:
        check_all(vars(self), {"capacity": (2, MAX_CONTEXT), "drafts": (1, MAX_DRAFTS)})

    def tensor(self, spec: TensorSpec) -> TensorSpec | None:
        """``spec`` as such an engine has it; None for what it does not have.

        Rows are wanted by their numbers, and the number of drafts is no input.
        """
        if spec.name == NUM_DRAFT:
            return None
        if spec.name == FIRST_ROW:
            return TensorSpec(WANTED_ROWS, DType.INT64, (WANTED,))
        sizes: dict[Dim, Dim | None] = {CAPACITY: self.capacity, DRAFTS: self.drafts}
        shape = tuple(sizes.get(dim) or dim for dim in spec.shape)
        return TensorSpec(spec.name, spec.dtype, shape)


def kv_bytes_per_token(layers: tuple[KvLayer, ...], dtype: DType) -> int:
    """Bytes that one token of one sequence takes in all KV buffers, keys and values."""
    return sum(2 * kv.heads * kv.head_size for kv in layers) * dtype.itemsize


def target_inputs(kv: tuple[KvLayer, ...], dtype: DType) -> tuple[TensorSpec, ...]:
    """Inputs of a target engine whose layers ``kv`` own buffers of ``dtype``."""
    return (
        TensorSpec(TOKENS, DType.INT64, (BATCH, ROWS)),
        TensorSpec(PAST_LENGTH, DType.INT32, (BATCH,)),
        TensorSpec(FIRST_ROW, DType.INT64, (1,)),
        *(layer.spec(past(layer.layer, part), dtype) for layer in kv for part in Part),
    )


def target_outputs(
    kv: tuple[KvLayer, ...], dtype: DType, vocab_size: int, hidden_size: int, *, all_hidden: bool
) -> tuple[TensorSpec, ...]:
    """Outputs of a target engine; the KV buffers come last, in the order of the inputs.

    ``all_hidden``: the hidden state of every row is returned, not of the wanted rows only.
    """
    rows = ROWS if all_hidden else WANTED
    return (
        TensorSpec(LOGITS, DType.FLOAT32, (BATCH, WANTED, vocab_size)),
        TensorSpec(ARGMAX, DType.INT64, (BATCH, WANTED)),
        TensorSpec(MARGIN, DType.FLOAT32, (BATCH, WANTED)),
        TensorSpec(HIDDEN, dtype, (BATCH, rows, hidden_size)),
        *(layer.spec(present(layer.layer, part), dtype) for layer in kv for part in Part),
    )


@dataclass(frozen=True)
class SplitContract:
    """Where a target is cut, for early exit: the front has layers ``0 .. early_exit - 1``.

    ``layers``: of the whole target; with ``early_exit == layers`` there is no back. ``reads``:
    buffers that layers of the front own and layers of the back read. ``shared_from``: the first
    layer that reads KV of another one, as all behind it do; they need the wanted rows only. None:
    every layer owns KV. ``per_layer_size``: width of what Gemma 4 adds to each layer per token;
    the front computes it for all layers, as its weights are those of one matrix.
    """

    early_exit: int
    layers: int
    reads: tuple[KvLayer, ...] = ()
    shared_from: int | None = None
    per_layer_size: int | None = None

    def __post_init__(self) -> None:
        check_all(
            vars(self),
            {
                "layers": (1, MAX_LAYERS),
                "shared_from": (0, MAX_LAYERS),
                "per_layer_size": (1, MAX_HEAD_SIZE),
            },
        )
        if not 1 <= self.early_exit <= self.layers:
            raise ValueError(f"early_exit must be in 1..{self.layers}, got {self.early_exit}")

    @property
    def has_back(self) -> bool:
        """Whether layers are left behind the front."""
        return self.early_exit < self.layers

    @property
    def front_picks(self) -> bool:
        """Whether the front drops all but the wanted rows on the way, so that it returns those."""
        return self.shared_from is not None and self.shared_from < self.early_exit

    @property
    def back_picks(self) -> bool:
        """The same of the back."""
        return self.shared_from is not None and self.early_exit < self.shared_from

    def exit_specs(self, dtype: DType, hidden_size: int, rows: str) -> tuple[TensorSpec, ...]:
        """What the front hands to the back, ``rows`` or ``wanted`` of it."""
        hidden = TensorSpec(EXIT_ROWS, dtype, (BATCH, rows, hidden_size))
        if self.per_layer_size is None or not self.has_back:
            return (hidden,)
        shape = (BATCH, rows, self.layers, self.per_layer_size)
        return (hidden, TensorSpec(PER_LAYER, dtype, shape))


def front_inputs(
    kv: tuple[KvLayer, ...], dtype: DType, split: SplitContract
) -> tuple[TensorSpec, ...]:
    """Inputs of the front of a target; ``kv``: buffers that its layers own."""
    return (
        TensorSpec(TOKENS, DType.INT64, (BATCH, ROWS)),
        TensorSpec(PAST_LENGTH, DType.INT32, (BATCH,)),
        *_first_row(split.front_picks),
        *_kv_specs(kv, dtype, past),
    )


def front_outputs(
    kv: tuple[KvLayer, ...], dtype: DType, hidden_size: int, split: SplitContract
) -> tuple[TensorSpec, ...]:
    """Outputs of the front: hidden state behind its last layer, and the KV buffers."""
    rows = WANTED if split.front_picks else ROWS
    return (*split.exit_specs(dtype, hidden_size, rows), *_kv_specs(kv, dtype, present))


def back_inputs(
    kv: tuple[KvLayer, ...], dtype: DType, hidden_size: int, split: SplitContract
) -> tuple[TensorSpec, ...]:
    """Inputs of the back of a target, at positions ``past_length ..``; ``kv``: buffers it owns.

    Without buffers of its own it may be fed the last rows of a block only, with a ``past_length``
    that counts those before them.
    """
    bound = tuple(sorted((*split.reads, *kv), key=lambda layer: layer.layer))
    return (
        *split.exit_specs(dtype, hidden_size, ROWS),
        TensorSpec(PAST_LENGTH, DType.INT32, (BATCH,)),
        *_first_row(split.back_picks),
        *_kv_specs(bound, dtype, past),
    )


def back_outputs(
    kv: tuple[KvLayer, ...], dtype: DType, hidden_size: int, split: SplitContract
) -> tuple[TensorSpec, ...]:
    """Outputs of the back: hidden state behind the last layer, and the KV buffers it owns."""
    rows = WANTED if split.back_picks else ROWS
    return (
        TensorSpec(LAST_ROWS, dtype, (BATCH, rows, hidden_size)),
        *_kv_specs(kv, dtype, present),
    )


def head_inputs(dtype: DType, hidden_size: int) -> tuple[TensorSpec, ...]:
    """Inputs of the head, which is that of the target and of early exit."""
    return (
        TensorSpec(HEAD_ROWS, dtype, (BATCH, ROWS, hidden_size)),
        TensorSpec(FIRST_ROW, DType.INT64, (1,)),
    )


def head_outputs(dtype: DType, vocab_size: int, hidden_size: int) -> tuple[TensorSpec, ...]:
    """Outputs of the head: the final norm of every row, logits of the wanted ones."""
    return target_outputs((), dtype, vocab_size, hidden_size, all_hidden=True)


def _first_row(there: bool) -> tuple[TensorSpec, ...]:
    return (TensorSpec(FIRST_ROW, DType.INT64, (1,)),) if there else ()


def _kv_specs(
    kv: tuple[KvLayer, ...], dtype: DType, name: Callable[[int, Part], str]
) -> tuple[TensorSpec, ...]:
    return tuple(layer.spec(name(layer.layer, part), dtype) for layer in kv for part in Part)


def mtp_layer_inputs(
    kv: tuple[KvLayer, ...], dtype: DType, hidden_size: int
) -> tuple[TensorSpec, ...]:
    """Inputs of an MTP layer that owns the buffers ``kv``."""
    return (
        TensorSpec(TOKENS, DType.INT64, (BATCH, ROWS)),
        TensorSpec(HIDDEN, dtype, (BATCH, ROWS, hidden_size)),
        TensorSpec(PAST_LENGTH, DType.INT32, (BATCH,)),
        TensorSpec(FIRST_ROW, DType.INT64, (1,)),
        *(layer.spec(past(layer.layer, part), dtype) for layer in kv for part in Part),
    )


def mtp_layer_outputs(
    kv: tuple[KvLayer, ...], dtype: DType, vocab_size: int, hidden_size: int
) -> tuple[TensorSpec, ...]:
    """Outputs of an MTP layer; the hidden state is that of every row."""
    return (
        TensorSpec(LOGITS, DType.FLOAT32, (BATCH, WANTED, vocab_size)),
        TensorSpec(ARGMAX, DType.INT64, (BATCH, WANTED)),
        TensorSpec(NEXT_HIDDEN, dtype, (BATCH, ROWS, hidden_size)),
        *(layer.spec(present(layer.layer, part), dtype) for layer in kv for part in Part),
    )


def mtp_drafter_inputs(
    kv: tuple[KvLayer, ...], dtype: DType, hidden_size: int, candidates: int
) -> tuple[TensorSpec, ...]:
    """Inputs of an MTP drafter that reads the target's buffers ``kv``."""
    return (
        TensorSpec(TOKEN, DType.INT64, (BATCH, 1)),
        TensorSpec(HIDDEN, dtype, (BATCH, 1, hidden_size)),
        TensorSpec(PAST_LENGTH, DType.INT32, (BATCH,)),
        TensorSpec(NUM_DRAFT, DType.INT64, ()),
        TensorSpec(NOISE, DType.FLOAT32, (BATCH, DRAFTS, candidates)),
        *(layer.spec(past(layer.layer, part), dtype) for layer in kv for part in Part),
    )


def mtp_drafter_outputs(candidates: int) -> tuple[TensorSpec, ...]:
    """Outputs of an MTP drafter that draws each token from ``candidates`` tokens.

    A logit of -inf marks a candidate that is none: the tokenizer does not have it.
    """
    return (
        TensorSpec(DRAFT_TOKENS, DType.INT64, (BATCH, DRAFTS)),
        TensorSpec(DRAFT_LOGITS, DType.FLOAT32, (BATCH, DRAFTS, candidates)),
        TensorSpec(DRAFT_CANDIDATES, DType.INT64, (BATCH, DRAFTS, candidates)),
    )
