"""Generate for a batch of prompts in this process."""

from quire import LLM, SamplingParams


def main() -> None:
    prompts = ["The capital of France is", "Water boils at", "The first prime numbers are"]
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with LLM() as llm:  # no model named: the built-in one
        for result in llm.generate(prompts, greedy, use_tqdm=False):
            output = result.outputs[0]
            print(f"{result.prompt!r} -> {output.text!r} ({output.finish_reason})")

        chat = [{"role": "user", "content": "What is the capital of Italy?"}]
        sampled = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=24)
        print("chat:", llm.chat(chat, sampled, use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main()
