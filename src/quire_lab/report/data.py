"""Where lengths, traces and texts come from: files of a data folder, or stand-ins that say so."""

import json
from dataclasses import dataclass
from pathlib import Path

from quire.bench.workload import DISTRIBUTIONS, Lengths, from_csv, named
from quire.core.errors import ConfigError

FILES = {
    "sharegpt": "sharegpt_lengths.csv",
    "alpaca": "alpaca_eval_lengths.csv",
    "azure": "azure2023/AzureLLMInferenceTrace_conv.csv",
    "mooncake": "mooncake/conversation_trace.jsonl",
    "xquad": "xquad/xquad.en.json",
    "mtbench": "mtbench/question.jsonl",
}
USUAL_FOLDERS = ("data", "shared/data", "../shared/data")  # from the working folder


@dataclass(frozen=True, slots=True)
class SampledLengths:
    """Lengths, and where they come from in words."""

    lengths: list[Lengths]
    source: str
    is_real: bool


@dataclass(frozen=True, slots=True)
class DataFolder:
    folder: Path | None  # None: stand-ins for everything

    @classmethod
    def at(cls, named_folder: str | None) -> "DataFolder":
        """The folder that was named, or the first usual one that exists."""
        if named_folder is not None:
            folder = Path(named_folder).expanduser()
            if not folder.is_dir():
                raise ConfigError(f"--data-dir {named_folder}: is no folder")
            return cls(folder)
        return cls(
            next((Path(one) for one in USUAL_FOLDERS if (Path(one) / FILES["sharegpt"]).is_file()), None)
        )

    def path(self, name: str) -> str | None:
        """Of one of FILES; None where the folder has no such file."""
        if self.folder is None or not (self.folder / FILES[name]).is_file():
            return None
        return str(self.folder / FILES[name])

    def contexts(self) -> list[str]:
        """The paragraphs of XQuAD, in English; none where the folder does not have them."""
        path = self.path("xquad")
        if path is None:
            return []
        articles = json.loads(Path(path).read_text(encoding="utf-8"))["data"]
        return [paragraph["context"] for article in articles for paragraph in article["paragraphs"]]

    def questions(self) -> list[str]:
        """The first questions of MT-bench's conversations; none where the folder does not have them."""
        path = self.path("mtbench")
        if path is None:
            return []
        return [json.loads(line)["turns"][0] for line in Path(path).read_text(encoding="utf-8").splitlines()]

    def lengths(self, name: str, count: int, seed: int) -> SampledLengths:
        """`count` requests like ShareGPT's or Alpaca's."""
        path = self.path(name)
        if path is not None:
            return SampledLengths(
                from_csv(path, count, seed), f"{name}: lengths of real requests ({FILES[name]})", True
            )
        prompt, output = DISTRIBUTIONS[name]
        words = f"{name}: a stand-in, log-normal lengths with means {prompt.mean:.0f} and {output.mean:.0f} tokens"
        return SampledLengths(named(name, count, seed), words, False)
