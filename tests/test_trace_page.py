"""The page of a trace in a browser: opened from the disk, pointed at, clicked, and used with the
keyboard, on a phone and on a desktop; colours that are told apart by everybody."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from accessible import violations
from browser import DESKTOP, PHONE, opened
from colours import BLINDNESS, JUST_SEEN, Colour, as_style, contrast, distance, of_hex, seen
from drafting import RightFor
from test_text import byte_level
from toys import Toy, scripted

from specrun.pages import html as pages
from specrun.trace import Recorder, Trace, TracedRound, TracedToken, write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    import specrun

OpenToy = Callable[..., "specrun.Engine"]
SIZES = pytest.mark.parametrize(
    "size", [PHONE, DESKTOP, (360, 740)], ids=["phone", "desktop", "360"]
)
TOY = Toy(max_context=100, vocabulary=("0", "1", "2", "<b>", "\n", "5", " six", "7", "\u200b", "9"))


@pytest.fixture
def made(open_toy: OpenToy, tmp_path: Path) -> Path:
    """Rounds: 2 of 3 drafts, none, all, and again; 21 tokens."""
    recorder = Recorder()
    engine = open_toy(TOY)
    result = engine.generate(
        [1], max_new_tokens=21, drafter=RightFor(TOY, [2, 0, 3]), num_assistant_tokens=3,
        logprobs=4, on_round=recorder,
    )  # fmt: skip
    recorder.write_page(tmp_path / "trace.html", engine, result, prompt="1")
    return tmp_path / "trace.html"


@pytest.fixture
def shown(browser: Browser, made: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The page as a desktop has it, or in the size that the test is given."""
    size = request.getfixturevalue("size") if "size" in request.fixturenames else DESKTOP
    with opened(browser, size) as page:
        page.goto(made.as_uri())
        yield page


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id"))


def details(page: Page) -> str:
    return page.locator("#details").inner_text()


@SIZES
def test_it_fits_and_reads(shown: Page, size: tuple[int, int]) -> None:
    assert shown.evaluate("document.documentElement.scrollWidth") <= size[0]
    text = shown.locator("#tokens").evaluate("box => box.textContent")
    assert text == 2 * "2<b>\n5 six7901" + "2"
    heads = shown.locator("h1, h2:visible").all_inner_texts()
    assert heads[:3] == ["Where the tokens came from", "Text", "Rounds"]
    assert heads[-2:] == ["In figures", "What ran"]


@SIZES
def test_a_click_or_a_tap_shows_what_else_was_probable(shown: Page, size: tuple[int, int]) -> None:
    panel = shown.locator("#token")
    assert panel.is_visible() == (size[0] > 900)
    shown.locator("#t3").click()
    text = details(shown)
    assert "Correction" in text and "in place of" in text and "round\n1 of 8, token 3 of 3" in text
    assert panel.locator(".bars li").count() == 4
    assert panel.locator(".bars .chosen").inner_text().startswith("5")
    assert "in the text" in panel.locator(".bars .chosen").inner_text()
    box = shown.locator("#t3").bounding_box()
    assert box is not None
    if size[0] < 900:  # the panel lies below, and can be closed
        top = panel.bounding_box()
        assert top is not None and box["y"] + box["height"] <= top["y"]
        shown.locator("#close").click()
        assert not panel.is_visible() and focused(shown) == "t3"


def test_the_mouse_shows_a_token_for_a_while(shown: Page) -> None:
    shown.locator("#t2").hover()
    assert "3 of 21" in details(shown) and "Accepted draft" in details(shown)
    shown.locator("#t5").click()
    shown.locator("#t2").hover()
    assert "3 of 21" in details(shown)
    shown.locator("h1").hover()
    assert "6 of 21" in details(shown)  # the chosen one again
    assert focused(shown) == "t5"


