"""The prefix cache: a second question after the same long text computes only its own tokens."""

from quire import LLM, SamplingParams

DOCUMENT = "The history of the printing press begins long before Gutenberg. " * 60
QUESTIONS = ("Who is named in the text?", "What is the text about?")


def main() -> None:
    sampling = SamplingParams(temperature=0, max_tokens=4)
    for enabled in (False, True):
        with LLM(enable_prefix_caching=enabled) as llm:
            print("prefix cache", "on" if enabled else "off")
            for question in QUESTIONS:
                result = llm.generate(f"{DOCUMENT}\n{question}\n", sampling, use_tqdm=False)[0]
                assert result.metrics.first_token is not None
                print(
                    f"  {len(result.prompt_token_ids)} prompt tokens, {result.num_cached_tokens} from the cache: "
                    f"first token after {result.metrics.first_token * 1000:.0f} ms"
                )


if __name__ == "__main__":
    main()
