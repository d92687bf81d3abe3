"""Chat templates as Hugging Face writes them."""

from __future__ import annotations

import datetime

import pytest

from specrun import UsageError
from specrun.chat import render

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
