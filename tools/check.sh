#!/usr/bin/env bash
# Every check, one line each; a failing one shows its output, and all of them run even if one fails.
set -uo pipefail
cd "$(dirname "$0")/.."
PY=${PY:-.venv/bin/python}
bin=$(dirname "$PY")
export PYTHONPATH=src # so that the checks need no installed package
export NO_MKDOCS_2_WARNING=1
folders=()
for folder in src tests tools benchmarks examples; do [ -d "$folder" ] && folders+=("$folder"); done
failed=()
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

check() { # NAME FIX COMMAND…
  local name=$1 fix=$2 output
  shift 2
  if output=$("$@" 2>&1); then
    printf 'ok    %s\n' "$name"
    case $name in budget*) printf '      %s\n' "$output" ;; esac
  else
    printf 'FAIL  %s\n' "$name"
    printf '%s\n' "$output" | sed 's/^/      /'
    [ -z "$fix" ] || printf '      -> %s\n' "$fix"
    failed+=("$name")
  fi
}

echo "== checks"
check "format" "make format" "$PY" -m ruff format --check --output-format concise "${folders[@]}"
check "lint" "make format repairs some of it" "$PY" -m ruff check --output-format concise "${folders[@]}"
check "types" "" "$PY" -m mypy
check "rooms" "imports point down the list of docs/architecture.md only" "$bin/lint-imports" --no-logo
check "imports" "" "$PY" tools/imports_gate.py
check "sizes" "" "$PY" tools/size_gate.py
check "words" "the glossary, docs/glossary.md, has the words of the field" "$PY" tools/words_gate.py
check "budget of the core path" "take optional features out of the core path, or merge what is said twice" "$PY" tools/budget_gate.py core
check "budget of ranks and replicas" "" "$PY" tools/budget_gate.py parts
check "budget of the package" "" "$PY" tools/budget_gate.py total
check "commits" "git commit --amend, or git rebase -i" "$PY" tools/commits_gate.py
check "site" "" "$PY" -m mkdocs build --strict --quiet --site-dir "$scratch/site"

if [ ${#failed[@]} -gt 0 ]; then
  echo "checks failed: ${failed[*]}" >&2
  exit 1
fi
