"""Grammars with `::=`: the language is kept, and the cost is bearable with a large vocabulary.

The reference is slow and plain: all texts of a grammar up to a length, as sets, by iteration."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Iterator

import numpy as np
import pytest

from quire.errors import InvalidRequest
from quire.params import StructuredOutputsParams
from quire.structured import lexemes
from quire.structured.ebnf import to_lark
from quire.structured.settle import unforced
from vocabularies import END, allowed_ids, large, letters, state

LETTERS = "abéè"
"""The last two begin with the same byte."""
LONGEST = 4
BYTES = {"a": "a", "b": "b", "é": "Ã©", "è": "Ã¨"}
WORDS = ["a", "b", "Ã", "©", "¨", "ab", "ba", "aa", "Ã©a", "bÃ", "©Ã©", "aÃ¨b"]
"""Tokens as a byte-level tokenizer spells them."""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [1-9] [0-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
OLD_JSON = r"""
root   ::= value
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (pair ("," ws pair)*)? "}" ws
pair   ::= string ":" ws value
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" chars "\"" ws
chars  ::= "" | [^"\\] chars | "\\" ["\\bfnrtu] chars
number ::= "-"? digits ("." digits)? ws
digits ::= [0-9] | digits [0-9]
ws     ::= ([ \t\n] ws)?
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
SQL = r"""
root       ::= query ";"?
query      ::= "SELECT " columns " FROM " source (" WHERE " condition)? order? (" LIMIT " [0-9]+)?
order      ::= " ORDER BY " name (" DESC")?
columns    ::= "*" | expr (", " expr)*
source     ::= name | "(" query ") AS " name
condition  ::= comparison ((" AND " | " OR ") comparison)*
comparison ::= expr compare expr | "(" condition ")" | "NOT " comparison | expr " IN (" query ")"
compare    ::= " = " | " < " | " > " | " <> " | " LIKE "
expr       ::= term ((" + " | " - " | " * ") term)*
term       ::= name | number | string | "(" expr ")" | ("COUNT" | "SUM" | "AVG") "(" expr ")"
name       ::= word ("." word)?
word       ::= [a-z_] [a-z0-9_]*
number     ::= "-"? [0-9]+ ("." [0-9]+)?
string     ::= "'" ([^'] | "''")* "'"
"""
OBJECT = '{"name": "Ada Lovelace", "list": [1, 2.5, {"a": true, "b": null}], "text": "long \\n"}'
EXAMPLES = [
    (JSON, OBJECT),
    (OLD_JSON, OBJECT),
    (ARITHMETIC, "abc+(12*foo_bar)-3=42\n(x)=7\n"),
    (SQL, "SELECT name, COUNT(id) FROM (SELECT * FROM people) AS p WHERE age > 30 AND "
          "name LIKE 'O''Brien %' ORDER BY age DESC LIMIT 10;"),
]  # fmt: skip


# ---- random grammars and all their texts -----------------------------------------------------


def expression(rng: random.Random, names: list[str], depth: int) -> str:
    kind = rng.randrange(8 if depth else 4)
    inner = [expression(rng, names, depth - 1) for _ in range(rng.randint(2, 3))] if depth else []
    if kind < 2:
        return f'"{"".join(rng.choices(LETTERS, k=rng.randint(1, 2)))}"'
    if kind == 2:
        return f"[{'^' if rng.random() < 0.2 else ''}{''.join(rng.sample(LETTERS, 2))}]"
    if kind == 3:
        return rng.choice(names)
    if kind < 6:
        return f"({' '.join(inner)})"
    if kind == 6:
        return f"({' | '.join(inner)})"
    return f"({inner[0]}){rng.choice(['*', '+', '?', '{0,2}', '{2}', '{1,}', '{0}', '{1,3}'])}"


def random_grammar(rng: random.Random) -> str:
    names = ["root", "x", "y", "z"][: rng.randint(2, 4)]
    lines = []
    for name in names:
        options = [expression(rng, names, 2) for _ in range(rng.randint(1, 3))]
        lines.append(f"{name} ::= {' | '.join(options)}")
    return "\n".join(lines)


