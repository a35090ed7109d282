"""Conversations with thoughts and tools through templates of known kinds, held against texts written by hand."""

import copy
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from longspec.data.chat.special_tokens import LayoutError
from tests.data import families
from tests.data.agent_families import AGENTS
from tests.data.families import encoded, stretches
from tests.refusals import refused

Record = dict[str, Any]
TOOL = {"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "sum", "arguments": '{"a":14,"b":"größer \\"x\\""}'}}
ARGUMENTS = '{"a": 14, "b": "größer \\"x\\""}'
QUESTION = {"role": "user", "content": "What is 14 + x?"}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"is": "17\nor so"}'}
LOOP = [
    QUESTION,
    {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [CALL]},
    RESULT,
    {"role": "assistant", "content": "It is 17.", "reasoning_content": "So it is."},
]
TWICE = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "yes", "reasoning_content": "hm"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "no", "reasoning_content": "well"},
]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Any]:
    byte_level = families.byte_level()
    return {name: families.family(name, byte_level) for name in [*AGENTS, "phi", "qwen2.5"]}


def trained(tokenizer: Any, record: Record) -> list[list[str]]:
    """Of each document what is trained."""
    return [stretches(tokenizer, document) for document in encoded(tokenizer, record)]


def served(tokenizer: Any, messages: list[Record], **given: Any) -> str:
    """The prompt as transformers lays it out, with arguments of calls as the template reads them: an object, or JSON text."""
    plain = []
    for message in messages:
        arguments = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        if "call.function.arguments +" in tokenizer.chat_template:
            arguments = [json.dumps(each, ensure_ascii=False) for each in arguments]
        else:
            message = message | {"content": message["content"] or ""}
        calls = zip(message.get("tool_calls", []), arguments, strict=True)
        made = [call | {"function": call["function"] | {"arguments": each}} for call, each in calls]
        plain.append(message | ({"tool_calls": made} if made else {}))
    # Not apply_chat_template, which takes a content of None out, so that such a template fails.
    words = tokenizer.special_tokens_map
    template = tokenizer.chat_template
    [text], _ = render_jinja_template([plain], chat_template=template, add_generation_prompt=True, **words, **given)
    return str(text)


LOOP_SAID = {
    "qwen3-tools": [
        f'<think>\nI add.\n</think>\n\n<tool_call>\n{{"name": "sum", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>',
        "<think>\nSo it is.\n</think>\n\nIt is 17.<|im_end|>",
    ],
    "r1-tools": [
        f"I add.\n</think>\n\n<|call_begin|>function<|sep|>sum\n```json\n{ARGUMENTS}\n```<|call_end|><|eos|>",
        "<think>\nSo it is.\n</think>\n\nIt is 17.<|eos|>",
    ],
    "harmony": [
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant to=functions.sum<|channel|>commentary json<|message|>"
        f"{ARGUMENTS}<|call|>",
        "<|channel|>analysis<|message|>So it is.<|end|><|start|>assistant<|channel|>final<|message|>It is 17.<|return|>",
    ],
}


@pytest.mark.parametrize("name", sorted(LOOP_SAID))
def test_thoughts_calls_and_their_ends_are_trained_behind_what_is_served(tokenizers: dict[str, Any], name: str) -> None:
    tokenizer, tools = tokenizers[name], None if name == "r1-tools" else [TOOL]
    documents = encoded(tokenizer, {"messages": LOOP, "tools": tools})
    assert len(documents) == (2 if name == "r1-tools" else 1), "one where the template keeps the thoughts of a loop"
    assert [said for document in documents for said in stretches(tokenizer, document)] == LOOP_SAID[name]
    prompt = served(tokenizer, LOOP[:-1], tools=tools).replace("Day: 2026-", "Day: 2024-")
    ids = documents[-1].ids
    assert documents[-1].as_served
    if name != "harmony":  # which tells the day
        end = len(tokenizer(prompt, add_special_tokens=False).input_ids)
        assert tokenizer.decode(ids[:end]) == prompt
        assert documents[-1].answer_mask[end - 1 : end + 1].tolist() == [0, 1]
    assert "17\nor so" not in "".join(LOOP_SAID[name])


def test_llama_calls(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["llama-tools"]
    messages = [QUESTION, {"role": "assistant", "tool_calls": [CALL]}, RESULT, {"role": "assistant", "content": "It is 17."}]
    record = {"messages": messages, "tools": [TOOL]}
    json_call = f'{{"name": "sum", "parameters": {ARGUMENTS}}}<|eot_id|>'
    assert trained(tokenizer, record) == [[json_call, "It is 17.<|eot_id|>"]]
    built_in = CALL | {"function": {"name": "search", "arguments": {"query": "14 + x"}}}
    record = {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [built_in]}]}
    record["chat_template_kwargs"] = {"builtin_tools": ["search"]}
    assert trained(tokenizer, record) == [['<|python_tag|>search.call(query="14 + x")<|eom_id|>']]


