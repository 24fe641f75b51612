"""Times single steps on one GPU: `python -m quire_lab.benchmarks.step_times_gpu > steps.json`, then
`quire bench fit --samples steps.json`.

Decodes over batches × contexts, and the prompts on the way there, through the real engine with
random weights. Each model runs in a process of its own; about a minute in all on an H200. The best of two repeats
counts: the first may compile. Progress goes to stderr.
"""

import argparse
import json
import subprocess
import sys
import time
from datetime import date

MODELS = ("llama-8b", "opt-13b")
CELLS = (
    *((1, 128), (1, 1900), (4, 512), (8, 1024), (16, 128), (16, 1900), (32, 1024), (64, 128), (64, 1024)),
    *((128, 64), (128, 512), (192, 256), (256, 64), (256, 384)),
)
# single prompts: how small steps of prompts cost
PROMPTS = ((1, 16), (1, 64), (1, 256), (1, 512), (1, 1024), (2, 512), (8, 32), (8, 96))


def main() -> None:
    options = _options()
    if options.child:
        print(json.dumps(_measure(options)))
        return
    runs = []
    for model in options.models.split(","):
        command = [
            sys.executable,
            "-m",
            "quire_lab.benchmarks.step_times_gpu",
            "--child",
            model,
            "--device",
            options.device,
        ]
        command += ["--repeats", str(options.repeats)] + (["--small"] if options.small else [])
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"{model}: ended with {done.returncode}")
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    import torch

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record = {
        "machine": machine,
        "date": date.today().isoformat(),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
        "runs": runs,
    }
    print(json.dumps(record, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="names of published architectures")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="the smallest batches only, to try the script")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "PyTorch sees no GPU here: run it on one, or try the script itself with --device cpu --small"
        )
    return options


def _measure(options: argparse.Namespace) -> dict[str, object]:
    from quire.bench.drive import Bench
    from quire.core.config import EngineConfig
    from quire.engine.build import build
    from quire_lab.fit.step_grid import StepCell, measure_grid

    settings = {"enable_prefix_caching": False}
    began = time.perf_counter()
    built = build(
        EngineConfig.of(model=options.child, load_format="dummy", device=options.device, **settings)
    )
    print(*built.report.lines(), sep="\n", file=sys.stderr)
    pairs = [*((*prompt, 1) for prompt in PROMPTS), *((*chosen, 12) for chosen in CELLS)]
    if options.small:
        pairs = [pair for pair in pairs if pair[0] * pair[1] <= 256]
    cells = [StepCell(*pair) for pair in pairs]

    def said(cell: StepCell) -> None:
        now = time.perf_counter() - began
        print(f"{options.child}: {cell.num_sequences} × {cell.context} after {now:.1f} s", file=sys.stderr)

    try:
        steps = measure_grid(Bench(built), cells, options.repeats, said)
    finally:
        built.engine.close()
    return {"model": options.child, "settings": settings, "steps": [step.as_dict() for step in steps]}


if __name__ == "__main__":
    main()
