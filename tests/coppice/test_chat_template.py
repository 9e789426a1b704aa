"""Chat templates give what they give in transformers."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from coppice.chat_template import ChatTemplate
from coppice.errors import InvalidArgument, StartError
from coppice.tokenizer import ChatMessage, Tokenizer

TALK = [
    ChatMessage("system", "Be <brief> & kind."),
    ChatMessage("user", "Hi\n {{ 1 }}"),
    ChatMessage("assistant", "Hello."),
    ChatMessage("user", "Bye “now”"),
]
TEMPLATES = {
    "special tokens": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] "
    "{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    "blocks on their own lines": "{% for m in messages %}\n    {% if m.role == 'user' %}\n"
    "U: {{ m.content }}\n    {% endif %}\n{% endfor %}\nA:",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}",
    "generation block": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}",
    "absent tools": "{% if tools is not none %}tools{% endif %}{{ messages[0].content }}",
    "date": "{{ strftime_now('%Y') }}{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}


def as_dicts(messages: list[ChatMessage]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


@pytest.fixture
def directory(smollm2: Path, tmp_path: Path) -> Path:
    """A tokenizer without a template."""
    (tmp_path / "tokenizer.json").symlink_to(smollm2 / "tokenizer.json")
    return tmp_path


def write_config(directory: Path, template: object) -> None:
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    content = json.dumps({**config, "chat_template": template})
    (directory / "tokenizer_config.json").write_text(content)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str, directory: Path) -> None:
    write_config(directory, TEMPLATES[name])
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=TEMPLATES[name],
    )
    expected = reference.apply_chat_template(
        as_dicts(TALK), tokenize=False, add_generation_prompt=True
    )
    assert Tokenizer.load(directory).render_chat(TALK) == expected


def test_the_default_model_has_its_chat_format(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    messages = [ChatMessage("system", "S"), ChatMessage("user", "U")]
    text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages) == text
    assert tokenizer.encode_chat(messages) == tokenizer.encode(text)


def test_the_template_file_goes_before_the_entry(directory: Path) -> None:
    write_config(directory, "entry")
    (directory / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(directory).render_chat(TALK) == "file"


def test_of_several_templates_the_default_is_taken(directory: Path) -> None:
    write_config(
        directory,
        [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}],
    )
    assert Tokenizer.load(directory).render_chat(TALK) == "plain"


def test_chat_without_a_template_is_an_invalid_argument(directory: Path) -> None:
    with pytest.raises(InvalidArgument, match="no chat template") as error:
        Tokenizer.load(directory).render_chat(TALK)
    assert error.value.field == "messages"


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('only user may speak') }}", "{{ messages[9].content.x }}"]
)
def test_a_template_that_refuses_makes_an_invalid_argument(source: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        ChatTemplate(source, {}).render(TALK)
    assert error.value.field == "messages"


def test_no_messages_are_an_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="at least one message"):
        ChatTemplate("x", {}).render([])


def test_a_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(InvalidArgument):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).render(TALK)


def test_a_template_that_does_not_compile_stops_the_start() -> None:
    with pytest.raises(StartError, match="cannot be compiled"):
        ChatTemplate("{% for %}", {})
