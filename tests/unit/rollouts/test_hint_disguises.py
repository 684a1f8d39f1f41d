"""The answer in disguise: each way of writing it is found, and harmless hints pass."""

from __future__ import annotations

import pytest
from repetition import crossed, repeated

from composer_mesh.rollouts.leaks import holds_answer

OF_42 = {
    "underscore": "answer_42",
    "joined to a word": "theansweris42",
    "in a name": "set result_42_final",
    "full width": "\uff14\uff12",
    "zero width space": "4\u200b2",
    "zero width joiner": "4\u200d2",
    "word joiner": "4\u20602",
    "soft hyphen": "4\u00ad2",
    "byte order mark": "4\ufeff2",
    "variation selector": "4\ufe0f2\ufe0f",
    "keycaps": "4\ufe0f\u20e32\ufe0f\u20e3",
    "combining overlay": "4\u03362\u0336",
    "Hangul filler": "4\u31642",
    "direction marks": "\u202d4\u200e2\u202c",
    "tag characters": "4\U000e00412",
    "Arabic digits": "\u0664\u0662",
    "Persian digits": "\u06f4\u06f2",
    "Devanagari digits": "\u096a\u0968",
    "Thai digits": "\u0e54\u0e52",
    "bold digits": "\U0001d7d2\U0001d7d0",
    "monospace digits": "\U0001d7fa\U0001d7f8",
    "superscript": "\u2074\u00b2",
    "subscript": "\u2084\u2082",
    "circled": "\u2463\u2461",
    "circled in one sign": "\u32b7",
    "negative circled": "\u2779\u2777",
    "with full stops": "\u248b\u2489",
    "in parentheses": "\u2477\u2475",
    "Chinese": "\u56db\u5341\u4e8c",
    "Chinese by digit": "\u56db\u4e8c",
    "Chinese for banks": "\u8086\u62fe\u8d30",
    "spaced": "4 2",
    "hyphen inside": "4-2",
    "dots inside": "4...2",
    "comma inside": "4, 2",
    "slashes of a list": "4 | 2",
    "line break": "4\n2",
    "brackets": "[4][2]",
    "quotes": "'4' '2'",
    "digits and words": "4, followed by 2",
    "leading zeros": "0042",
    "trailing zeros": "42.000",
    "exponent": "4.2e1",
    "power of ten": "4.2 \u00d7 10^1",
    "power as superscript": "4.2\u00d710\u00b9",
    "power in LaTeX": "4.2 \\times 10^{1}",
    "plus sign": "+42",
    "ordinal": "the 42nd",
    "with unit": "42km",
    "words": "Forty-Two",
    "words in one": "fortytwo",
    "words with underscore": "forty_two",
    "words full width": "\uff46\uff4f\uff52\uff54\uff59 \uff54\uff57\uff4f",
    "ordinal word": "the forty-second",
    "digit words": "four two",
    "digit words with hyphen": "four-two",
    "leet": "f0rty-tw0",
    "Cyrillic letters in words": "f\u043erty tw\u043e",
    "accents": "f\u00f3rty tw\u00f3",
    "misspelt": "fourty two",
    "Spanish": "cuarenta y dos",
    "French": "quarante-deux",
    "German": "zweiundvierzig",
    "Italian": "quarantadue",
    "Portuguese": "quarenta e dois",
    "Dutch": "twee\u00ebnveertig",
    "Polish": "czterdzie\u015bci dwa",
    "Russian": "\u0441\u043e\u0440\u043e\u043a \u0434\u0432\u0430",
    "Turkish": "k\u0131rk iki",
    "Hindi": "\u092c\u092f\u093e\u0932\u0940\u0938",
    "Arabic": "\u0625\u062b\u0646\u0627\u0646 \u0648\u0623\u0631\u0628\u0639\u0648\u0646",
    "Korean": "\uc0ac\uc2ed\uc774\uc785\ub2c8\ub2e4",
    "Vietnamese": "b\u1ed1n m\u01b0\u01a1i hai",
    "Indonesian": "empat puluh dua",
    "Spanish by digit": "cuatro dos",
    "Roman": "XLII",
    "Roman signs": "\u2169\u216c\u2160\u2160",
    "small Roman": "xlii",
    "LaTeX box": "\\boxed{42}",
    "LaTeX braces": "{4}{2}",
    "LaTeX space": "4\\,2",
    "LaTeX fonts": "\\mathbf{4}\\mathbf{2}",
    "bold in Markdown": "**4****2**",
    "bold in HTML": "<b>4</b><b>2</b>",
    "HTML signs": "&#52;&#50;",
    "HTML hexadecimal": "&#x34;&#x32;",
    "JSON escapes": "\\u0034\\u0032",
    "C escapes": "\\x34\\x32",
    "URL escapes": "%34%32",
    "hexadecimal": "0x2A",
    "hexadecimal with h": "2Ah",
    "named hexadecimal": "2a in hex",
    "binary": "0b101010",
    "bare binary": "101010",
    "octal": "0o52",
    "named octal": "52 in base 8",
    "base64": "NDI=",
    "letter for a digit": "4z",
    "Cyrillic letter for a digit": "\u04272",
    "backwards, said so": "24 reversed",
    "words backwards": "owt-ytrof",
    "quotient": "84/2",
    "sum": "41+1",
    "joined to a letter": "x42",
    "percentage": "4200%",
    "other sign": "-42",
    "in Japanese text": "\u300c\u7b5442\u300d",
    "dozens and more": "three dozen and six",
    "part of a dozen": "3.5 dozen",
    "half a dozen more": "three and a half dozen",
}
OTHERS = [
    ("57,25", "57.25"),
    ("57\u066b25", "57.25"),
    ("57\u00b725", "57.25"),
    ("57\u00bc", "57.25"),
    ("57 point 25", "57.25"),
    ("57 dot 25", "57.25"),
    ("fifty-seven point two five", "57.25"),
    ("5 7 . 2 5", "57.25"),
    ("1_234", "1234"),
    ("1'234", "1234"),
    ("1.234", "1234"),
    ("1\u202f234", "1234"),
    ("12,34,567", "1234567"),
    ("two thousand and twelve", "2012"),
    ("minus three", "-3"),
    ("negative 3", "-3"),
    ("\u22123", "-3"),
    ("4O", "40"),
    ("l2", "12"),
    ("1 2 3 4", "1234"),
    ("answer_Paris", "Paris"),
    ("is-Paris-", "Paris"),
    ("P a r i s", "Paris"),
    ("P.A.R.I.S", "Paris"),
    ("\u0420aris", "Paris"),
    ("\u24c5\u24d0\u24e1\u24d8\u24e2", "Paris"),
    ("P\u00e1r\u00eds", "Paris"),
    ("p4ris", "Paris"),
    ("siraP", "Paris"),
    ("Par&#105;s", "Paris"),
    ("UGFyaXM=", "Paris"),
    ("new_york", "New York"),
    ("1,200 / 2", "600"),
    ("6 \u00d7 7", "42"),
    ("50 - 8", "42"),
    ("1/2", "0.5"),
    ("50 percent", "0.5"),
    ("a dozen", "12"),
    ("half a dozen", "6"),
    ("\u7b54\u306f7\u3067\u3059", "7"),
]
FRAMES = ["{}", "Hint: the result is {}.", "Look ({}) and try again!"]


