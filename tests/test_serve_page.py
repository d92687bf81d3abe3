"""The chat page in a browser: streams, colours, stop, settings, keys, keyboard, labels, sizes."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from accessible import violations
from browser import DESKTOP, PHONE, opened
from colours import BLINDNESS, JUST_SEEN, contrast, distance, of_style, seen
from serving import LONG, TOY, Serving, serving, until
from test_serve import THINKING
from toys import Toy

from specrun import EngineError, Round
from specrun.origin import origins
from specrun.target import Target

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

KEY = "a-secret-key"
TEXT = "12312"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("page")) as made:
        yield made


def choose(page: Page, **settings: str) -> None:
    """Open the settings and fill them in."""
    if page.locator("#settings").get_attribute("open") is None:
        page.locator("#settings summary").click()
    for name, value in settings.items():
        field = page.locator(f"#{name}")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)


def ask(page: Page, text: str = TEXT) -> None:
    """Send a message by keyboard, and wait for the end of the answer."""
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")
    page.wait_for_selector("#send:enabled")


def sent(page: Page) -> list[Any]:
    """What the page asks for from now on."""
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json))
    return bodies


def spans(page: Page) -> list[tuple[str, str]]:
    """Text and origin of the tokens of the last answer."""
    tokens = page.locator(".turn.assistant").last.locator(".token").all()
    return [
        (token.text_content() or "", (token.get_attribute("class") or "").split()[-1])
        for token in tokens
    ]


@pytest.mark.parametrize("method", ["plain", "draft"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_an_answer_in_colours(
    browser: Browser, served: Serving, method: Any, size: tuple[int, int]
) -> None:
    """Tokens, origins and the page's own summary are those of the engine."""
    rounds: list[Round] = []
    wanted = served.alone.generate(
        TEXT, method=method, num_assistant_tokens=2, max_new_tokens=24, on_round=rounds.append
    )
    with opened(browser, size) as page:
        page.goto(served.server.url)
        choose(page, method=method, most="24", **({"k": "2"} if method == "draft" else {}))
        ask(page)
        assert spans(page) == list(zip(wanted.text, origins(rounds), strict=True))
        line = page.locator(".turn.assistant .stats").inner_text()
        assert line.startswith(f"24 tokens by {method}, ")
        assert f"{wanted.stats.tokens_per_target_step:.2f} per target step" in line
        assert (f"of {wanted.stats.drafted} drafts accepted" in line) == (method == "draft")
        assert line.endswith("cut at the longest length")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """About a hundred tokens per second, so that an answer does not end before it is looked at."""
    verify = Target.verify

    def slow(self: Target, *arguments: Any, **named: Any) -> Any:
        time.sleep(0.01)
        return verify(self, *arguments, **named)

    monkeypatch.setattr(Target, "verify", slow)


@pytest.mark.usefixtures("slowly")
def test_tokens_come_one_by_one_and_stop(browser: Browser, served: Serving) -> None:
    """While it answers it can be stopped, by button and by key; what there is stays."""
    with opened(browser) as page:
        page.goto(served.server.url)
        choose(page, method="plain", most=str(LONG))
        for turn, stop in enumerate(("button", "key")):
            page.locator("#prompt").fill(TEXT)
            page.locator("#send").click()
            answer = page.locator(".turn.assistant").nth(turn)
            page.wait_for_function(
                "turn => document.querySelectorAll('.turn.assistant')[turn]"
                ".querySelectorAll('.token').length > 5",
                arg=turn,
            )
            assert answer.get_attribute("aria-busy") == "true"
            assert page.locator("#send").is_disabled()
            if stop == "button":
                page.locator("#stop").click()
            else:
                page.keyboard.press("Escape")
            page.wait_for_selector("#send:enabled")
            assert answer.locator(".stats").inner_text() == "Stopped."
            assert answer.get_attribute("aria-busy") is None
            assert page.locator("#status").inner_text() == "Stopped"
            assert len(spans(page)) > 5
            until(lambda: served.pool.running == 0)


