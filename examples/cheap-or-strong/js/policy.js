// Answers here what the local model can, and sends the rest to a stronger one.
//
// Free rules first: trivial turns and tool results stay here, and so does whatever looks like personal data. Then one
// step asks three questions. Personal data keeps a request here whatever else is true; of the rest, only what is
// surely simple stays.
//
// Configuration: upstream ("strong"), model (the upstream's own), min-confidence (0.45), hard-at (a level from 0 to 2:
// 1.2), private-at (0.5).
import { boolean, choice, config, decide, forward, generate, lastUser, score } from "forkpoint-policy";

const TRIVIAL = /^\s*(hi|hello|hey|thanks|thank you|ok|okay|yes|no|bye|good (morning|evening))[\s.!?]*$/i;

// Mail addresses, IBANs, card-like digit groups and telephone numbers with a country code.
const PERSONAL = /[\w.+-]+@[\w-]+\.\w{2,}|\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}\b|\b(?:\d{4}[ -]?){3}\d{3,4}\b|\+\d{2}[\d ()-]{7,}/;

export function route(request, session) {
  const last = request.messages.at(-1);
  if (!last || last.role === "tool") return generate("tool-result");
  const text = lastUser(request);
  if (TRIVIAL.test(text)) return generate("trivial");
  // All that was said and called would leave, so all of it is looked at.
  const said = request.messages.flatMap((turn) => [turn.content, ...turn.toolCalls.map((call) => call.arguments)]);
  if (said.some((text) => PERSONAL.test(text))) return generate("private", { by: "pattern" });

  const [task, hard, personal] = decide(session, [
    choice("Which kind of model does the user's last message need?", [
      { name: "small", description: "a short fact, a rewording, a simple question" },
      { name: "large", description: "several steps of reasoning, long code, an expert's knowledge" },
    ]),
    score("How hard is it to answer the user's last message well?", ["easy", "medium", "hard"]),
    boolean("Does this conversation contain personal data about someone, such as a name with an address, health or money matters?"),
  ]);
  const labels = { task: task.choice, confidence: task.confidence.toFixed(2), hard: hard.level.toFixed(2), private: personal.yes.toFixed(2) };

  if (personal.yes >= config("private-at", 0.5)) return generate("private", labels);
  const strong = (reason) => forward(config("upstream", "strong"), reason, labels, config("model"));
  if (task.choice === "large") return strong("large");
  if (hard.level >= config("hard-at", 1.2)) return strong("hard");
  if (task.confidence < config("min-confidence", 0.45)) return strong("low-confidence");
  return generate("small", labels);
}
