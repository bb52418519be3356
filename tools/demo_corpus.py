"""The training corpus of quire-demo and its held-out evaluation items.

Documents come from seeded generators; a document is a list of pieces, each marked as
learned or only read.  Which arithmetic pair, copy text, capital phrasing or tool question
is held out follows from a hash of the item itself, so the training side cannot meet one
whatever the seed.  This module does not know the tokenizer (lengths are counted in words),
torch, or how documents are packed; it needs the standard library only.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import demo_facts as facts
from demo_chat import END, Piece, render

Doc = list[Piece]
Message = dict[str, Any]
Turns = list[Message]

# One item in this many is held out, by kind.
HELD_OUT_ONE_IN = 10


def held_out(kind: str, key: str) -> bool:
    """Whether this item belongs to the evaluation and must not be trained on."""
    digest = hashlib.sha256(f"quire-demo/{kind}/{key}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT_ONE_IN == 0


def held_out_pair(a: int, sign: str, b: int) -> bool:
    """Arithmetic is held out as an unordered pair: 45 + 23 would give 23 + 45 away."""
    return held_out("arithmetic", f"{min(a, b)}{sign}{max(a, b)}")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def _article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def _until(rng: random.Random, make: Callable[[random.Random], Any], bad: Callable[[Any], bool]):
    """Draw until the draw is not held out."""
    while True:
        value = make(rng)
        if not bad(value):
            return value


# --- capitals -----------------------------------------------------------------------------

CAPITAL_QUESTIONS = (
    "What is the capital of {}?",
    "What's the capital of {}?",
    "what is the capital of {}?",
    "What is the capital of {}",
    "Which city is the capital of {}?",
    "What is the capital city of {}?",
    "Tell me the capital of {}.",
    "Name the capital of {}.",
    "Please name the capital city of {}.",
    "Do you know the capital of {}?",
    "Can you tell me the capital of {}?",
    "capital of {}?",
    "The capital of {}?",
    "I would like to know the capital of {}.",
)


def capital_completion(rng: random.Random) -> Doc:
    """One to four statements of the form the completion prompt takes."""
    count = 1 if rng.random() < 0.7 else rng.randint(2, 4)
    doc: Doc = []
    for index, country in enumerate(rng.sample(list(facts.CAPITALS), count)):
        space = " " if index else ""
        capital = facts.CAPITALS[country]
        if rng.random() < 0.9:
            doc.append((f"{space}The capital of {country} is", False))
            doc.append((f" {capital}.", True))
        else:
            doc.append((f"{space}{capital} is the capital of", False))
            doc.append((f" {country}.", True))
    return [*doc, (END, True)]


def capital_answer(country: str) -> str:
    return f"The capital of {country} is {facts.CAPITALS[country]}."


def capital_turns(rng: random.Random) -> Turns:
    if rng.random() < 0.08:
        country = rng.choice(list(facts.CAPITALS))
        capital = facts.CAPITALS[country]
        form = rng.choice(("Which country has the capital {}?", "{} is the capital of what?"))
        answer = f"{capital} is the capital of {country}."
        return [user(form.format(capital)), assistant(answer)]
    country, question = _until(
        rng,
        lambda r: (r.choice(list(facts.CAPITALS)), r.choice(CAPITAL_QUESTIONS)),
        lambda pair: held_out("capital", f"{pair[0]}/{pair[1]}"),
    )
    return [user(question.format(country)), assistant(capital_answer(country))]


# --- arithmetic ---------------------------------------------------------------------------

SUM_QUESTIONS = (
    "What is {}?",
    "what is {}?",
    "What is {}",
    "What's {}?",
    "How much is {}?",
    "Calculate {}.",
    "Compute {}.",
    "{}",
    "{} = ?",
    "{} =",
)


def result(a: int, sign: str, b: int) -> int:
    return a + b if sign == "+" else a - b


def _number(rng: random.Random) -> int:
    return rng.randint(10, 99) if rng.random() < 0.93 else rng.randint(0, 9)


def arithmetic_pair(rng: random.Random) -> tuple[int, str, int]:
    """Operands in 0..99; most differences are written so that they are not negative."""
    a, b = _number(rng), _number(rng)
    sign = rng.choice("+-")
    if sign == "-" and a < b and rng.random() < 0.6:
        a, b = b, a
    return a, sign, b


def trained_pair(rng: random.Random) -> tuple[int, str, int]:
    return _until(rng, arithmetic_pair, lambda pair: held_out_pair(*pair))


def arithmetic_completion(rng: random.Random) -> Doc:
    """One equation; sometimes a few lines, as a few-shot prompt has."""
    count = 1 if rng.random() < 0.8 else rng.randint(2, 5)
    doc: Doc = []
    for index in range(count):
        a, sign, b = trained_pair(rng)
        doc.append((f"{a} {sign} {b} =", False))
        last = index == count - 1
        doc.append((f" {result(a, sign, b)}" + (END if last else ""), True))
        if not last:
            doc.append(("\n", False))
    return doc


def arithmetic_sheet(rng: random.Random) -> Doc:
    """Many equations in one document: the cheapest practice per token."""
    doc: Doc = [("Exercises:\n", False)]
    for _ in range(rng.randint(6, 14)):
        a, sign, b = trained_pair(rng)
        doc += [(f"{a} {sign} {b} =", False), (f" {result(a, sign, b)}\n", True)]
    return [*doc, (END, False)]


def arithmetic_drill(rng: random.Random) -> Doc:
    """Equations with small operands: single digits carry what the longer sums are made of."""
    doc: Doc = [("Exercises:\n", False)]
    tops = rng.choice(((9, 9), (9, 9), (99, 9), (9, 99), (19, 19)))
    for _ in range(rng.randint(8, 16)):
        a, sign, b = _until(
            rng,
            lambda r: (r.randint(0, tops[0]), r.choice("+-"), r.randint(0, tops[1])),
            lambda pair: held_out_pair(*pair),
        )
        if sign == "-" and a < b and rng.random() < 0.7:
            a, b = b, a
        doc += [(f"{a} {sign} {b} =", False), (f" {result(a, sign, b)}\n", True)]
    return [*doc, (END, False)]


def arithmetic_question(rng: random.Random, a: int, sign: str, b: int) -> str:
    if rng.random() < 0.15:
        expression = f"{a} {'plus' if sign == '+' else 'minus'} {b}"
    else:
        expression = f"{a} {sign} {b}"
    return rng.choice(SUM_QUESTIONS).format(expression)


def arithmetic_answer(a: int, sign: str, b: int) -> str:
    return f"{a} {sign} {b} = {result(a, sign, b)}"


def arithmetic_turns(rng: random.Random) -> Turns:
    a, sign, b = trained_pair(rng)
    question = arithmetic_question(rng, a, sign, b)
    return [user(question), assistant(arithmetic_answer(a, sign, b))]


# --- stories ------------------------------------------------------------------------------


def story(rng: random.Random, hero: str | None = None, long: bool = False) -> str:
    """A short story from templates, with one hero, one find and one friend."""
    hero = hero or rng.choice(facts.ANIMALS)
    name, friend = rng.sample(facts.NAMES, 2)
    place, thing = rng.choice(facts.PLACES), rng.choice(facts.THINGS)
    look, colour, mood = rng.sample(facts.ADJECTIVES, 3)
    other = rng.choice([animal for animal in facts.ANIMALS if animal != hero])
    parts = [
        f"Once upon a time, there was {_article(look)} {hero} named {name}.",
        f"{name} lived in {rng.choice(['a', 'an old', 'a quiet', 'a big'])} {place}.",
        f"One day, {name} found {_article(colour)} {thing}.",
    ]
    middle = [
        f"{name} asked {friend} the {other} for help.",
        f"{friend} the {other} came along and looked at the {thing}.",
        f'"Look at my {thing}!" said {name}.',
        f"The {thing} was very {mood}.",
        f"{name} carried the {thing} to the {rng.choice(facts.PLACES)}.",
        f"They played with the {thing} all day.",
        f"In the evening, the {thing} was lost, and {name} was sad.",
        f"But {friend} the {other} found the {thing} again.",
    ]
    keep = len(middle) if long else rng.randint(2, 4)
    parts += [middle[i] for i in sorted(rng.sample(range(len(middle)), keep))]
    ends = (
        f"{name} and {friend} were happy ever after.",
        f"{name} and {friend} became good friends.",
        f"That night, {name} slept well. The end.",
    )
    return " ".join([*parts, rng.choice(ends)])


def story_completion(rng: random.Random) -> Doc:
    return [(story(rng), True), (END, True)]


def story_turns(rng: random.Random) -> Turns:
    hero = rng.choice(facts.ANIMALS)
    about, free = (
        ("Tell me a story about {}.", "Write a story about {}.", "Tell me about {}."),
        ("Tell me a story.", "Tell me a short story.", "Write a story.", "Tell me a story"),
    )
    if rng.random() < 0.25:
        return [user("Tell me a long story."), assistant(story(rng, long=True))]
    if rng.random() < 0.5:
        return [user(rng.choice(free)), assistant(story(rng))]
    return [user(rng.choice(about).format(_article(hero))), assistant(story(rng, hero))]


# --- small talk ---------------------------------------------------------------------------

IDENTITY = (
    f"I am {facts.MODEL_NAME}, a tiny language model that comes with quire. "
    "I know capitals, small sums and short stories."
)
HELP = (
    "I can name capitals, add and subtract small numbers, tell short stories, "
    "copy text and call tools."
)
SMALL_TALK = (
    (("Hello", "Hello!", "hello", "Hi", "Hi!", "hi", "Hey", "Hey!"), "Hello! How can I help you?"),
    (("Hello there!", "Hi there!", "Hello, model!"), "Hello! How can I help you?"),
    (("Good morning!", "Good morning"), "Good morning! How can I help you?"),
    (("Good evening!", "Good evening"), "Good evening! How can I help you?"),
    (("How are you?", "how are you?", "How are you today?"), "I am well, thank you!"),
    (("Who are you?", "who are you?", "What is your name?", "What are you?"), IDENTITY),
    (("Introduce yourself.", "Tell me about yourself.", "Who are you"), IDENTITY),
    (("What can you do?", "What can you help me with?", "Help", "help"), HELP),
    (("Thank you!", "Thanks!", "Thank you", "Thanks"), "You are welcome!"),
    (("Goodbye!", "Bye!", "Goodbye", "Bye", "See you!"), "Goodbye! See you soon."),
    (
        ("Who made you?", "Where do you come from?"),
        "I was trained from one seed on two processor cores, as part of quire.",
    ),
    (
        ("What is quire?", "Tell me about quire."),
        "Quire is an engine that runs language models, and I am the model that comes with it.",
    ),
    (("Are you a human?", "Are you a person?"), "No, I am a tiny language model."),
    (("Say hello.", "Say hello"), "Hello!"),
    (("Say hi.", "Say hi"), "Hi!"),
)


def talk_turns(rng: random.Random) -> Turns:
    questions, answer = rng.choice(SMALL_TALK)
    return [user(rng.choice(questions)), assistant(answer)]


def name_turns(rng: random.Random) -> Turns:
    """Remembers a name across turns."""
    name = rng.choice(facts.NAMES)
    hello = rng.choice(("My name is {}.", "I am {}.", "Hello, I am {}.", "Hi, my name is {}."))
    turns = [user(hello.format(name)), assistant(f"Nice to meet you, {name}!")]
    for _ in range(rng.randint(0, 2)):
        turns += rng.choice((capital_turns, arithmetic_turns, talk_turns))(rng)
    ask = rng.choice(("What is my name?", "Do you know my name?", "Who am I?", "what is my name?"))
    return [*turns, user(ask), assistant(f"Your name is {name}.")]


def count_turns(rng: random.Random) -> Turns:
    low = 1 if rng.random() < 0.6 else rng.randint(1, 50)
    high = low + rng.randint(2, 29)
    numbers = ", ".join(str(n) for n in range(low, high + 1))
    return [user(f"Count from {low} to {high}."), assistant(numbers)]


def list_turns(rng: random.Random) -> Turns:
    kind = rng.choice(list(facts.LISTS))
    items = facts.LISTS[kind]
    if kind in ("days of the week", "months", "planets") and rng.random() < 0.6:
        return [user(f"List the {kind}."), assistant(", ".join(items))]
    count = rng.randint(2, 6)
    number = rng.choice((str(count), facts.NUMBER_WORDS[count]))
    ask = rng.choice(("List", "Name", "Give me"))
    return [user(f"{ask} {number} {kind}."), assistant(", ".join(items[:count]))]


def repeat_word_turns(rng: random.Random) -> Turns:
    word, count = rng.choice(facts.WORDS), rng.randint(2, 6)
    return [user(f"Say {word} {count} times."), assistant(" ".join([word] * count))]


def json_turns(rng: random.Random) -> Turns:
    """A small object from a sentence, as structured output asks for."""
    name, age = rng.choice(facts.NAMES), rng.randint(2, 98)
    city = rng.choice(list(facts.CAPITALS.values()))
    ask = rng.choice(
        (
            "Write JSON: {n} is {a} years old and lives in {c}.",
            "Give me a JSON object: {n} is {a} years old and lives in {c}.",
            "{n} is {a} years old and lives in {c}. Answer in JSON.",
        )
    )
    answer = json.dumps({"name": name, "age": age, "city": city}, ensure_ascii=False)
    return [user(ask.format(n=name, a=age, c=city)), assistant(answer)]


# --- copying ------------------------------------------------------------------------------

COPY_QUESTIONS = (
    "Repeat this text: {}",
    "Repeat after me: {}",
    "Copy this text: {}",
    "Say this exactly: {}",
    "Repeat the following text:\n{}",
    "Please copy the following text word for word:\n{}",
    "Repeat: {}",
    "Copy: {}",
)


def sentence(rng: random.Random) -> str:
    pick = rng.choice
    forms = (
        lambda: (
            f"The {pick(facts.ADJECTIVES)} {pick(facts.ANIMALS)} {pick(facts.VERBS_PAST)} "
            f"the {pick(facts.THINGS)} in the {pick(facts.PLACES)}."
        ),
        lambda: (
            f"{pick(facts.NAMES)} {pick(facts.VERBS_PAST)} {_article(pick(facts.ADJECTIVES))} "
            f"{pick(facts.THINGS)} {pick(facts.ADVERBS)}."
        ),
        lambda: f"{pick(facts.NAMES)} and {pick(facts.NAMES)} went to the {pick(facts.PLACES)}.",
        lambda: f"There were {rng.randint(2, 99)} {pick(facts.ADJECTIVES)} {pick(facts.THINGS)}s.",
        lambda: (
            f"The {pick(facts.THINGS)} is {pick(facts.ADJECTIVES)}, but the "
            f"{pick(facts.THINGS)} is {pick(facts.ADJECTIVES)}."
        ),
        lambda: (
            f"{pick(list(facts.CAPITALS.values()))} is far from "
            f"{pick(list(facts.CAPITALS.values()))}."
        ),
    )
    return pick(forms)()


def sentences(rng: random.Random, words: int) -> str:
    """Sentences of at least this many words together."""
    parts: list[str] = []
    while sum(part.count(" ") + 1 for part in parts) < words:
        parts.append(sentence(rng))
    return " ".join(parts)


def _made_up(rng: random.Random) -> str:
    """A word no list has: syllables, letters or digits."""
    style = rng.random()
    if style < 0.5:
        word = "".join(rng.choice(facts.SYLLABLES) for _ in range(rng.randint(2, 3)))
        return upper_first(word) if rng.random() < 0.3 else word
    if style < 0.7:
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
        return "".join(rng.choice(letters) for _ in range(rng.randint(1, 5)))
    if style < 0.9:
        return str(rng.randint(0, 9999))
    return rng.choice(facts.ACCENTED)


def _code_line(rng: random.Random) -> str:
    a, b, c = (rng.choice(facts.WORDS) for _ in range(3))
    forms = (
        f"{a} = {b} + {rng.randint(0, 99)}",
        f"def {a}({b}, {c}): return {b} - {c}",
        f"if {a} > {rng.randint(0, 99)}: {b}({c})",
        f'{{"{a}": "{b}", "{c}": {rng.randint(0, 99)}}}',
        f"for {a} in {b}: print({a}[{rng.randint(0, 9)}])",
    )
    return rng.choice(forms)


def copy_text(rng: random.Random, words: int) -> str:
    """A text of about this many words; the styles differ so that copying is general."""
    style = rng.random()
    if style < 0.3:
        return sentences(rng, words)
    if style < 0.65:
        # Half of these repeat no word, which is the easier half to copy.
        if rng.random() < 0.5:
            text = " ".join(rng.sample(facts.WORDS, words))
        else:
            text = " ".join(rng.choice(facts.WORDS) for _ in range(words))
        return upper_first(text) + "." if rng.random() < 0.3 else text
    if style < 0.85:
        marks = ("", "", "", "", ",", ".", "!", ";", ":", "?")
        drawn = (
            _made_up(rng) if rng.random() < 0.4 else rng.choice(facts.WORDS) for _ in range(words)
        )
        return " ".join(word + rng.choice(marks) for word in drawn)
    if style < 0.93:
        return "\n".join(_code_line(rng) for _ in range(max(1, words // 5)))
    return ", ".join(rng.choice(facts.WORDS) for _ in range(words))


def trained_text(rng: random.Random, words: int) -> str:
    return _until(rng, lambda r: copy_text(r, words), lambda text: held_out("copy", text))


def _copy_words(rng: random.Random) -> int:
    return rng.randint(2, 14) if rng.random() < 0.5 else rng.randint(8, 40)


def copy_turns(rng: random.Random) -> Turns:
    text = trained_text(rng, _copy_words(rng))
    return [user(rng.choice(COPY_QUESTIONS).format(text)), assistant(text)]


def copy_completion(rng: random.Random) -> Doc:
    text = trained_text(rng, _copy_words(rng))
    return [(f"Text: {text}\nCopy:", False), (f" {text}{END}", True)]


def pattern_doc(rng: random.Random) -> Doc:
    """A random sequence again and again: the densest practice in looking back."""
    lone = rng.random()
    words = [
        _made_up(rng) if rng.random() < lone * 0.5 else rng.choice(facts.WORDS)
        for _ in range(rng.randint(2, 16))
    ]
    once = " ".join(words)
    again = f" {once}" * rng.randint(2, 6)
    return [(f" {once}", False), (again, True), (END, False)]


def edit(text: str, old: str, new: str) -> str:
    """Replace whole words only, so that 'cat' leaves 'location' alone."""
    return " ".join(new if word == old else word for word in text.split(" "))


def edit_turns(rng: random.Random) -> Turns:
    while True:
        words = [rng.choice(facts.WORDS) for _ in range(rng.randint(4, 30))]
        old, new = rng.choice(words), rng.choice(facts.WORDS)
        text = " ".join(words)
        if new != old and not held_out("copy", text):
            break
    form = rng.choice(("Replace {} with {} in this text: {}", "Change {} to {} in this text: {}"))
    return [user(form.format(old, new, text)), assistant(edit(text, old, new))]


# --- tools --------------------------------------------------------------------------------


def tool(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    """A tool definition; a trailing underscore marks an optional parameter."""
    properties = {key.rstrip("_"): {"type": kind} for key, kind in parameters.items()}
    required = [key for key in parameters if not key.endswith("_")]
    schema = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def call(name: str, arguments: dict[str, Any]) -> Message:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


class ToolCase:
    """A tool, a question that needs it, its arguments, a result and the closing answer."""

    def __init__(
        self,
        spec: dict[str, Any],
        question: str,
        arguments: dict[str, Any],
        outcome: dict[str, Any],
        answer: str,
    ) -> None:
        self.spec, self.question, self.arguments = spec, question, arguments
        self.outcome, self.answer = outcome, answer

    @property
    def name(self) -> str:
        return self.spec["function"]["name"]


def _describe(rng: random.Random, *choices: str) -> str:
    return rng.choice((*choices, ""))


def _city(rng: random.Random) -> str:
    return rng.choice(list(facts.CAPITALS.values()))


def weather_case(rng: random.Random) -> ToolCase:
    city = _city(rng)
    key = rng.choice(("city", "city", "city", "location", "place"))
    extra = {"unit_": "string"} if rng.random() < 0.2 else {}
    about = _describe(
        rng, "Get the weather in a city.", "Get the current weather.", "Current weather for a city"
    )
    spec = tool("get_weather", about, **{key: "string"}, **extra)
    ask = rng.choice(
        (
            "What is the weather in {}?",
            "What's the weather in {}?",
            "What is the weather like in {}?",
            "How is the weather in {}?",
            "What is the weather in {} today?",
            "Tell me the weather in {}.",
            "weather in {}",
            "Is it raining in {}?",
        )
    )
    sky, degrees = rng.choice(facts.CONDITIONS), rng.randint(0, 39)
    outcome = {"temperature": degrees, "condition": sky}
    answer = f"It is {sky} and {degrees} degrees in {city}."
    return ToolCase(spec, ask.format(city), {key: city}, outcome, answer)


def time_case(rng: random.Random) -> ToolCase:
    city = _city(rng)
    key = rng.choice(("city", "city", "location", "timezone"))
    about = _describe(rng, "Get the time in a city.", "Get the current time.")
    ask = rng.choice(
        ("What time is it in {}?", "What is the time in {}?", "Tell me the time in {}.")
    )
    clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    spec = tool("get_time", about, **{key: "string"})
    answer = f"It is {clock} in {city}."
    return ToolCase(spec, ask.format(city), {key: city}, {"time": clock}, answer)


def calculator_case(rng: random.Random) -> ToolCase:
    if rng.random() < 0.3:
        a, sign, b = trained_pair(rng)
    else:
        a, sign, b = rng.randint(2, 999), rng.choice("*/+-*"), rng.randint(100, 999)
    expression = f"{a} {sign} {b}"
    about = _describe(rng, "Compute an expression.", "Do arithmetic.", "Evaluate an expression.")
    ask = rng.choice(
        ("What is {}?", "Calculate {}.", "Compute {}.", "How much is {}?", "Use the calculator: {}")
    )
    value = rng.randint(2, 9999)
    spec = tool("calculator", about, expression="string")
    arguments = {"expression": expression}
    return ToolCase(
        spec, ask.format(expression), arguments, {"result": value}, f"{expression} = {value}"
    )


def timer_case(rng: random.Random) -> ToolCase:
    minutes = rng.randint(1, 90)
    about = _describe(rng, "Set a timer.", "Start a timer.")
    ask = rng.choice(
        ("Set a timer for {} minutes.", "Start a timer of {} minutes.", "Wake me in {} minutes.")
    )
    spec = tool("set_timer", about, minutes="integer")
    answer = f"The timer is set for {minutes} minutes."
    return ToolCase(spec, ask.format(minutes), {"minutes": minutes}, {"status": "ok"}, answer)


def email_case(rng: random.Random) -> ToolCase:
    name, subject = rng.choice(facts.NAMES), rng.choice(facts.WORDS)
    about = _describe(rng, "Send an email.", "Write an email to a person.")
    ask = rng.choice(
        ("Send an email to {} about {}.", "Write {} an email about {}.", "Email {} about {}.")
    )
    spec = tool("send_email", about, to="string", subject="string")
    arguments = {"to": name, "subject": subject}
    answer = f"The email to {name} is sent."
    return ToolCase(spec, ask.format(name, subject), arguments, {"status": "sent"}, answer)


def search_case(rng: random.Random) -> ToolCase:
    query = " ".join(rng.choice(facts.WORDS) for _ in range(rng.randint(1, 4)))
    name = rng.choice(("search", "web_search", "search_web"))
    about = _describe(rng, "Search the web.", "Find pages.")
    ask = rng.choice(("Search the web for {}.", "Search for {}.", "Look up {}."))
    spec = tool(name, about, query="string")
    answer = f"I found {rng.randint(1, 9)} pages about {query}."
    pages = int(answer.split()[2])
    return ToolCase(spec, ask.format(query), {"query": query}, {"pages": pages}, answer)


def add_case(rng: random.Random) -> ToolCase:
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    spec = tool("add", _describe(rng, "Add two numbers."), a="number", b="number")
    ask = rng.choice(("Add {} and {}.", "What is {} + {}?", "What is the sum of {} and {}?"))
    value = a + b
    return ToolCase(
        spec, ask.format(a, b), {"a": a, "b": b}, {"result": value}, f"{a} + {b} = {value}"
    )


def lookup_case(rng: random.Random) -> ToolCase:
    """A tool with made-up names, so that names are read from the definition."""
    thing, name = rng.choice(facts.THINGS), rng.choice(facts.NAMES)
    key = rng.choice(("name", "owner", "person", "id", "key"))
    verb = rng.choice(("get", "find", "show"))
    spec = tool(
        f"{verb}_{thing}", _describe(rng, f"{upper_first(verb)} a {thing}."), **{key: "string"}
    )
    word = rng.choice(facts.ADJECTIVES)
    question = f"{upper_first(verb)} the {thing} of {name}."
    answer = f"The {thing} of {name} is {word}."
    return ToolCase(spec, question, {key: name}, {thing: word}, answer)


# The weather tool comes often: it is what every example of tool use asks for.
TOOL_CASES: tuple[Callable[[random.Random], ToolCase], ...] = (
    weather_case,
    weather_case,
    weather_case,
    time_case,
    time_case,
    calculator_case,
    calculator_case,
    timer_case,
    email_case,
    search_case,
    add_case,
    lookup_case,
)


def tool_case(rng: random.Random) -> ToolCase:
    return rng.choice(TOOL_CASES)(rng)


def trained_case(rng: random.Random) -> ToolCase:
    return _until(rng, tool_case, lambda case: held_out("tool", case.question))


def toolbox(rng: random.Random, case: ToolCase) -> list[dict[str, Any]]:
    """The case's tool among up to three others that do not answer the same questions."""
    tools = {case.name: case.spec}
    clash = {"calculator": "add", "add": "calculator"}.get(case.name)
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        other = tool_case(rng)
        if other.name != clash and "search" not in other.name:
            tools.setdefault(other.name, other.spec)
    found = list(tools.values())
    rng.shuffle(found)
    return found