def test_a_conversation(browser: Browser, served: Serving) -> None:
    """Every question goes with what was said before; a new chat forgets it."""
    bodies: list[Any] = []
    with opened(browser) as page:
        page.on(
            "request",
            lambda request: bodies.append(request.post_data_json) if request.post_data else None,
        )
        page.goto(served.server.url)
        choose(page, most="3", temperature="0.5", seed="7")
        ask(page, "12")
        ask(page, "3")
        first = "".join(text for text, _ in spans(page))
        assert [message["role"] for message in bodies[1]["messages"]] == [
            "user",
            "assistant",
            "user",
        ]
        assert [message["content"] for message in bodies[1]["messages"]][::2] == ["12", "3"]
        assert (bodies[1]["temperature"], bodies[1]["seed"], bodies[1]["max_tokens"]) == (0.5, 7, 3)
        assert "num_assistant_tokens" not in bodies[1]
        page.get_by_role("button", name="New chat").click()
        assert page.locator(".turn").count() == 0 and page.locator("#hint").is_visible()
        ask(page, "3")
        assert bodies[2]["messages"] == [{"role": "user", "content": "3"}]
        assert len(first) == 3


@pytest.mark.usefixtures("slowly")
def test_a_new_chat_in_the_middle_of_an_answer(browser: Browser, served: Serving) -> None:
    """Nothing of the old one is in the next request."""
    bodies: list[Any] = []
    with opened(browser) as page:
        page.goto(served.server.url)
        choose(page, method="plain", most=str(LONG))
        page.locator("#prompt").fill(TEXT)
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn.assistant .token")
        page.get_by_role("button", name="New chat").click()
        page.wait_for_selector("#send:enabled")
        assert page.locator(".turn").count() == 0
        page.on("request", lambda request: bodies.append(request.post_data_json))
        choose(page, most="2")
        ask(page, "3")
        assert bodies[0]["messages"] == [{"role": "user", "content": "3"}]


def test_the_keyboard(browser: Browser, served: Serving) -> None:
    with opened(browser) as page:
        page.goto(served.server.url)
        choose(page, most="2")
        page.locator("#prompt").focus()
        page.keyboard.type("1")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("2")
        assert page.locator("#prompt").input_value() == "1\n2"
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn.assistant .stats")
        assert page.locator(".turn.user .text").inner_text() == "1\n2"
        assert page.evaluate("document.activeElement.id") == "prompt"
        page.keyboard.press("Enter")  # nothing to send
        assert page.locator(".turn").count() == 2
        reached = set()
        for _ in range(20):
            page.keyboard.press("Tab")
            reached.add(
                page.evaluate("document.activeElement.id || document.activeElement.tagName")
            )
        assert {"fresh", "SUMMARY", "method", "k", "most", "log", "prompt", "send"} <= reached


def test_labels(browser: Browser, served: Serving) -> None:
    """Everything that takes input has a name; the conversation is announced when it is whole."""
    with opened(browser) as page:
        page.goto(served.server.url)
        choose(page, most="2")
        fields = page.locator("input:visible, select:visible, textarea:visible").all()
        assert len(fields) == 7
        for field in fields:
            labels = field.evaluate("field => [...field.labels].map(l => l.innerText).join('')")
            assert labels.strip(), field
        log = page.get_by_role("log", name="Conversation")
        assert log.get_attribute("aria-live") == "polite"
        assert page.locator("#status").get_attribute("role") == "status"
        ask(page)
        assert page.locator("#status").inner_text() == "The answer is complete"
        assert page.get_by_role("list", name="Where tokens come from").locator("li").count() == 4
        assert page.locator("html").get_attribute("lang") == "en"
        assert page.title() == "toy – specrun chat"
        assert violations(page) == []


def test_what_is_wrong_is_shown(browser: Browser, served: Serving) -> None:
    with opened(browser) as page:
        page.goto(served.server.url)
        choose(page, method="mtp-drafter", k="60")
        ask(page)
        alert = page.get_by_role("alert")
        assert "the drafter was exported for at most 16, got 60" in alert.inner_text()
        choose(page, k="2", most="3")
        ask(page)
        assert len(spans(page)) == 3


