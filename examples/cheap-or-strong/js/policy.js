// Answers here what the local model can, and sends the rest to a stronger one.
//
// Free rules first: trivial turns and tool results stay here, and so does whatever looks like personal data. Then two
// probes, which cost no token, say whether a request holds personal data, which keeps it here whatever else is true,
// and how demanding it is; of the rest, only what is surely simple stays.
//
// Configuration: upstream ("strong"), model (the upstream's own), hard-at (a level from 0, trivial, to 3, expert: 1.5),
// min-mass (below it the probe knows nothing like the request: 0.02), private-at (0.5). A threshold out of its range is an
// error.
import { boolean, config, configWithin, decide, forward, generate, lastUser, probed, score } from "forkpoint-policy";

const TRIVIAL = /^\s*(hi|hello|hey|thanks|thank you|ok|okay|yes|no|bye|good (morning|evening))[\s.!?]*$/i;

// Mail addresses, IBANs, card-like digit groups and telephone numbers with a country code.
const PERSONAL = /[\w.+-]+@[\w-]+\.\w{2,}|\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}\b|\b(?:\d{4}[ -]?){3}\d{3,4}\b|\+\d{2}[\d ()-]{7,}/;

export function route(request, session) {
  const privateAt = configWithin("private-at", 0.5, 0, 1);
  const minMass = configWithin("min-mass", 0.02, 0, 1);
  const hardAt = configWithin("hard-at", 1.5, 0, 3);
  const last = request.messages.at(-1);
  if (!last || last.role === "tool") return generate("tool-result");
  const text = lastUser(request);
  if (TRIVIAL.test(text)) return generate("trivial");
  // All that was said and called would leave, so all of it is looked at.
  const said = request.messages.flatMap((turn) => [turn.content, ...turn.toolCalls.map((call) => call.arguments)]);
  if (said.some((text) => PERSONAL.test(text))) return generate("private", { by: "pattern" });

  const [hard, personal] = decide(session, [
    probed("difficulty", score("How demanding is the last request for a language model?", ["trivial", "simple", "demanding", "expert"])),
    probed("personal-data", boolean("Does the last message contain personal data of an identifiable person?")),
  ]);
  const labels = { hard: hard.level.toFixed(2), private: personal.yes.toFixed(2), mass: hard.mass.toFixed(2) };

  if (personal.yes >= privateAt) return generate("private", labels);
  const strong = (reason) => forward(config("upstream", "strong"), reason, labels, config("model"));
  if (hard.level >= hardAt) return strong("hard");
  if (hard.mass < minMass) return strong("unfamiliar");
  return generate("simple", labels);
}
