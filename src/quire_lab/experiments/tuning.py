"""`tuning`: a prompt, examples, retrieved examples and fine-tuning, compared on a format that is new to the model."""

import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quire import LLM, SamplingParams
from quire.train.finetune import FinetuneJob, finetune
from quire.train.settings import TrainSettings
from quire_lab.report.experiment import Check, Experiment, Finding, Setup, Table

FORM = re.compile(r"\[steps=\d+; ops=[-+*/](,[-+*/])*; answer=(-?[\d.,/]+)\]")
INSTRUCTION = (
    "Answer with one line in this format and nothing else: [steps=N; ops=LIST; answer=X], where N is the number of "
    "calculations, LIST their operators (+, -, *, /) separated by commas, and X the result."
)
MAX_QUESTION = 200  # characters
NUM_SHOWN = 3  # examples in a prompt
GOAL = 0.9
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Task:
    question: str
    answer: str  # in the format

    @property
    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]


@dataclass(frozen=True, slots=True)
class Scores:
    format_accuracy: float
    answer_accuracy: float
    prompt_tokens: float  # of a request
    output_tokens: float
    seconds: float  # of a request
    preparation_seconds: float = 0.0  # training


def read_tasks(path: Path) -> list[Task]:
    """GSM8K's short questions; the answer's line is made of its calculations."""
    tasks = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        steps = re.findall(r"<<([^=>]*)=", record["answer"])
        operators = [sign for step in steps for sign in re.findall(r"(?<=[\d)%. ])[-+*/]", step)]
        result = record["answer"].rsplit("#### ", 1)[1].strip()
        if operators and len(record["question"]) <= MAX_QUESTION:
            form = f"[steps={len(steps)}; ops={','.join(operators)}; answer={result}]"
            tasks.append(Task(record["question"], form))
    return tasks


def stand_ins(count: int) -> list[Task]:
    """Sums in words, where there is no GSM8K."""
    return [
        Task(f"Ann has {n + 3} pens and buys 2 more. How many has she?", f"[steps=1; ops=+; answer={n + 5}]")
        for n in range(count)
    ]  # fmt: skip


def run(setup: Setup) -> Finding:
    folder = setup.data.folder
    path = None if folder is None else folder / "gsm8k" / "test.jsonl"
    is_real = path is not None and path.is_file()
    tasks = read_tasks(path) if path is not None and is_real else stand_ins(600)
    num_trained, num_asked = setup.pick(8, 400, 400), setup.pick(4, 48, 94)
    shown, asked = tasks[:num_trained], tasks[-num_asked:]
    settings = TrainSettings(
        rank=setup.pick(2, 16, 16),
        epochs=setup.pick(1, 2, 2),
        batch_size=setup.pick(8, 16, 16),
        batch_tokens=1024,
        learning_rate=1e-3,
        validation_split=0.0,
        max_length=512,
        seed=setup.seed,
    )
    scores: dict[str, Scores] = {}
    with tempfile.TemporaryDirectory() as scratch, setup.progress(5, "ways") as bar:
        data = Path(scratch) / "data.jsonl"
        data.write_text("".join(json.dumps({"messages": task.messages}) + "\n" for task in shown))
        bar.note("training")
        started = time.monotonic()
        threads = setup.engine.get("num_threads")
        job = FinetuneJob(
            data, Path(scratch) / "mine", setup.engine.get("model"), None, settings, num_threads=threads
        )
        finetune(job)
        trained_seconds = time.monotonic() - started
        bar()
        llm = LLM(use_tqdm=False, lora_modules=(f"mine={job.output}",), **setup.engine)
        for name, chats in _ways(shown, asked).items():
            bar.note(name)
            is_tuned = name == "fine-tuning"
            scores[name] = _scores(
                llm, chats, asked, "mine" if is_tuned else None, trained_seconds * is_tuned
            )
            bar()
    return _finding(setup, scores, settings, num_trained, is_real)