@pytest.mark.parametrize("name", sorted(LOOP_SAID))
def test_earlier_thoughts_are_not_read(tokenizers: dict[str, Any], name: str) -> None:
    documents = encoded(tokenizers[name], {"messages": TWICE})
    first, second = (stretches(tokenizers[name], document, kind=0)[0] for document in documents)
    assert "yes" in second
    assert "hm" not in second
    assert second.startswith(first.removesuffix("<think>\n").removesuffix("<|start|>assistant"))
    assert all(document.as_served for document in documents)


MAGISTRAL = """{{ bos_token }}[SYSTEM_PROMPT]Think between [THINK] and [/THINK].[/SYSTEM_PROMPT]
{%- for turn in messages %}{{ '[INST]' + turn.content + '[/INST]' if turn.role == 'user' else turn.content + eos_token }}
{%- endfor %}"""


def test_the_marks_of_magistral_are_a_thought() -> None:
    tokenizer = families.family("mistral", families.byte_level())
    tokenizer.chat_template = MAGISTRAL
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    question = {"role": "user", "content": "first"}
    within = {"messages": [question, {"role": "assistant", "content": "[THINK]hm[/THINK]yes"}]}
    apart = {"messages": [question, {"role": "assistant", "content": "yes", "reasoning_content": "hm"}]}
    for record in (within, apart):
        assert trained(tokenizer, record) == [["[THINK]hm[/THINK]yes</s>"]]


def test_thinking_switched_off_is_part_of_the_prompt(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["qwen3-tools"]
    turns = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in TWICE]
    record = {"messages": turns, "chat_template_kwargs": {"enable_thinking": False}}
    documents = encoded(tokenizer, record)
    assert [stretches(tokenizer, document) for document in documents] == [["yes<|im_end|>"], ["no<|im_end|>"]]
    assert stretches(tokenizer, documents[1], kind=0)[0] == served(tokenizer, turns[:-1], enable_thinking=False)
    assert all(document.as_served for document in documents)
    # Without the argument the template writes the empty thought itself, which nobody said and no prompt has.
    [document] = encoded(tokenizer, {"messages": turns[:2], "tools": [TOOL]})
    assert stretches(tokenizer, document) == ["yes<|im_end|>"]
    assert not document.as_served


def test_a_template_for_tools_lays_out_conversations_with_tools_alone(tokenizers: dict[str, Any]) -> None:
    tokenizer, plain = copy.deepcopy(tokenizers["qwen3-tools"]), families.QWEN25
    record = {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}], "tools": [TOOL]}
    whole = encoded(tokenizer, record)
    tokenizer.chat_template = {"default": plain, "tool_use": tokenizer.chat_template}
    parts = [[(list(each.ids), each.answer_mask.tolist()) for each in made] for made in (encoded(tokenizer, record), whole)]
    assert parts[0] == parts[1]
    [document] = encoded(tokenizer, {"messages": [QUESTION, {"role": "assistant", "content": "17"}]})
    assert tokenizer.decode(document.ids).startswith("<|im_start|>system\nBe of help.<|im_end|>")


