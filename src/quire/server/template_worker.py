"""`python -m quire.server.template_worker`: renders the chat templates that requests carry, in a process that may die.

Started by request_templates.py only. A job is a line of JSON on stdin, its answer a line on stdout. No thread can be
stopped from outside and no check inside jinja sees `10 ** 10 ** 10`, so time and memory are bounded by the system:
an alarm ends the process even within one long operation, and memory past the limit is an error of that job.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

from quire.core.errors import ConfigError, InvalidRequest
from quire.text.template import ChatTemplate

MEMORY_BYTES = 512 << 20  # of address space, the interpreter's own included


def main() -> int:
    seconds, max_characters = float(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole group; the parent decides
    # imports what it needs, before the limits hold
    ChatTemplate("").render([{"role": "user", "content": ""}])
    with suppress(ValueError, OSError):  # some systems know no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answer = _answer(line, max_characters)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
    return 0


def _answer(line: bytes, max_characters: int) -> str:
    """`{"text": …}`, or `{"error": …, "param": …}`."""
    try:
        text = _rendered(json.loads(line))
        if len(text) > max_characters:
            return _wrong(
                f"the chat template made {len(text):,} characters, and {max_characters:,} are allowed"
            )
        return json.dumps({"text": text})
    except InvalidRequest as refusal:
        return _wrong(str(refusal), refusal.param)
    except ConfigError as error:
        return _wrong(str(error))
    except MemoryError:
        return _wrong(f"the chat template needs more than {MEMORY_BYTES >> 20} MiB of memory")
    except Exception as fault:  # any fault of a client's template is the client's error
        return _wrong(f"the chat template fails: {type(fault).__name__}: {fault}"[:300])


def _rendered(job: dict[str, Any]) -> str:
    template = _template(job["template"], tuple(sorted(job["special"].items())))
    return template.render(
        job["messages"],
        job["tools"],
        add_generation_prompt=job["add_generation_prompt"],
        continue_final_message=job["continue_final_message"],
        **job["variables"],
    )


@lru_cache(maxsize=32)
def _template(text: str, special: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(text, dict(special))


def _wrong(message: str, param: str | None = "chat_template") -> str:
    return json.dumps({"error": message, "param": param})


if __name__ == "__main__":
    sys.exit(main())