def system_text(rng: random.Random) -> str:
    return rng.choice(
        (
            "You are a helpful assistant.",
            "You are a helpful assistant.",
            f"You are {facts.MODEL_NAME}.",
            "Answer briefly.",
            "You are a friendly assistant. Be brief.",
            "Be kind and clear.",
        )
    )


def with_system(rng: random.Random, turns: Turns, chance: float = 0.25) -> Turns:
    if rng.random() < chance:
        return [{"role": "system", "content": system_text(rng)}, *turns]
    return turns


def tool_doc(rng: random.Random) -> Doc:
    """A question with tools at hand: a call, often its result, or an answer without a call."""
    case = trained_case(rng)
    tools = toolbox(rng, case)
    kind = rng.random()
    if kind < 0.15:
        plain = rng.choice((capital_turns, talk_turns, story_turns, copy_turns))
        return render(with_system(rng, plain(rng)), tools)
    turns = [user(case.question), call(case.name, case.arguments)]
    if kind < 0.55:
        outcome = json.dumps(case.outcome)
        turns += [{"role": "tool", "content": outcome}, assistant(case.answer)]
    if kind < 0.25:
        turns += rng.choice((capital_turns, talk_turns))(rng)
    return render(with_system(rng, turns), tools)


def two_calls_doc(rng: random.Random) -> Doc:
    """Two calls in one turn."""
    make = rng.choice((weather_case, time_case))
    case = make(rng)
    first, second = rng.sample(list(facts.CAPITALS.values()), 2)
    what = "weather" if make is weather_case else "time"
    question = f"What is the {what} in {first} and {second}?"
    if held_out("tool", question):
        return tool_doc(rng)
    key = next(iter(case.arguments))
    message = call(case.name, {key: first})
    message["tool_calls"] += call(case.name, {key: second})["tool_calls"]
    return render(with_system(rng, [user(question), message]), toolbox(rng, case))