def test_two_calls_and_two_results_in_one_turn(tokenizers: dict[str, Any]) -> None:
    other = CALL | {"id": "b", "function": {"name": "double", "arguments": {}}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, other]},
        RESULT,
        {"role": "tool", "content": "", "tool_call_id": "b"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "thanks"},
    ]
    tokenizer, record = tokenizers["qwen3-tools"], {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    first = "Let me see.\n" + call.format("sum", ARGUMENTS) + "\n" + call.format("double", "{}") + "<|im_end|>"
    documents = encoded(tokenizer, record)
    assert [stretches(tokenizer, document) for document in documents] == [[first], ["Done.<|im_end|>"]]
    assert [document.left_out for document in documents] == [0, 1]


CALLING: Record = {"role": "assistant", "tool_calls": [CALL]}
CALLING_TWICE, SAYING_TOO = CALLING | {"tool_calls": [CALL, CALL]}, CALLING | {"content": "I add."}


@pytest.mark.parametrize(
    ("name", "messages", "more", "place", "fact"),
    [
        ("phi", TWICE, {}, "messages[1].reasoning_content:", "such an"),
        ("phi", [QUESTION, CALLING], {}, "messages[1].tool_calls[0]:", "such an"),
        ("qwen2.5", [QUESTION, LOOP[3]], {"tools": [TOOL]}, "tools:", "`align`"),
        ("llama-tools", LOOP[:2], {}, "messages[1].reasoning_content:", "such an"),
        ("llama-tools", [QUESTION, SAYING_TOO], {}, "messages[1].content:", "such an"),
        ("llama-tools", [QUESTION, CALLING_TWICE], {}, "the chat template refuses it:", "single tool-calls"),
        ("harmony", [QUESTION, CALLING_TWICE], {}, "messages[1].tool_calls[1]:", "such an"),
        ("harmony", [QUESTION, LOOP[1] | {"content": "I say."}], {}, "the chat template refuses it:", "thinking beside"),
        ("r1-tools", [QUESTION, SAYING_TOO], {}, "messages[1]:", "ends such"),
        ("qwen3-tools", TWICE, {"enable_thinking": False}, "messages[1].reasoning_content:", "without a thought"),
        ("qwen3-tools", TWICE, {"enable_thinkin": False}, "chat_template_kwargs.enable_thinkin:", "drop it"),
    ],
)
def test_what_cannot_be_laid_out_exactly_is_refused(
    tokenizers: dict[str, Any], name: str, messages: list[Record], more: Record, place: str, fact: str
) -> None:
    """more: tools, or arguments of the template."""
    record = {"messages": messages} | (more if "tools" in more else {"chat_template_kwargs": more})
    with refused(place, fact, kind=LayoutError):
        encoded(tokenizers[name], record)


def test_a_template_that_leaves_out_what_a_tool_returned_is_refused(tokenizers: dict[str, Any]) -> None:
    tokenizer = families.family("phi", families.byte_level())
    tokenizer.chat_template = families.PHI.replace("{{ '<|' +", "{% if turn.role != 'tool' %}{{ '<|' +").replace(
        "'<|end|>\\n' }}", "'<|end|>\\n' }}{% endif %}"
    )
    said = [
        {"role": role, "content": content} for role, content in (("assistant", "I look."), ("tool", "3"), ("assistant", "ok"))
    ]
    with refused("messages[2].content:", "tool's result", kind=LayoutError):
        encoded(tokenizer, {"messages": [QUESTION, *said]})


WORDS = ["a", "ab ", "\n", " ", "größer", "🙂", "14", '"', "\\", "{"]
WORDS += ["<|im_end|>", "<|call|>", "<|eos|>", "<tool", "\ue000", "\uf001"]
SAID = st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map("".join).filter(str.strip)
VALUES = st.recursive(
    SAID | st.integers() | st.booleans(), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(SAID, inner, max_size=2)
)
THOUGHT_AND = st.tuples(SAID, SAID)


@st.composite
def conversations(draw: st.DrawFn) -> list[Record]:
    """Questions, each with an answer, before which a tool may be called once or twice."""
    messages: list[Record] = []
    for _ in range(draw(st.integers(1, 2))):
        messages.append({"role": "user", "content": draw(SAID)})
        for _ in range(draw(st.integers(0, 2))):
            thought, result = draw(THOUGHT_AND)
            call = {"name": "sum", "arguments": draw(st.dictionaries(SAID, VALUES, max_size=2))}
            messages.append({"role": "assistant", "reasoning_content": thought, "tool_calls": [call]})
            messages.append({"role": "tool", "content": result})
        thought, content = draw(THOUGHT_AND)
        messages.append({"role": "assistant", "reasoning_content": thought, "content": content})
    return messages


def expected(name: str, message: Record, before: Record) -> str:
    """What is trained of an answer, written by the rules of its family."""
    thought, content = message["reasoning_content"], message.get("content", "")
    call = message.get("tool_calls", [None])[0]
    arguments = json.dumps(call["arguments"], ensure_ascii=False) if call else ""
    if name == "harmony":
        head = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        if call:
            return f"{head} to=functions.sum<|channel|>commentary json<|message|>{arguments}<|call|>"
        return f"{head}<|channel|>final<|message|>{content}<|return|>"
    if name == "qwen3-tools":
        said = (
            content.lstrip("\n") if call is None else f'<tool_call>\n{{"name": "sum", "arguments": {arguments}}}\n</tool_call>'
        )
        return f"<think>\n{thought.strip(chr(10))}\n</think>\n\n{said}<|im_end|>"
    said = content if call is None else f"<|call_begin|>function<|sep|>sum\n```json\n{arguments}\n```<|call_end|>"
    opened = "" if before["role"] == "user" else "<think>\n"
    return f"{opened}{thought.strip()}\n</think>\n\n{said}<|eos|>"


@settings(max_examples=60)
@given(name=st.sampled_from(sorted(LOOP_SAID)), messages=conversations())
def test_any_answer_comes_back_from_its_tokens(tokenizers: dict[str, Any], name: str, messages: list[Record]) -> None:
    """Whatever is thought, said, asked of tools and returned by them; each answer once, in order, and nothing else."""
    tokenizer = tokenizers[name]
    documents = encoded(tokenizer, {"messages": messages})
    texts = [text for document in documents for text in stretches(tokenizer, document)]
    pairs = pairwise(messages)
    assert texts == [expected(name, answer, before) for before, answer in pairs if answer["role"] == "assistant"]
    if name != "harmony":  # names of special tokens that somebody typed stay text
        ends = [document.ids[document.answer_mask == 1].tolist().count(tokenizer.eos_token_id) for document in documents]
        assert sum(ends) == len(texts)
