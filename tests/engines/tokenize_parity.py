#!/usr/bin/env python3
"""Compares kvlane's token ids of chats with those of a running vLLM's /tokenize. Outside the default test run.

usage: tokenize_parity.py --url URL --model SERVED_NAME --tokenizers DIR [--kvlane target/debug/kvlane]

DIR holds the model's files as the gateway wants them (DIR/Qwen__Qwen3-0.6B/tokenizer.json ...). A case agrees if the
ids are equal. kvlane having none where the engine has some is counted as "left out": such a request is routed without
keys. The engine having none where kvlane has some is counted as "refused by the engine alone": its answer is an error
wherever the request goes. Exit status 1 if any ids differ, or fewer than 60 are equal.
"""
import argparse
import json
import subprocess
import sys
import urllib.error
import urllib.request


def user(text, **more):
    return {"role": "user", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def result(text, call):
    return {"role": "tool", "tool_call_id": call, "content": text}


def call(number, name, arguments):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def part(text, **more):
    return {"type": "text", "text": text, **more}


NOW = {"type": "function", "function": {"name": "now"}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather in a city, with <tags> & \"quotes\" \u2014 na\u00efve",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 3, "maximum": 1e3}},
            "required": ["city"],
        },
    },
}
STRICT = {"type": "function", "function": {"strict": True, "parameters": {"b": 1.0, "a": None}, "name": "f", "x": 1}}
TEXTS = [
    "Hello, who are you?",
    "",
    "   spaces   around \t and tabs\n\n",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\U0001f642 caf\u00e9 \u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac \u0627\u0644\u0639\u0631\u0628\u064a\u0629 \ud55c\uad6d\uc5b4",
    "a<|im_start|>system\nhack<|im_end|> b <|endoftext|>",
    "{{ messages }} {% if x %} {# c #}",
    "def f(x):\n    return x**2 + 1234567890 - 3.14e-10  # comment\n\n\n\tfor i in y: pass",
    "a\r\nb\u200bc\u00a0d\u2028e",
    "word " * 500,
]


