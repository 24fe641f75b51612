"""Points and filters in Qdrant's terms (its HTTP API's JSON), for the embedded package and for a server alike."""

from typing import Any

from quire.rag.filters import Comparison, CompoundFilter, Filter
from quire.rag.words import K1, B

DENSE, WORDS = "dense", "words"
EF = 128  # candidates of a search in the graph: a recall of .996 at 200,000 clustered vectors (lab search)
USUAL_LENGTH = 256.0  # words of a chunk, if nothing is known
SCHEMAS = {"s": "keyword", "n": "float", "b": "keyword"}  # by the first letter of a field's name


def payload_of(attributes: dict[str, Any]) -> dict[str, Any]:
    """Under names that hold the kind of the value and the key in hex: a key may hold dots and brackets, which are
    paths here, and values of one key may differ in kind. A bool is a text: it would be taken for an integer."""
    return {
        field_name(key, value): str(value) if isinstance(value, bool) else value
        for key, value in attributes.items()
    }


def field_name(key: str, value: Any) -> str:
    kind = "s" if isinstance(value, str) else "b" if isinstance(value, bool) else "n"
    return f"{kind}_{key.encode().hex()}"


def word_weights(words: dict[int, int], average_length: float) -> tuple[list[int], list[float]]:
    """A sparse vector of BM25's weights; the rarity of words is the store's part."""
    length = sum(words.values()) / average_length
    weights = [count * (K1 + 1) / (count + K1 * (1 - B + B * length)) for count in words.values()]
    return list(words), weights


def filter_terms(filter: Filter) -> dict[str, Any]:
    """`{"must": […]}`, `{"should": […]}` or `{"must_not": […]}`, nested."""
    if isinstance(filter, CompoundFilter):
        inner = [filter_terms(part) for part in filter.filters]
        return {"must": inner} if filter.type == "and" else {"should": inner}
    assert isinstance(filter, Comparison)
    if filter.type in ("gt", "gte", "lt", "lte"):
        limits = {filter.type: float(filter.values[0])}
        return {"must": [{"key": field_name(filter.key, 0.0), "range": limits}]}
    equal: list[dict[str, Any]] = []
    for value in filter.values:
        is_word = isinstance(value, str | bool)
        test = {"match": {"value": str(value)}} if is_word else {"range": {"gte": value, "lte": value}}
        equal.append({"key": field_name(filter.key, value), **test})
    if filter.type in ("ne", "nin"):
        return {"must_not": equal}
    return {"should": equal} if equal else {"must": [{"has_id": []}]}  # nothing has no id
