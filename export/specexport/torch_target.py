"""A target that transformers runs with PyTorch, behind the same verbs as an engine.

The loop and the drafters of :mod:`specrun` do not see the difference. Keys and values stand in the
buffers of :class:`specrun.kv.KvBuffers`, which PyTorch and the engines of drafters share without a
copy, where their layout is that of transformers' cache; otherwise in tensors of the model's own
(multi-head latent attention, whose engines keep the compressed form, and models or buffers on a
GPU), from where rows that drafters read are copied into the buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin, DummyLayer

from specexport.models import last_hidden
from specgraphs import families
from specrun.contract import DType, Part, past
from specrun.errors import EngineError
from specrun.kv import KvBuffers
from specrun.options import PREFILL_CHUNK
from specrun.target import KvTarget, OnRows, Rows


class TorchTarget(KvTarget):
    """transformers' causal language model on KV buffers, for one sequence.

    ``early_exit``: layers of the model that draft, see ``draft``; None: it does not.
    ``read_by_drafters``: layers whose KV buffers some drafter reads.
    """

    all_hidden = True
    name = "PyTorch"

    def __init__(
        self,
        model: Any,
        kv: KvBuffers,
        *,
        prefill_chunk: int = PREFILL_CHUNK,
        early_exit: int | None = None,
        read_by_drafters: frozenset[int] = frozenset(),
    ) -> None:
        self.kv = kv
        self.prefill_chunk = prefill_chunk
        self._model = model
        self._early_exit = early_exit
        self._cap = families.softcap(model.config)
        self._ahead = 0  # rows behind ``length`` that the first layers have, see ``draft``
        self._rows = _CacheRows(kv, model.device, read_by_drafters)
        plan = families.kv_plan(model.config)
        layers = range(int(model.config.num_hidden_layers))
        self._cache = Cache(
            layers=[_CacheLayer(self._rows, i) if plan.owns(i) else DummyLayer() for i in layers]
        )

    def truncate(self, length: int) -> None:
        """Forget KV rows from ``length`` on. Raises ValueError when there are fewer."""
        super().truncate(length)
        self._ahead = 0

    def start_drafting(self, rows: int) -> int:
        """The first layers are ahead by nothing; returns how many of ``rows`` they can take."""
        self._ahead = 0
        fitting = min(rows, self.room)
        self.kv.reserve(fitting)
        return fitting

    def draft(self, token: int, *, want_logits: bool = False) -> Rows:
        """Feed one token to the first layers only; what the head says of their hidden state.

        Verifying feeds it to all layers again, which writes the same rows. Raises EngineError.
        """
        assert self._early_exit is not None, "the manifest refuses early exit without its layers"
        tokens: NDArray[np.int64] = np.array([[token]], dtype=np.int64)
        with self._running(self.length + self._ahead):
            hidden = self._model.model.norm(self._exit_rows(tokens, self._early_exit))
            logits = families.head_logits(self._model, hidden, self._cap)
        self._ahead += 1
        return _rows(logits, hidden, want_logits)

    def _step(
        self,
        tokens: NDArray[np.int64],
        first_row: int,
        want_logits: bool,
        on_rows: OnRows | None = None,
    ) -> Rows:
        count, start = tokens.shape[1], self.length
        wanted = count - first_row
        # Given a number, layers that share KV skip the other rows; given places, they do not.
        keep = wanted if on_rows is None else torch.arange(first_row, count)
        with self._running(start), last_hidden(self._model) as hidden:
            out = self._model(**self._inputs(tokens), logits_to_keep=keep)
        self.kv.advance(count)
        self._ahead = 0
        if on_rows is not None:
            on_rows(start, _host(hidden[0][0]))
        return _rows(out.logits, hidden[0][:, -wanted:], want_logits)

    def _exit_rows(self, tokens: NDArray[np.int64], layers: int) -> Any:
        """Hidden state behind the first ``layers`` layers, before the final norm."""
        decoder = self._model.model
        seen: list[Any] = []

        def leave(module: Any, args: Any, kwargs: Any) -> None:
            seen.append(args[0] if args else kwargs["hidden_states"])
            raise _Left

        behind = decoder.layers[layers] if layers < len(decoder.layers) else decoder.norm
        handle = behind.register_forward_pre_hook(leave, with_kwargs=True)
        try:
            decoder(**self._inputs(tokens))
        except _Left:
            pass
        finally:
            handle.remove()
        return seen[0]

    def _inputs(self, tokens: NDArray[np.int64]) -> dict[str, Any]:
        device, start = self._model.device, self._rows.start
        places = torch.arange(start, start + tokens.shape[1], device=device)
        return {
            "input_ids": torch.from_numpy(np.ascontiguousarray(tokens)).to(device),
            "position_ids": places[None],
            "cache": self._cache,
            "use_cache": True,
        }

    @contextlib.contextmanager
    def _running(self, start: int) -> Iterator[None]:
        """A run whose rows begin at ``start``. What PyTorch raises becomes an EngineError."""
        self._rows.begin(start)
        try:
            with torch.inference_mode():
                yield
        except Exception as error:
            raise EngineError(
                f"{self.name}: a run failed: {type(error).__name__}: {error}"
            ) from error


class _Left(Exception):
    """A forward pass is left early: what it was wanted for has been seen."""


class _CacheRows:
    """Where the layers' keys and values stand: which rows are the past, and the tensors."""

    def __init__(self, kv: KvBuffers, device: Any, read_by_drafters: frozenset[int]) -> None:
        self.kv = kv
        self.start = 0
        self._shares = device.type == "cpu" and bool(kv.arrays)
        self._read_by_drafters = {past(layer, p) for layer in read_by_drafters for p in Part}
        self._tensors: dict[str, Any] = {}
        self._version = kv.version

    def begin(self, start: int) -> None:
        """The next rows stand from ``start`` on. Buffers that moved are found again."""
        self.start = start
        if self.kv.version == self._version:
            return
        self._version = self.kv.version
        for name, old in self._tensors.items():
            if self._shared(name, old) is None:
                grown = self._empty(old)
                grown[:, :, : self.kv.length] = old[:, :, : self.kv.length]
                self._tensors[name] = grown
            else:
                self._tensors[name] = self._over(name)

    def write(self, name: str, rows: Any) -> Any:
        """Store ``rows`` ``[1, heads, n, size]``; returns all rows up to the last of them."""
        if name not in self._tensors:
            shared = self._shared(name, rows)
            self._tensors[name] = self._empty(rows) if shared is None else shared
        tensor, stop = self._tensors[name], self.start + rows.shape[2]
        tensor[:, :, self.start : stop] = rows
        if not self._shares and name in self._read_by_drafters and self._fits(name, rows):
            self.kv.write_rows(name, self.start, _host(rows))
        return tensor[:, :, :stop]

    def _shared(self, name: str, rows: Any) -> Any:
        """The KV buffer as a tensor, where it is laid out as ``rows`` are; else None."""
        return self._over(name) if self._shares and self._fits(name, rows) else None

    def _over(self, name: str) -> Any:
        tensor = torch.from_numpy(self.kv.arrays[name])
        return tensor.view(torch.bfloat16) if self.kv.dtype is DType.BFLOAT16 else tensor

    def _fits(self, name: str, rows: Any) -> bool:
        buffer = self.kv.buffers.get(name)
        if buffer is None:
            return False
        same = buffer.shape[1] == rows.shape[1] and buffer.shape[3] == rows.shape[3]
        return same and self.kv.dtype.value == str(rows.dtype).removeprefix("torch.")

    def _empty(self, rows: Any) -> Any:
        batch, heads, _, size = rows.shape
        return rows.new_zeros((batch, heads, self.kv.capacity, size))


