"""OpenAI's batch format: a file of requests, answered by `quire run-batch` without a server."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

CITIES = ("France", "Italy", "Japan")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        requests, results = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        with requests.open("w") as file:
            for country in CITIES:
                question = f"What is the capital of {country}?"
                body = {
                    "messages": [{"role": "user", "content": question}],
                    "temperature": 0,
                    "max_tokens": 16,
                }
                row = {"custom_id": country, "method": "POST", "url": "/v1/chat/completions", "body": body}
                file.write(json.dumps(row) + "\n")
        command = [sys.executable, "-m", "quire", "run-batch", "-i", str(requests), "-o", str(results)]
        subprocess.run(command, check=True)
        for line in results.read_text().splitlines():  # in the order of completion
            row = json.loads(line)
            answer = row["response"]["body"]["choices"][0]["message"]["content"]
            print(f"{row['custom_id']}: {answer}")


if __name__ == "__main__":
    main()
