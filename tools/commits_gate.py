"""The commit gate: a subject of at most 72 characters, a blank line and a body that says why.

It reads the commits after BASE, without merges. Outside of a git repository, in a shallow clone, and where BASE is not
part of the history, nothing can be checked, and the gate passes.

Usage: python tools/commits_gate.py [ROOT [BASE]]. Prints one line per finding and exits 1 if there is any.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BASE = "f0bc6e09eb942f55cab25c283890631935e3e6a9"  # the last commit before the rule
MAX_SUBJECT = 72


def git(root: Path, *arguments: str) -> str | None:
    """Its output; None if git is missing or fails."""
    try:
        run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return run.stdout if run.returncode == 0 else None


def messages(root: Path, base: str) -> dict[str, str] | None:
    """Abbreviated hash → message of each commit after `base`; None where the history cannot be read."""
    if (git(root, "rev-parse", "--is-shallow-repository") or "true").strip() == "true":
        return None
    if git(root, "merge-base", "--is-ancestor", base, "HEAD") is None:
        return None
    log = git(root, "log", "--no-merges", "--format=%h%n%B%x00", f"{base}..HEAD")
    if log is None:
        return None
    commits = (entry.strip("\n").partition("\n") for entry in log.split("\0"))
    return {name: message for name, _, message in commits if name}


def findings(commits: dict[str, str]) -> Iterator[str]:
    for name, message in commits.items():
        subject, _, rest = message.partition("\n")
        if len(subject) > MAX_SUBJECT:
            yield f"{name}: the subject has {len(subject)} characters (at most {MAX_SUBJECT}): {subject}"
        if rest and not rest.startswith("\n"):
            yield f"{name}: no blank line after the subject: {subject}"
        if not rest.strip():
            yield f"{name}: no body that says why: {subject}"


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]
    commits = messages(root, arguments[1] if len(arguments) > 1 else BASE)
    if commits is None:
        print("commit gate: no full history here, nothing checked")
        return 0
    lines = list(findings(commits))
    print(
        "\n".join(
            [*lines, f"commit gate: {len(commits)} commits, {f'{len(lines)} findings' if lines else 'ok'}"]
        )
    )
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
