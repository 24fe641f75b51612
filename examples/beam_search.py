"""Beam search: the best hypotheses with their scores."""

from quire import LLM


def main() -> None:
    with LLM() as llm:
        prompt = "The capital of France is"
        result = llm.beam_search(prompt, beam_width=4, num_return=3, max_tokens=12, use_tqdm=False)[0]
        for output in result.outputs:  # best first
            assert output.cumulative_logprob is not None
            print(f"{output.cumulative_logprob:8.3f}  {output.text!r}")


if __name__ == "__main__":
    main()