def test_the_keyboard_goes_everywhere(shown: Page) -> None:
    shown.get_by_text("What these are").focus()
    shown.keyboard.press("Tab")
    assert focused(shown) == "t0"  # one stop for all tokens
    assert "none: reading the prompt gave it" in details(shown)
    steps = [
        ("ArrowRight", "t1"), ("ArrowRight", "t2"), ("ArrowLeft", "t1"), ("ArrowDown", "t4"),
        ("ArrowDown", "t5"), ("ArrowDown", "t9"), ("ArrowUp", "t5"), ("ArrowUp", "t4"),
        ("ArrowUp", "t1"), ("ArrowUp", "t0"), ("ArrowUp", "t0"), ("ArrowLeft", "t0"),
        ("End", "t20"), ("ArrowRight", "t20"), ("ArrowDown", "t20"), ("Home", "t0"),
    ]  # fmt: skip
    for key, expected in steps:
        shown.keyboard.press(key)
        assert focused(shown) == expected, key
        selected = shown.locator("#tokens [aria-selected]")
        assert selected.count() == 1 and selected.get_attribute("id") == expected
        assert shown.locator(f"#{expected}").get_attribute("tabindex") == "0"
    shown.keyboard.press("ArrowDown")
    shown.keyboard.press("Enter")
    assert shown.evaluate("document.activeElement.parentElement.id") == "r0"
    assert shown.locator("#r0").get_attribute("open") is not None
    shown.keyboard.press("ArrowDown")
    assert shown.evaluate("document.activeElement.parentElement.id") == "r1"
    shown.keyboard.press("Enter")
    shown.locator("#r1 .drafts").wait_for()
    assert shown.locator("#r1 .rejected").count() == 3


def test_a_token_is_told_in_words(shown: Page) -> None:
    shown.locator("#t3").click()
    label = shown.locator("#t3").get_attribute("aria-label") or ""
    assert (
        label.startswith("5, correction, round 1 of 8, ")
        and label.endswith(", in place of 5") is False
    )
    assert re.fullmatch(r"5, correction, round 1 of 8, [\d.]+ %, in place of ␣six", label)
    shown.locator("#t4").click()
    assert (shown.locator("#t4").get_attribute("aria-label") or "").startswith("␣six, correction")


def test_what_a_screen_reader_finds(shown: Page) -> None:
    assert shown.get_by_role("listbox", name="Generated tokens").count() == 1
    assert shown.get_by_role("option").count() == 21
    for name in ("Plain", "Accepted draft", "Correction", "Bonus"):
        assert shown.get_by_role("button", name=re.compile(f"^{name} ")).count() == 1
    charts = shown.get_by_role("img")
    assert charts.count() == shown.locator("figure").count() == 5
    assert all(
        charts.nth(at).get_attribute("aria-label") and shown.locator("figure table").nth(at).count()
        for at in range(5)
    )
    assert shown.get_by_role("complementary", name="Token").count() == 1
    labels = shown.locator("button:visible, summary:visible").all_inner_texts()
    assert all(label.strip() for label in labels)


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "light"), (DESKTOP, "dark")])
def test_nobody_is_kept_out(
    browser: Browser, made: Path, size: tuple[int, int], scheme: str
) -> None:
    """The rules of WCAG that a program can check, with everything open."""
    with opened(browser, size, color_scheme=scheme) as page:
        page.goto(made.as_uri())
        assert violations(page) == []
        page.locator("#show-rejected").check()
        page.locator("#open-all").click()
        for summary in page.locator("figure summary, #ran summary").all():
            summary.click()
        page.locator("[data-origin=accepted]").click()
        page.locator("#t3").click()
        assert violations(page) == []


def test_a_page_that_keeps_somebody_out_is_found(page: Page) -> None:
    page.set_content("<html lang=en><title>t</title><main><h1>t</h1><img src=''></main>")
    assert [found.partition(":")[0] for found in violations(page)] == ["image-alt"]


def test_what_the_origins_are(shown: Page) -> None:
    shown.get_by_text("What these are").click()
    assert shown.get_by_text("the target's own token in place of a draft it rejected").is_visible()


