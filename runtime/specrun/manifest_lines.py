"""What ``inspect`` tells of an engine folder."""

from __future__ import annotations

from specrun import contract
from specrun.contract import Role
from specrun.manifest import EngineSpec, Manifest
from specrun.plans import PRODUCTS, ProfileSpec
from specrun.response_format import ResponseFormat


def lines(manifest: Manifest) -> dict[str, str]:
    """What is told of an engine folder, by title."""
    generation = manifest.generation
    told = {
        "target": f"{manifest.target.id} ({manifest.target.architecture})",
        "vocabulary": f"{manifest.tokenizer.vocab_size} tokens",
        "chat template": manifest.tokenizer.chat_template or "-",
        **_answers(manifest.tokenizer.response),
        "end ids": " ".join(map(str, generation.eos_token_ids)) or "-",
        "max context": f"{generation.max_context} tokens",
        "generation": ", ".join(f"{k} {v}" for k, v in generation.defaults.items()) or "-",
    }
    for method, drafter in manifest.drafters.items():
        source = drafter.source.id if drafter.source is not None else "the target's own checkpoint"
        most = drafter.max_num_draft
        limit = f", drafts up to {most} tokens" if most is not None else ""
        schedule = drafter.schedule.replace("_", "-")  # as --schedule spells it
        start = f", starts with {drafter.num_assistant_tokens} drafts ({schedule})"
        front = manifest.engines.get("front") if method == "early-exit" else None
        layers = f", first {front.split.early_exit} layers" if front and front.split else ""
        told[f"method {method}"] = f"{source}{layers}{start}{limit}"
    for name, engine in manifest.engines.items():
        told |= _engine(name, engine)
    for entry in manifest.files:
        told[f"file {entry.path}"] = f"{entry.size} bytes, sha256 {entry.sha256[:12]}…"
    parity = manifest.parity
    if parity is not None:
        told["parity"] = (
            f"{parity.scope}: worst error {parity.worst_error:.2g} ({parity.worst_tensor};"
            f" {parity.tolerance:.2g} allowed)"
        )
    else:
        told["parity"] = "never compared with transformers"
    if (quality := manifest.quality) is not None:
        told["quality"] = (
            f"perplexity {quality.perplexity:.4g}, in fp32 {quality.reference_perplexity:.4g}"
            f" ({quality.loss:+.1%}); {quality.argmax_agreement:.1%} of the most probable tokens"
            f" the same, on {quality.tokens} tokens of {quality.text}"
        )
    for index, note in enumerate(manifest.notes, start=1):
        told[f"note {index}"] = note
    return told


def _answers(response: ResponseFormat | None) -> dict[str, str]:
    """How their parts are marked, where that is known."""
    regions = response.regions() if response is not None else {}
    told = [
        f"{channel.replace('_', ' ')} {region.starts[0]!r}"
        + (f" to {region.ends[0]!r}" if region.ends else "")
        for channel, region in regions.items()
    ]
    return {"answers": ", ".join(told)} if told else {}


def _engine(name: str, engine: EngineSpec) -> dict[str, str]:
    """An engine and its plans."""
    own = engine.role is not Role.MTP_DRAFTER and engine.kv
    kv = f", {engine.kv_bytes_per_token} bytes of KV per token" if own else ""
    where = engine.file or "none, PyTorch verifies from the checkpoint"
    fixed = ", in the dialect of TensorRT" if engine.fixed is not None else ""
    told = {f"engine {name}": f"{where}, {_precision(engine)}{kv}{fixed}"}
    for plan in engine.plans:
        profiles = ", ".join(_profile(profile) for profile in plan.profiles)
        told[f"plan {plan.file}"] = (
            f"{PRODUCTS[plan.flavour]} {plan.version}, SM {plan.compute_capability},"
            f" {plan.size / 1e6:.1f} MB; {profiles}"
        )
    return told


def _profile(profile: ProfileSpec) -> str:
    """Its name, and how many rows it takes."""
    rows = [
        sizes.max[contract.ROWS_AXIS]
        for name, sizes in profile.inputs.items()
        if name in contract.FED
    ]
    return profile.name + (f" up to {rows[0]} rows" if rows else "")


def _precision(engine: EngineSpec) -> str:
    """How its weights are stored, and what a step reads of them."""
    read = f"{engine.step_bytes / 1e6:.1f} MB of weights read in a step"
    if (stored := engine.weights) is None:
        return f"{engine.precision}, {read}"
    parts = [f"head {stored.head}", f"embedding {stored.embedding}"]
    if engine.precision in ("int8", "int4"):
        parts.insert(0, f"blocks of {stored.block_size}")
    for names, how in (
        (stored.kept_int8, "kept in int8"),
        (stored.rotated, "rotated"),
        (stored.two_terms, "with two 8-bit terms"),
        (stored.kept_float, "kept as floats"),
    ):
        if names:
            parts.append(f"{len(names)} layer{'s' if len(names) > 1 else ''} {how}")
    return f"{engine.precision} ({', '.join(parts)}), {read}"
