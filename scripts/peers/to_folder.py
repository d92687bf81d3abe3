"""A GGUF file as a Hugging Face folder: fp32 weights, tokenizer, chat template.

    python -m peers.to_folder MODEL.gguf FOLDER

Runs in the transformers environment, whose own reader unpacks the weights. The folder appears whole
or not at all.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any


def convert(source: Path, out: Path) -> None:
    """Write ``out``; the values are those of the GGUF file, unpacked to fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    read: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    weights = {name: tensor.clone() for name, tensor in read.state_dict().items()}
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A fresh object, because what was read from GGUF refuses to be saved.
    model: Any = type(read)(config).to(torch.float32)
    model.load_state_dict(weights)
    model.tie_weights()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
