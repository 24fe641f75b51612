"""The laboratory's command and its page: names, files, faults, and a page that needs nothing else."""

import base64
from html.parser import HTMLParser

import pytest

from quire.cli.main import main
from quire.core.errors import QuireError
from quire_lab.cli import lab as bench_lab
from quire_lab.experiments import registry
from quire_lab.report.experiment import Check, Experiment, Finding, Table
from quire_lab.report.figure import Picture
from quire_lab.report.files import write_finding
from quire_lab.report.page import as_page
from quire_lab.report.regression import fit_line, fit_power

pytest.importorskip("matplotlib")


def small(name="small", fails=False):
    """An experiment without a model."""

    def run(setup):
        if fails:
            raise QuireError("the <device> is away")
        with setup.progress(2, "steps") as bar:
            bar.note("half")
            bar(2)
        picture = Picture(
            name, "A line", "It goes up.", lambda figure: figure.subplots().plot([1, 2], [3, 4])
        )
        table = Table("Numbers", ["what", "ms"], [["a < b", "1.0"]])
        return Finding(
            "It is 1 < 2.",
            [table],
            [picture],
            {"x": 1},
            {"seed": 0},
            [Check("1 < 2", "1", True)],
            ["by hand"],
        )

    return Experiment(name, f"About {name}", "What is it?", run)


@pytest.fixture
def two(monkeypatch):
    """Only two experiments, the second of which fails."""
    listed = {"small": registry.Listed("small", "a small one"), "broken": registry.Listed("broken", "fails")}
    monkeypatch.setattr(registry, "EXPERIMENTS", listed)
    monkeypatch.setattr(bench_lab, "EXPERIMENTS", listed)
    monkeypatch.setattr(bench_lab, "find", lambda name: small(name, fails=name == "broken"))


class Read(HTMLParser):
    def __init__(self):
        super().__init__()
        self.images, self.links, self.words, self.open = [], [], [], []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "img":
            self.images.append(given)
        if tag in ("link", "script", "iframe"):
            self.links.append(tag)
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_all_writes_one_page_and_a_failure_costs_only_itself(two, tmp_path, capsys):
    assert main(["bench", "lab", "all", "--output-dir", str(tmp_path), "--size", "quick"]) == 1
    assert "1 experiments, 1 did not run" in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    read = Read()
    read.feed(page)
    assert not read.open
    assert not read.links
    assert "http" not in page.replace("http://www.w3.org", "")
    (image,) = read.images
    assert base64.b64decode(image["src"].partition(",")[2]).startswith(b"\x89PNG")
    assert image["alt"] == "A line. It goes up."
    words = " ".join(read.words)
    for expected in (
        "It is 1 < 2.",
        "a < b",
        "About small",
        "the <device> is away",
        "processor",
        "quire bench lab all",
    ):
        assert expected in words, expected
    assert str(tmp_path) not in page


def test_one_experiment_leaves_its_files(two, tmp_path, capsys):
    assert main(["bench", "lab", "small", "--output-dir", str(tmp_path / "new" / "folder")]) == 0
    assert "yes  1 < 2: 1" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert names == {"small.png", "small.json", "small.txt", "small.html"}


def test_list_names_every_experiment(capsys):
    assert main(["bench", "lab", "list"]) == 0
    out = capsys.readouterr().out
    for name in (
        "numbers",
        "precision",
        "kvcache",
        "roofline",
        "waste",
        "batching",
        "sharing",
        "blocksize",
        "prefix",
        "preempt",
    ):
        assert f"\n{name} " in f"\n{out}"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["wsate"], "there is no experiment 'wsate': did you mean waste?"),
        (["qqqq"], "there is no experiment 'qqqq': `quire bench lab list` shows them"),
        (["waste", "--price-per-hour", "0"], "--price-per-hour is 0: give more than 0"),
        (["waste", "--time-limit", "0"], "--time-limit is 0: give more than 0 seconds"),
        (["waste", "--precision", "1"], "--precision is 1: give a number between 0 and 1"),
        (["precision", "--contexts", "0"], "--contexts is 0: give 1 or more"),
        (
            ["precision", "--formats", "int5"],
            "--formats int5: is not known, choose from none, checkpoint, int8",
        ),
        (["waste", "--data-dir", "/nowhere"], "--data-dir /nowhere: is no folder"),
        (["waste", "--output-dir", "/proc/here"], "--output-dir /proc/here: cannot be written"),
    ],
)
def test_bad_input_is_one_line(words, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "lab", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert expected in line


def test_every_experiment_has_a_module_of_its_name():
    for name in registry.EXPERIMENTS:
        experiment = registry.find(name)
        assert experiment.name == name
        assert experiment.title
        assert experiment.question.endswith((".", "?"))


def test_fits_find_what_was_put_in():
    power = fit_power([1, 2, 4, 8], [3, 12, 48, 192])
    assert (power.exponent, power.scale) == (pytest.approx(2), pytest.approx(3))
    line = fit_line([1, 2, 3], [5, 7, 9], [1, 1, 1])
    assert (line.intercept, line.slope, line.r_squared) == (
        pytest.approx(3),
        pytest.approx(2),
        pytest.approx(1),
    )


def test_a_busy_machine_is_said(tmp_path):
    experiment = small()
    finding = Finding("It is.", [], [], {}, {})
    quiet = write_finding(experiment, finding, 1.0, tmp_path, load=0.5)
    busy = write_finding(experiment, finding, 1.0, tmp_path, load=1e6)
    assert not quiet.disturbed
    assert "times are disturbed" in as_page([busy], [], [], "quire bench lab small")
    assert busy.record["results"]["load_average_before"] == 1e6
