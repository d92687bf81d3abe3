"""The texts that come with the exporter, as tokens of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from specexport import tokenizer_files
from specexport.sources import Source

FOLDER = Path(__file__).parent / "bundled" / "texts"
CALIBRATION = FOLDER / "calibration.txt"
EVALUATION = FOLDER / "evaluation.txt"
MAX_TOKENS = 1024


def tokens(source: Source, text: Path, max_tokens: int = MAX_TOKENS) -> list[int]:
    """Ids of ``text``, with the begin id where the tokenizer sets one; as many as the model takes.

    Ids that the model's table does not have are left out.
    """
    tokenizer = tokenizer_files.load(source.path)
    ids = tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
    vocab = int(source.config.vocab_size)
    most = min(max_tokens, int(source.config.max_position_embeddings))
    return [int(i) for i in ids if int(i) < vocab][:most]
