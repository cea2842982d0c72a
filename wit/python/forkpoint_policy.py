"""Helpers for policies in Python over the modules that componentize-py generates.

What the values mean is the contract's to say: wit/policy.wit. A policy is a function in policy.py that `policy`
decorates; whatever exception leaves it takes the policy's fallback.
"""

import math
from dataclasses import dataclass, field, replace

import wit_world
from componentize_py_types import Err
from wit_world.imports import engine, host
from wit_world.imports.dispatch import (
    Forward, Generation, Plan_Forward, Plan_Generate, Plan_Next, Plan_Reject, Plan_Reply, Rejection, Routing,
)
from wit_world.imports.engine import (
    BooleanSides, ChoiceOption, Criteria_Boolean, Criteria_Choice, Criteria_Score, Question, Rung, Verdict_Boolean,
    Verdict_Choice,
)
from wit_world.imports.types import Message, Role, Sampling, ToolCall

__all__ = [
    "policy", "boolean", "choice", "score", "probed", "decide", "Answer", "draft", "last_user", "pending_calls", "generate",
    "forward", "reply", "reject", "next_policy", "system", "config", "config_number", "config_within", "log", "Message",
    "Role", "Rung", "Sampling", "ToolCall",
]


def policy(function):
    """Makes a function of (request, session) the component's `route`."""

    def route(self, request, session):
        try:
            return function(request, session)
        except Err as error:
            raise Err(_reason(error.value)) from error
        except Exception as error:
            raise Err(f"{type(error).__name__}: {error}") from error

    # componentize-py looks for this class in the policy's own module.
    function.__globals__["WitWorld"] = type("WitWorld", (wit_world.WitWorld,), {"route": route})
    return function


def _reason(value) -> str:
    """The kind and text of an engine's refusal, or the text of another error."""
    kind = type(value).__name__
    return f"{kind.removeprefix('Failure_').lower()}: {value.value}" if kind.startswith("Failure_") else str(value)


def boolean(instructions, yes=None, no=None):
    """A yes-or-no question; `yes` and `no` may say when to answer either."""
    return Question(instructions, Criteria_Boolean(BooleanSides(yes, no)), None)


def choice(instructions, options):
    """One of 1 to 26 options, each a name or (name, what it means)."""
    pairs = [(option, None) if isinstance(option, str) else option for option in options]
    return Question(instructions, Criteria_Choice([ChoiceOption(*pair) for pair in pairs]), None)


def score(instructions, levels):
    """A place on a scale of 2 to 10 levels, lowest first."""
    return Question(instructions, Criteria_Score(list(levels)), None)


def probed(probe, question):
    """Has a question answered by the probe of this name, which costs no tokens."""
    return replace(question, probe=probe)


@dataclass
class Answer:
    """What a question got; of yes, level and choice, the one that was asked for, and the others hold nothing."""

    mass: float
    rung: Rung
    yes: float = math.nan
    level: float = math.nan
    choice: str = ""
    probabilities: list[float] = field(default_factory=list)
    confidence: float = 0.0


def decide(session, questions):
    """Answers questions about a session in one engine step."""
    return [_answer(answer) for answer in engine.decide(session, questions)]


def _answer(answer):
    verdict, out = answer.verdict, Answer(answer.mass, answer.rung)
    if isinstance(verdict, Verdict_Boolean):
        out.yes, out.confidence = verdict.value, abs(2 * verdict.value - 1)
        return out
    out.probabilities, out.confidence = verdict.value.probabilities, verdict.value.confidence
    if isinstance(verdict, Verdict_Choice):
        out.choice = verdict.value.choice
    else:
        out.level = verdict.value.score
    return out


def draft(session, sampling=None):
    """Writes a reply in a session, usually a fork, which then holds it."""
    return engine.generate(session, sampling or _sampling())


def last_user(request):
    """The text of the user's last turn, or ""."""
    return next((turn.content for turn in reversed(request.messages) if turn.role == Role.USER), "")


def pending_calls(request):
    """The calls that the model proposed last and that no tool has answered yet."""
    at = next((i for i in reversed(range(len(request.messages))) if request.messages[i].tool_calls), None)
    if at is None:
        return []
    answered = {turn.tool_call_id for turn in request.messages[at:]}
    return [call for call in request.messages[at].tool_calls if call.id not in answered]


def _sampling():
    return Sampling(None, None, None, None, [])


def _routing(plan, reason, labels):
    return Routing(plan, reason, [(name, str(value)) for name, value in (labels or {}).items()])


def generate(reason, labels=None, *, on=None, model=None, append=(), tools=None, sampling=None):
    """Replies from a model in this process; by itself the session's own, with what the client asked for."""
    generation = Generation(on, model, list(append), tools, sampling or _sampling())
    return _routing(Plan_Generate(generation), reason, labels)


def system(content):
    """A turn of instructions, for `append`."""
    return Message(Role.SYSTEM, content, [], None)


def forward(upstream, reason, labels=None, model=None):
    """Sends the request to an upstream that the operator named."""
    return _routing(Plan_Forward(Forward(upstream, model)), reason, labels)


def reply(text, reason="reply", labels=None):
    """Answers with this text; no model runs."""
    return _routing(Plan_Reply(text), reason, labels)


def reject(status, code, message, labels=None):
    """Refuses, with an HTTP status of 400 to 599, a code for programs and a sentence for people."""
    return _routing(Plan_Reject(Rejection(status, code, message)), code, labels)


def next_policy(reason="next", labels=None):
    """Has no opinion: the next policy of the chain is asked."""
    return _routing(Plan_Next(), reason, labels)


def config(key, otherwise=None):
    """A value of the policy's configuration, or `otherwise`."""
    value = host.config(key)
    return otherwise if value is None else value


def config_number(key, otherwise):
    """A value of the policy's configuration as a number. A value that is none raises."""
    value = host.config(key)
    return otherwise if value is None else float(value)


def config_within(key, otherwise, least, most):
    """The same from `least` to `most`. A threshold beyond them, or a NaN, would hold for nothing, and raises."""
    number = config_number(key, otherwise)
    if not least <= number <= most:
        raise ValueError(f"config {key} = {number}: must lie between {least} and {most}")
    return number


def log(message):
    """Writes a line to the server's log."""
    host.log(host.Level.INFO, message)
