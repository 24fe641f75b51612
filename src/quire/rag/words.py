"""The words that text search compares: lower case, without stop words, stemmed (Porter), hashed to 32 bits.

Both indexes use the same words, so they rank alike.
"""

import re
import zlib
from collections import Counter
from functools import lru_cache

K1, B = 1.2, 0.75  # BM25: saturation of a repeated word, share of the length correction
_WORD = re.compile(r"[^\W_]+")
MAX_WORD = 64  # characters
_STOPS = (
    "a about above after again against all am an and any are as at be because been before being below between both "
    "but by can could did do does doing down during each few for from further had has have having he her here hers "
    "herself him himself his how i if in into is it its itself just me more most my myself no nor not now of off on "
    "once only or other our ours ourselves out over own s same she should so some such t than that the their theirs "
    "them themselves then there these they this those through to too under until up very was we were what when where "
    "which while who whom why will with you your yours yourself yourselves"
)
STOP_WORDS = frozenset(_STOPS.split())


def word_counts(text: str) -> dict[int, int]:
    """How often each word occurs, by its hash."""
    found = Counter(word[:MAX_WORD] for word in _WORD.findall(text.lower()) if word not in STOP_WORDS)
    counts: Counter[int] = Counter()
    for word, count in found.items():
        counts[_term(word)] += count
    return dict(counts)


@lru_cache(maxsize=1 << 16)
def _term(word: str) -> int:
    return zlib.crc32(stem(word).encode())


# ---------------------------------------------------------------------- Porter's stemmer (1980)

_STEP2 = {
    "ational": "ate", "tional": "tion", "enci": "ence", "anci": "ance", "izer": "ize", "abli": "able", "alli": "al",
    "entli": "ent", "eli": "e", "ousli": "ous", "ization": "ize", "ation": "ate", "ator": "ate", "alism": "al",
    "iveness": "ive", "fulness": "ful", "ousness": "ous", "aliti": "al", "iviti": "ive", "biliti": "ble",
}  # fmt: skip
_STEP3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
_STEP4 = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate", "iti",
    "ous", "ive", "ize",
)  # fmt: skip
_BY_LENGTH = [sorted(endings, key=len, reverse=True) for endings in (_STEP2, _STEP3, _STEP4)]


def stem(word: str) -> str:
    """Of an English word in lower case; words with other letters stay as they are."""
    if len(word) <= 2 or not word.isascii() or not word.isalpha():
        return word
    if word.endswith("s") and not word.endswith("ss"):  # a plural
        word = word[: -2 if word.endswith(("sses", "ies")) else -1]
    word = _past(word)
    if word.endswith("y") and _has_vowel(word[:-1]):
        word = word[:-1] + "i"
    for endings, table in ((_BY_LENGTH[0], _STEP2), (_BY_LENGTH[1], _STEP3)):
        ending = next((ending for ending in endings if word.endswith(ending)), None)
        if ending is not None and _measure(word[: -len(ending)]) > 0:
            word = word[: -len(ending)] + table[ending]
    ending = next((ending for ending in _BY_LENGTH[2] if word.endswith(ending)), None)
    if ending is not None:
        left = word[: -len(ending)]
        if _measure(left) > 1 and (ending != "ion" or left.endswith(("s", "t"))):
            word = left
    return _final(word)


def _past(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    ending = next((ending for ending in ("ed", "ing") if word.endswith(ending)), None)
    if ending is None or not _has_vowel(word[: -len(ending)]):
        return word
    word = word[: -len(ending)]
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _ends_double(word) and word[-1] not in "lsz":
        return word[:-1]
    return word + "e" if _measure(word) == 1 and _ends_short(word) else word


def _final(word: str) -> str:
    if word.endswith("e"):
        left = word[:-1]
        measure = _measure(left)
        if measure > 1 or (measure == 1 and not _ends_short(left)):
            word = left
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word


def _kinds(word: str) -> str:
    """A `v` for each vowel and a `c` for each consonant; y is a vowel after a consonant."""
    kinds = ""
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and kinds.endswith("c"))
        kinds += "v" if vowel else "c"
    return kinds


def _measure(word: str) -> int:
    """How often consonants follow vowels."""
    return _kinds(word).count("vc")


def _has_vowel(word: str) -> bool:
    return "v" in _kinds(word)


def _ends_double(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _kinds(word).endswith("c")


def _ends_short(word: str) -> bool:
    """Consonant, vowel, consonant, the last none of w, x, y."""
    return _kinds(word).endswith("cvc") and word[-1] not in "wxy"