class _CacheLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """A layer of transformers' cache over :class:`_CacheRows`. It keeps every row: what a sliding
    window hides, the mask hides, so that going back across the window is a length too."""

    is_sliding = False

    def __init__(self, rows: _CacheRows, layer: int) -> None:
        super().__init__()
        self._rows = rows
        self._names = tuple(past(layer, part) for part in Part)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Nothing: tensors are made at the first write."""

    def update(self, key_states: Any, value_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Store the rows of a run; returns all up to them."""
        key, value = self._names
        return self._rows.write(key, key_states), self._rows.write(value, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Rows that ``update`` will return, and the position of the first."""
        return self._rows.start + query_length, 0

    def get_seq_length(self) -> int:
        """Rows before those of the run."""
        return self._rows.start

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1


def _rows(logits: Any, hidden: Any, want_logits: bool) -> Rows:
    """As an engine returns them: argmax is the first of the largest, margin its lead."""
    values: NDArray[np.float32] = logits.float().cpu().numpy()
    argmax = values.argmax(axis=-1)
    two = np.partition(values, -2, axis=-1)[..., -2:]
    return Rows(argmax, _host(hidden), values if want_logits else None, two[..., 1] - two[..., 0])


def _host(tensor: Any) -> NDArray[Any]:
    """As an array; bfloat16 as its bits."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.contiguous().view(torch.uint16)
    array: NDArray[Any] = tensor.numpy()
    return array
