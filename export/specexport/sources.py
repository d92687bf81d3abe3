"""From what the user names to a checkpoint that can be exported.

A source is the name of a preset, a checkpoint folder, a ``.gguf`` file or a hub id, looked for in
that order; write ``./name`` for a folder that is called like a preset. A hub id may end in
``@REVISION``. Code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexport import (
    config_sizes,
    gguf_header,
    gguf_source,
    hub,
    naming,
    prequantized,
    presets,
    tasks,
    tokenizer_files,
)
from specexport.cli_options import TEXT_GENERATION, Task
from specexport.errors import SourceError, WeightsError
from specexport.prequantized import Scheme
from specexport.safetensors_files import check_links, read_folder, weight_files
from specexport.tokenizer_files import TokenizerInfo
from specexport.weights import StoredTensor, Weights
from specgraphs import families
from specrun.reading import parse_json, read_text, shown

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

AUTO: Task = "auto"
CONFIG = "config.json"
MAX_CONFIG_BYTES = 4 << 20
AS_PUBLISHED = "the file must be as the model's authors published it"
GENERATION = "generation_config.json"
QUANTIZATION = "quantization_config"
MULTIMODAL = ("gemma3", "gemma4", "gemma4_unified")  # of these the text model is exported
TARGETS = families.TARGETS + MULTIMODAL
ASSISTANTS = families.ASSISTANTS
LOCAL_PAIR = "specexport PATH/TO/target --drafter PATH/TO/assistant --out DIR"


def supported_model_types() -> tuple[str, ...]:
    """The ``model_type`` values that can be exported, targets before assistants."""
    return TARGETS + ASSISTANTS


@dataclass(frozen=True)
class Source:
    """A checkpoint, resolved: its configuration, its weights by place, its tokenizer.

    ``id``: hub id, name of the local folder or file, or preset and part. ``revision``: commit on
    the hub, None for local files. ``path``: the folder, or the GGUF file. ``config``: configuration
    of the text model. ``full_config``: of the whole checkpoint (the same, unless it is multimodal
    or an assistant). ``generation``: the content of generation_config.json, else the ids in the
    configuration. ``scheme``: how a folder's linear layers are stored in integers, None for floats.
    """

    id: str
    revision: str | None
    path: Path
    config: Any = field(repr=False)
    full_config: Any = field(repr=False)
    generation: dict[str, Any] = field(repr=False)
    weights: Weights = field(repr=False)
    scheme: Scheme | None = None

    @property
    def model_type(self) -> str:
        """As config.json has it, for example ``gemma4``."""
        return str(self.full_config.model_type)

    @property
    def architecture(self) -> str:
        """Name of the transformers class that is traced, for example ``Gemma4ForCausalLM``."""
        return self.class_and_config()[0].__name__

    @property
    def is_assistant(self) -> bool:
        """True for a drafter that only works on another model's hidden states and KV."""
        return self.model_type in ASSISTANTS

    def class_and_config(self) -> tuple[type[PreTrainedModel], Any]:
        """The class to trace and the configuration to make it from.

        The names of ``weights`` are those of its state dict. An assistant is made from its full
        configuration, anything else from the text part.
        """
        return _class_and_config(self.full_config, self.config)

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the state dict, for ``weights.check_complete``; takes no memory."""
        return naming.expected_shapes(naming.meta_model(*self.class_and_config()))

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """The tensors of a folder by their names in it; quantized layers as one weight each."""
        return _stored_tensors(self.path, self.scheme)

    def write_tokenizer(self, folder: Path) -> TokenizerInfo:
        """Write tokenizer.json and, if there is one, chat_template.jinja. Raises SourceError."""
        return tokenizer_files.write(self.path, folder)

    def load_reference(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """The transformers model with its weights, in eval mode; ``dtype`` is float32 if None.

        Loaded by transformers itself, not through ``weights``, so that comparing with it checks
        them too; only with a ``scheme``, which transformers needs other packages for, it is filled
        from them. Raises WeightsError if transformers had to invent a tensor.
        """
        import torch

        cls, config = self.class_and_config()
        dtype = dtype or torch.float32
        if self.scheme is not None:
            return _filled(cls, config, self.weights, dtype)
        with quiet():
            if self.path.is_file():
                loaded: Any = gguf_source.load_model(self.path, cls, config, dtype)
            else:
                loaded = cls.from_pretrained(
                    self.path,
                    config=copy.deepcopy(config),
                    dtype=dtype,
                    key_mapping=naming.KEY_MAPPING,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                )
        model: PreTrainedModel
        model, info = loaded
        for problem in ("missing_keys", "mismatched_keys"):
            if found := sorted(map(str, info[problem])):
                raise WeightsError(f"{self.path}: {problem.replace('_', ' ')}: {found[:5]}")
        return model.eval()


@dataclass(frozen=True)
class Wanted:
    """What is wanted of a checkpoint besides its name.

    ``revision``: branch, tag or commit, of hub ids only. ``token``: for the hub; None takes
    HF_TOKEN or the stored login. ``config_only``: no weights; those of the Source are empty then.
    ``local_only``: nothing is downloaded. ``cache_dir``: the hub's, None for its own.
    ``task``: auto: what it is for is inferred, and refused if that is no text generation.
    """

    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    config_only: bool = False
    local_only: bool = False
    cache_dir: str | None = None
    task: Task = TEXT_GENERATION


def resolve(
    source: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    config_only: bool = False,
    local_only: bool = False,
) -> Source:
    """The checkpoint that ``source`` names; for a preset its target. Raises SourceError.

    ``token``, ``config_only``, ``local_only``: see :class:`Wanted`.
    """
    return resolve_as(source, Wanted(revision, token, config_only, local_only))


def resolve_as(source: str | Path, wanted: Wanted) -> Source:
    """The same, with all that may be wanted."""
    return resolve_pair_as(source, None, wanted, wanted, pair=False)[0]


def resolve_pair(
    source: str | Path,
    drafter: str | Path | None = None,
    *,
    revision: str | None = None,
    drafter_revision: str | None = None,
    pair: bool = True,
    token: str | None = None,
    config_only: bool = False,
) -> tuple[Source, Source | None]:
    """The target that ``source`` names, and its drafter.

    A preset brings its own drafter, which ``drafter`` replaces; ``pair=False`` leaves it out.
    ``revision`` is for hub ids only: branch, tag or commit. ``token``, ``config_only``: see
    :class:`Wanted`. Raises SourceError.
    """
    wanted = Wanted(revision, token, config_only)
    drafting = replace(wanted, revision=drafter_revision)
    return resolve_pair_as(source, drafter, wanted, drafting, pair=pair)


def resolve_pair_as(
    source: str | Path,
    drafter: str | Path | None,
    wanted: Wanted,
    drafting: Wanted,
    *,
    pair: bool = True,
) -> tuple[Source, Source | None]:
    """The same, with all that may be wanted of the target, and of the drafter."""
    preset = presets.find(source) if isinstance(source, str) else None
    if preset is None:
        target = _resolve(source, wanted)
        return target, None if drafter is None else _resolve(drafter, drafting)
    chosen: str | Path | None = drafter
    if chosen is None and pair:
        chosen = preset.drafter
    try:
        target = _resolve(preset.target, wanted, name=f"{preset.name}/target")
        if chosen is None:
            return target, None
        own = f"{preset.name}/assistant" if chosen == preset.drafter else None
        return target, _resolve(chosen, drafting, name=own)
    except SourceError as error:
        if preset.bundled or drafter is not None:
            raise
        raise SourceError(
            f"preset {preset.name}: {error}",
            hint=f"if the model lies on this machine, give its folders: {LOCAL_PAIR}",
        ) from error


def _resolve(source: str | Path, wanted: Wanted, name: str | None = None) -> Source:
    path = Path(source).expanduser()
    name = name or path.resolve().name
    if path.is_dir():
        _no_revision(source, wanted.revision)
        return _from_folder(path, None, wanted, name=name)
    if path.is_file():
        _no_revision(source, wanted.revision)
        if path.suffix != ".gguf":
            raise SourceError(
                f"{path}: not a checkpoint",
                hint="give the folder it lies in, with config.json, or a .gguf file",
            )
        return _from_gguf(path, name)
    if isinstance(source, str) and (named := _hub_id(source, wanted.revision)) is not None:
        repo, revision = named
        return _from_hub(repo, revision, wanted)
    raise SourceError(
        f"{source}: no such folder or file, and not the name of a preset or a hub model",
        hint=f"presets: {', '.join(presets.PRESETS)}; a hub model is ORGANISATION/NAME",
    )


def _from_hub(repo: str, revision: str | None, wanted: Wanted) -> Source:
    """What cannot be exported is told before its weights are downloaded."""
    if wanted.local_only:
        return _from_folder(*_downloaded(repo, revision, wanted), wanted, name=repo)
    folder, commit = _downloaded(repo, revision, replace(wanted, config_only=True))
    if wanted.task == AUTO or not wanted.config_only:
        hub.fetch_extras(repo, commit, token=wanted.token, cache_dir=wanted.cache_dir)
    if not wanted.config_only:
        _configuration(folder, wanted)
        folder, commit = _downloaded(repo, commit, wanted)
    return _from_folder(folder, commit, wanted, name=repo)


def _downloaded(repo: str, revision: str | None, wanted: Wanted) -> tuple[Path, str | None]:
    return hub.download(
        repo,
        revision,
        token=wanted.token,
        config_only=wanted.config_only,
        local_only=wanted.local_only,
        cache_dir=wanted.cache_dir,
    )


def _hub_id(source: str, revision: str | None) -> tuple[str, str | None] | None:
    """Id and revision of ``ORG/NAME`` or ``ORG/NAME@REVISION``; None for anything else."""
    repo, at, own = source.partition("@")
    if not hub.HUB_ID.fullmatch(repo) or repo.endswith(".gguf") or bool(at) != bool(own):
        return None
    if own and revision is not None:
        raise SourceError(
            f"{source}: names a revision, and {revision} is given besides",
            hint="leave --revision out, or the part from @ on",
        )
    return repo, own or revision


def _no_revision(source: str | Path, revision: str | None) -> None:
    if revision is not None:
        raise SourceError(f"{source}: a revision is for hub models, this is local")


def _configuration(folder: Path, wanted: Wanted) -> dict[str, Any]:
    """The content of config.json, of a checkpoint that is of a supported kind."""
    config_file = folder / CONFIG
    if not config_file.is_file():
        if wanted.task == AUTO:
            tasks.check(folder, {}, multimodal=False)
        gguf = sorted(path.name for path in folder.glob("*.gguf"))
        raise SourceError(
            f"{folder}: no {CONFIG} in it",
            hint=f"give the file itself: {folder / gguf[0]}"
            if gguf
            else "give a checkpoint folder as save_pretrained() writes it",
        )
    check_links(folder)
    raw = _read_json(config_file)
    config_sizes.check(config_file, raw)
    if wanted.task == AUTO:
        tasks.check(folder, raw, multimodal=raw.get("model_type") in MULTIMODAL)
    _check_supported(str(folder), raw)
    return raw


def _from_folder(folder: Path, revision: str | None, wanted: Wanted, *, name: str) -> Source:
    config_file = folder / CONFIG
    config_only = wanted.config_only
    raw = _configuration(folder, wanted)
    scheme = _scheme(str(folder), raw)
    if not config_only:
        weight_files(folder)  # says what is wrong with the weights before anything slow
    full_config = _load_config(folder)
    config = _text_config(full_config)
    generation_file = folder / GENERATION
    generation = (
        _read_json(generation_file)
        if generation_file.is_file()
        else _generation(full_config, config)
    )
    weights = Weights({})
    model = _model_of(config_file, full_config, config)
    if not config_only:
        weights = naming.map_weights(_stored_tensors(folder, scheme), model)
    return Source(name, revision, folder, config, full_config, generation, weights, scheme)


def _model_of(file: Path, full_config: Any, config: Any) -> PreTrainedModel:
    """The model without weights. Raises SourceError where the configuration makes none."""
    try:
        if int(config.num_hidden_layers) < 1:
            raise ValueError("num_hidden_layers must be at least 1")
        return naming.meta_model(*_class_and_config(full_config, config))
    except Exception as error:  # modules check their sizes and names, or fail on them, as they like
        raise SourceError(
            f"{file}: makes no model: {type(error).__name__}: {error}",
            hint=AS_PUBLISHED,
        ) from error


def _stored_tensors(folder: Path, scheme: Scheme | None) -> dict[str, StoredTensor]:
    stored = read_folder(folder)
    return dict(stored) if scheme is None else prequantized.grouped(stored, scheme)


def _filled(
    cls: type[PreTrainedModel], config: Any, weights: Weights, dtype: torch.dtype
) -> PreTrainedModel:
    """transformers' model with ``weights`` in ``dtype``; tied ones are one tensor."""
    import torch
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = cls(copy.deepcopy(config))
    weights.check_complete(naming.expected_shapes(model))
    state: dict[str, torch.Tensor] = {}
    for name in sorted(weights.names(), key=lambda name: weights.alias(name) is not None):
        same = state.get(weights.canonical(name))
        value = torch.from_numpy(weights.read(name)) if same is None else same
        state[name] = value.to(dtype) if value.is_floating_point() else value
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.requires_grad_(False).eval()


