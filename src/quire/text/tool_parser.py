"""Parsers of tool calls: the state machine that every format shares, and the parsers of calls that a grammar forces."""

import json
import re
from collections.abc import Callable

from quire.text.pieces import Arguments, CallBegin, CallEnd, Content, Piece, PieceParser


class CallParser(PieceParser):
    """The frame of parsers that read calls as JSON objects. They never raise.

    A call is passed on as soon as its name is known and its arguments begin. Text that turns out to be no call
    before that is content, as it was written; arguments that break later cannot be taken back, and end as they are.
    """

    is_forced = False  # by a grammar: a call's text is then not shown, valid or not

    def __init__(self, state: Callable[[], bool]) -> None:
        super().__init__(state)
        self.written: list[str] = []  # looked at, and undecided: a call's text, and what led to it
        self.num_calls = 0
        self.call: CallObject | None = None  # the one that is being read

    def finish(self) -> list[Piece]:
        """An open call ends; all that waited is text. White space behind calls is not."""
        if self.call is not None and self.call.begun:
            self.end_call(self.state)
        held = "".join(self.written) + self.rest
        if held.strip() or not self.num_calls:
            self.pieces.append(Content(held))
        self.written, self.rest = [], ""
        return self.taken()

    def read_call(self) -> "CallObject":
        """Lets the open call take what it can."""
        assert self.call is not None
        self.pass_over(self.call.feed(self.rest))
        self.pieces += self.call.take()
        return self.call

    def pass_over(self, end: int) -> None:
        self.written.append(self.rest[:end])
        self.rest = self.rest[end:]

    def end_call(self, state: Callable[[], bool]) -> None:
        self.pieces.append(CallEnd(self.num_calls, "" if self.is_forced else "".join(self.written)))
        self.written = []
        self.num_calls += 1
        self.call = None
        self.state = state

    def refuse(self, state: Callable[[], bool]) -> None:
        """The text that was read is no call: it is shown as it was written."""
        self.pieces.append(Content("".join(self.written)))
        self.written = []
        self.call = None
        self.state = state


# ---------------------------------------------------------------------- calls that a grammar forces


class JsonArrayParser(CallParser):
    """[{"name": …, "parameters": {…}}, …]. From the first character that breaks the array, text is content."""

    is_forced = True

    def __init__(self) -> None:
        super().__init__(self._before_array)

    def finish(self) -> list[Piece]:
        if self.num_calls and self.state != self.show_rest:
            self.written = []  # brackets, and a call behind others that broke off before its arguments
        return super().finish()

    def _before_array(self) -> bool:
        return self._expect({"[": self._before_call})

    def _before_call(self) -> bool:
        if self.rest.lstrip().startswith("{"):
            self.call = CallObject(self.num_calls, needs_arguments=True)
            self.state = self._in_call
            return True
        return self._expect({})

    def _in_call(self) -> bool:
        call = self.read_call()
        if call.closed:
            self.end_call(self._behind_call)
        elif call.broken and call.begun:
            self.end_call(self.show_rest)
        elif call.broken:
            self.refuse(self.show_rest)
        return True

    def _behind_call(self) -> bool:
        return self._expect({",": self._before_call, "]": self._behind_array})

    def _behind_array(self) -> bool:
        return self._expect({})

    def _expect(self, states: dict[str, Callable[[], bool]]) -> bool:
        """One character behind white space selects the next state; any other starts text."""
        bare = self.rest.lstrip()
        self.pass_over(len(self.rest) - len(bare))
        if not bare:
            return False
        state = states.get(bare[0])
        if state is None:
            self.refuse(self.show_rest)
        else:
            self.pass_over(1)
            self.state = state
        return True


