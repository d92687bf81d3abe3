"""A trace as a page: the text in the colours of its origins, rounds, charts, what ran it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specrun.origin import ORIGINS, Origin
from specrun.pages import charts, files, html
from specrun.pages.charts import Bar, Series
from specrun.text import BROKEN
from specrun.trace.record import Trace, TracedRound, TracedToken
from specrun.trace.spans import code, hidden, visible

BINS = 60  # of the charts along the text
JOINERS = "\u200c\u200d"  # between letters of some scripts, and in emoji, they belong there

MEANING: dict[Origin, str] = {
    "accepted": "drafts that the target agreed with",
    "correction": "the target's own token in place of a draft it rejected",
    "bonus": "the target's own token behind drafts that all stood",
    "plain": "the target's own token where nothing was drafted",
}
NAMES: dict[Origin, str] = {
    "accepted": "Accepted draft",
    "correction": "Correction",
    "bonus": "Bonus",
    "plain": "Plain",
}


def write_page(path: str | Path, trace: Trace) -> None:
    """Write the page of ``trace``, complete or not at all. Raises UsageError where it cannot."""
    files.write(Path(path), page(trace))


def page(trace: Trace) -> str:
    """The page as HTML."""
    stats = trace.stats
    title = f"Trace: {trace.folder.target}, {stats.method}"
    body = "\n".join(
        (
            '<a class="skip" href="#text">To the text</a>',
            f"<header>{_header(trace)}</header>",
            "<main>",
            '<div class="with-side"><div>',
            _text(trace),
            _rounds(trace),
            f"</div>{_ASIDE}</div>",
            _figures(trace),
            _facts(trace),
            "</main>",
            f"<footer>specrun {html.escape(trace.specrun)}, {html.escape(trace.created)}</footer>",
        )
    )
    return html.document(
        title,
        body,
        description="Where each token of a generated text came from",
        script="trace.js",
        data=data(trace),
    )


def data(trace: Trace) -> dict[str, Any]:
    """What the script of the page reads. Log-probabilities are rounded."""
    last = {token.group: index for index, token in enumerate(trace.tokens)}
    names = {id_: visible(name) for id_, name in trace.names.items()}
    return {
        "tokens": [_packed(trace, index, last, names) for index in range(len(trace.tokens))],
        "rounds": [
            [
                done.num_draft,
                list(done.proposal),
                done.accepted,
                done.token,
                done.first,
                done.emitted,
                round(done.draft_seconds * 1e3, 3),
                round(done.verify_seconds * 1e3, 3),
            ]
            for done in trace.rounds
        ],
        "names": names,
        "origins": [NAMES[origin] for origin in ORIGINS],
        "alternatives": trace.options.get("logprobs"),
    }


def _packed(trace: Trace, index: int, last: dict[int, int], names: dict[int, str]) -> list[object]:
    token = trace.tokens[index]
    said = visible(token.text)
    part = index - token.group + 1
    parts = last[token.group] - token.group + 1
    return [
        token.id,
        ORIGINS.index(token.origin),
        -1 if token.round is None else token.round,
        None if token.logprob is None else round(token.logprob, 4),
        [[id_, round(value, 4)] for id_, value in token.top],
        [part, parts] if parts > 1 else 0,
        said if said and said != names[token.id] else 0,
    ]


def _header(trace: Trace) -> str:
    stats = trace.stats
    acceptance = f"{stats.acceptance:.0%}" if stats.drafted else "nothing drafted"
    parts = [
        html.tag("h1", "Where the tokens came from"),
        html.tag(
            "p",
            html.escape(
                f"{trace.folder.target}, {trace.folder.precision}, method {stats.method}"
                f" ({stats.mode}); the text ended by {trace.finish_reason}"
            ),
        ),
    ]
    if trace.error is not None:
        parts.append(html.tag("p", html.escape(f"An error ended it: {trace.error}"), class_="note"))
    elif trace.finish_reason in ("cancelled", "timeout", "unfinished"):
        parts.append(html.tag("p", "The text is not finished.", class_="note"))
    if stats.lossy:
        text = "Verified against a mix of target and drafter: not the target's own text."
        parts.append(html.tag("p", text, class_="note"))
    parts.append(
        html.tiles(
            (
                ("new tokens", str(stats.emitted)),
                ("tokens per target step", f"{stats.tokens_per_target_step:.2f}"),
                ("of the drafts accepted", acceptance),
                ("tokens per second", f"{stats.tokens_per_second:.1f}"),
                ("rounds", str(stats.rounds)),
            )
        )
    )
    return "\n".join(parts)


# The text.


def _text(trace: Trace) -> str:
    rejected = sum(len(done.rejected) for done in trace.rounds)
    total = max(1, len(trace.tokens))
    legend = "".join(
        f'<li><button type="button" aria-pressed="true" data-origin="{origin}">'
        f'<span class="chip {origin}"'
        f' aria-hidden="true">abc</span> {NAMES[origin]} {count} ({count / total:.0%})'
        "</button></li>"
        for origin, count in trace.origins.items()
        if count or origin in ("accepted", "plain")
    )
    meaning = {NAMES[origin]: MEANING[origin] for origin in ORIGINS}
    meaning["Rejected draft"] = "a draft that the target did not agree with; no part of the text"
    parts = [
        f'<ul class="legend" aria-label="What is coloured; press to hide or show">{legend}</ul>',
        '<p><label class="label"><input type="checkbox" id="show-rejected"'
        f"{'' if rejected else ' disabled'}> Show rejected drafts in the text ({rejected})"
        "</label></p>",
        f"<details><summary>What these are</summary>{html.definitions(meaning)}</details>",
        _tokens(trace),
        '<p class="keys soft"><kbd>←</kbd> <kbd>→</kbd> token, <kbd>↑</kbd> <kbd>↓</kbd> round,'
        " <kbd>Home</kbd> <kbd>End</kbd>, <kbd>Enter</kbd> its round. Rest the mouse on a token, or"
        " tap it, to see what else was probable.</p>",
        "<noscript><p>Without JavaScript the colours are there; details, filters and rounds are"
        " not.</p></noscript>",
    ]
    if trace.origins["accepted"] != trace.stats.accepted:
        parts.append(
            '<p class="soft">The text ended inside a draft: its last token is an accepted draft'
            " here, and the round's own token in the statistics.</p>"
        )
    return html.section("Text", *parts, id_="text")


def _tokens(trace: Trace) -> str:
    """Every token as an element; their text alone is the text, line ends included."""
    last = {token.group: index for index, token in enumerate(trace.tokens)}
    spans = "".join(
        f'<span class="t {token.origin}" role="option" tabindex="-1" id="t{index}"'
        f"{_label(token, trace.names)}>{_inside(token, index, last[token.group], trace.names)}"
        "</span>"
        for index, token in enumerate(trace.tokens)
    )
    return (
        '<div class="text" id="tokens" role="listbox" dir="auto" aria-orientation="horizontal"'
        f' aria-label="Generated tokens">{spans}</div>'
    )


def _label(token: TracedToken, names: dict[int, str]) -> str:
    """A name for screen readers where nothing can be read; the script gives the others theirs."""
    if token.text.strip() and not all(map(hidden, token.text.strip())):
        return ""
    return f' aria-label="{html.escape(visible(token.text or names[token.id]))}"'


def _inside(token: TracedToken, index: int, last: int, names: dict[int, str]) -> str:
    if token.text:
        return inline(token.text)
    if index < last:  # its bytes wait for those of the next
        return _mark(f"{index - token.group + 1}/{last - token.group + 1}")
    return _mark(visible(names[token.id]))  # special, or cut off by a stop string


def inline(text: str) -> str:
    """``text`` as HTML, with marks for what cannot be seen in place of it; spaces as they are."""
    parts = []
    for index, char in enumerate(text):
        if char == "\n":
            parts.append('<i class="nl"></i>\n')
        elif char == BROKEN or (hidden(char) and not _joins(text, index)):
            parts.append(_mark(char if char == BROKEN else code(char)))
        else:
            parts.append(html.escape(char))
    return "".join(parts)


def _joins(text: str, index: int) -> bool:
    """Whether the character stands between two that it may join."""
    if text[index] not in JOINERS or not 0 < index < len(text) - 1:
        return False
    return not text[index - 1].isascii() and not text[index + 1].isascii()


def _mark(shown: str) -> str:
    return f'<i class="ch" data-c="{html.escape(shown)}"></i>'


_ASIDE = """
<aside id="token" class="idle" aria-labelledby="token-head">
<h2 id="token-head">Token</h2><button type="button" id="close">Close</button>
<div id="details"><p class="soft">Choose a token of the text.</p></div>
</aside>"""


def _rounds(trace: Trace) -> str:
    if not trace.rounds:
        return html.section("Rounds", "<p>There was no round.</p>", id_="rounds")
    steer = (
        '<div class="steer"><button type="button" id="earlier">Earlier</button>'
        '<button type="button" id="later">Later</button>'
        '<button type="button" id="open-all" aria-expanded="false">Open these</button>'
        '<span id="which" class="soft" role="status"></span></div>'
    )
    text = "A round proposes drafts, and one run of the target verifies them."
    return html.section(
        "Rounds", f'<p class="soft">{text}</p>', steer, '<ol class="rounds" id="list"></ol>',
        id_="rounds",
    )  # fmt: skip


# Charts.


def _figures(trace: Trace) -> str:
    found = [
        _by_position(trace),
        _by_phase(trace),
        _per_step(trace.rounds),
        _along_the_text(trace.rounds),
        _times(trace.rounds),
    ]
    shown = "\n".join(chart for chart in found if chart)
    return html.section("In figures", f'<div class="figures">{shown}</div>', id_="figures")


def _by_position(trace: Trace) -> str:
    stats = trace.stats
    if not stats.drafted:
        return ""
    pairs = list(zip(stats.accepted_by_position, stats.drafted_by_position, strict=True))
    items = [
        Bar(str(at), accepted / drafted, f"{accepted / drafted:.0%}",
            f"place {at}: {accepted} of {drafted} accepted")
        for at, (accepted, drafted) in enumerate(pairs, 1)
    ]  # fmt: skip
    text = f"{stats.accepted} of {stats.drafted} drafts were accepted ({stats.acceptance:.0%})."
    svg = charts.bars(
        items, says=f"Share accepted by place in the proposal. {text}",
        x_title="place in the proposal", highest=1.0,
    )  # fmt: skip
    numbers = [
        (item.label, str(drafted), str(accepted), item.shown)
        for item, (accepted, drafted) in zip(items, pairs, strict=True)
    ]
    return html.figure(
        "Acceptance by position", svg, text, ("place", "drafted", "accepted", "share"), numbers
    )


def _by_phase(trace: Trace) -> str:
    seconds = trace.stats.seconds
    total = sum(seconds.values())
    if not total:
        return ""
    items = [
        Bar(phase, value, f"{_seconds(value)}, {value / total:.0%}")
        for phase, value in seconds.items()
    ]
    most = max(items, key=lambda item: item.value)
    text = f"{_seconds(total)} in all, most of it {most.label} ({most.value / total:.0%})."
    numbers = [(item.label, f"{item.value:.6f}", f"{item.value / total:.1%}") for item in items]
    return html.figure(
        "Time by phase",
        charts.rows(items, says=f"Time by phase. {text}"),
        text,
        ("phase", "seconds", "share"),
        numbers,
    )


def _per_step(rounds: Sequence[TracedRound]) -> str:
    if not rounds:
        return ""
    counts = Counter(done.emitted for done in rounds)
    items = [
        Bar(str(size), counts[size] / len(rounds), f"{counts[size] / len(rounds):.0%}",
            f"{size} tokens: {counts[size]} rounds")
        for size in range(1, max(counts) + 1)
    ]  # fmt: skip
    tokens = sum(done.emitted for done in rounds)
    text = f"{tokens / len(rounds):.2f} tokens per run of the target on average."
    svg = charts.bars(
        items, says=f"Share of rounds by the tokens they gave. {text}", x_title="tokens of a round"
    )
    numbers = [(item.label, str(counts[int(item.label)]), item.shown) for item in items]
    return html.figure("Tokens per target step", svg, text, ("tokens", "rounds", "share"), numbers)


def _along_the_text(rounds: Sequence[TracedRound]) -> str:
    bins = _bins(rounds)
    if len(bins) < 2:
        return ""
    points = [(_middle(part), _mean(done.emitted for done in part)) for part in bins]
    least, most = min(y for _, y in points), max(y for _, y in points)
    text = f"Between {least:.2f} and {most:.2f}; 1 is plain decoding."
    svg = charts.lines(
        [Series("tokens per target step", points)],
        says=f"Tokens per target step along the text. {text}",
        x_title="token of the text", level=1.0, markers=False,
    )  # fmt: skip
    numbers = [(charts.number(x), f"{y:.2f}") for x, y in points]
    title = "Tokens per target step along the text"
    return html.figure(title, svg, text, ("about token", "tokens per step"), numbers)


def _times(rounds: Sequence[TracedRound]) -> str:
    bins = _bins(rounds)
    if len(bins) < 2:
        return ""
    series = [
        Series("verify (target)", [
            (_middle(part), 1e3 * _mean(done.verify_seconds for done in part)) for part in bins
        ]),
        Series("draft", [
            (_middle(part), 1e3 * _mean(done.draft_seconds for done in part)) for part in bins
        ]),
    ]  # fmt: skip
    verify = 1e3 * _mean(done.verify_seconds for done in rounds)
    draft = 1e3 * _mean(done.draft_seconds for done in rounds)
    text = f"A round took {verify:.2f} ms to verify and {draft:.2f} ms to draft on average."
    svg = charts.lines(
        series, says=f"Milliseconds of a round along the text. {text}",
        x_title="token of the text", markers=False,
    )  # fmt: skip
    numbers = [
        (charts.number(x), f"{y:.3f}", f"{z:.3f}")
        for (x, y), (_, z) in zip(series[0].points, series[1].points, strict=True)
    ]
    return html.figure(
        "Milliseconds of a round", svg, text, ("about token", "verify ms", "draft ms"), numbers
    )


def _bins(rounds: Sequence[TracedRound]) -> list[Sequence[TracedRound]]:
    """Neighbouring rounds together, so that there are no more than BINS."""
    size = max(1, math.ceil(len(rounds) / BINS))
    return [rounds[at : at + size] for at in range(0, len(rounds), size)]


def _middle(part: Sequence[TracedRound]) -> float:
    """Number of the token in the middle, counted from 1."""
    return (part[0].first + part[-1].first + part[-1].emitted - 1) // 2 + 1


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


# What ran.


def _facts(trace: Trace) -> str:
    folder, machine = trace.folder, trace.machine
    counted = {
        name: value
        for name, value in trace.stats.as_dict().items()
        if not isinstance(value, (list, dict))
    }
    shown = [
        "<h3>Model</h3>",
        html.definitions(
            {
                "target": folder.target,
                "revision": folder.revision,
                "architecture": folder.architecture,
                "precision": folder.precision,
                "drafter": folder.drafter,
                "folder": folder.path,
                "fingerprint of its files": folder.fingerprint,
            }
        ),
        "<h3>Machine</h3>",
        html.definitions(
            {
                "processor": machine.cpu,
                "threads": machine.threads,
                "device": machine.device,
                "onnxruntime": machine.onnxruntime,
                "specrun": trace.specrun,
            }
        ),
        "<h3>Options</h3>",
        html.definitions(html.plain_values(trace.options)),
        f"<details><summary>How the folder was opened</summary>"
        f"{html.definitions(html.plain_values(trace.engine))}</details>",
        f"<details><summary>All statistics</summary>"
        f"{html.definitions(html.plain_values(counted))}</details>",
    ]
    if trace.prompt is not None:
        prompt = html.tag("div", inline(trace.prompt), class_="text", dir="auto")
        shown.append(f'<details id="prompt"><summary>Prompt</summary>{prompt}</details>')
    whole = html.tag("div", inline(trace.text), class_="text", dir="auto")
    shown.append(f"<details><summary>The text without colours</summary>{whole}</details>")
    return html.section("What ran", *shown, id_="ran")