def texts_of(grammar: str) -> set[str]:
    """All texts over `LETTERS` up to `LONGEST` characters, read from the grammar's own text."""
    rules = {
        line.split(" ::= ")[0]: _tokens(line.split(" ::= ")[1]) for line in grammar.splitlines()
    }
    known: dict[str, set[str]] = {name: set() for name in rules}
    while True:
        found = {name: _alternatives(list(tokens), known) for name, tokens in rules.items()}
        if found == known:
            return known["root"]
        known = found


def _tokens(text: str) -> list[str]:
    out: list[str] = []
    at = 0
    while at < len(text):
        ends = {'"': '"', "[": "]", "{": "}"}
        if text[at] in ends:
            end = text.index(ends[text[at]], at + 1) + 1
        elif text[at].isalpha():
            end = at + next((i for i, c in enumerate(text[at:]) if not c.isalpha()), len(text) - at)
        else:
            end = at + 1
        if text[at:end].strip():
            out.append(text[at:end])
        at = end
    return out


def _alternatives(tokens: list[str], known: dict[str, set[str]]) -> set[str]:
    found = _sequence(tokens, known)
    while tokens and tokens[0] == "|":
        tokens.pop(0)
        found |= _sequence(tokens, known)
    return found


def _sequence(tokens: list[str], known: dict[str, set[str]]) -> set[str]:
    found = {""}
    while tokens and tokens[0] not in ("|", ")"):
        head = tokens.pop(0)
        if head == "(":
            part = _alternatives(tokens, known)
            assert tokens.pop(0) == ")"
        elif head[0] == '"':
            part = {head[1:-1]}
        elif head[0] == "[":
            part = {c for c in LETTERS if (c in head[1:]) != head.startswith("[^")}
        else:
            part = known[head]
        if tokens and tokens[0][0] in "*+?{":
            part = _times(part, tokens.pop(0))
        found = _product(found, part)
    return found


def _times(part: set[str], sign: str) -> set[str]:
    least, most = {"*": (0, 9), "+": (1, 9), "?": (0, 1)}.get(sign, (0, 0))
    if sign[0] == "{":
        low, _, high = sign[1:-1].partition(",")
        least, most = int(low), int(high or (9 if "," in sign else low))
    found, power = set(), {""}
    for count in range(most + 1):
        if count >= least:
            found |= power
        power = _product(power, part)
    return found


def _product(left: set[str], right: set[str]) -> set[str]:
    return {a + b for a, b in itertools.product(left, right) if len(a + b) <= LONGEST}


# ---- the language is kept --------------------------------------------------------------------


def spelled(text: str) -> list[int]:
    """A text byte by byte."""
    return [WORDS.index(byte) + 1 for char in text for byte in BYTES[char]]


def every_text() -> Iterator[str]:
    for length in range(LONGEST + 1):
        yield from map("".join, itertools.product(LETTERS, repeat=length))


