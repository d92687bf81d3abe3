"""The weights of the MTP layers that stand in a target's own checkpoint.

Released checkpoints have them as layers behind the last one (``model.layers.61.enorm.weight``) or
under ``mtp.``; transformers leaves both out of the target and knows how to rename them for its
MtpModel, and those rules are applied here. Copies of the target's embedding and head that some
checkpoints repeat per layer are not read, as transformers does not: the target's are used.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from specexport import naming
from specexport.errors import WeightsError
from specexport.sources import Source, quiet
from specexport.weights import Shape, Weights

if TYPE_CHECKING:
    from transformers.modeling_layers import MtpModel

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
APART = re.compile(r"(?:model\.)?mtp\.")
OWN = "layers."  # prefix of what the layers do not share with the target


def read(source: Source) -> Weights | None:
    """The MTP layers' tensors under the names of MtpModel's state dict; None without any.

    Raises WeightsError naming what is missing or misshapen where there are some.
    """
    if source.path.is_file() or not getattr(source.config, "num_mtp_layers", None):
        return None
    count = int(source.config.num_hidden_layers)
    stored = {
        name: tensor
        for name, tensor in source.stored_tensors().items()
        if is_mtp(naming.text_name(name), count)
    }
    if not stored:
        return None
    target = naming.meta_model(*source.class_and_config())
    model = meta_model(target)
    expected = expected_shapes(model)
    rename = naming.renamer(model, expected, model.get_weight_conversions(target))
    try:
        weights = Weights(naming.collect(stored, expected, rename))
        weights.check_complete(expected)
    except WeightsError as error:
        raise WeightsError(
            f"MTP layers of {source.id}: {error}", hint="--no-mtp exports the target without them"
        ) from error
    return weights


def is_mtp(name: str, num_hidden_layers: int) -> bool:
    """Whether a checkpoint tensor of the text model belongs to its MTP layers."""
    if APART.match(name):
        return True
    layer = LAYER.search(name)
    return layer is not None and int(layer[1]) >= num_hidden_layers


def meta_model(target: Any) -> MtpModel:
    """transformers' MTP layers of the model ``target``, without memory for their weights."""
    import torch
    from transformers.modeling_layers import MtpModel

    with torch.device("meta"):
        return MtpModel(target, target.config.num_mtp_layers)


def expected_shapes(model: Any) -> dict[str, Shape]:
    """Name -> shape of what the MTP layers do not share with the target."""
    shapes = naming.expected_shapes(model)
    return {name: shape for name, shape in shapes.items() if name.startswith(OWN)}


def load_reference(source: Source, target: Any, dtype: Any) -> Any:
    """transformers' MTP layers of ``target``, its model of ``source``, loaded by transformers.

    transformers looks for the layers by the numbers that they have in the released models, so it
    is told those of this one.
    """
    from transformers.modeling_layers import MtpModel

    count, layers = target.config.num_hidden_layers, target.config.num_mtp_layers
    behind = [rf"^model\.layers\.{number}\." for number in range(count, count + layers)]
    target._keys_to_ignore_on_load_unexpected = [*behind, r"^mtp\."]
    target.config.name_or_path = str(source.path)
    target.config.dtype = dtype
    with quiet():
        return MtpModel.from_pretrained(target, device_map={"": "cpu"}).eval()