@pytest.mark.parametrize("frame", repeated(FRAMES))
@pytest.mark.parametrize("name", OF_42)
def test_every_disguise_of_a_number_is_found(name: str, frame: str) -> None:
    assert holds_answer(frame.format(OF_42[name]), "42")


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize(("text", "answer"), OTHERS)
def test_disguises_of_other_answers_are_found(text: str, answer: str, frame: str) -> None:
    assert holds_answer(frame.format(text), answer)


HARMLESS = [
    "There is no tool abacus. Use one of: add, divide, lookup.",
    "Write one tool call as valid JSON: the call is not closed by </tool_call>.",
    "The argument a of divide must be a number, not text.",
    "divide needs the arguments a and b.",
    "There is no key price_eur. The keys are: price_usd, weight_kg, width_cm.",
    "Units convert only so: km to m, kg to g, h to min.",
    "Do not divide by zero; check the order.",
    "Numbers go up to 1000000000000.",
    "17.5 is wrong. Do every step, then copy the last result.",
    "Do not give up. Call the next tool.",
    'Another try began like this: {"name": "lookup", "arguments": {"key": "lamp"}} gave 18.5.',
    "Add the first two numbers, then multiply the sum by the third one.",
    "Convert minutes to hours before you subtract: 1 h = 60 min.",
    "Once you have the total, seize the remainder; one cent is due on the way to the end.",
    "The file is utf-8, hashed with sha256, at https://host.test/v1/items?id=7&page=3.",
    "Use \\frac{a}{b} and keep two decimals, i.e. round to 0.01.",
    "I would read the table again: row IV lists the mix of 3 and 5.",
    "Step 1: look up. Step 2: add. Step 3: answer.",
    "The second call failed at 10:35 on 2026-01-05, version 1.4.2.",
    "Vier Augen sehen mehr als zwei.",
    "Le prix est donn\u00e9 hors taxe, en euros.",
    "\u8bf7\u5148\u67e5\u4e00\u67e5\u8868\uff0c\u518d\u8ba1\u7b97\u3002",
    "The mm, cm and ml are units; MM and DC are not.",
    "Do not go back to front: begin with the left side.",
    "Add 3 + 4 first, then 5 * 6, and divide by 7 - 2.",
    "The formats are mp3, h264 and utf8; compare x1 with y2 in row b7.",
    "The text is on pages 30-45 of the edition of 2026-01-05, at 2/3 of 1/1/2026.",
    "Only 80% of the budget is left, 12.5 percent less than before.",
    "Eggs are sold by the dozen; two dozen fill a box.",
    "It is -7 degrees outside.",
    "\u7b2c3\u56de\u306e\u554f\u984c\u3092\u898b\u76f4\u3057\u3066\u304f\u3060\u3055\u3044\u3002",
]
ANSWERS = [
    "42",
    "57.25",
    "-3",
    "12",
    "1234",
    "100",
    "16",
    "250",
    "0.5",
    "99",
    "1009",
    "Paris",
    "blue",
]


@pytest.mark.parametrize(("answer", "hint"), crossed(ANSWERS, HARMLESS))
def test_a_harmless_hint_passes(hint: str, answer: str) -> None:
    assert not holds_answer(hint, answer)


@pytest.mark.parametrize(
    "text", ["half of 84", "(80 + 4) / 2", "84 / 2 / 1", "one more than 41", "21 twice"]
)
def test_what_the_docs_say_is_not_found(text: str) -> None:
    assert not holds_answer(f"The result is {text}.", "42")


def test_a_digit_that_ends_a_word_and_the_sign_of_a_negative_answer_count() -> None:
    assert not holds_answer("Look at q2 and step2.", "2")
    assert not holds_answer("Step 3 is next.", "-3")
    assert not holds_answer("Divide 84/0 by nothing.", "42")