@SIZES
def test_filters(shown: Page, size: tuple[int, int]) -> None:
    back = "element => getComputedStyle(element).backgroundColor"
    button = shown.locator("[data-origin=accepted]")
    before = shown.locator("#t1").evaluate(back)
    assert button.get_attribute("aria-pressed") == "true" and before != "rgba(0, 0, 0, 0)"
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert shown.locator("#t1").evaluate(back) == "rgba(0, 0, 0, 0)"
    assert shown.locator("#t3").evaluate(back) != "rgba(0, 0, 0, 0)"
    shown.locator("#t0").focus()
    for expected in ("t3", "t4", "t8"):  # the arrows pass what is hidden
        shown.keyboard.press("ArrowRight")
        assert focused(shown) == expected
    button.click()
    assert shown.locator("#t1").evaluate(back) == before


@SIZES
def test_rejected_drafts_on_demand(shown: Page, size: tuple[int, int]) -> None:
    text = shown.locator("#tokens")
    assert text.locator(".rejected").count() == 0
    shown.locator("#show-rejected").check()
    rejected = text.locator(".rejected")
    assert rejected.count() == 5 and rejected.first.inner_text() == " six"
    following = rejected.first.evaluate("element => element.nextElementSibling.id")
    assert following == "t3"
    shown.locator("#show-rejected").uncheck()
    assert text.locator(".rejected").count() == 0


@SIZES
def test_rounds(shown: Page, size: tuple[int, int]) -> None:
    rounds = shown.locator("#list details")
    assert rounds.count() == 8
    assert "2 of 3 drafts stood, 3 tokens" in rounds.first.inner_text()
    assert not shown.locator("#r0 .drafts").count()
    shown.locator("#r0 summary").click()
    shown.locator("#r0 .drafts").wait_for()
    kinds = shown.locator("#r0 .drafts small").all_inner_texts()
    assert kinds == ["accepted", "accepted", "rejected", "correction"]
    shown.locator("#r0 button").click()
    assert focused(shown) == "t1"
    shown.locator("#open-all").click()
    shown.locator("#r7 .drafts").wait_for()
    assert shown.locator("#list .drafts").count() == 8
    shown.locator("#open-all").click()
    assert shown.locator("#list details[open]").count() == 0


def test_invisible_characters_and_line_ends(shown: Page) -> None:
    assert shown.locator("#t6 .ch").get_attribute("data-c") == "U+200B"
    assert shown.locator("#t2 .nl").count() == 1
    assert shown.locator("b").count() == 0


def test_a_character_in_parts(browser: Browser, open_toy: OpenToy, tmp_path: Path) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a🦊", add_special_tokens=False).ids
    engine, recorder = open_toy(scripted(ids, tokenizer=tokenizer)), Recorder()
    result = engine.generate([0], max_new_tokens=5, method="plain", on_round=recorder)
    recorder.write_page(tmp_path / "fox.html", engine, result)
    with opened(browser) as page:
        page.goto((tmp_path / "fox.html").as_uri())
        assert page.locator("#tokens").evaluate("box => box.textContent") == "a🦊"
        page.locator("#t2").click()
        assert "2 of 4 of what became text together" in details(page)
        assert "Alternatives were not asked for." in details(page)
        page.locator("#t4").click()
        assert (page.locator("#t4").get_attribute("aria-label") or "").startswith(
            "🦊, plain, part 4"
        )


def long(found: Trace, count: int) -> Trace:
    """``count`` rounds of 4 tokens."""
    token = TracedToken(5, "word ", 0, "accepted", 0, -0.5, ((5, -0.5), (6, -1.0)))
    tokens = [token.__class__(5, "word ", 0, "plain", None)]
    rounds = []
    for number in range(count):
        first = len(tokens)
        kinds: list[Any] = ["accepted"] * 3 + ["correction"]
        for place, kind in enumerate(kinds):
            tokens.append(
                TracedToken(5, "word ", first + place, kind, number, -0.5, ((5, -0.5), (6, -1.0)))
            )
        rounds.append(TracedRound(4, (5, 5, 5, 6), 3, 5, first, 4, 0.001, 0.002))
    fields = {name: getattr(found, name) for name in found.__dataclass_fields__}
    return Trace(**{**fields, "tokens": tuple(tokens), "rounds": tuple(rounds)})


