"""LLM: the engine in-process. `LLM().generate(["…"])` is the whole API for offline use."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from quire.core.config import EngineConfig
from quire.core.errors import AdapterError, InvalidRequest, QueueFull, QuireError
from quire.core.sampling import SamplingParams
from quire.core.step import SequenceUpdate
from quire.engine.adapters import Adapters
from quire.engine.build import Built, Report, build
from quire.llm.one_caller import OneCaller
from quire.llm.outputs import RequestOutput, request_output
from quire.llm.progress import load_progress
from quire.text.answer import Answer
from quire.text.load import choose_tokenizer
from quire.text.prompts import PreparedPrompt, Prompt, as_list, prepare, ready_to_sample
from quire.text.template import ChatTemplate, load_template
from quire.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one step added to the first sequence's text; the last piece has the whole `output`."""

    text: str
    num_tokens: int  # of the answer so far
    output: RequestOutput | None = None


class LLM:
    """A model ready to generate. Settings are those of `EngineConfig`, flat: unknown names are refused.

    Without `model` it is the built-in one. It steps the engine in the caller's thread, with no queue between them, and
    is not thread-safe; AsyncLLM serves concurrent callers through the engine's loop.
    """

    def __init__(self, model: str | None = None, *, use_tqdm: bool = True, **settings: Any) -> None:
        self.config = EngineConfig.of(model=model, **settings)
        with load_progress(use_tqdm) as progress:
            self.config.adapters.check_folders()
            self._built: Built = build(self.config, progress)
        self.engine = self._built.engine
        self.tokenizer: Tokenizer | None = choose_tokenizer(self.config.model, self._built.source)
        self._template: ChatTemplate | None = None
        self._ids = itertools.count()
        self._one_caller = OneCaller()

    # ------------------------------------------------------------------ generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """One result per prompt, in the prompts' order. All are checked before any is computed.

        `adapter` names a LoRA adapter for all prompts, or one (or None) for each.
        """
        prepared = [self.prepare(prompt) for prompt in as_list(prompts)]
        return self._run(prepared, sampling if sampling is not None else sampling_params, use_tqdm, adapter)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        beam_width: int = 4,
        max_tokens: int | None = 64,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        num_return: int | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """As `generate`, each result with the `num_return` best hypotheses (all `beam_width` unless told), best first.

        `early_stopping`: True ends when there are `beam_width` hypotheses, False when the best live beam is no better
        than the worst of them by its present length, "never" when it cannot become better.
        """
        sampling = SamplingParams(
            n=beam_width if num_return is None else num_return,
            best_of=beam_width,
            max_tokens=max_tokens,
            use_beam_search=True,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        return self.generate(prompts, sampling, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or a list of them, through the model's chat template."""
        if not isinstance(messages, Sequence):
            raise InvalidRequest(
                f"messages must be a list of messages, not {type(messages).__name__}", "messages"
            )
        several: Any = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prepared = []
        for conversation in several:
            text = self.template.render(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            prepared.append(self.prepare(text, add_special_tokens=False, goes_on=continue_final_message))
        return self._run(prepared, sampling if sampling is not None else sampling_params, use_tqdm, adapter)

    def prepare(
        self, prompt: Prompt, add_special_tokens: bool = True, goes_on: bool = True
    ) -> PreparedPrompt:
        """A prompt as tokens. Raises ContextExceeded, before any work, for a text that cannot fit."""
        limits = self.engine.limits
        return prepare(
            prompt,
            self.tokenizer,
            add_special_tokens=add_special_tokens,
            goes_on=goes_on and limits.encoder is None,
            max_model_len=limits.max_model_len,
        )

    # ------------------------------------------------------------------ streaming; one iterator at a time

    def stream(
        self, prompt: PreparedPrompt, sampling: SamplingParams, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[TextDelta]:
        """Pieces of the answer to one prompt. `stopped` is asked between steps; if true the answer ends there.

        A caller that stops iterating aborts the request.
        """
        answers: dict[str, Answer] = {}
        with self._serving(answers):
            answer = self._submit(answers, prompt, ready_to_sample(sampling, self.tokenizer))
            first = answer.sequences[0]
            while not answer.finished:
                if stopped():
                    answer.end("abort")
                    yield TextDelta(first.new_text, len(first.token_ids))
                    break
                for _answer, update in self._take_updates(answers):
                    if update.index == 0 and first.new_text:
                        yield TextDelta(first.new_text, len(first.token_ids))
        if answer.fault is not None:
            raise answer.fault
        yield TextDelta("", len(first.token_ids), request_output(answer, prompt, self.tokenizer))

    def generate_each(
        self,
        prompts: Sequence[PreparedPrompt],
        sampling: SamplingParams,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, RequestOutput | QuireError]]:
        """(index of the prompt, its result), in the order of finishing. An error of one prompt is its result.

        Prompts beyond the bounds of the queue are submitted as it empties. Ends when `stopped` is true.
        """
        waiting = deque(range(len(prompts)))
        answers: dict[str, Answer] = {}
        indices: dict[str, int] = {}
        with self._serving(answers):
            while (waiting or answers) and not stopped():
                while waiting:
                    index = waiting[0]
                    try:
                        answer = self._submit(
                            answers, prompts[index], ready_to_sample(sampling, self.tokenizer)
                        )
                    except QueueFull:
                        break
                    except QuireError as error:
                        yield waiting.popleft(), error
                    else:
                        indices[answer.request_id] = waiting.popleft()
                for answer, _update in self._take_updates(answers):
                    if answer.finished and answers.pop(answer.request_id, None) is not None:
                        index = indices[answer.request_id]
                        yield index, answer.fault or request_output(answer, prompts[index], self.tokenizer)

    # ------------------------------------------------------------------ adapters

    def add_adapter(self, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """An adapter from memory, as PEFT would save it: tensors by name, and adapter_config.json's content.

        Nothing touches the disk. A name that is known already means this one from now on.
        """
        self._adapters.add(name, tensors, config)

    def remove_adapter(self, name: str) -> None:
        """Requests that run with it go on; new ones do not find it."""
        self._adapters.remove(name)

    def adapters(self) -> list[str]:
        """Names that `generate(adapter=…)` takes."""
        return self._adapters.library.names()

    @property
    def _adapters(self) -> Adapters:
        if self.engine.adapters is None:
            raise AdapterError("adapters are off: start with enable_lora=True, lora_modules or lora_dir")
        return self.engine.adapters

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            self._template = load_template(self._built.source, self.config.model.chat_template)
        return self._template

    @property
    def report(self) -> Report:
        """What was decided at start: memory, blocks, limits."""
        return self._built.report

    def default_sampling(self) -> SamplingParams:
        """What the model's generation_config.json asks for."""
        return self._built.default_sampling

    def get_tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    # ------------------------------------------------------------------ the loop

    def _run(
        self,
        prompts: list[PreparedPrompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        names = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(names) != len(prompts):
            raise InvalidRequest(f"{len(names)} adapters for {len(prompts)} prompts: give one, or one each")
        samplings = self._samplings(sampling, len(prompts))
        answers: dict[str, Answer] = {}
        with self._serving(answers):
            for prompt, params, name in zip(prompts, samplings, names, strict=True):
                self._submit(answers, prompt, params, name)
            with tqdm(
                total=len(answers), disable=not use_tqdm, desc="generate", unit="req", leave=True
            ) as bar:
                self._drive(answers, bar)
        return [
            request_output(answer, prompt, self.tokenizer)
            for answer, prompt in zip(answers.values(), prompts, strict=True)
        ]

    def _samplings(
        self, sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling is None:
            sampling = self.default_sampling()
        if isinstance(sampling, Mapping) or not isinstance(sampling, Iterable):
            params: Any = sampling  # refused unless it is SamplingParams
            return [ready_to_sample(params, self.tokenizer)] * count
        each = list(sampling)
        if len(each) != count:
            raise InvalidRequest(
                f"{len(each)} sampling parameters for {count} prompts: give one, or one each"
            )
        return [ready_to_sample(params, self.tokenizer) for params in each]

    @contextmanager
    def _serving(self, answers: Mapping[str, Answer]) -> Iterator[None]:
        """The only call meanwhile. However it ends, on ctrl-C too, none of its requests is left running."""
        with self._one_caller.call():
            try:
                yield
            finally:
                for request_id in answers:
                    self.engine.abort(request_id)

    def _submit(
        self,
        answers: dict[str, Answer],
        prompt: PreparedPrompt,
        sampling: SamplingParams,
        adapter: str | None = None,
    ) -> Answer:
        request_id = str(next(self._ids))
        self.engine.add(prompt.request(request_id, sampling, adapter))
        context_id = prompt.context_id(self.tokenizer)
        answer = Answer(request_id, sampling, self.tokenizer, clock=self.engine.clock, context_id=context_id)
        answers[request_id] = answer
        return answer

    def _drive(self, answers: dict[str, Answer], bar: tqdm) -> None:
        num_tokens = 0
        while self.engine.has_work:
            for answer, update in self._take_updates(answers):
                num_tokens += len(update.token_ids)
                if answer.fault is not None:
                    raise answer.fault
                if answer.finished and answer.sequences[update.index].finish_reason is not None:
                    bar.update(1)
            elapsed = bar.format_dict["elapsed"]
            if not bar.disable and elapsed > 0:
                bar.set_postfix_str(f"{num_tokens / elapsed:.1f} tok/s", refresh=False)

    def _take_updates(self, answers: Mapping[str, Answer]) -> Iterator[tuple[Answer, SequenceUpdate]]:
        """Steps the engine once and adds each update to its answer; a stop string ends its sequence in the engine."""
        for update in self.engine.step():
            answer = answers.get(update.request_id)
            if answer is not None:
                if answer.take(update):
                    self.engine.stop(update.request_id, update.index)
                yield answer, update

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Ends its threads, processes and files. Model and pool are freed with the last reference to this object."""
        self._one_caller.close()
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
