"""Reports walk records: the fields say what is shown, and in which words."""

from dataclasses import dataclass

from quire.core.stats import PoolSize, Shown, gauge, rows, shown, walk


@dataclass(frozen=True, slots=True)
class Inner:
    longest: int = gauge("longest", "Tokens.", shown=Shown("limits", "{:,} tokens"))
    most: int = shown("limits", "{} rows")
    hidden: int = 5


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner
    lines: tuple[str, ...] = shown("")
    pool: PoolSize = shown("pool")
    gpus: tuple[str, ...] = shown("gpu", ", ".join, empty="none")
    note: str = shown("note", default="")


def test_fields_of_one_label_share_a_line_and_empty_ones_are_left_out() -> None:
    outer = Outer(Inner(2048, 8), ("swap      on", "          and more"), PoolSize(0, 0, 0), ())
    assert rows(outer) == [
        ("limits", "2,048 tokens, 8 rows"),
        ("swap", "on"),
        ("", "and more"),
        ("gpu", "none"),
    ]


def test_a_field_may_be_exported_and_shown() -> None:
    size = PoolSize(3, 16, 4_000_000, "float16", "num_blocks")
    outer = Outer(Inner(7, 0), (), size, ("one", "two"), "x")
    assert rows(outer) == [
        ("limits", "7 tokens"),
        ("pool", "4 MB: 3 blocks of 16 tokens = 48 tokens in float16 (set by num_blocks)"),
        ("gpu", "one, two"),
        ("note", "x"),
    ]
    assert [(metric.name, value) for metric, value in walk(outer.inner)] == [("longest", 7)]