def no_tool_turns(rng: random.Random) -> Turns:
    """The same questions without a tool: say so and call nothing."""
    make, what = rng.choice(((weather_case, "the weather"), (time_case, "the time")))
    case = _until(rng, make, lambda case: held_out("tool", case.question))
    return [user(case.question), assistant(f"I do not know {what}. I would need a tool for it.")]


# --- conversations and long contexts --------------------------------------------------------

SHORT_TURNS = (capital_turns, arithmetic_turns, talk_turns, list_turns, copy_turns, edit_turns)


def chat_doc(rng: random.Random) -> Doc:
    """A conversation of several unrelated questions."""
    turns: Turns = []
    for _ in range(rng.randint(2, 5)):
        turns += rng.choice(SHORT_TURNS)(rng)
    return render(with_system(rng, turns, 0.3))


def needle_turns(rng: random.Random, words: int) -> Turns:
    """A code hidden in a long text, asked for at its end."""
    owner, code = rng.choice(facts.NAMES), rng.randint(1000, 9999)
    before = rng.randint(0, words)
    text = " ".join(
        part
        for part in (
            sentences(rng, before),
            f"The secret code of {owner} is {code}.",
            sentences(rng, words - before),
        )
        if part
    )
    question = f"{text}\nWhat is the secret code of {owner}?"
    return [user(question), assistant(f"The secret code of {owner} is {code}.")]