def test_one_answer_does_not_fill_the_context(browser: Browser, tmp_path: Any) -> None:
    """What the page asks for by itself; the server's own limit, and a checkpoint's smaller one."""
    own = dataclasses.replace(TOY, defaults=(("max_new_tokens", 4),))
    cases: list[tuple[Toy, dict[str, Any], int]] = [
        (TOY, {}, 512),
        (TOY, {"max_new_tokens": 600}, 600),
        (own, {}, 4),
    ]
    for place, (toy, options, wanted) in enumerate(cases):
        with serving(tmp_path / str(place), toy, **options) as served, opened(browser) as page:
            page.goto(served.server.url)
            bodies = sent(page)
            assert page.locator("#most").get_attribute("placeholder") == str(wanted)
            ask(page)
            assert bodies[0]["max_tokens"] == len(spans(page)) == wanted
            choose(page, most="0")  # cannot be meant
            ask(page)
            assert len(bodies) == 1 and page.evaluate("document.activeElement.id") == "most"
            choose(page, most="2")
            ask(page)
            assert bodies[1]["max_tokens"] == len(spans(page)) == 2


def test_a_conversation_that_is_too_long(browser: Browser, tmp_path: Any) -> None:
    """Said in plain words; the question comes back, and a new chat answers it."""
    bodies: list[Any] = []
    toy = dataclasses.replace(TOY, max_context=40, draft=None)
    with serving(tmp_path, toy) as served, opened(browser) as page:
        page.goto(served.server.url)
        page.on("request", lambda request: bodies.append(request.post_data_json))
        ask(page, "12312")  # and its answer takes the rest
        ask(page, "45")
        assert page.get_by_role("alert").inner_text() == (
            "This conversation is too long for the model. Press “New chat” to begin another one,"
            " or send a shorter message. (prompt: 42 tokens do not fit into the context of 40"
            " with a new one)"
        )
        assert page.locator("#prompt").input_value() == "45"
        ask(page, "6")
        assert [m["content"] for m in bodies[2]["messages"]][::2] == ["12312", "6"]
        page.get_by_role("button", name="New chat").click()
        assert page.locator("#prompt").input_value() == "6"
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn.assistant .stats")
        assert bodies[3]["messages"] == [{"role": "user", "content": "6"}]
        assert page.locator("#prompt").input_value() == ""


