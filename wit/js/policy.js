// Helpers for policies in JavaScript. `forkpoint policy build` puts them before the policy, which imports them from
// "forkpoint-policy"; policy.d.ts has their types. What the values mean is the contract's to say: wit/policy.wit.
import { decide as engineDecide, generate as engineGenerate } from "forkpoint:policy/engine@0.1.0";
import { log as hostLog, config as hostConfig } from "forkpoint:policy/host@0.1.0";

/** A yes-or-no question; `sides` may say when to answer either: { yes, no }. */
export const boolean = (instructions, sides = {}) => ({ instructions, criteria: { tag: "boolean", val: sides } });

/** One of 1 to 26 options, each a name or { name, description }. */
export const choice = (instructions, options) => ({
  instructions,
  criteria: { tag: "choice", val: options.map((option) => (typeof option === "string" ? { name: option } : option)) },
});

/** A place on a scale of 2 to 10 levels, lowest first. */
export const score = (instructions, levels) => ({ instructions, criteria: { tag: "score", val: levels } });

/** Has a question answered by the probe of this name, which costs no tokens: the policy ships its examples. */
export const probed = (probe, question) => ({ ...question, probe });

/** Answers questions about a session in one engine step. Each answer holds `mass`, `confidence`, `rung` ("labels" or "probe") and, by its kind,
 *  `yes` (the probability), `choice` (a name) or `level` (the expected one, from 0); `probabilities` for the latter two,
 *  in the order asked. Throws when the engine does not serve the call. */
export const decide = (session, questions) =>
  engineDecide(session, questions).map(({ verdict: { tag, val }, mass, rung }) => {
    if (tag === "boolean") return { yes: val, confidence: Math.abs(2 * val - 1), mass, rung };
    if (tag === "score") {
      return { level: val.score, probabilities: val.probabilities, confidence: val.confidence, mass, rung };
    }
    return { choice: val.choice, probabilities: val.probabilities, confidence: val.confidence, mass, rung };
  });

/** Writes a reply in a session, usually a fork: { text, tokens, finishReason }. */
export const draft = (session, sampling = {}) => engineGenerate(session, { stop: [], ...sampling });

/** The text of the user's last turn, or "". */
export const lastUser = (request) => request.messages.findLast((turn) => turn.role === "user")?.content ?? "";

/** The calls that the model proposed last and that no tool has answered yet. */
export const pendingCalls = (request) => {
  const turns = request.messages.slice(request.messages.findLastIndex((turn) => turn.toolCalls.length > 0));
  const answered = turns.map((turn) => turn.toolCallId);
  return (turns[0]?.toolCalls ?? []).filter((call) => !answered.includes(call.id));
};

/** Logs a line: level is "debug", "info", "warn" or "error". */
export const log = (level, message) => hostLog(level, message);

/** A value of the policy's configuration, or `otherwise`. Where `otherwise` is a number, so is what comes back, and a
 *  value that is none throws. */
export const config = (key, otherwise) => {
  const value = hostConfig(key);
  if (value == null) return otherwise;
  if (typeof otherwise !== "number") return value;
  const number = Number(value);
  if (value.trim() === "" || Number.isNaN(number)) throw `config ${key} = "${value}": not a number`;
  return number;
};

/** A number of the policy's configuration from `least` to `most`, or `otherwise`. Another throws: a threshold beyond
 *  them would hold for nothing. */
export const configWithin = (key, otherwise, least, most) => {
  const number = config(key, otherwise);
  if (!(number >= least && number <= most)) throw `config ${key} = ${number}: must lie between ${least} and ${most}`;
  return number;
};

const routing = (tag, val, reason, labels = {}) => ({
  plan: { tag, val },
  reason,
  labels: Object.entries(labels).map(([name, value]) => [name, String(value)]),
});

/** Replies from a model in this process. `how` may hold on, model, append (turns), tools (names) and sampling. */
export const generate = (reason, labels, how = {}) =>
  routing("generate", { ...how, append: how.append ?? [], sampling: { stop: [], ...how.sampling } }, reason, labels);

/** A turn of instructions, for `append`. */
export const system = (content) => ({ role: "system", content, toolCalls: [] });

/** Sends the request to an upstream that the operator named; `model` may be undefined. */
export const forward = (upstream, reason, labels, model) => routing("forward", { upstream, model }, reason, labels);

/** Answers with this text; no model runs. */
export const reply = (text, reason = "reply", labels) => routing("reply", text, reason, labels);

/** Refuses, with an HTTP status of 400 to 599, a code for programs and a sentence for people. */
export const reject = (status, code, message, labels) => routing("reject", { status, code, message }, code, labels);

/** Has no opinion: the next policy of the chain is asked. */
export const next = (reason = "next", labels) => routing("next", undefined, reason, labels);

/** What was thrown, as text: an engine's refusal is an error whose payload has its kind and why. */
export const reason = (error) => {
  const { payload } = Object(error);
  if (payload?.tag !== undefined) return `${payload.tag}: ${payload.val}`;
  return payload === undefined ? String(error) : String(payload);
};
