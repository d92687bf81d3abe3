"""Chat templates as Hugging Face writes them."""

from __future__ import annotations

import datetime

import pytest

from specrun import UsageError
from specrun.chat import check_known, render

USER = [{"role": "user", "content": "Hi <b> & ü"}]


def test_variables_and_generation_prompt() -> None:
    template = (
        "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]"
        "{{ message.content | trim }}{% endfor %}{% if add_generation_prompt %}[model]{% endif %}"
    )
    assert render(template, USER, {"bos_token": "<s>"}) == "<s>[user]Hi <b> & ü[model]"


def test_blocks_leave_no_lines_behind() -> None:
    inner = "    {% if true %}\n{{ message.role }}\n    {% endif %}\n"
    template = f"{{% for message in messages %}}\n{inner}{{% endfor %}}"
    assert render(template, USER, {}) == "user\n"


def test_what_templates_use() -> None:
    template = (
        "{{ messages | tojson }}|{{ strftime_now('%Y') }}|"
        "{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}|"
        "{% generation %}x{% endgeneration %}|"
        "{{ tools is none }}{{ documents is none }}{{ nothing is defined }}"
    )
    year = datetime.datetime.now().year
    messages = '[{"role": "user", "content": "Hi <b> & ü"}]'
    assert render(template, USER, {}) == f"{messages}|{year}|01|x|TrueTrueFalse"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no system role') }}", "refuses the prompt: no system role"),
        ("{% if %}", "the chat template refuses the prompt"),
        ("{{ messages[0].content + 1 }}", "the chat template failed: TypeError"),
        ("{{ ''.__class__.__mro__ }}", "refuses the prompt: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "refuses the prompt"),
    ],
)
def test_a_template_that_refuses(template: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        render(template, USER, {})
    assert "--raw" in str(caught.value.hint)


@pytest.mark.parametrize("value", [True, False])
def test_thinking_on_and_off(value: bool) -> None:
    template = "{% if enable_thinking is defined %}{{ enable_thinking }}{% else %}-{% endif %}"
    assert render(template, [], {}, enable_thinking=value) == str(value)
    assert render(template, [], {}) == "-"
    other = "{{ thinking | default('-') }}"  # as DeepSeek-V3.1 calls it
    assert render(other, [], {}, enable_thinking=value) == str(value)
    assert render(other, [], {}) == "-"
    for ignorant in ("{{ messages }}", "{% set thinking = 1 %}{{ thinking }}"):
        with pytest.raises(UsageError, match="cannot turn thinking on or off, got"):
            render(ignorant, [], {}, enable_thinking=value)


def test_what_a_template_knows() -> None:
    """Asked for without rendering; one that is broken is left to the rendering."""
    check_known("{{ tools }}{{ enable_thinking }}", tools=[{}], enable_thinking=True)
    check_known("{{ messages }}", tools=None, enable_thinking=None)
    check_known("{{ broken", tools=[{}], enable_thinking=True)
    with pytest.raises(UsageError, match="knows nothing of tools"):
        check_known("{{ enable_thinking }}", tools=[{}], enable_thinking=True)
    with pytest.raises(UsageError, match="cannot turn thinking on or off, got False"):
        check_known("{{ tools }}", tools=[{}], enable_thinking=False)


def test_tools_are_a_variable() -> None:
    template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    assert render(template, [], {}, tools=[{"a": "ö"}]) == '{"a": "ö"}'
    assert render(template, [], {}, tools=[]) == render(template, [], {}) == ""
    with pytest.raises(UsageError, match="the chat template knows nothing of tools, got 1"):
        render("{{ messages }}", [], {}, tools=[{}])
