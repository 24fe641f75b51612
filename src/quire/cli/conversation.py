"""Conversation: the messages so far, cut to what the context holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.core.errors import InvalidRequest
from quire.llm.llm import LLM, Message
from quire.text.prompts import PreparedPrompt, prepare

ANSWER_SHARE = 4  # a quarter of the context is kept for the answer, unless less is asked for


@dataclass(slots=True)
class Conversation:
    """A system message, if any, and turns of user and assistant."""

    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def reset(self) -> None:
        self.messages.clear()

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def take_back(self) -> None:
        """Forgets the last message, which could not be answered."""
        self.messages.pop()

    def prompt(self, llm: LLM, max_tokens: int | None) -> tuple[PreparedPrompt, int]:
        """The prompt for the next answer, and how many old messages had to be forgotten to make room."""
        limit = _context(llm)
        share = limit // ANSWER_SHARE
        room = limit - (share if max_tokens is None else min(share, max_tokens))
        num_forgotten = 0
        prepared = self._prepared(llm)
        while len(prepared.token_ids) > room and len(self.messages) > 1:
            num_forgotten += self._forget_oldest_turn()
            prepared = self._prepared(llm)
        if len(prepared.token_ids) >= limit:
            raise InvalidRequest(
                f"this message has {len(prepared.token_ids)} tokens with its template and the context is {limit}: "
                "shorten it or raise --max-model-len"
            )
        return prepared, num_forgotten

    def _prepared(self, llm: LLM) -> PreparedPrompt:
        return prepare(llm.template.render(self._all()), llm.tokenizer, add_special_tokens=False)

    def _all(self) -> Sequence[Message]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def _forget_oldest_turn(self) -> int:
        """Drops messages up to the next one of the user: templates want a conversation to begin with it."""
        end = next(
            (i for i, m in enumerate(self.messages) if i > 0 and m["role"] == "user"), len(self.messages) - 1
        )
        del self.messages[:end]
        return end


def _context(llm: LLM) -> int:
    """Tokens that one sequence can have: the model's context, or the whole pool where that is smaller."""
    memory = llm.engine.memory
    return min(llm.engine.limits.max_model_len, memory.num_blocks * memory.block_size)
