"""How commands show what a generation did."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrun.cli_options import SAMPLING
from specrun.options import GenerateOptions
from specrun.reading import printable

if TYPE_CHECKING:
    from specrun.stats import Stats


def stats_table(stats: Stats) -> str:
    """The statistics of a generation, for people."""
    return table(stats_lines(stats))


def stats_lines(stats: Stats) -> dict[str, str]:
    """The same by title."""
    by_position = " ".join(f"{share:.2f}" for share in stats.acceptance_by_position) or "-"
    seconds = " ".join(f"{phase} {value:.3f}" for phase, value in stats.seconds.items())
    lossy = ", lossy" if stats.lossy else ""
    exact = f", exact in runs of {stats.exact_width} rows" if stats.exact else ""
    read = "" if stats.prefilled == stats.prompt_tokens else f" ({stats.prefilled} of them read)"
    lines = {
        "method": f"{stats.method} ({stats.mode}{lossy}{exact}) on {stats.provider}",
        "tokens": f"{stats.prompt_tokens} prompt{read}, {stats.emitted} new",
        "drafted": f"{stats.drafted}, accepted {stats.accepted} ({stats.acceptance:.0%})",
        "acceptance by position": by_position,
        "tokens per target step": f"{stats.tokens_per_target_step:.2f}",
        "seconds": f"{seconds} ({stats.tokens_per_second:.1f} tokens/s)",
    }
    if stats.verifier_failure is not None:
        lines["verified"] = (
            f"by PyTorch in {stats.torch_steps} of {stats.target_steps} steps:"
            f" {stats.verifier_failure}"
        )
    if stats.near_ties is not None:
        share = f"{stats.near_ties} of {stats.emitted} tokens"
        lines["near ties"] = f"{share} could be others in blocks of another width (see --exact)"
    return lines


def sampling(options: GenerateOptions) -> str:
    """The options of sampling that took effect, the checkpoint's own among them."""
    names = (*(flag[2:].replace("-", "_") for flag, _, _ in SAMPLING), "ensemble_weight")
    neutral = (None, 0, 1)
    given = {name: getattr(options, name) for name in names}
    shown = [
        f"{name} {value}"
        for name, value in given.items()
        if value is not None and (name == "seed" or value not in neutral)
    ]
    if words := len(options.bad_words) + len(options.bad_words_ids or ()):
        shown.append(f"{words} bad words")
    sampled = "sampled" if options.do_sample else "greedy"
    return ", ".join([sampled, *shown])


def table(lines: dict[str, str]) -> str:
    """Names and values in two columns, without what a terminal would obey."""
    width = max(map(len, lines))
    return printable("\n".join(f"{name:<{width}}  {value}" for name, value in lines.items()))