def _from_gguf(path: Path, name: str) -> Source:
    header = gguf_header.read(path)
    config = gguf_source.load_config(path, header)
    weights = gguf_source.map_weights(path, header, _model_of(path, config, config))
    return Source(name, None, path, config, config, _generation(config, config), weights)


def _class_and_config(full_config: Any, config: Any) -> tuple[type[PreTrainedModel], Any]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    made_from = full_config if full_config.model_type in ASSISTANTS else config
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(made_from)]
    return cls, made_from


def _load_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # configurations check themselves and raise what they like
        raise SourceError(f"{folder / CONFIG}: {error}", hint=AS_PUBLISHED) from error
    for part in (config, config.get_text_config()):
        vars(part).pop(QUANTIZATION, None)  # what is traced is the model in floats
    return config


def _text_config(full_config: Any) -> Any:
    """The text part; whether the head is tied is said by the checkpoint's outermost level."""
    config = full_config.get_text_config()
    if config is full_config:
        return config
    config = copy.deepcopy(config)
    if full_config.tie_word_embeddings is not None:
        config.tie_word_embeddings = full_config.tie_word_embeddings
    return config


def _check_supported(where: str, raw: dict[str, Any]) -> None:
    model_type = raw.get("model_type")
    if model_type not in supported_model_types():
        raise SourceError(
            f"{where}: model type {shown(model_type)} is not supported",
            hint=f"supported: {', '.join(supported_model_types())}",
        )