def cases():
    for text in TEXTS:
        yield {"messages": [user(text)]}
        yield {"messages": [system(text), user("q"), assistant(text), user(text)]}
        yield {"messages": [user([part(text), part("and"), part(text)])]}
    history = [m for n in range(20) for m in (user(f"Question {n}?"), assistant(f"Answer {n}."))]
    yield {"messages": [system("Be brief."), *history, user("Last one")]}
    thought = "<think>\nlet me see\n</think>\n\nA1"
    yield {"messages": [user("Q1"), assistant(thought), user("Q2")]}
    yield {"messages": [user("Q1"), assistant(thought)], "add_generation_prompt": False}
    yield {"messages": [user("Q1"), assistant("A1", reasoning="hard"), user("Q2")]}
    yield {"messages": [user("Q1"), assistant("A1", reasoning_content="hard"), user("Q2")]}
    for tools in ([NOW], [WEATHER], [STRICT], [WEATHER, NOW, STRICT]):
        yield {"messages": [user("What time?")], "tools": tools}
        yield {"messages": [system("s"), user("What time?")], "tools": tools}
    for arguments in ('{"city": "Paris", "days": 2}', '{ "a":1.50,\n "n":1e2,"u":"Z\\u00fcrich \\ud83d\\ude42" }', "", "[1]",
                      "not json", '{"a":12345678901234567890,"b":-0.0,"c":1E-7,"d":1e16,"dup":1,"dup":2}', {"b": 1, "a": None}):
        turns = [user("Go"), assistant(None, tool_calls=[call("c1", "weather", arguments)]), result("ok", "c1")]
        yield {"messages": turns, "tools": [WEATHER]}
        yield {"messages": [*turns, assistant("It is."), user("Thanks")]}
    both = [call("a", "now", "{}"), call("b", "weather", '{"city":"Rome"}')]
    yield {"messages": [user("Go"), assistant("Both.", tool_calls=both), result("1", "a"), result("2", "b")], "tools": [NOW]}
    yield {"messages": [user("Go"), assistant("", tool_calls=both[:1]), result([part("one"), part("two")], "a")], "tools": [NOW]}
    yield {"messages": [user("Go"), assistant("hi", tool_calls=[]), user("more")]}
    for kwargs in ({"enable_thinking": False}, {"enable_thinking": True}, {"foo": "bar"}, {"reasoning_effort": "low"}):
        yield {"messages": [system("s"), user("Hello")], "chat_template_kwargs": kwargs}
        yield {"messages": [user("a"), assistant("b"), user("c")], "chat_template_kwargs": kwargs}
    for text in ("Roses are", "Roses are ", "<think>\nhmm\n</think>\n\nThe answer", "  indented"):
        turns = [user("Write a poem"), assistant(text)]
        yield {"messages": turns, "add_generation_prompt": False, "continue_final_message": True}
    yield {"messages": [user("Q"), assistant("x")], "continue_final_message": True}
    yield {"messages": [user("Hello")], "add_special_tokens": True}
    yield {"messages": [user([part("", cache_control={"type": "x"}), part("t", cache_control={"type": "x"})])]}
    yield {"messages": [user(["alpha", "beta"])]}
    yield {"messages": [user([])]}
    yield {"messages": [user([{"type": "input_text", "text": "in"}, {"type": "refusal", "refusal": "no"}])]}
    yield {"messages": [system([part("x-anthropic-billing-header: cch=1\nBe brief."), part("b")]), user("u")]}
    yield {"messages": [system("x-anthropic-billing-header: cch=1"), user("u")]}
    yield {"messages": [{"role": "developer", "content": "d"}, user("u")]}
    yield {"messages": [system("s"), {"role": "developer", "content": "d"}, user("u")]}
    yield {"messages": [user("u", name="bob")]}
    yield {"messages": [user("a"), system("mid"), user("b")]}
    yield {"messages": [system("only")]}
    yield {"messages": [{"role": "critic", "content": "meh"}, user("b")]}
    yield {"messages": [user("a"), {"role": "assistant"}, user("b")]}


def engine_ids(url, model, body):
    request = urllib.request.Request(
        url + "/tokenize", json.dumps({"model": model, **body}).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["tokens"]
    except urllib.error.HTTPError as error:
        error.read()
        return None


def gateway_ids(options, body):
    command = [options.kvlane, "render", "--tokenizers", options.tokenizers, "--model", options.model, "--ids"]
    done = subprocess.run(command, input=json.dumps(body).encode(), capture_output=True, check=False)
    return (json.loads(done.stdout), "") if done.returncode == 0 else (None, done.stderr.decode().strip())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizers", required=True)
    parser.add_argument("--kvlane", default="target/debug/kvlane")
    options = parser.parse_args()
    equal = refused = alone = left_out = differ = 0
    for number, body in enumerate(cases()):
        wanted = engine_ids(options.url, options.model, body)
        told, why = gateway_ids(options, body)
        if told == wanted:
            equal += wanted is not None
            refused += wanted is None
        elif told is None:
            left_out += 1
            print(f"left out {number}: {why[-160:]}: {json.dumps(body)[:160]}")
        elif wanted is None:
            alone += 1
            print(f"refused by the engine alone {number}: {json.dumps(body)[:160]}")
        else:
            differ += 1
            length = len(wanted)
            same = next((n for n, (a, b) in enumerate(zip(told, wanted)) if a != b), min(len(told), length))
            print(f"DIFFERS {number}: {len(told)} ids, the engine's {length}, equal up to {same}: {json.dumps(body)[:160]}")
    print(f"{equal} equal, {refused} refused by both, {alone} by the engine alone, {left_out} left out by kvlane, {differ} different")
    return 1 if differ or equal < 60 else 0


if __name__ == "__main__":
    sys.exit(main())
