"""Writes corpus.txt: our own English and code sentences, put together from our own word lists with a fixed seed.

    python3 make_corpus.py > corpus.txt
"""

import random

RANDOM = random.Random(20260101)

NOUNS = """answer queue server reader writer engine gateway request response token block prefix cache prompt model
memory thread core socket stream buffer message header body client network packet window limit counter table index key
value entry record event batch trace report result error reason warning signal timer clock deadline minute second hour
morning evening week month year season winter summer river mountain forest garden island harbour village city street
bridge station train ship plane road map letter book page chapter story poem song music picture camera colour shape
number sum ratio average median sample measure experiment theory proof idea question problem solution method plan
project team engineer teacher student doctor farmer baker sailor driver artist writer lawyer judge neighbour friend
family child parent brother sister house kitchen table chair window door roof wall floor lamp clock bottle bread cheese
apple orange lemon potato onion soup coffee water milk sugar salt pepper oil fire stone wood iron silver gold glass
paper cotton leather engine wheel motor battery cable switch button screen keyboard computer program function variable
string integer array list loop branch condition module library package version release change commit patch review test
bug fix log file folder path disk backup database row column query filter order price market shop customer invoice
contract payment budget salary tax law rule policy country border language word sentence paragraph translation summary
weather rain snow wind storm cloud sun moon star planet galaxy light sound wave energy force speed distance weight
temperature pressure volume area surface angle corner centre edge side middle beginning end history future past moment
animal horse dog cat bird fish bee spider tree flower leaf root seed field grass hill valley lake sea ocean beach""".split()

VERBS = """reads writes sends receives holds keeps drops counts measures compares explains describes builds repairs
opens closes starts stops moves follows finds loses learns teaches asks answers accepts refuses splits joins sorts
checks changes replaces removes adds copies prints stores loads calls returns waits runs walks carries draws paints
cooks cleans washes buys sells pays promises remembers forgets believes doubts expects predicts observes records
translates summarizes reviews improves breaks protects warns helps visits leaves reaches crosses passes fills empties
connects divides multiplies reduces increases shares hides shows""".split()

ADJECTIVES = """small large quick slow early late bright dark warm cold new old simple careful quiet loud narrow wide
empty full heavy light deep shallow strong weak honest curious patient busy free local remote public private common
rare exact rough smooth sharp soft hard open closed first second third last next previous whole partial single double
green blue red yellow white black grey brown useful useless safe dangerous cheap expensive healthy tired hungry
friendly strange famous ordinary modern ancient possible impossible correct wrong clear vague main other same
different important necessary independent""".split()

ADVERBS = """quickly slowly carefully quietly often seldom always never usually sometimes again twice once today
yesterday tomorrow soon later early together alone almost exactly roughly simply clearly finally""".split()

PLACES = """in the garden|at the station|near the river|behind the house|on the table|under the bridge|across the lake|
through the forest|over the mountain|before the meeting|after the storm|during the winter|without a reason|
with great care|for the whole team|from the beginning|until the end|between two pages|inside the buffer|
outside the city|around the corner|against the wind|by the window|into the queue|out of the box""".replace("\n", "").split("|")

OPENERS = """Please explain how|Could you tell me why|Write a short story in which|Describe in detail how|Summarize the text where|
Give me three reasons why|Translate the sentence where|What would happen if|I would like to know when|Can you show that|
Let us assume that|It is well known that|There is no doubt that|As far as we know,|In other words,|For example,|
On the other hand,|First of all,|Then we notice that|The report says that|My colleague thinks that|Nobody expected that""".replace("\n", "").split("|")

SYSTEM = [
    "You are a helpful assistant. Answer in a few clear sentences and say when you do not know something.",
    "You are a careful programmer. Read the code below, find the mistake and explain how to correct it.",
    "You are a patient teacher. Use simple words, short examples and one question at the end.",
    "You answer questions about a document. Quote the paragraph that supports your answer.",
    "You are a translator. Keep names, numbers and punctuation as they are in the original text.",
]