def test_a_long_text(browser: Browser, open_toy: OpenToy, tmp_path: Path) -> None:
    """10,001 tokens: all there, some rounds at a time, the last ones too."""
    engine, recorder = open_toy(Toy()), Recorder()
    result = engine.generate([1], max_new_tokens=4, method="plain", on_round=recorder)
    file = tmp_path / "long.html"
    write_page(file, long(recorder.trace(engine, result), 2500))
    assert file.stat().st_size < 2_000_000
    with opened(browser) as page:
        page.goto(file.as_uri())
        assert page.get_by_role("listbox").locator(".t").count() == 10_001
        page.locator("#t0").focus()
        page.keyboard.press("End")
        assert focused(page) == "t10000" and "round\n2500 of 2500" in details(page)
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.parentElement.id") == "r2499"
        assert page.locator("#list details").count() == 20
        assert page.locator("#which").inner_text() == "2481 to 2500 of 2500"
        assert page.locator("#later").is_disabled()
        page.locator("#earlier").click()
        assert page.locator("#which").inner_text() == "2461 to 2480 of 2500"
        page.locator("#show-rejected").check()
        assert page.locator("#tokens .rejected").count() == 2500


def test_without_javascript(browser: Browser, made: Path) -> None:
    with opened(browser, java_script_enabled=False) as page:
        page.goto(made.as_uri())
        assert page.locator("#tokens .accepted").count() == 12
        assert "Without JavaScript" in page.locator("noscript").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_scheme_of_the_system(browser: Browser, made: Path, scheme: str) -> None:
    with opened(browser, color_scheme=scheme, reduced_motion="reduce") as page:
        page.goto(made.as_uri())
        style = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(style) == as_style(colours(scheme)["page"])
        moves = "getComputedStyle(document.querySelector('button')).transitionDuration"
        assert page.evaluate(moves) == "0s"


# Colours, from the style sheet itself.

KINDS = ("accepted", "correction", "bonus", "plain")


def colours(scheme: str) -> dict[str, Colour]:
    """The variables of a scheme as linear RGB."""
    light, dark = re.findall(r":root \{(.*?)\}", pages._file("page.css"), re.S)[:2]
    text = light if scheme == "light" else light + dark
    found = re.findall(r"--([\w-]+): #([0-9a-f]{6});", text)
    return {name: of_hex(value) for name, value in found}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_lines_have_contrast(scheme: str) -> None:
    """WCAG 2 AAA for what is generated, AA for the rest, 3 for lines and edges."""
    found = colours(scheme)
    for kind in KINDS:
        assert contrast(found["ink"], found[f"{kind}-back"]) >= 7, kind
        if kind != "plain":
            assert contrast(found[kind], found["page"]) >= 3, kind
    for back in ("page", "card"):
        assert contrast(found["ink"], found[back]) >= 7
        assert contrast(found["soft"], found[back]) >= 4.5
        assert contrast(found["edge"], found[back]) >= 3
        assert contrast(found["focus"], found[back]) >= 7
        assert contrast(found["bar"], found[back]) >= 3
        for number in range(6):
            assert contrast(found[f"s{number}"], found[back]) >= 3, number


@pytest.mark.parametrize("kind", BLINDNESS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colour_blind_people_tell_origins_apart(scheme: str, kind: str) -> None:
    """By what is behind the letters alone, at seven times what can just be seen."""
    found = colours(scheme)
    for a, b in itertools.combinations(KINDS, 2):
        far = distance(seen(found[f"{a}-back"], kind), seen(found[f"{b}-back"], kind))
        assert far >= 7 * JUST_SEEN, (a, b, far)


def test_every_origin_has_a_line_of_its_own() -> None:
    """What the colour tells, the kind of the line tells as well."""
    style = pages._file("page.css")
    lines = {kind: re.search(rf"^\.{kind} \{{.*underline (\w+)", style, re.M) for kind in KINDS}
    kinds = [found[1] for found in lines.values() if found]
    assert sorted(kinds) == ["dotted", "double", "solid", "wavy"]