def test_an_answer_that_breaks_off(
    browser: Browser, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question comes back, and neither is part of the conversation."""
    bodies: list[Any] = []
    verify = Target.verify
    count = [0]

    def failing(self: Target, *arguments: Any, **named: Any) -> Any:
        count[0] += 1
        if count[0] > 3:
            raise EngineError("it broke", hint="mend it")
        return verify(self, *arguments, **named)

    engine = {"verify": "engine"}
    with serving(tmp_path, opening=engine) as served, opened(browser) as page:
        page.goto(served.server.url)
        page.on("request", lambda request: bodies.append(request.post_data_json))
        choose(page, method="plain", most="9")
        with monkeypatch.context() as patch:
            patch.setattr(Target, "verify", failing)
            ask(page, "123")
        assert page.get_by_role("alert").inner_text() == "it broke (hint: mend it)"
        assert len(spans(page)) > 0 and page.locator("#prompt").input_value() == "123"
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn.assistant .stats")
        assert bodies[1]["messages"] == [{"role": "user", "content": "123"}]


def test_blanks_at_the_ends_of_lines(browser: Browser, served: Serving) -> None:
    """They are coloured inside of the text alone, wherever a line ends."""
    with opened(browser, PHONE) as page:
        page.goto(served.server.url)
        choose(page, most="1")
        ask(page)
        beyond = page.evaluate(
            """() => {
              const text = document.querySelector(".turn.assistant .text");
              for (let i = 0; i < 400; i++)
                text.append(element("span", "token accepted", "w".repeat(i % 7 + 1) + " "));
              const edge = text.getBoundingClientRect().right + 0.5;
              const boxes = [...text.children].flatMap((token) => [...token.getClientRects()]);
              return boxes.filter((box) => box.right > edge).length;
            }"""
        )
        assert beyond == 0


def test_text_is_no_markup(browser: Browser, served: Serving) -> None:
    with opened(browser) as page:
        page.goto(served.server.url)
        choose(page, most="2")
        text = "<img src=x onerror=alert(1)><b>1</b>"
        ask(page, text)
        assert page.locator(".turn.user .text").inner_text() == text
        assert page.locator("main img, main b").count() == 0


def test_a_key(browser: Browser, tmp_path: Any) -> None:
    with serving(tmp_path, api_key=KEY) as served, opened(browser) as page:
        page.goto(served.server.url)
        assert page.locator("#key").is_visible()  # open by itself
        ask(page)
        assert "wants its API key" in page.get_by_role("alert").inner_text()
        choose(page, key=KEY, most="3")
        ask(page)
        assert len(spans(page)) == 3
        assert KEY not in page.content()


def test_a_thought_and_a_folder_without_a_template(browser: Browser, tmp_path: Any) -> None:
    with serving(tmp_path / "a", THINKING) as served, opened(browser) as page:
        page.goto(served.server.url)
        page.locator("#settings summary").click()
        assert page.locator("#thinking").is_visible() and not page.locator("#key").is_visible()
        ask(page, "1")
        thought = page.locator(".turn.assistant details.thought")
        assert thought.locator(".text").inner_text() == "ab"
        assert page.locator(".turn.assistant > .text").inner_text() == "12"
        bodies: list[Any] = []
        page.on("request", lambda request: bodies.append(request.post_data_json))
        choose(page, thinking="no")
        ask(page, "1")
        assert bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
        # The thought is no part of what was said.
        assert bodies[0]["messages"][1] == {"role": "assistant", "content": "12"}
    with serving(tmp_path / "b", Toy()) as served, opened(browser) as page:
        page.goto(served.server.url)
        choose(page, most="4")
        ask(page, "123")
        assert "".join(text for text, _ in spans(page)) == "4567"


# How it looks.


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_that_everybody_can_tell_apart(
    browser: Browser, served: Serving, scheme: Any
) -> None:
    """By colour with every kind of colour blindness, and by underlines without any colour."""
    with opened(browser, PHONE, color_scheme=scheme) as page:
        page.goto(served.server.url)
        tokens = "[...document.querySelectorAll('.legend .token')]"
        style = f"name => {tokens}.map(token => getComputedStyle(token)[name])"
        colours = page.evaluate(style, "color")
        lines = page.evaluate(style, "textDecorationLine")
        styles = page.evaluate(style, "textDecorationStyle")
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert len(colours) == 4
    assert contrast(of_style(back), (1, 1, 1)) < 1.1 or scheme == "dark"
    shown = [of_style(colour) for colour in colours]
    for colour in shown:
        assert contrast(colour, of_style(back)) >= 4.5
    for kind in BLINDNESS:
        for one, other in itertools.combinations([seen(colour, kind) for colour in shown], 2):
            assert distance(one, other) > 25 > 10 * JUST_SEEN
    assert len(set(zip(lines, styles, strict=True))) == 4


def test_fingers_find_what_they_want(browser: Browser, served: Serving) -> None:
    """On a phone nothing is smaller than 44 pixels or beside the screen, settings open or not."""
    with opened(browser, (320, 568), has_touch=True) as page:
        page.goto(served.server.url)
        for opened_settings in (False, True):
            if opened_settings:
                page.locator("#settings summary").tap()
            for field in page.locator("button, input, select, textarea, summary").all():
                if not field.is_visible():
                    continue
                box = field.bounding_box()
                assert box is not None
                assert box["height"] >= 44 and box["x"] >= 0 and box["x"] + box["width"] <= 320
            assert page.evaluate("document.documentElement.scrollWidth") <= 320
        assert page.locator("#send").bounding_box()["y"] < 568  # type: ignore[index]


def test_colours_can_be_turned_off(browser: Browser, served: Serving) -> None:
    with opened(browser) as page:
        page.goto(served.server.url)
        choose(page, most="9", method="draft", colours="no")
        ask(page)
        token = page.locator(".turn.assistant .token.accepted").first
        assert token.evaluate("e => getComputedStyle(e).textDecorationLine") == "none"


def test_the_page_lets_nothing_else_in(served: Serving) -> None:
    answer = served.http.get("/")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert not re.search(r"(src|href)=\"(?!data:,)", answer.text)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert TOY.chat_template is not None


def test_without_a_page(tmp_path: Any) -> None:
    with serving(tmp_path, page=False) as served:
        assert served.http.get("/").status_code == 404