CODE = [
    "def {n}_{m}({a}, {b}):\n    \"\"\"Return the {j} {n} of a {m}.\"\"\"\n    {r} = []\n    for {i} in range(len({a})):\n        if {a}[{i}] > {b}:\n            {r}.append({a}[{i}])\n    return {r}\n",
    "fn {n}_{m}({a}: &[u32], {b}: u32) -> Option<u32> {{\n    let mut {r} = 0;\n    for {i} in {a} {{\n        if *{i} == {b} {{\n            {r} += 1;\n        }}\n    }}\n    if {r} > 0 {{ Some({r}) }} else {{ None }}\n}}\n",
    "struct {N} {{\n    {n}: String,\n    {m}: Vec<u64>,\n    {a}: Option<usize>,\n}}\n\nimpl {N} {{\n    pub fn new({n}: String) -> Self {{\n        Self {{ {n}, {m}: Vec::new(), {a}: None }}\n    }}\n}}\n",
    "SELECT {n}.id, {n}.{a}, count(*) AS {r} FROM {n} JOIN {m} ON {m}.{n}_id = {n}.id WHERE {n}.{b} > {k} GROUP BY {n}.id ORDER BY {r} DESC LIMIT {k};\n",
    "{{\"{n}\": {{\"id\": {k}, \"name\": \"{j} {m}\", \"{a}\": [1, 2, 3], \"{b}\": null, \"ok\": true}}}}\n",
    "class {N}:\n    def __init__(self, {n}, {m}=None):\n        self.{n} = {n}\n        self.{m} = {m} or {{}}\n\n    def {a}(self):\n        return self.{m}.get(self.{n}, {k})\n",
    "const {n} = async ({a}) => {{\n  const {r} = await fetch(`/{m}/${{{a}}}`);\n  if (!{r}.ok) throw new Error('{j} {m}');\n  return {r}.json();\n}};\n",
    "# {j} {n}\n\n* the {m} is {j}\n* run `make {n}` and read `{m}.log`\n* see section {k} for the {a}\n",
]


def clause():
    noun, other = RANDOM.choice(NOUNS), RANDOM.choice(NOUNS)
    subject = f"the {RANDOM.choice(ADJECTIVES)} {noun}" if RANDOM.random() < 0.5 else f"a {noun}"
    object_ = f"the {other}" if RANDOM.random() < 0.6 else f"every {RANDOM.choice(ADJECTIVES)} {other}"
    text = f"{subject} {RANDOM.choice(VERBS)} {object_}"
    if RANDOM.random() < 0.4:
        text += " " + RANDOM.choice(PLACES)
    if RANDOM.random() < 0.3:
        text += " " + RANDOM.choice(ADVERBS)
    return text


def sentence():
    kind = RANDOM.random()
    if kind < 0.4:
        text = clause() + "."
        return text[0].upper() + text[1:]
    if kind < 0.6:
        return f"{RANDOM.choice(OPENERS)} {clause()}?"
    if kind < 0.8:
        text = f"{clause()}, {RANDOM.choice(['and', 'but', 'because', 'so that', 'while', 'although'])} {clause()}."
        return text[0].upper() + text[1:]
    return f"It took {RANDOM.randrange(2, 999)} {RANDOM.choice(NOUNS)}s and {RANDOM.randrange(1, 60)} minutes; {clause()}, isn't it?"


def code():
    names = RANDOM.sample(NOUNS, 5)
    return RANDOM.choice(CODE).format(
        n=names[0], m=names[1], a=names[2], b=names[3], r=names[4], i=RANDOM.choice("ijkxy"),
        N=names[0].capitalize() + names[1].capitalize(), j=RANDOM.choice(ADJECTIVES), k=RANDOM.randrange(1, 500))


def main():
    words = NOUNS + VERBS + ADJECTIVES + ADVERBS
    RANDOM.shuffle(words)
    print("Words: the " + ", the ".join(words) + ".")
    for number in range(230):
        print(RANDOM.choice(SYSTEM) if number % 5 == 0 else "")
        print(" ".join(sentence() for _ in range(RANDOM.randrange(2, 6))))
        if number % 4 == 0:
            print()
            print(code())


if __name__ == "__main__":
    main()
