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
    hidden[b, i]     = final_norm(h[b, first_row + i])

The MTP drafter engine (Gemma 4 assistant) reads the target's KV rows ``0 .. past_length - 1``
and never writes::

    x = [embedding(token), hidden]       token: the last committed one, not in the KV
    token, hidden, logits = step(x)  at position past_length, repeated ``num_draft`` times
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DType(StrEnum):
    """Element types that cross the border of an engine."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    INT64 = "int64"
    INT32 = "int32"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return {"float32": 4, "float16": 2, "int64": 8, "int32": 4}[self.value]


class Role(StrEnum):
    """What an engine is for; the key of its entry in the manifest."""

    TARGET = "target"
    MTP_DRAFTER = "mtp_drafter"


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

# Outputs of the target.
LOGITS = "logits"  # float32 [batch, wanted, vocabulary]
ARGMAX = "argmax"  # int64 [batch, wanted]
HIDDEN = "hidden"  # KV dtype [batch, wanted, hidden size]; also an input of the MTP drafter

# The MTP drafter: inputs besides past_length, hidden [batch, 1, hidden size] and the KV buffers.
TOKEN = "token"  # int64 [batch, 1], the last committed token
NUM_DRAFT = "num_draft"  # int64 scalar (shape []), steps of this call

# Outputs of the MTP drafter.
DRAFT_TOKENS = "draft_tokens"  # int64 [batch, drafts]
DRAFT_LOGITS = "draft_logits"  # float32 [batch, drafts, candidates]
DRAFT_CANDIDATES = "draft_candidates"  # int64 [batch, drafts, candidates]; centroid head only

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
        for name in ("heads", "head_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.layer < 0 or (self.window is not None and self.window < 1):
            raise ValueError(f"layer {self.layer} with window {self.window} cannot be")

    def spec(self, name: str, dtype: DType) -> TensorSpec:
        """The buffer as a tensor called ``name``."""
        return TensorSpec(name, dtype, (BATCH, self.heads, CAPACITY, self.head_size))


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
    kv: tuple[KvLayer, ...], dtype: DType, vocab_size: int, hidden_size: int
) -> tuple[TensorSpec, ...]:
    """Outputs of a target engine; the KV buffers come last, in the order of the inputs."""
    return (
        TensorSpec(LOGITS, DType.FLOAT32, (BATCH, WANTED, vocab_size)),
        TensorSpec(ARGMAX, DType.INT64, (BATCH, WANTED)),
        TensorSpec(HIDDEN, dtype, (BATCH, WANTED, hidden_size)),
        *(layer.spec(present(layer.layer, part), dtype) for layer in kv for part in Part),
    )


def mtp_drafter_inputs(
    kv: tuple[KvLayer, ...], dtype: DType, hidden_size: int
) -> tuple[TensorSpec, ...]:
    """Inputs of an MTP drafter that reads the target's buffers ``kv``."""
    return (
        TensorSpec(TOKEN, DType.INT64, (BATCH, 1)),
        TensorSpec(HIDDEN, dtype, (BATCH, 1, hidden_size)),
        TensorSpec(PAST_LENGTH, DType.INT32, (BATCH,)),
        TensorSpec(NUM_DRAFT, DType.INT64, ()),
        *(layer.spec(past(layer.layer, part), dtype) for layer in kv for part in Part),
    )


def mtp_drafter_outputs(candidates: int, sparse: bool) -> tuple[TensorSpec, ...]:
    """Outputs of an MTP drafter that scores ``candidates`` tokens per step.

    ``sparse``: the candidates change per step and are returned too (centroid head); otherwise
    candidate i is token i.
    """
    outputs = (
        TensorSpec(DRAFT_TOKENS, DType.INT64, (BATCH, DRAFTS)),
        TensorSpec(DRAFT_LOGITS, DType.FLOAT32, (BATCH, DRAFTS, candidates)),
    )
    if not sparse:
        return outputs
    return (*outputs, TensorSpec(DRAFT_CANDIDATES, DType.INT64, (BATCH, DRAFTS, candidates)))