def compare(grammar: str) -> None:
    """Compare all texts, and the masks at the beginnings of those that belong to the grammar."""
    vocabulary, expected = letters(WORDS), texts_of(grammar)
    try:
        settled = unforced(vocabulary.settle(StructuredOutputsParams(grammar=grammar)))
        start = vocabulary.compile(settled)
    except InvalidRequest:
        assert not expected, grammar
        return
    begins = {text[:i] for text in expected for i in range(len(text) + 1)}
    for text in every_text():
        matcher = start.deep_copy()
        read = all(matcher.consume_token(token) for token in spelled(text))
        assert (read and matcher.is_accepting()) == (text in expected), (grammar, text)
        if text in begins:
            assert read, (grammar, text)
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
            for token, word in enumerate(WORDS, 1):
                allowed = bool(mask[token // 32] >> (token % 32) & 1)
                longer = matcher.deep_copy()
                one_by_one = all(longer.consume_token(WORDS.index(b) + 1) for b in word)
                assert allowed == one_by_one, (grammar, text, word)


@pytest.mark.parametrize("seed", range(2))
def test_random_grammars_keep_their_language(seed: int) -> None:
    rng = random.Random(seed)
    made = (random_grammar(rng) for _ in itertools.count())
    with_rules = (grammar for grammar in made if "\n" in to_lark(grammar))
    for grammar in itertools.islice(with_rules, 12):
        compare(grammar)
    for grammar in itertools.islice(made, 8):
        compare(grammar)


@pytest.mark.parametrize("grammar", [
    'root ::= x "b"\nx ::= "a" x "a" | [ab]+',  # a unit that goes on with what follows it
    'root ::= "(" root ")" | "a"* "b"?\n',
    'root ::= x | y\nx ::= "a" x "b" | "aa" "é"\ny ::= "a" y "è" | "aa" "b"',
    'root ::= [é] [è]* root? | "éa"',  # two characters that begin with one byte
    'root ::= [aé]+ x\nx ::= "è" x? "b" | "è"',
    'root ::= x "b" | y "a"\nx ::= [ab] [ab] | "é" x "é"\ny ::= "ab" | "è" y',  # both units match
    'root ::= "a" root | "b" root | ""',
    'root ::= root "a" | "b"',
    'root ::= "a" root',
    'root ::= x? root "a" | "b"\nx ::= "b"*',
])  # fmt: skip
def test_what_is_hard_for_a_lexer(grammar: str) -> None:
    if "(" in grammar:
        found = state(letters(["a", "b", "(", ")"]), grammar=grammar)
        assert allowed_ids(found, [3, 1, 2]) == [4]
    else:
        compare(grammar)


def test_plain_loops_are_repetitions() -> None:
    for grammar, expected in (
        ('root ::= ([ab] root)?', "[ab]"),
        ('root ::= root "a" | "b"', "a"),
        ('root ::= "b" | "a" root | [ab] (root | "b")', "[ab]"),
    ):  # fmt: skip
        lark = to_lark(grammar)
        assert "\n" not in lark and expected in lark and "*" in lark
    assert "\n" in to_lark('root ::= "a" root "b" | "a"')


# ---- a large vocabulary ----------------------------------------------------------------------


@pytest.mark.parametrize("grammar, text", EXAMPLES, ids=["json", "old json", "arithmetic", "sql"])
def test_known_grammars_stay_within_the_limits(grammar: str, text: str) -> None:
    vocabulary = large()
    wanted = StructuredOutputsParams(grammar=grammar)
    vocabulary.check(vocabulary.settle(wanted))
    found = state(vocabulary, forces=False, grammar=grammar)
    tokens = vocabulary.tokens.tokenize_str(text)
    for i, token in enumerate(tokens):
        assert token in allowed_ids(found, tokens[:i]), vocabulary.tokens.decode_str(tokens[:i])
    assert END in allowed_ids(found, tokens)


def test_units_are_large() -> None:
    """One character each would be as exact, and cost too much."""
    for grammar, _ in EXAMPLES:
        lines = to_lark(grammar).splitlines()
        lengths = [len(line) for line in lines if line.startswith("T")]
        assert len(lengths) < 30 and statistics.fmean(lengths) > 25, lines


def test_a_grammar_too_large_to_compare_goes_by_character(monkeypatch: pytest.MonkeyPatch) -> None:
    units = to_lark(JSON)
    monkeypatch.setattr(lexemes, "MAX_NODES", 10)
    assert to_lark(JSON) != units
    compare(
        'root ::= "(" root? ")" [ab]* | [éè] root? [ab] | "a"'.replace("(", "a").replace(")", "b")
    )


def test_hostile_grammars_are_read_in_time() -> None:
    chain = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(3000))
    for grammar in (
        f'root ::= "a" root "b" | r0\n{chain}\nr3000 ::= "a"?',
        'root ::= "a" root "b" | ' + '("a" | ' * 90 + '"b"' + ")*" * 90,
        "root ::= root " + "[ab]? " * 5000 + 'root | "a"',
        'root ::= "(" root ")" | ' + " | ".join(f'"a{i}" root' for i in range(3000)),
    ):
        to_lark(grammar)