def _scheme(where: str, raw: dict[str, Any]) -> Scheme | None:
    """How the layers are stored in integers. Raises SourceError for a way that is not read."""
    text = raw.get("text_config")
    found = raw.get(QUANTIZATION) or (text.get(QUANTIZATION) if isinstance(text, dict) else None)
    if not found:
        return None
    if not isinstance(found, dict):
        raise SourceError(
            f"{where}: {QUANTIZATION} in {CONFIG} must be an object, is {shown(found)}",
            hint=AS_PUBLISHED,
        )
    try:
        return prequantized.scheme(found)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise SourceError(
            f"{where}: {QUANTIZATION} in {CONFIG} is none: {error}", hint=AS_PUBLISHED
        ) from error
    except prequantized.NotReadError as error:
        raise SourceError(
            f"{where}: the checkpoint is quantized already ({error})",
            hint="give the unquantized checkpoint; quantizing is part of the export. Quantized ones"
            f" are read in {prequantized.READ}",
        ) from error


def _generation(full_config: Any, config: Any) -> dict[str, Any]:
    """The ids of the configuration under the names of generation_config.json."""
    found: dict[str, Any] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values = [getattr(c, name, None) for c in (full_config, config)]
        value = next((v for v in values if v is not None), None)
        if value is not None:
            found[name] = value
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no report of unused tensors: what matters is raised."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(read_text(path, MAX_CONFIG_BYTES))
    except (ValueError, OSError) as error:
        raise SourceError(f"{path}: {error}", hint=AS_PUBLISHED) from error
    if not isinstance(data, dict):
        raise SourceError(f"{path}: must be a JSON object, is {shown(data)}", hint=AS_PUBLISHED)
    return data
