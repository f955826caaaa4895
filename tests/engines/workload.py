"""What the checks send: conversations and completions with shared beginnings, which come again and grow."""

import json
import random

from harness import ADAPTERS, MODEL

WORDS = (
    "river stone boat harbour lantern winter letter garden engine window market bridge signal table orange keyboard "
    "planet teacher station copper violin thunder meadow pepper ladder compass blanket theory ocean candle 河 石头 été"
).split()


def text(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words)) + "."


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]


class Chat:
    """A conversation; each turn holds all turns before it. `holder` is the endpoint that answered last."""

    def __init__(self, name, rng, system=None, **options):
        self.name = name
        self.holder = None
        self.rng = rng
        self.path = "/v1/chat/completions"
        self.options = options
        self.messages = [{"role": "system", "content": system}] if system else []
        self.messages.append({"role": "user", "content": text(rng, 60)})

    def body(self):
        return {"model": MODEL, "messages": self.messages, "max_tokens": 12, "temperature": 0, **self.options}

    def grow(self, answer):
        self.messages.append({"role": "assistant", "content": answer or "Yes."})
        self.messages.append({"role": "user", "content": text(self.rng, 40)})


class Completion:
    """A prompt as text or token ids, which gets longer. `holder` as of a chat."""

    def __init__(self, name, rng, head, **options):
        self.name = name
        self.holder = None
        self.rng = rng
        self.path = "/v1/completions"
        self.options = options
        self.prompt = head + self.more()

    def more(self):
        return " " + text(self.rng, 50)

    def body(self):
        return {"model": MODEL, "prompt": self.prompt, "max_tokens": 12, "temperature": 0, **self.options}

    def grow(self, answer):
        self.prompt += (answer or "") + self.more()


class Tokens(Completion):
    def more(self):
        return [self.rng.randrange(1000, 100_000) for _ in range(70)]

    def grow(self, answer):
        self.prompt = self.prompt + self.more()


def conversations(name, adapters):
    """Those of one case, with LoRA adapters where these are served; other names give other texts."""
    rng = random.Random(name)
    systems = [f"You are helper {number} of {name}. " + text(rng, 50) for number in range(2)]
    heads = [f"Report {number} of {name}: " + text(rng, 60) for number in range(2)]
    chats = [Chat(f"chat {number}", rng, systems[number % 2]) for number in range(6)]
    chats.append(Chat("chat without system", rng))
    chats.append(Chat("chat with tools", rng, systems[0], tools=TOOLS, tool_choice="none"))
    chats.append(Chat("chat, streamed", rng, systems[1], stream=True, stream_options={"include_usage": True}))
    chats.append(Chat("chat with arguments", rng, chat_template_kwargs={"enable_thinking": False}))
    chats.append(Chat("chat with a salt", rng, systems[0], cache_salt=f"salt of {name}"))
    texts = [Completion(f"completion {number}", rng, heads[number % 2]) for number in range(4)]
    texts.append(Completion("completion, streamed", rng, heads[0], stream=True, stream_options={"include_usage": True}))
    texts.append(Tokens("completion of token ids", rng, []))
    for adapter in ADAPTERS if adapters else ():
        chats += [Chat(f"chat {number} with adapter {adapter}", rng, systems[0], model=adapter) for number in range(2)]
    return chats + texts


def read_answer(body, streamed):
    """The text of an answer and what its engine says of the prompt: (text, prompt tokens, cached tokens)."""
    if streamed:
        lines = (line[6:] for line in body.decode().splitlines() if line.startswith("data: "))
        parts = [json.loads(line) for line in lines if line != "[DONE]"]
    else:
        parts = [json.loads(body)]
    said = ""
    usage = {}
    for part in parts:
        usage = part.get("usage") or usage
        for choice in part["choices"]:
            message = choice.get("message") or choice.get("delta") or choice
            said += message.get("content") or message.get("text") or ""
    details = usage.get("prompt_tokens_details") or {}
    return said, usage["prompt_tokens"], details.get("cached_tokens") or 0