class NamedParser:
    """The whole answer is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> list[Piece]:
        if self._begun:
            return [Arguments(0, text)] if text else []
        text = text.lstrip()
        if not text:
            return []
        self._begun = True
        return [CallBegin(0, self._name), Arguments(0, text)]

    def finish(self) -> list[Piece]:
        return [CallEnd(0, "")] if self._begun else []


ToolParser = CallParser | NamedParser


# ---------------------------------------------------------------------- one call


_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_STRING_STOP = re.compile(r'["\\]')
_PLAIN = re.compile(r"[\w.+-]+")  # numbers, true, false, null, and what models write in their place
_NESTED_STOP = re.compile(r'["{}\[\]]|[^\w\s.:,+-]')  # a quote, a bracket, or what JSON never has there


class CallObject:
    """Follows the object however its text is cut. Keys may come in any order; unknown ones are passed over. Written by
    hand: incremental JSON parsers pass on whole values, and arguments must stream character by character.

    `begun` says that the call was passed on; `closed` that the object has ended; `broken` that it is no such object
    (or not JSON) from here on. `complete` says that its arguments, if there are any, have ended.
    """

    def __init__(
        self, index: int, accepts: Callable[[str], bool] = bool, needs_arguments: bool = False
    ) -> None:
        """A name that `accepts` refuses breaks the object; so do missing arguments, if it needs them."""
        self.begun = self.closed = self.broken = self.complete = False
        self._index = index
        self._accepts = accepts
        self._needs_arguments = needs_arguments
        self._name: str | None = None
        self._has_arguments = False
        self._early: list[str] = []  # arguments that came before the name
        self._key = ""
        self._string: list[str] = []  # the raw characters of a key or a string value
        self._escaped = self._in_string = False
        self._depth = 0
        self._pieces: list[Piece] = []
        self._step: Callable[[str, int], int] = self._punctuation
        self._expect({"{": self._open_object})

    def feed(self, text: str, at: int = 0) -> int:
        """Reads on from `at`; where it stopped: the end, or behind the object, or what breaks it."""
        while at < len(text) and not (self.closed or self.broken):
            at = self._step(text, at)
        return at

    def take(self) -> list[Piece]:
        """The pieces that have become certain since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    # ------------------------------------------------------------------ steps: each reads a part and says where it ends

    def _punctuation(self, text: str, at: int) -> int:
        """White space, then one of the expected characters. Any other breaks the object."""
        action = self._expected.get(text[at])
        if action is not None:
            action()
        elif text[at] not in _SPACE:
            self.broken = True
        return at + (not self.broken)

    def _key_string(self, text: str, at: int) -> int:
        at = self._read_string(text, at)
        if not self._in_string:
            self._key = self._decoded() or ""
            self._expect({":": self._open_value})
        return at

    def _value(self, text: str, at: int) -> int:
        char = text[at]
        if char in _SPACE:
            return at + 1
        is_name = self._key == "name" and self._name is None
        is_arguments = self._is_arguments()
        if char == '"':
            if is_name:
                self._open_string(self._name_string)
            else:
                self._open_string(self._arguments_string if is_arguments else self._other_string)
            return at + 1
        if is_name or (is_arguments and char not in "{n"):
            return self._break(at)
        if char in "{[":
            if is_arguments:
                self._has_arguments = True
                self._begin()
            self._step = self._arguments_nested if is_arguments else self._other_nested
            return at
        self._string.clear()
        self._step = self._plain_value
        return at if _PLAIN.match(char) else self._break(at)

    def _name_string(self, text: str, at: int) -> int:
        at = self._read_string(text, at)
        if not self._in_string:
            name = self._decoded()
            if not name or not self._accepts(name):
                return self._break(at)
            self._name = name
            if self._has_arguments:
                self._begin()
            self._close_value()
        return at

    def _arguments_string(self, text: str, at: int) -> int:
        """Some models write the arguments as JSON within a string."""
        at = self._read_string(text, at)
        if not self._in_string:
            self._has_arguments = self.complete = True
            self._begin()
            self._argue(self._decoded() or "{}")
            self._close_value()
        return at

    def _other_string(self, text: str, at: int) -> int:
        at = self._read_string(text, at)
        if not self._in_string:
            self._close_value()
        return at

    def _arguments_nested(self, text: str, at: int) -> int:
        end = self._read_nested(text, at)
        self._argue(text[at:end])
        if not self._depth:
            self.complete = True
            self._close_value()
        return end

    def _other_nested(self, text: str, at: int) -> int:
        end = self._read_nested(text, at)
        if not self._depth:
            self._close_value()
        return end

    def _plain_value(self, text: str, at: int) -> int:
        match = _PLAIN.match(text, at)
        if match is not None:
            self._string.append(match[0])
            return match.end()
        if self._is_arguments() and "".join(self._string) != "null":
            return self._break(at)
        self._close_value()
        return at

    # ------------------------------------------------------------------ between values

    def _expect(self, actions: dict[str, Callable[[], None]]) -> None:
        """What each character that may follow does."""
        self._expected = actions
        self._step = self._punctuation

    def _open_object(self) -> None:
        self._expect({'"': self._open_key, "}": self._end})

    def _open_key(self) -> None:
        self._open_string(self._key_string)

    def _open_value(self) -> None:
        self._step = self._value

    def _close_value(self) -> None:
        self._expect({",": self._next_key, "}": self._end})

    def _next_key(self) -> None:
        self._expect({'"': self._open_key})

    # ------------------------------------------------------------------ reading

    def _is_arguments(self) -> bool:
        return self._key in _ARGUMENTS and not self._has_arguments

    def _open_string(self, step: Callable[[str, int], int]) -> None:
        self._string.clear()
        self._in_string = True
        self._step = step

    def _read_string(self, text: str, at: int) -> int:
        """Up to and with the closing quote, which ends `_in_string`."""
        if self._escaped:
            self._escaped = False
            self._string.append(text[at])
            return at + 1
        match = _STRING_STOP.search(text, at)
        if match is None:
            self._string.append(text[at:])
            return len(text)
        self._string.append(text[at : match.start()])
        if match[0] == "\\":
            self._string.append("\\")
            self._escaped = True
        else:
            self._in_string = False
        return match.end()

    def _read_nested(self, text: str, at: int) -> int:
        """Through brackets and strings, up to and with the bracket that closes the first."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_STRING_STOP if self._in_string else _NESTED_STOP).search(text, at)
            if match is None:
                return len(text)
            at, char = match.end(), match[0]
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\" and self._in_string:
                self._escaped = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return at
            else:
                return self._break(at - 1)
        return at

    def _decoded(self) -> str | None:
        try:
            return str(json.loads('"' + "".join(self._string) + '"', strict=False))
        except ValueError:
            return None

    # ------------------------------------------------------------------ results

    def _begin(self) -> None:
        if self._name is not None:
            self.begun = True
            self._pieces.append(CallBegin(self._index, self._name))
            self._argue("".join(self._early))

    def _argue(self, text: str) -> None:
        if not self.begun:
            self._early.append(text)
        elif text:
            self._pieces.append(Arguments(self._index, text))

    def _end(self) -> None:
        if self._name is None or (self._needs_arguments and not self._has_arguments):
            self.broken = True
            return
        if not self._has_arguments:
            self._begin()
            self._argue("{}")
        self.closed = self.complete = True

    def _break(self, at: int) -> int:
        self.broken = True
        return at
