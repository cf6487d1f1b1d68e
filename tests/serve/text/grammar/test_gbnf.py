"""Grammars in llama.cpp's notation mean here what they mean there."""

from collections.abc import Iterator

import pytest
from cases.text.letters import letters
from tokenizers import AddedToken

from duetto.sampling.structured import StructuredOutputsParams
from duetto.serve.text.grammar.compiler import GrammarCompiler
from duetto.serve.text.grammar.gbnf import is_gbnf, normalise_gbnf

WORDS = letters(None, AddedToken("<eos>", special=True))


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCompiler]:
    found = GrammarCompiler(WORDS, len(WORDS), [WORDS.token_id("<eos>")])
    yield found
    found.close()


def accepts(grammars: GrammarCompiler, gbnf: str, text: str) -> bool:
    constraint = grammars.compile_constraint(StructuredOutputsParams(grammar=gbnf), 0)
    constraint.advance(WORDS.encode(text))
    (mask,) = constraint.token_masks()
    word, bit = divmod(WORDS.encode("<eos>")[0], 32)
    return constraint.failure is None and bool(mask[word] >> bit & 1)


@pytest.mark.parametrize(
    ("gbnf", "text", "other"),
    [
        (r'root ::= "\u00e9\u6771"', "é東", "é"),
        (r'root ::= "\U0001F600\U000000e9"', "😀é", "😀e"),
        (r"root ::= [\u00e0-\u00ff]", "é", "e"),
        (r"root ::= [^\U0001F600-\U0001F64F]", "é", "😀"),
        (r'root ::= "\u0022\u005c\u000a" [\u005d\u005c\u005e]+', '"\\\n]\\^', '"\\\n['),
        (r'root ::= "\\u00e9"', r"\u00e9", "é"),
        ('root ::= start "b"\nstart ::= "a"', "ab", "b"),
        ('start ::= "a" start | "x"\nroot ::= start "b"', "aaxb", "ab"),
        ('# no start: x\nroot ::= aB a-b a_b\naB ::= "a"\na-b ::= "b"\na_b ::= "c"', "abc", "aac"),
        ('root ::= 1a{2}\n1a ::= "q"', "qq", "q"),
        ("root ::= .{3}", "a\nb", "ab"),
        ('root ::= "." [.] "a|b"', "..a|b", "..a"),
        ('root ::= [a&&b~~]+', "&a~b", "c"),
    ],
)  # fmt: skip
def test_a_grammar_accepts_what_llama_cpp_accepts(grammars, gbnf, text, other):
    assert accepts(grammars, gbnf, text) and not accepts(grammars, gbnf, other)


def test_numbers_of_no_character_are_refused(grammars):
    for escape in (r"\ud83d", r"\U00110000", r"\u12"):
        with pytest.raises(ValueError, match="structured_outputs is not allowed"):
            accepts(grammars, f'root ::= "{escape}"', "x")


def test_lark_with_gbnfs_sign_in_a_string_stays_lark(grammars):
    assert not is_gbnf('start: "x ::= y"') and is_gbnf("start ::= root") and not is_gbnf("start : b")
    assert accepts(grammars, 'start: "x ::= y"', "x ::= y")


def test_unaffected_grammars_are_unchanged():
    same = 'root ::= item{1,3} # . start\nitem ::= "[.]" [^"\\\\]\n'
    assert normalise_gbnf(same) == same
