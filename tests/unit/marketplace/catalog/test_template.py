"""Chat templates: what the engine would render, in a sandbox, with bounds."""

from __future__ import annotations

from typing import Any

import pytest

from marketplace.catalog import template as module
from marketplace.catalog.template import (
    ChatTemplate,
    TemplateError,
    UnsupportedMessages,
    UnsupportedTools,
)
from tests.vocabularies import smollm2_header

CHATML = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
TYPED = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}|{% endfor %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


class TestRendering:
    def test_the_bundled_models_template_gives_its_documented_form(self) -> None:
        template = ChatTemplate(smollm2_header().text("tokenizer.chat_template") or "")
        assert template.render([system("Be brief."), user("Hi")]) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_developers_are_system_to_the_template(self) -> None:
        rendered = ChatTemplate(CHATML).render([{"role": "developer", "content": "Be brief."}, user("Hi")])
        assert rendered == "<|system|>Be brief.\n<|user|>Hi\n<|assistant|>"

    def test_text_parts_are_joined_by_line_ends(self) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        assert ChatTemplate(CHATML).render([user(parts)]) == "<|user|>one\ntwo\n<|assistant|>"

    def test_content_that_is_null_is_empty(self) -> None:
        chat = [user("a"), {"role": "assistant", "content": None}, user("b")]
        assert ChatTemplate(CHATML).render(chat) == "<|user|>a\n<|assistant|>\n<|user|>b\n<|assistant|>"

    def test_a_template_without_a_system_role_gets_its_text_in_the_users_turn(self) -> None:
        template = ChatTemplate(NO_SYSTEM)
        assert not template.capabilities.system
        assert template.render([system("Be brief."), user("Hi")]) == "[user]Be brief.\nHi"
        assert template.render([system("Alone.")]) == "[user]Alone."

    def test_a_template_that_takes_parts_only_gets_parts(self) -> None:
        template = ChatTemplate(TYPED)
        assert template.capabilities.typed_content
        assert template.render([user("plain"), user([{"type": "text", "text": "typed"}])]) == "plain|typed|"

    def test_tools_are_rendered_where_the_template_has_a_place_for_them(self) -> None:
        template = ChatTemplate(TOOLS)
        tool = {"type": "function", "function": {"name": "naïve<b>"}}
        rendered = template.render([user("Hi")], [tool])
        assert '"naïve<b>"' in rendered, "as the engine writes it: no HTML or ASCII escapes"

    def test_the_begin_token_is_not_written_twice(self) -> None:
        source = "{{ bos_token }}" + CHATML
        assert ChatTemplate(source, bos_token="<s>", adds_bos=True).render([user("x")]).startswith("<|user|>")
        assert ChatTemplate(source, bos_token="<s>").render([user("x")]).startswith("<s><|user|>")

    def test_messages_are_not_changed(self) -> None:
        chat = [system("s"), user([{"type": "text", "text": "x"}])]
        ChatTemplate(NO_SYSTEM).render(chat)
        assert chat == [system("s"), user([{"type": "text", "text": "x"}])]


class TestRefusals:
    @pytest.mark.parametrize(
        "messages",
        [
            [],
            [{"content": "no role"}],
            [user([{"type": "image_url", "image_url": {"url": "x"}}])],
            [user(7)],
            [user(["bare"])],
            [{"role": "tool", "content": "unknown role"}],
        ],
    )
    def test_messages_that_do_not_fit_are_the_requests_fault(self, messages: list[dict[str, Any]]) -> None:
        with pytest.raises(UnsupportedMessages) as caught:
            ChatTemplate(NO_SYSTEM).render(messages)
        assert caught.value.status == 400
        assert (caught.value.param or "").startswith("messages")

    def test_the_templates_own_words_reach_the_caller(self) -> None:
        with pytest.raises(UnsupportedMessages, match="no tool"):
            ChatTemplate(NO_SYSTEM).render([{"role": "tool", "content": "x"}])

    def test_tools_are_refused_where_the_template_has_no_place_for_them(self) -> None:
        with pytest.raises(UnsupportedTools) as caught:
            ChatTemplate(CHATML).render([user("x")], [{"type": "function", "function": {"name": "f"}}])
        assert caught.value.param == "tools"

    def test_a_chat_has_a_bounded_number_of_messages(self) -> None:
        with pytest.raises(UnsupportedMessages):
            ChatTemplate(CHATML).render([user("x")] * (module.MAX_MESSAGES + 1))

    @pytest.mark.parametrize(
        "source", ["", "   ", "{% for %}", "{{ unclosed", "nothing of the message", "{{ raise_exception('never') }}"]
    )
    def test_a_template_that_cannot_render_a_chat_is_refused_at_once(self, source: str) -> None:
        with pytest.raises(TemplateError):
            ChatTemplate(source)


class TestSandbox:
    @pytest.mark.parametrize(
        "attack",
        [
            "{{ ''.__class__.__mro__ }}",
            "{{ messages.append(1) }}",
            "{{ messages.__init__.__globals__ }}",
            "{{ self.__init__.__globals__ }}",
            "{{ cycler.__init__.__globals__ }}",
            "{{ 'x' * 100000000 }}",
            "{{ 9 ** 9999999 }}",
            "{{ '%9999999999d' % 1 }}",
            "{{ '{:>9999999999}'.format(1) }}",
            "{{ ('{:>9999999999}' | attr('format'))(1) }}",
            "{{ 'x' | center(9999999999) }}",
            "{{ 'x'.ljust(9999999999) }}",
            "{{ 'x'.zfill(9999999999) }}",
            "{{ 'x'.center(9999999999) }}",
            "{{ 'a\tb'.expandtabs(9999999999) }}",
            "{% for i in range(9999999999) %}x{% endfor %}",
            "{% include 'etc/passwd' %}",
            "{{ strftime_now('%9999999999Y') | length }}",
        ],
    )
    def test_a_template_reaches_neither_python_nor_all_memory(self, attack: str) -> None:
        # Harmless for the probe's "hello" and needle, so that the attack runs on the request.
        source = CHATML + "{% if messages[0].content == 'now' %}[" + attack + "]{% endif %}"
        template = ChatTemplate(source)
        try:
            rendered = template.render([user("now")])
        except UnsupportedMessages:
            return
        assert len(rendered) < 2_000
        assert "class" not in rendered
        assert "object at 0x" not in rendered

    def test_output_is_cut_off_at_the_bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_PROMPT_CHARACTERS", 1_000)
        template = ChatTemplate(CHATML)
        with pytest.raises(UnsupportedMessages, match="1000 characters"):
            template.render([user("x" * 1_001)])