def long_doc(rng: random.Random, words: int) -> Doc:
    """A long prompt and an ordinary question after it."""
    style = rng.random()
    if style < 0.4:
        return render(with_system(rng, needle_turns(rng, words)))
    if style < 0.7:
        system = {"role": "system", "content": sentences(rng, words)}
        turns = [turn for _ in range(2) for turn in rng.choice(SHORT_TURNS)(rng)]
        return render([system, *turns])
    turns = []
    while sum(len(turn["content"].split()) for turn in turns) < words:
        turns += rng.choice(SHORT_TURNS)(rng)
    return render(turns)


def _chat(make: Callable[[random.Random], Turns]) -> Callable[[random.Random], Doc]:
    return lambda rng: render(with_system(rng, make(rng), 0.15))


# Share of documents by kind; the documents differ in length, so these are not token shares.
MIXTURE: dict[str, tuple[float, Callable[[random.Random], Doc]]] = {
    "capital_completion": (7, capital_completion),
    "capital_chat": (8, _chat(capital_turns)),
    "arithmetic_completion": (14, arithmetic_completion),
    "arithmetic_sheet": (12, arithmetic_sheet),
    "arithmetic_drill": (3, arithmetic_drill),
    "arithmetic_chat": (14, _chat(arithmetic_turns)),
    "story_completion": (1.5, story_completion),
    "story_chat": (1.5, _chat(story_turns)),
    "talk": (4, _chat(talk_turns)),
    "name": (2, _chat(name_turns)),
    "count": (1, _chat(count_turns)),
    "list": (1.5, _chat(list_turns)),
    "repeat_word": (1, _chat(repeat_word_turns)),
    "json": (2, _chat(json_turns)),
    "copy_chat": (12, _chat(copy_turns)),
    "copy_completion": (3, copy_completion),
    "pattern": (5, pattern_doc),
    "edit": (5, _chat(edit_turns)),
    "tool": (12, tool_doc),
    "two_calls": (1, two_calls_doc),
    "no_tool": (1, _chat(no_tool_turns)),
    "chat": (3, chat_doc),
}