def _ways(shown: Sequence[Task], asked: Sequence[Task]) -> dict[str, list[list[Message]]]:
    def chats(examples: Sequence[Sequence[Task]], instruction: str) -> list[list[Message]]:
        result = []
        for task, before in zip(asked, examples, strict=True):
            turns = [message for example in before for message in example.messages]
            system = [{"role": "system", "content": instruction}] if instruction else []
            result.append([*system, *turns, task.messages[0]])
        return result

    none: list[Sequence[Task]] = [()] * len(asked)
    return {
        "a prompt": chats(none, INSTRUCTION),
        "three examples": chats([shown[:NUM_SHOWN]] * len(asked), INSTRUCTION),
        "three retrieved examples": chats([_nearest(task, shown) for task in asked], INSTRUCTION),
        "fine-tuning": chats(none, ""),
    }


def _nearest(task: Task, shown: Sequence[Task]) -> list[Task]:
    """The examples that share the rarest words with the question."""
    words = [set(re.findall(r"\w+", example.question.lower())) for example in shown]
    counts = Counter(word for own in words for word in own)
    mine = set(re.findall(r"\w+", task.question.lower()))
    score = [sum(1 / counts[word] for word in mine & own) for own in words]
    best = sorted(range(len(shown)), key=lambda at: -score[at])[:NUM_SHOWN]
    return [shown[at] for at in reversed(best)]


def _scores(
    llm: LLM, chats: list[list[Message]], asked: Sequence[Task], adapter: str | None, prepared: float
) -> Scores:
    sampling = SamplingParams(temperature=0, max_tokens=48)
    started = time.monotonic()
    outputs = llm.chat(chats, sampling, use_tqdm=False, adapter=adapter)
    seconds = time.monotonic() - started
    forms = [FORM.fullmatch(output.outputs[0].text.strip()) for output in outputs]
    results = [FORM.fullmatch(task.answer) for task in asked]
    right = [bool(m and r and m[2] == r[2]) for m, r in zip(forms, results, strict=True)]
    count = len(asked)
    return Scores(
        sum(form is not None for form in forms) / count,
        sum(right) / count,
        sum(len(output.prompt_token_ids) for output in outputs) / count,
        sum(len(output.outputs[0].token_ids) for output in outputs) / count,
        seconds / count,
        prepared,
    )


def _finding(
    setup: Setup, scores: dict[str, Scores], settings: TrainSettings, num_trained: int, is_real: bool
) -> Finding:
    price = setup.price_per_hour / 3600
    rows = [
        [
            name, f"{100 * s.format_accuracy:.0f} %", f"{100 * s.answer_accuracy:.0f} %", f"{s.prompt_tokens:.0f}",
            f"{s.output_tokens:.0f}", f"{s.seconds:.2f}", f"{s.preparation_seconds:.0f}",
            f"{price * s.preparation_seconds:.4f}", f"{1000 * price * s.seconds:.4f}",
        ]
        for name, s in scores.items()
    ]  # fmt: skip
    head = [
        "way", "in the format", "right answer", "prompt tokens", "answer tokens", "s a request", "s of training",
        f"{setup.currency} of training", f"{setup.currency} of 1,000 requests",
    ]  # fmt: skip
    tuned, best = (
        scores["fine-tuning"],
        max(s.format_accuracy for n, s in scores.items() if n != "fine-tuning"),
    )
    return Finding(
        f"After {tuned.preparation_seconds:.0f} s of training {100 * tuned.format_accuracy:.0f} % of held-out answers "
        f"are in a format that the model did not know; with prompts and examples it is {100 * best:.0f} % at most.",
        [Table("One task, four ways", head, rows)],
        [],
        {name: asdict(s) for name, s in scores.items()},
        {"seed": setup.seed, "engine": dict(setup.engine), "training": asdict(settings), "examples": num_trained},
        [Check("fine-tuned: 90 % in the format", f"{tuned.format_accuracy:.2f}", tuned.format_accuracy >= GOAL)],
        [
            "questions of GSM8K's test part, the first ones to train and the last ones held out"
            if is_real
            else "stand-ins for GSM8K: sums in words",
            "prices are those of this machine's time; a request's time is that of all of them as one batch, divided",
        ],
    )  # fmt: skip


EXPERIMENT = Experiment(
    "tuning",
    "Prompting, retrieval or fine-tuning",
    "A model should answer in a format that it does not know. What do a prompt, examples, retrieved examples and an "
    "adapter bring, and what do they cost?",
    run,
)