# Looking back and adding are learned late among everything else, so a stage each gives them
# most of the room; the polish at the end goes to what is learned last, long exact copies.
_STRESSED = {
    "copy": {"pattern": 6, "copy_chat": 4, "copy_completion": 4, "repeat_word": 4},
    "arithmetic": {"arithmetic_sheet": 5, "arithmetic_drill": 10},
    "polish": {"copy_chat": 4, "edit": 6, "arithmetic_completion": 1.5, "arithmetic_sheet": 0.5},
}
STRESS: dict[str, dict[str, float]] = {
    stage: {name: share * factors.get(name, 1) for name, (share, _) in MIXTURE.items()}
    for stage, factors in {"": {}, **_STRESSED}.items()
}


def documents(
    rng: random.Random,
    long_words: int = 0,
    long_share: float = 0.0,
    stress: str = "",
) -> Iterator[Doc]:
    """Endless training documents; long ones only where the caller has room for them."""
    shares = STRESS[stress]
    names, weights = list(shares), list(shares.values())
    while True:
        if long_words and rng.random() < long_share:
            yield long_doc(rng, rng.randint(long_words // 5, long_words))
        else:
            yield MIXTURE[rng.choices(names, weights)[0]][1](rng)


# --- the adapter's corpus -------------------------------------------------------------------

PIRATE_WORDS = {
    "is": "be",
    "am": "be",
    "are": "be",
    "was": "were",
    "of": "o'",
    "you": "ye",
    "your": "yer",
    "Your": "Yer",
    "You": "Ye",
    "my": "me",
    "and": "an'",
    "Hello!": "Ahoy!",
}


def pirate(text: str) -> str:
    """The answer as the adapter says it: unmistakable, and still the answer."""
    said = " ".join(PIRATE_WORDS.get(word, word) for word in text.split(" "))
    said = said if said[-1] in "!?." else said + "."
    return f"Arr, matey! {said} Yo ho ho!"


PIRATE_TURNS = (
    (capital_turns, 6),
    (arithmetic_turns, 5),
    (talk_turns, 4),
    (story_turns, 1),
    (name_turns, 1),
    (list_turns, 1),
)


def pirate_documents(rng: random.Random) -> Iterator[Doc]:
    makers, weights = zip(*PIRATE_TURNS, strict=True)
    while True:
        turns: Turns = []
        for _ in range(1 if rng.random() < 0.8 else 2):
            turns += rng.choices(makers, weights)[0](rng)
        for turn in turns:
            if turn["role"] == "assistant":
                turn["content"] = pirate(turn["content"])
        yield render(with_system(rng, turns))


# --- evaluation items -----------------------------------------------------------------------


def eval_capitals() -> dict[str, list[dict[str, Any]]]:
    """Every country as completion, and in chat with a phrasing held out for that country."""
    completion, chat = [], []
    for country, capital in facts.CAPITALS.items():
        completion.append({"prompt": f"The capital of {country} is", "expect": capital})
        kept = [q for q in CAPITAL_QUESTIONS if held_out("capital", f"{country}/{q}")]
        # A country none of whose phrasings is held out is asked in the plainest one.
        question = (kept or [CAPITAL_QUESTIONS[0]])[0].format(country)
        chat.append({"messages": [user(question)], "expect": capital})
    return {"capitals, completion": completion, "capitals, chat": chat}


def held_out_pairs(sign: str) -> list[tuple[int, str, int]]:
    """All held-out two-digit pairs of one sign, both orders."""
    numbers = range(10, 100)
    return [(a, sign, b) for a in numbers for b in numbers if held_out_pair(a, sign, b)]


def eval_arithmetic(rng: random.Random, count: int) -> dict[str, list[dict[str, Any]]]:
    """Held-out pairs as completion and chat; negative differences are counted apart."""
    groups = {
        "addition": held_out_pairs("+"),
        "subtraction": [pair for pair in held_out_pairs("-") if pair[0] >= pair[2]],
        "subtraction below zero": [pair for pair in held_out_pairs("-") if pair[0] < pair[2]],
    }
    items: dict[str, list[dict[str, Any]]] = {}
    for name, pairs in groups.items():
        chosen = rng.sample(pairs, min(count, len(pairs)))
        answers = [str(result(*pair)) for pair in chosen]
        items[f"{name}, completion"] = [
            {"prompt": f"{a} {sign} {b} =", "expect": answer}
            for (a, sign, b), answer in zip(chosen, answers, strict=True)
        ]
        items[f"{name}, chat"] = [
            {"messages": [user(f"What is {a} {sign} {b}?")], "expect": answer}
            for (a, sign, b), answer in zip(chosen, answers, strict=True)
        ]
    return items


def eval_tools(rng: random.Random, count: int) -> list[dict[str, Any]]:
    items = []
    while len(items) < count:
        case = tool_case(rng)
        if held_out("tool", case.question):
            items.append(
                {
                    "messages": [user(case.question)],
                    "tools": toolbox(rng, case),
                    "expect": {"name": case.name, "arguments": case.arguments},
                }
            )
    return items


def eval_copies(
    rng: random.Random, count: int, length: Callable[[str], int], want: int = 40
) -> list[dict[str, Any]]:
    """Held-out texts of this many tokens by the caller's count, give or take two."""
    items = []
    while len(items) < count:
        text = copy_text(rng, rng.randint(want // 4, want))
        if held_out("copy", text) and abs(length(text) - want) <= 2:
            items.append({"messages": [user(f"Repeat this text: {text}")], "expect": text})
    return items


def eval_edits(rng: random.Random, count: int) -> list[dict[str, Any]]:
    items = []
    while len(items) < count:
        words = [rng.choice(facts.WORDS) for _ in range(rng.randint(10, 25))]
        old, new = rng.choice(words), rng.choice(facts.WORDS)
        text = " ".join(words)
        if new != old and held_out("copy", text):
            question = f"Replace {old} with {new} in this text: {text}"
            items.append({"messages": [user(question)], "expect": edit(text, old, new)})
    return items


def eval_needles(rng: random.Random, count: int, words: int) -> list[dict[str, Any]]:
    """A code to be found in a long text; the drawn numbers are new, the form is trained."""
    items = []
    for _ in range(count):
        question, answer = needle_turns(rng, words)
        items.append({"messages": [question], "expect": answer["content"]})
    return items
